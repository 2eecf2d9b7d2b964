"""Object stores and remote file systems as a :class:`~accelfn.storage.disk.Disk`, through ``fsspec``.

An object appears under its name when it has been uploaded completely, and replaces an older one at once. So
``sync`` completes an upload, and closing one that was not synced discards it. There are no directories, which
are the beginnings of names, and no locks: renaming copies and removes.
"""

from __future__ import annotations

import datetime
import errno
import importlib
import itertools
import os
import threading
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from accelfn.errors import MissingExtraError
from accelfn.storage.address import Address, as_path
from accelfn.storage.disk import REAL_DISK, Disk, Folder, Status

# Uploaded at a time. S3 has at most 10,000 parts, so a file has at most 320 GB.
_PART_BYTES = 1 << 25
# Requested at least, and at most at a time.
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 24
# What clients call the time of an object's last change.
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5")
_NUMBERS = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (NotADirectoryError, errno.ENOTDIR),
    (IsADirectoryError, errno.EISDIR),
    (TimeoutError, errno.ETIMEDOUT),
)


def disk_at(place: str | os.PathLike[str]) -> Disk:
    """Return the disk of a place: that of the system, or for an address an object store.

    The client is configured as always: by its own variables, such as ``AWS_ENDPOINT_URL``, or by those and
    the files of ``fsspec``.

    Raises:
        MissingExtraError: The client's package isn't installed.
        ValueError: There is no such scheme.
    """
    path = as_path(place)
    if not isinstance(path, Address):
        return REAL_DISK
    store = _Store(_filesystem(str(path)))
    return Disk(
        create=store.create,
        write=store.write,
        start_writing=lambda descriptor, place, size: None,
        sync=store.sync,
        close=store.close,
        sync_folder=lambda path: None,
        make_folder=lambda path: None,
        rename=store.rename,
        remove_file=store.remove_file,
        remove_folder=store.remove_folder,
        open_folder=store.open_folder,
        names=store.names,
        open_file=store.open_file,
        status=store.status,
        status_of=store.status_of,
        lock=lambda path: None,
        start_reading=store.start_reading,
        read=store.read,
        parallel_reads=True,
        has_whole_files=True,
    )


def open_binary(place: str | os.PathLike[str]) -> BinaryIO:
    """Open a file or an object to read it with few requests, from its begin or at any offset.

    Raises:
        OSError: It can't be opened; with its name.
        MissingExtraError: The client's package isn't installed.
    """
    path = as_path(place)
    if not isinstance(path, Address):
        return open(path, "rb")
    address = str(path)
    with _naming_errors(address):
        return _filesystem(address).open(address, "rb", block_size=_LEAST_BYTES)


def _filesystem(address: str) -> Any:
    fsspec: Any = importlib.import_module("fsspec")
    try:
        return fsspec.core.url_to_fs(address)[0]
    except ImportError as error:
        name = getattr(error.__cause__ or error, "name", None)
        raise MissingExtraError(
            f"{address} needs {name}: pip install {name}." if name else f"{address}: {error}."
        ) from error
    except ValueError as error:
        raise ValueError(f"{address} can't be opened: {error}.") from error


@contextmanager
def _naming_errors(path: str) -> Generator[None, None, None]:
    """Convert the errors of clients to ``OSError`` with a number and the path."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is not None:
            raise
        found = (number for kind, number in _NUMBERS if isinstance(error, kind))
        number = error.errno or next(found, errno.EIO)
        raise OSError(number, error.strerror or str(error) or os.strerror(number), path) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error


@dataclass(slots=True)
class _Upload:
    """An object that is written."""

    path: str
    file: Any
    size: int = 0
    is_complete: bool = False


@dataclass(slots=True)
class _Download:
    """An object that is read.

    Attributes:
        path: Of the object.
        status: When it was opened.
        blocks: What each thread has requested last, with its offset.
        ends: Where the part ends that each thread is going to read.
    """

    path: str
    status: Status
    blocks: dict[int, tuple[int, bytes]] = field(default_factory=dict[int, "tuple[int, bytes]"])
    ends: dict[int, int] = field(default_factory=dict[int, int])


class _Store:
    """The operations on an object store, and what is open."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        self._open: dict[int, _Upload | _Download] = {}
        self._numbers = itertools.count()

    def create(self, path: str) -> int:
        with _naming_errors(path):
            file = self._filesystem.open(self._key(path), "wb", block_size=_PART_BYTES, autocommit=False)
        return self._add(_Upload(path, file))

    def write(self, descriptor: int, content: memoryview, place: int) -> int:
        upload = self._open[descriptor]
        if not isinstance(upload, _Upload) or place != upload.size:
            raise OSError(errno.ESPIPE, "objects are written from their begin to their end", upload.path)
        with _naming_errors(upload.path):
            upload.file.write(content)
        upload.size += len(content)
        return len(content)

    def sync(self, descriptor: int) -> None:
        upload = self._open[descriptor]
        if isinstance(upload, _Upload) and not upload.is_complete:
            with _naming_errors(upload.path):
                upload.file.close()
                upload.file.commit()
            upload.is_complete = True

    def close(self, descriptor: int) -> None:
        one = self._open.pop(descriptor)
        if isinstance(one, _Upload) and not one.is_complete:
            with suppress(Exception):  # the caller has an error already
                one.file.close()
                one.file.discard()

    def rename(self, path: str, new: str) -> None:
        with _naming_errors(path):
            self._filesystem.cp_file(self._key(path), self._key(new))
        self.remove_file(path)

    def remove_file(self, path: str) -> None:
        with _naming_errors(path):
            self._filesystem.rm_file(self._key(path))

    def remove_folder(self, path: str) -> None:
        """Do nothing, unless it is a real directory of a remote file system."""
        with suppress(FileNotFoundError), _naming_errors(path):
            self._filesystem.rmdir(self._key(path))

    def open_folder(self, path: str) -> Folder:
        if self.status(path).kind != "directory":
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return Folder(path, None)

    def names(self, folder: Folder) -> list[str]:
        key = self._key(folder.path)
        if "//" not in folder.path:  # nobody may list all buckets
            return []
        with _naming_errors(folder.path):
            self._filesystem.invalidate_cache(key)
            found: list[str] = self._filesystem.ls(key, detail=False)
        # Stores list what stands for an empty directory in it.
        return [name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != key]

    def open_file(self, folder: Folder, name: str) -> int:
        path = os.path.join(folder.path, name)
        status = self.status(path)
        if status.kind == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return self._add(_Download(path, status))

    def status(self, path: str) -> Status:
        key = self._key(path)
        if "//" not in path or not key.strip("/"):  # the store itself, which has all buckets
            return Status("directory", 0, 0, 0, 0.0)
        with _naming_errors(path):
            self._filesystem.invalidate_cache(key)
            found: Mapping[str, Any] = self._filesystem.info(key)
        if found["type"] not in ("file", "directory"):
            return Status("other", 0, 0, 0, 0.0)
        version = next((found[name] for name in _VERSIONS if found.get(name)), "")
        return Status(found["type"], found["size"] or 0, 0, zlib.crc32(str(version).encode()), _time(found))

    def status_of(self, descriptor: int) -> Status:
        one = self._open[descriptor]
        return self.status(one.path) if isinstance(one, _Upload) else one.status

    def start_reading(self, descriptor: int, place: int, size: int) -> None:
        one = self._open[descriptor]
        assert isinstance(one, _Download)
        one.ends[threading.get_ident()] = place + size

    def read(self, descriptor: int, target: memoryview, place: int) -> int:
        one = self._open[descriptor]
        assert isinstance(one, _Download)
        thread = threading.get_ident()
        start, block = one.blocks.get(thread, (0, b""))
        if not start <= place < start + len(block):
            size = max(len(target), one.ends.get(thread, 0) - place, _LEAST_BYTES)
            end = min(place + min(size, _MOST_BYTES), one.status.size)
            if place >= end:
                return 0
            try:
                with _naming_errors(one.path):
                    block = self._filesystem.cat_file(self._key(one.path), start=place, end=end)
            except FileNotFoundError:
                raise
            except OSError:
                if self.status(one.path) == one.status:
                    raise
                return 0  # another one that ends before has replaced it
            start = place
            one.blocks[thread] = start, block
        part = memoryview(block)[place - start : place - start + len(target)]
        target[: len(part)] = part
        return len(part)

    def _add(self, one: _Upload | _Download) -> int:
        descriptor = next(self._numbers)
        self._open[descriptor] = one
        return descriptor

    def _key(self, path: str) -> str:
        # Which fsspec documents for its subclasses.
        return self._filesystem._strip_protocol(path.replace(os.sep, "/"))


def _time(found: Mapping[str, Any]) -> float:
    """Return when an object was changed, in seconds since 1970; 0 if the store doesn't say."""
    when = next((found[name] for name in _TIMES if found.get(name)), 0.0)
    if isinstance(when, str):
        when = datetime.datetime.fromisoformat(when.replace("Z", "+00:00"))
    return when.timestamp() if isinstance(when, datetime.datetime) else float(when)
