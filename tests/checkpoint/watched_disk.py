"""The real disk, with a callback before every operation, which may make it fail.

Saves take the disk from ``accelfn.checkpoint.save``, where :func:`installed` puts another one for this
process.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from accelfn.checkpoint.disk import REAL_DISK, Disk, Folder

__all__ = ("CHANGES", "Watcher", "installed", "watched")

Watcher = Callable[[str, str], None]  # kind of operation, path

CHANGES = (
    *("make_folder", "create", "write", "sync", "sync_folder"),
    *("rename", "remove_file", "remove_folder"),
)


def watched(watcher: Watcher) -> Disk:
    """Return the real disk, which calls ``watcher`` before every change and reading."""
    paths: dict[int, str] = {}

    def by_path(kind: str, act: Callable[[str], None]) -> Callable[[str], None]:
        def told(path: str) -> None:
            watcher(kind, path)
            act(path)

        return told

    def create(path: str) -> int:
        watcher("create", path)
        descriptor = REAL_DISK.create(path)
        paths[descriptor] = path
        return descriptor

    def write(descriptor: int, content: memoryview, place: int) -> int:
        watcher("write", paths[descriptor])
        return REAL_DISK.write(descriptor, content, place)

    def sync(descriptor: int) -> None:
        watcher("sync", paths[descriptor])
        REAL_DISK.sync(descriptor)

    def rename(source: str, target: str) -> None:
        watcher("rename", source)
        REAL_DISK.rename(source, target)

    def open_folder(path: str) -> Folder:
        watcher("open_folder", path)
        return REAL_DISK.open_folder(path)

    def open_file(folder: Folder, name: str) -> int:
        path = os.path.join(folder.path, name)
        watcher("open_file", path)
        descriptor = REAL_DISK.open_file(folder, name)
        paths[descriptor] = path
        return descriptor

    return replace(
        REAL_DISK,
        create=create,
        write=write,
        sync=sync,
        rename=rename,
        open_folder=open_folder,
        open_file=open_file,
        sync_folder=by_path("sync_folder", REAL_DISK.sync_folder),
        make_folder=by_path("make_folder", REAL_DISK.make_folder),
        remove_file=by_path("remove_file", REAL_DISK.remove_file),
        remove_folder=by_path("remove_folder", REAL_DISK.remove_folder),
    )


@contextmanager
def installed(disk: Disk) -> Generator[None, None, None]:
    """Make the saves of this process use ``disk``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelfn.checkpoint.save.REAL_DISK", disk)
        yield
