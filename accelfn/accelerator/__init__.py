"""The shim for people who know Hugging Face Accelerate."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from accelfn.accelerator.accelerator import Accelerator as Accelerator
from accelfn.accelerator.local_sgd import LocalSGD as LocalSGD
from accelfn.accelerator.proxies import (
    AcceleratedDataLoader as AcceleratedDataLoader,
    AcceleratedOptimizer as AcceleratedOptimizer,
    AcceleratedScheduler as AcceleratedScheduler,
)
