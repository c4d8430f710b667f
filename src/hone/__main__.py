"""`python -m hone`, for where the `hone` command is not on the path."""

import sys

from hone.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
