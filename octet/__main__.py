"""Runs the command line for `python -m octet`."""

import sys

try:
    from octet_cli.main import main

    main()
except KeyboardInterrupt:  # outside a command: the imports take some tenths of a second
    print("interrupted", file=sys.stderr)
    sys.exit(130)
