"""An object store in memory, which tells a watcher of every request before it serves it.

As in S3, an object appears when its upload is complete, and there are no directories.
"""

import io
import itertools
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec  # pyright: ignore[reportMissingTypeStubs]
import pytest
from fsspec.spec import AbstractFileSystem  # pyright: ignore[reportMissingTypeStubs]

ADDRESS = "objects://bucket/runs"

Watcher = Callable[[str, str], None]  # kind of request, name of the object


class Store:
    """The objects by name, each with the time of its upload."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.watcher: Watcher = lambda kind, name: None
        self.hidden: set[str] = set()  # names that lists don't have yet
        self.asked: Counter[str] = Counter()  # bytes that were read

    def names(self) -> list[str]:
        """List the objects by the end of their names, after the address of the runs."""
        return sorted(name.removeprefix("bucket/runs/") for name in self.objects)


class Upload(io.BytesIO):
    """An object that is uploaded."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__()
        self.store, self.name, self.content = store, name, b""

    def write(self, content: Any) -> int:
        self.store.watcher("upload", self.name)
        return super().write(content)

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
            super().close()

    def commit(self) -> None:
        self.store.watcher("complete", self.name)
        self.store.objects[self.name] = self.content, time.time()

    def discard(self) -> None:
        self.store.watcher("discard", self.name)


def filesystem(store: Store) -> type[Any]:
    """Return a class of file systems for ``fsspec`` that hold the objects of a store."""

    class Objects(AbstractFileSystem):
        protocol = "objects"
        cachable = False

        def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
            store.watcher("open", path)
            if mode == "wb":
                return Upload(store, path)
            return io.BytesIO(self._content(path))

        def _content(self, path: str) -> bytes:
            if path not in store.objects:
                raise FileNotFoundError(path)
            return store.objects[path][0]

        def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
            store.watcher("read", path)
            content = self._content(path)[start:end]
            store.asked[path] += len(content)
            return content

        def cp_file(self, path1: str, path2: str, **_: Any) -> None:
            store.watcher("copy", path1)
            store.objects[path2] = self._content(path1), time.time()

        def rm_file(self, path: str) -> None:
            store.watcher("remove", path)
            self._content(path)
            del store.objects[path]

        def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
            store.watcher("list", path)
            seen = [
                name for name in store.objects if name.startswith(f"{path}/") and name not in store.hidden
            ]
            if not seen:
                raise FileNotFoundError(path)
            return sorted({f"{path}/{name[len(path) + 1 :].split('/')[0]}" for name in seen})

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            store.watcher("look at", path)
            if path in store.objects:
                content, changed = store.objects[path]
                return {
                    "name": path,
                    "type": "file",
                    "size": len(content),
                    "mtime": changed,
                    "ETag": f"{changed} {len(content)}",
                }
            if path == "bucket" or any(name.startswith(f"{path}/") for name in store.objects):
                return {"name": path, "type": "directory", "size": 0}
            raise FileNotFoundError(path)

        def rmdir(self, path: str) -> None:
            raise FileNotFoundError(path)

    return Objects


@contextmanager
def object_store() -> Generator[Store, None, None]:
    """Serve an empty store at ``objects://bucket`` during a ``with`` block."""
    store = Store()
    fsspec.register_implementation("objects", filesystem(store), clobber=True)  # pyright: ignore[reportUnknownMemberType]
    yield store


class Killed(BaseException):
    """The program was killed: every request raises this."""


class Faults:
    """Lets one request fail, or kills the program at it."""

    def __init__(self, number: int, error: Callable[[str], BaseException]) -> None:
        self.left, self.error, self.request = number, error, ""

    def __call__(self, kind: str, name: str) -> None:
        self.left -= 1
        is_killed = self.left < 0 and isinstance(self.error(name), Killed)
        if self.left == -1 or is_killed:
            self.request = self.request or f"{kind} {name}"
            raise self.error(name)


def every_request(
    store: Store, error: Callable[[str], BaseException], act: Callable[[], object]
) -> Generator[tuple[Faults, BaseException | None], None, None]:
    """Do something to the same store again and again, and let the first, second, ... request fail.

    The last time none does.
    """
    before = dict(store.objects)
    for number in itertools.count():
        store.objects = dict(before)
        faults = Faults(number, error)
        store.watcher = faults
        raised: BaseException | None = None
        try:
            act()
        except (Exception, Killed) as found:  # noqa: BLE001 -- looked at by the caller
            raised = found
        store.watcher = lambda kind, name: None
        yield faults, raised
        if not faults.request:
            return


def memory_store() -> None:
    """Empty the store of ``memory://``, which all programs of a process share."""
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/runs", recursive=True)  # pyright: ignore[reportUnknownMemberType]


@pytest.fixture
def store() -> Generator[Store, None, None]:
    """Return an empty store at ``objects://bucket``."""
    with object_store() as found:
        yield found
