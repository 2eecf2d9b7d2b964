import warnings
from collections.abc import Iterator

import pytest

from accelfn.compat.current import current


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
