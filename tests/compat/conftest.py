import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from accelfn.compat.current import current

# They import libraries that only slow tests have.
collect_ignore_glob = ["*_program.py"]


@pytest.fixture
def alone() -> Iterator[None]:
    """Run a test in a process without a world: the one state that programs without a context have."""
    current().close()
    current().trackers.clear()
    current().debug = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accelfn.compat: this program has Accelerate's arithmetic")
        yield
    current().close()
    current().reset()


@pytest.fixture(scope="session")
def peer() -> Any:
    """Accelerate itself, which slow tests compare with."""
    return pytest.importorskip("accelerate", minversion="1.15.0")
