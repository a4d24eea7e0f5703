"""What changes while the gateway runs: its configuration and its backends; and its own life."""
