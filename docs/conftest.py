"""Pages whose programs need more packages than the test command has are slow tests."""

from __future__ import annotations

import pytest

_NEED_MORE = ("fp8.md", "optimizers.md", "shard-a-pytree.md", "tracking.md")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the pages that need more."""
    for item in items:
        if item.path.name in _NEED_MORE:
            item.add_marker(pytest.mark.slow)
