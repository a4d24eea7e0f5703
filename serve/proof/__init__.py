"""Sends golden prompts to a backend, and checks whether the answers match its artifact.

`probe` sends the prompts, `plan` selects them, `engine_report` reads what the engine reports about
itself, and `client_view` finds out what clients get by default. `octet.proof` judges the answers.
"""
