"""A disk in memory that logs every operation, and the states in which a power cut could leave it.

What is promised of a real disk, and no more: the bytes of a file survive once the file was synced, and a
change to the names in a directory once that directory was synced. Of everything else any part may be lost:
each change of names by itself, in any order, and of a file's bytes all, some, or all but their number.
"""

import errno
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from accelfn.storage.disk import Disk, Folder, Status

ROOT = 1


class Killed(BaseException):
    """The program was killed: every operation raises this."""


class Operation(NamedTuple):
    """One entry of the log. Of a change of names, ``inode`` is what the name stands for."""

    kind: str  # create, write, sync, sync_folder, mkdir, link, rename, unlink, rmdir, acknowledged
    inode: int
    folder: int = 0
    name: str = ""
    target: str = ""
    content: bytes = b""
    place: int = 0


Names = dict[int, dict[str, int]]  # by directory
Contents = dict[int, bytes]  # by file


def apply_names(names: Names, one: Operation) -> None:
    """Carry out one change of names, as far as what it changes is there."""
    here = names.setdefault(one.folder, {})
    if one.kind in ("create", "mkdir", "link"):
        here[one.name] = one.inode
    else:
        if here.get(one.name) == one.inode:
            del here[one.name]
        if one.kind == "rename":
            here[one.target] = one.inode


@dataclass
class Model:
    """The disk as programs see it, and what has happened to it since it was last known to be durable."""

    names: Names = field(default_factory=lambda: {ROOT: {}})
    contents: Contents = field(default_factory=dict[int, bytes])
    log: list[Operation] = field(default_factory=list[Operation])
    skip: tuple[str, int] | None = None  # function and line of a sync that is left out
    kill_at: int = -1  # the number of the operation at which the program ends
    fail_at: int = -1  # the number of the operation that fails
    steps: list[str] = field(default_factory=list[str])  # kinds of the operations so far
    sites: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])  # of syncs
    start: tuple[Names, Contents] = ({ROOT: {}}, {})  # durable, before the log

    def disk(self) -> Disk:
        own = (
            "create write sync sync_folder make_folder rename remove_file remove_folder open_folder open_file"
        )
        return Disk(
            **{name: getattr(self, name) for name in (*own.split(), "status_of", "lock", "read")},
            start_writing=lambda descriptor, place, size: None,
            close=lambda descriptor: None,
            names=lambda folder: list(self.names[folder.descriptor or 0]),
            status=lambda path: self.status_of(self.find(path)),
        )

    def find(self, path: str, start: int = ROOT) -> int:
        inode = start
        for part in filter(None, path.split("/")):
            if inode not in self.names:
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
            if part not in self.names[inode]:
                raise FileNotFoundError(errno.ENOENT, "not there", path)
            inode = self.names[inode][part]
        return inode

    def _step(self, kind: str) -> None:
        number = len(self.steps)
        self.steps.append(kind)
        if 0 <= self.kill_at <= number:
            raise Killed
        if number == self.fail_at:
            raise OSError(errno.EIO, "the disk failed")

    def _split(self, path: str) -> tuple[int, str]:
        parent, name = os.path.split(path)
        return self.find(parent), name

    def _change(self, one: Operation) -> None:
        apply_names(self.names, one)
        self.log.append(one)

    def _make(self, path: str, kind: str) -> int:
        self._step("new")
        folder, name = self._split(path)
        if name in self.names[folder]:
            raise FileExistsError(errno.EEXIST, "there is one", path)
        inode = 1 + max((*self.names, *self.contents))
        if kind == "mkdir":
            self.names[inode] = {}
        else:
            self.contents[inode] = b""
        self._change(Operation(kind, inode, folder, name))
        return inode

    def create(self, path: str) -> int:
        return self._make(path, "create")

    def make_folder(self, path: str) -> None:
        self._make(path, "mkdir")

    def write(self, descriptor: int, content: memoryview, place: int) -> int:
        self._step("write")
        now = self.contents[descriptor]
        self.contents[descriptor] = now[:place] + bytes(content) + now[place + len(content) :]
        self.log.append(Operation("write", descriptor, content=bytes(content), place=place))
        return len(content)

    def _sync(self, kind: str, inode: int) -> None:
        self._step(kind)
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while "model_disk" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        site = (frame.f_code.co_name, frame.f_lineno)
        self.sites.add(site)
        if site != self.skip:
            self.log.append(Operation(kind, inode))

    def sync(self, descriptor: int) -> None:
        self._sync("sync", descriptor)

    def sync_folder(self, path: str) -> None:
        self._sync("sync_folder", self.find(path))

    def rename(self, source: str, target: str) -> None:
        self._step("rename")
        folder, name = self._split(source)
        other, new = self._split(target)
        inode = self.find(source)
        if new in self.names[other] and self.names.get(self.names[other][new]):
            raise OSError(errno.ENOTEMPTY, "not empty", target)
        if folder == other:
            self._change(Operation("rename", inode, folder, name, new))
        else:  # each directory by itself may lose its part of it
            self._change(Operation("link", inode, other, new))
            self._change(Operation("unlink", inode, folder, name))

    def _remove(self, path: str, kind: str) -> None:
        self._step(kind)
        folder, name = self._split(path)
        inode = self.find(path)
        if kind == "rmdir" and self.names[inode]:
            raise OSError(errno.ENOTEMPTY, "not empty", path)
        self._change(Operation(kind, inode, folder, name))

    def remove_file(self, path: str) -> None:
        assert self.find(path) in self.contents
        self._remove(path, "unlink")

    def remove_folder(self, path: str) -> None:
        self._remove(path, "rmdir")

    def open_folder(self, path: str) -> Folder:
        inode = self.find(path)
        if inode not in self.names:
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
        return Folder(path, inode)

    def open_file(self, folder: Folder, name: str) -> int:
        return self.find(name, folder.descriptor or 0)

    def status_of(self, descriptor: int) -> Status:
        if descriptor in self.names:
            return Status("directory", 0, 0, descriptor, 0.0)
        return Status("file", len(self.contents[descriptor]), 0, descriptor, 0.0)

    def lock(self, path: str) -> Callable[[], None]:
        self.find(path)
        return lambda: None

    def read(self, descriptor: int, target: memoryview, place: int) -> int:
        content = self.contents[descriptor][place : place + len(target)]
        target[: len(content)] = content
        return len(content)

    def files(self, path: str = "/") -> dict[str, bytes]:
        """Return all files below a directory by path; directories as empty ones with a slash."""
        return dict(_walk(self.names, self.contents, self.find(path), ""))


def _walk(names: Names, contents: Contents, inode: int, path: str) -> Iterator[tuple[str, bytes]]:
    for name, child in sorted(names.get(inode, {}).items()):
        if child in contents:
            yield f"{path}/{name}", contents[child]
        else:
            yield f"{path}/{name}/", b""
            yield from _walk(names, contents, child, f"{path}/{name}")


def _torn(durable: bytes, now: bytes) -> list[bytes]:
    """Return what may be in a file after a power cut."""
    half = len(now) // 2
    return list(
        dict.fromkeys([durable, now, now[:half], bytes(len(now)), now[:half] + bytes(len(now) - half)])
    )


def crashes(start: tuple[Names, Contents], log: Sequence[Operation]) -> Iterator[Model]:
    """Return every state that a power cut at the end of ``log`` could leave."""
    changes: list[Operation] = []  # of names, that may be lost
    names: Names = {inode: dict(here) for inode, here in start[0].items()}
    durable: Contents = dict(start[1])
    now: Contents = dict(start[1])
    for one in log:
        if one.kind == "write":
            before = now[one.inode]
            now[one.inode] = before[: one.place] + one.content + before[one.place + len(one.content) :]
        elif one.kind == "sync":
            durable[one.inode] = now[one.inode]
        elif one.kind == "sync_folder":
            for change in changes:
                if change.folder == one.inode:
                    apply_names(names, change)
            changes = [change for change in changes if change.folder != one.inode]
        elif one.kind != "acknowledged":
            changes.append(one)
            if one.kind == "create":
                now[one.inode] = durable[one.inode] = b""
            elif one.kind == "mkdir":
                names[one.inode] = {}
    unsure = [inode for inode in now if now[inode] != durable[inode]]
    seen: set[tuple[tuple[str, bytes], ...]] = set()
    for kept in itertools.product((False, True), repeat=len(changes)):
        after = {inode: dict(here) for inode, here in names.items()}
        for change, stays in zip(changes, kept, strict=True):
            if stays:
                apply_names(after, change)
        for torn in itertools.product(*(_torn(durable[inode], now[inode]) for inode in unsure)):
            contents = {**durable, **dict(zip(unsure, torn, strict=True))}
            tree = tuple(_walk(after, contents, ROOT, ""))
            if tree not in seen:
                seen.add(tree)
                yield settled(Model(names=after, contents=contents))


def settled(model: Model) -> Model:
    """Return the same disk with all of it durable, as after a restart."""
    names = {inode: dict(here) for inode, here in model.names.items()}
    return Model(
        names={inode: dict(here) for inode, here in names.items()},
        contents=dict(model.contents),
        start=(names, dict(model.contents)),
    )
