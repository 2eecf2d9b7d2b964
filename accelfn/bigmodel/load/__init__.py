"""Weights from files to the places that a plan gives them."""

__all__: tuple[str, ...] = ()
