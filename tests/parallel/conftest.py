"""What tests of replicated models have in common."""

import importlib

import pytest


@pytest.fixture(scope="package", autouse=True)
def imported() -> None:
    """Import what torch's engines will: once here, and not for a second in each forked rank."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        importlib.import_module(name)
