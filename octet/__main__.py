"""Runs the command line for `python -m octet`."""

from octet_cli.main import main

main()
