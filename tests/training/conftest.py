"""What tests of training have in common."""

import importlib

import pytest


@pytest.fixture(scope="package", autouse=True)
def imported() -> None:
    """Import what torch's engines will: once here, and not for a second in each forked rank."""
    importlib.import_module("torch._dynamo")
