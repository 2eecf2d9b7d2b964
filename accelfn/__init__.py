"""Distributed PyTorch training as plain functions over one frozen context."""

__all__ = ("__version__",)

__version__ = "0.1.0"
