"""`python -m octet`."""

from octet_cli.main import main

main()
