"""The disk of a rank: each operation on it is a step of the schedule that the rank follows, if it does."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from accelfn.context import Context, MakeError
from accelfn.storage.disk import Disk, Folder

# Operations that are announced, with their words. Closing a descriptor isn't, nor are hints and what no
# other program can notice.
_WORDS = MappingProxyType(
    {
        "create": "create",
        "write": "write",
        "sync": "sync",
        "rename": "rename",
        "open_folder": "open",
        "names": "list",
        "open_file": "open",
        "read": "read",
        "lock": "lock",
        "sync_folder": "sync",
        "make_folder": "make",
        "remove_file": "remove",
        "remove_folder": "remove",
        "status": "look at",
    }
)


def disk_of(ctx: Context, disk: Disk) -> Disk:
    """Return ``disk`` for a rank: unchanged, unless it follows a schedule (``accelfn.testing.Schedule``).

    Ranks: local.
    """
    reach = ctx.collectives.threads.reach
    return disk if reach is None else announcing(disk, reach)


def announcing(disk: Disk, reach: Callable[[str, MakeError], None]) -> Disk:
    """Return a disk that announces each operation before it carries it out.

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

    def path_of(place: int | str | Folder, name: object = None, *_: object) -> str:
        """Return the path that the arguments of an operation name."""
        if isinstance(place, Folder):
            return os.path.join(place.path, name) if isinstance(name, str) else place.path
        return paths[place] if isinstance(place, int) else place

    def announced(name: str, word: str) -> Callable[..., Any]:
        act = getattr(disk, name)

        def operation(*args: Any) -> Any:
            path = path_of(*args)
            if name == "rename":
                announce(f"rename {os.path.basename(path)} to", args[1])
            else:
                announce(word, path)
            result = act(*args)
            if name in ("create", "open_file"):
                paths[result] = path
            return hold(path, result) if name == "lock" and result is not None else result

        return operation

    def hold(path: str, release: Callable[[], None]) -> Callable[[], None]:
        locks[path] = release

        def announced_release() -> None:
            with suppress(OSError):  # an injected one: releasing never fails
                announce("release", path)
            locks.pop(path)()

        return announced_release

    return replace(disk, **{name: announced(name, word) for name, word in _WORDS.items()})
