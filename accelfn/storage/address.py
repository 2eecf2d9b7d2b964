"""Addresses such as ``s3://bucket/run``, beside paths of files."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    _Path = Path
else:
    _Path = type(Path())  # before Python 3.12, Path itself has no subclasses that work

# pathlib makes one slash of two. A single letter is a drive of Windows.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):[/\\]+(.*)", re.DOTALL)
_CHAIN = re.compile(r".*::.*:[/\\].*", re.DOTALL)
_LOCAL = ("file", "local")


class Address(_Path):
    """An address, for reading its parts and joining names: unlike a path's, its text keeps both slashes.

    What ``pathlib`` does on disks, such as ``exists``, looks at this machine's disks: use ``fsspec``.
    """

    def __str__(self) -> str:
        """Return the address."""
        return _ADDRESS.sub(
            lambda found: f"{found[1].lower()}://" + found[2].replace("\\", "/"), super().__str__()
        )

    def resolve(self, strict: bool = False) -> Address:
        """Return the address itself, which no directory of this machine precedes."""
        return self


def is_address(place: str | os.PathLike[str]) -> bool:
    """Return whether a place is an address. Pure.

    >>> is_address("s3://bucket/run"), is_address(Path("s3://bucket/run")), is_address("runs/s3")
    (True, True, False)
    """
    found = _ADDRESS.fullmatch(os.fspath(place))
    return found is not None and found[1].lower() not in _LOCAL


def as_path(place: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file or directory, or an address, without ``..`` in it.

    Raises:
        ValueError: An address has nothing after its scheme, or is a chain of them.

    >>> str(as_path("memory:/runs/a/../b/")), str(as_path("file:///runs/a"))
    ('memory://runs/b', '/runs/a')
    """
    found = _ADDRESS.fullmatch(os.fspath(place))
    if _CHAIN.fullmatch(os.fspath(place)):
        raise ValueError(f"{os.fspath(place)!r} is a chain of addresses. Pass the one of the store alone.")
    if found is None:
        return Path(os.path.abspath(place))
    rest = posixpath.normpath(f"/{found[2]}").lstrip("/")
    if not rest:
        raise ValueError(f"{os.fspath(place)!r} has neither a bucket nor a path. Pass a whole address.")
    scheme = found[1].lower()
    return Path(f"/{rest}") if scheme in _LOCAL else Address(f"{scheme}://{rest}")
