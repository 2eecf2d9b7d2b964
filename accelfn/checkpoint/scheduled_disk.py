"""The disk of a rank: each operation on it is a step of the schedule that the rank follows, if it does."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from accelfn.context import Context, MakeError
from accelfn.storage.disk import Disk, Folder, Status


def disk_of(ctx: Context, disk: Disk) -> Disk:
    """Return ``disk`` for a rank: unchanged, unless it follows a schedule (``accelfn.testing.Schedule``).

    Ranks: local.
    """
    reach = ctx.collectives.threads.reach
    return disk if reach is None else announcing(disk, reach)


def announcing(disk: Disk, reach: Callable[[str, MakeError], None]) -> Disk:
    """Return a disk that announces each operation before it carries it out.

    Closing a descriptor isn't announced, nor are hints and what no other program can notice.

    Args:
        disk: Carries the operations out.
        reach: As ``Threads.reach``. If it raises something else than an ``Exception``, the rank has died, and
            its locks are released, as the operating system does for a process.
    """
    paths: dict[int, str] = {}  # by descriptor
    locks: dict[str, Callable[[], None]] = {}

    def announce(operation: str, path: str) -> None:
        def failure(text: str) -> OSError:
            return OSError(errno.EIO, text, path)

        try:
            reach(f"{operation} {os.path.basename(path)}", failure)
        except Exception:
            raise
        except BaseException:
            while locks:
                locks.popitem()[1]()
            raise

    def create(path: str) -> int:
        announce("create", path)
        descriptor = disk.create(path)
        paths[descriptor] = path
        return descriptor

    def write(descriptor: int, content: memoryview, place: int) -> int:
        announce("write", paths[descriptor])
        return disk.write(descriptor, content, place)

    def sync(descriptor: int) -> None:
        announce("sync", paths[descriptor])
        disk.sync(descriptor)

    def rename(source: str, target: str) -> None:
        announce(f"rename {os.path.basename(source)} to", target)
        disk.rename(source, target)

    def open_folder(path: str) -> Folder:
        announce("open", path)
        return disk.open_folder(path)

    def names(folder: Folder) -> list[str]:
        announce("list", folder.path)
        return disk.names(folder)

    def open_file(folder: Folder, name: str) -> int:
        path = os.path.join(folder.path, name)
        announce("open", path)
        descriptor = disk.open_file(folder, name)
        paths[descriptor] = path
        return descriptor

    def read(descriptor: int, target: memoryview, place: int) -> int:
        announce("read", paths[descriptor])
        return disk.read(descriptor, target, place)

    def lock(path: str) -> Callable[[], None] | None:
        announce("lock", path)
        release = disk.lock(path)
        if release is None:
            return None
        locks[path] = release

        def announced_release() -> None:
            with suppress(OSError):  # an injected one: releasing never fails
                announce("release", path)
            locks.pop(path)()

        return announced_release

    def status(path: str) -> Status:
        announce("look at", path)
        return disk.status(path)

    def by_path(operation: str, act: Callable[[str], None], path: str) -> None:
        announce(operation, path)
        act(path)

    return replace(
        disk,
        create=create,
        write=write,
        sync=sync,
        rename=rename,
        open_folder=open_folder,
        names=names,
        open_file=open_file,
        read=read,
        lock=lock,
        sync_folder=partial(by_path, "sync", disk.sync_folder),
        make_folder=partial(by_path, "make", disk.make_folder),
        remove_file=partial(by_path, "remove", disk.remove_file),
        remove_folder=partial(by_path, "remove", disk.remove_folder),
        status=status,
    )
