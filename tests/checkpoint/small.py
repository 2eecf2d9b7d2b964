"""Small checkpoints: saved, read, and rewritten."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import accelfn as af
from accelfn.storage.disk import REAL_DISK, Disk
from tests.checkpoint.watched_disk import installed


def save(directory: str | os.PathLike[str], value: int, *, disk: Disk = REAL_DISK, **options: Any) -> Path:
    """Save a checkpoint of one tensor as one process; the options are those of ``save_state``."""
    with installed(disk):
        af.save_state(af.Context(), directory, {"x": torch.tensor(value)}, **options)
    return Path(directory)


def value(directory: str | os.PathLike[str]) -> int:
    """Return what :func:`save` was given."""
    return int(af.load_tree(directory)["x"])


def names(directory: Path) -> list[str]:
    """List a directory."""
    return sorted(os.listdir(directory))


def said(directory: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint as JSON has it."""
    return json.loads((directory / "manifest.json").read_bytes().partition(b"\n")[0])


def rewrite(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says, and give it the checksum of that."""
    manifest = said(directory)
    change(manifest)
    seal(directory, json.dumps(manifest).encode())


def seal(directory: Path, line: bytes) -> None:
    """Write a manifest with a checksum that is right."""
    digest = hashlib.sha256(line).hexdigest().encode()
    (directory / "manifest.json").write_bytes(line + b"\n" + digest + b"\n")


def flip(file: Path, place: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)


class Bomb:
    """Makes a directory when it is unpickled, or calls something else with its path."""

    def __init__(self, path: Path, call: Any = os.mkdir) -> None:
        self.path, self.call = path, call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (str(self.path),)


class Stateful:
    """An object that is saved by its state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
