"""Run the self-test on this rank: ``accelfn launch -m accelfn.launch.selftest``."""

import sys

from accelfn.launch.selftest.program import run_selftest

if __name__ == "__main__":
    sys.exit(run_selftest())
