"""The shim for people who know Hugging Face Accelerate."""

from accelfn.accelerator.accelerator import Accelerator
from accelfn.accelerator.local_sgd import LocalSGD
from accelfn.accelerator.proxies import AcceleratedDataLoader, AcceleratedOptimizer, AcceleratedScheduler

__all__ = ("AcceleratedDataLoader", "AcceleratedOptimizer", "AcceleratedScheduler", "Accelerator", "LocalSGD")
