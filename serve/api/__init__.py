"""OpenAI's HTTP interface: requests in, answers out, errors as OpenAI's objects."""
