"""`python -m octet`."""

from octet.cli import main

main()
