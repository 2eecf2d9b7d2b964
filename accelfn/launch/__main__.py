"""Run the command line with ``python -m accelfn.launch``."""

import sys

from accelfn.launch.main import main

__all__ = ()

if __name__ == "__main__":
    sys.exit(main())
