"""Access control: API keys, the models they may use, their rates and their quotas."""
