"""``python -m slidedp``: the command line."""

import sys

from slidedp.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
