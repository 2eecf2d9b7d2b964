"""A tracker without dependencies: one file of JSON lines per run."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from accelfn.errors import ConfigurationError
from accelfn.storage.address import is_address
from accelfn.tracking.adapters import BuiltInTracker, Table
from accelfn.tracking.values import as_pillow, plain_config, read_pixels, walk


class JSONLTracker(BuiltInTracker):
    """Writes a run to the directory ``<logging_dir>/<project_name>/<run_name>/``.

    ``events.jsonl`` contains one JSON object per line. Each line is appended by a single write, so that a
    crash loses at most the last line. Images are PNG files in ``images/``, which needs Pillow. ``accelfn
    runs`` lists, shows and plots runs, and :func:`accelfn.launch.read_run` reads them. The guide describes
    the format.

    Args:
        project_name: Name of the project, a directory of runs.
        logging_dir: Parent directory.
        run_name: Name of the run; None for the time and six random digits.
        resume: Whether to continue an existing run: the one with this name or, without ``run_name``, the last
            one of the project. If a step is logged again, the last value counts. If there is no run to
            continue, a new one starts.
    """

    name = "jsonl"
    modules: ClassVar[tuple[str, ...]] = ()
    requires_logging_directory = True
    default_directory: ClassVar[str | None] = "runs"
    handle = "folder"

    def __init__(
        self,
        project_name: str,
        logging_dir: str | os.PathLike[str] = "runs",
        *,
        run_name: str | None = None,
        resume: bool = False,
    ) -> None:
        """Set the directory; ``start`` creates it.

        Raises:
            ConfigurationError: ``logging_dir`` is an address such as ``s3://bucket``.
        """
        if is_address(logging_dir):
            raise ConfigurationError(
                f"jsonl: {os.fspath(logging_dir)} is an address, and this tracker appends to files. Pass a "
                "directory as logging_dir."
            )
        project = Path(logging_dir) / _safe(project_name)
        if resume and run_name is None:
            run_name = _latest(project)
        super().__init__()
        self.project_name = project_name
        self.run_name: str = run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        self.folder: Path = project / _safe(self.run_name)
        self.resume = resume
        self._file: int | None = None
        self._num_images = 0
        self._is_torn = False

    def start(self) -> None:
        """Create the directory, and write the first line.

        Raises:
            ConfigurationError: The run exists, and ``resume`` isn't set.
        """
        path = self.folder / "events.jsonl"
        if path.exists() and not self.resume:
            raise ConfigurationError(
                f"jsonl: the run {self.run_name!r} exists in {self.folder.parent}. Choose another run_name, "
                "or pass resume=True to continue it."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        size = os.lseek(self._file, 0, os.SEEK_END)
        if size:
            os.lseek(self._file, size - 1, os.SEEK_SET)
            self._is_torn = os.read(self._file, 1) != b"\n"
        self._num_images = sum(1 for _ in self.folder.glob("images/*"))
        names = {"project": self.project_name, "run": self.run_name, "host": socket.gethostname()}
        self._write("start", format=1, **names, process=os.getpid())

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration."""
        self._write("config", values=values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step.

        Raises:
            TypeError: ``kwargs`` isn't empty.
        """
        _refuse(kwargs)
        self._write("log", step=step, values=plain_config(values))

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images as PNG files, and log their names; ``captions`` has one text per image."""
        captions = kwargs.pop("captions", None)
        _refuse(kwargs)
        for name, images in values.items():
            files: list[str] = []
            for pixels in read_pixels(images, name):
                number = self._num_images
                file = f"images/{_safe(name)}-{'' if step is None else f'{step}-'}{os.getpid()}-{number}.png"
                self._num_images += 1
                (self.folder / "images").mkdir(exist_ok=True)
                as_pillow(pixels).save(self.folder / file)
                files.append(file)
            self._write("images", step=step, name=name, files=files, captions=captions)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        _refuse(options)
        self._write("table", step=step, name=name, **plain_config(table._asdict()))

    def finish(self) -> None:
        """Write the last line, and flush the file to disk."""
        if self._file is None:
            return
        self._write("finish")
        os.fsync(self._file)
        os.close(self._file)
        self._file = None

    def _write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            raise ConfigurationError(
                f"jsonl: the run {self.run_name!r} is not open. Log between start and finish."
            )
        record = {"kind": kind, "time": time.time(), **walk(fields, _finite)}
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        # After an incomplete line, start a new one.
        data = (b"\n" if self._is_torn else b"") + line.encode(errors="backslashreplace") + b"\n"
        # A single write, so that a killed process leaves no partial line.
        written = os.write(self._file, data)
        self._is_torn = written < len(data)
        if self._is_torn:
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written")


def _latest(project: Path) -> str | None:
    """Return the run of a project that was written last, or None."""
    files = sorted(project.glob("*/events.jsonl"), key=lambda file: file.stat().st_mtime)
    return files[-1].parent.name if files else None


def _safe(name: str) -> str:
    """Return a name as a single path component.

    >>> _safe("a/b: c"), _safe("..")
    ('a_b_ c', '_')
    """
    return re.sub(r"^\.+", "_", re.sub(r"[^\w.\- ]", "_", name).strip()) or "_"


def _finite(value: Any, path: str) -> Any:
    """Replace NaN and infinity, which JSON lacks, by text."""
    del path
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _refuse(kwargs: Mapping[str, Any]) -> None:
    if kwargs:
        raise TypeError(f"jsonl doesn't support {', '.join(kwargs)} in log_kwargs. Leave it out.")
