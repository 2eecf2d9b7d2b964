"""The real disk, with a callback before every operation, which may make it fail.

Everything takes the disk of a path from ``disk_at``, for which :func:`installed` puts another one.
"""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest

from accelfn.storage.disk import REAL_DISK, Disk, Folder

Watcher = Callable[[str, str], None]  # kind of operation, path

CHANGES = (
    *("make_folder", "create", "write", "sync", "sync_folder"),
    *("rename", "remove_file", "remove_folder"),
)
READINGS = ("open_folder", "open_file")


def watched(watcher: Watcher) -> Disk:
    """Return the real disk, which calls ``watcher`` before every change and reading."""
    paths: dict[int, str] = {}  # by descriptor

    def told(kind: str) -> Callable[..., Any]:
        act = getattr(REAL_DISK, kind)

        def call(first: Any, *others: Any) -> Any:
            path = paths[first] if isinstance(first, int) else first
            if isinstance(first, Folder):
                path = os.path.join(first.path, others[0])
            watcher(kind, path)
            result = act(first, *others)
            if kind in ("create", "open_file"):
                paths[result] = path
            return result

        return call

    return replace(REAL_DISK, **{kind: told(kind) for kind in (*CHANGES, *READINGS)})


def locked(disk: Disk) -> Disk:
    """Return a disk that ranks on threads use one at a time."""
    lock = threading.Lock()

    def alone(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with lock:
                return act(*arguments)

        return call

    acts = {field.name: getattr(disk, field.name) for field in fields(disk)}
    return replace(disk, **{name: alone(act) for name, act in acts.items() if callable(act)})


@contextmanager
def installed(disk: Disk) -> Generator[None, None, None]:
    """Make this process use ``disk`` for all paths of files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelfn.storage.object_store.REAL_DISK", disk)
        yield
