"""Who may ask: API keys, the models they may use, their rates and their quotas."""
