"""Folders that weights are written to, and errors that say which argument names one that can't take them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path

__all__ = ("check_folder", "writing_to")


def check_folder(folder: str | os.PathLike[str], argument: str) -> None:
    """Refuse what is a file, or lies below one.

    Args:
        folder: It needn't be there.
        argument: As the caller knows it.

    Raises:
        NotADirectoryError: It is there, or a part of its path is, and is no directory.
        ValueError: It can't be a path.
    """
    path = Path(folder)
    if "\0" in str(path):
        raise ValueError(f"{argument}: a path has no zero bytes: got {str(path)!r}.")
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        what = "it is a file" if there == path else f"{there} is a file"
        raise _said(NotADirectoryError(errno.ENOTDIR, what), path, argument)


@contextlib.contextmanager
def writing_to(folder: str | os.PathLike[str], argument: str) -> Generator[Path]:
    """Make a folder, and while weights are written to it, let errors of the disk say what to do.

    Args:
        folder: It is made if it isn't there.
        argument: As the caller knows it.

    Raises:
        OSError: It can't be made, or written to. Class, ``errno`` and ``filename`` are those of the system's
            error.
    """
    path = Path(folder)
    check_folder(path, argument)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _said(error, path, argument) from error
    try:
        yield path
    except OSError as error:
        if error.errno is None or not _is_within(error.filename, path):
            raise  # of a file that is read meanwhile, say
        raise _said(error, path, argument) from error


def _is_within(filename: object, folder: Path) -> bool:
    if not isinstance(filename, (str, os.PathLike)):
        return filename is None
    return Path(os.path.abspath(os.fspath(filename))).is_relative_to(os.path.abspath(folder))


def _said(error: OSError, folder: Path, argument: str) -> OSError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        todo = "Make room there, or pass a folder on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        todo = "Pass a folder that you may write to"
    else:
        todo = "Pass another folder"
    said = f"{argument}={str(folder)!r} can't take weights: {error.strerror}. {todo}"
    return OSError(error.errno, said, error.filename or str(folder))
