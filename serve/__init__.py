"""From a request to tokens: the gateway, its backends and the embedded engine."""
