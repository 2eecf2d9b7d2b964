"""Part of a mapping of weights: those of one module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ("Prefixed", "prefixed")


class Prefixed(Mapping[str, Any]):
    """The entries of a mapping whose names begin with a prefix, without it."""

    def __init__(self, whole: Mapping[str, Any], prefix: str) -> None:
        self.whole = whole
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.whole[self.prefix + key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.prefix + key in self.whole

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.whole if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def prefixed(whole: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """Give the entries of ``whole`` whose names begin with ``prefix``, without it."""
    return Prefixed(whole, prefix) if prefix else whole
