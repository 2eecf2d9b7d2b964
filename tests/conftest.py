"""What holds in all tests: how hard hypothesis tries, how many threads torch has, and interrupts.

With CI set, hypothesis tries the same examples each time; ``--hypothesis-profile=thorough`` tries more.
"""

import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from hypothesis import settings

# Before torch is imported: two workers with two threads each would compete for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Collecting doctests would import them: packages that stand for others, and what measures beside others.
collect_ignore = ["stand_ins", "bench"]

# No deadline: the machine is shared, and a slow example is not a wrong one.
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=250, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "quick")

# A shell that starts the suite in the background ignores interrupts, and so would what a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Compile extensions in a folder of this run: what a killed one locks stays locked."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ:  # workers of pytest-xdist inherit it
        folder = os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Leave the half a million objects of collected tests out of garbage collections, in forked ranks too."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave out what a file's tests have left, too: tests ask for collections that would take seconds."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def dtensors() -> None:
    """Import here what a process's first DTensor does: that takes a second, in each forked rank."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="session")
def deepspeed_ops() -> None:
    """Compile what DeepSpeed reduces by once, in which tests with a bounded time would be cut off."""
    code = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=800)
