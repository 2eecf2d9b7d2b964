"""The tracker that needs no package: one file of JSON lines for each run."""

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
from typing import Any, ClassVar, cast

from accelfn.errors import ConfigurationError
from accelfn.tracking.adapters import BuiltInTracker, Table
from accelfn.tracking.values import as_pillow, plain_config, read_pixels


class JSONLTracker(BuiltInTracker):
    """Writes a run into a folder: ``<logging_dir>/<project_name>/<run_name>/``.

    ``events.jsonl`` in it has one JSON object a line, and lines are only ever added, each by one write; so
    what was logged is there after a crash, and at most the last line is torn. Images are PNG files in
    ``images/``, which takes Pillow. ``accelfn runs`` lists, shows and draws such folders, and
    :func:`accelfn.launch.read_run` reads them. The guide describes the lines.

    Args:
        project_name: Folder of the runs that belong together.
        logging_dir: What the folders are made in.
        run_name: Of this run; None makes one of the time and six random digits.
        resume: Whether to continue the run of this name if it is there; without ``run_name`` the latest one
            of the project, by when its last line was written. A step that is logged again counts as it was
            logged last. Where there is nothing to continue, a run begins.
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
        """Choose the folder; nothing is written before ``start``."""
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
        """Make the folder, and write the first line.

        Raises:
            ConfigurationError: There is a run of this name, and ``resume`` isn't set.
        """
        path = self.folder / "events.jsonl"
        is_there = path.exists()
        if is_there and not self.resume:
            raise ConfigurationError(
                f"jsonl: there is a run {self.run_name!r} in {self.folder.parent} already. Choose another "
                "run_name, or go on with it by resume=True."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        size = os.lseek(self._file, 0, os.SEEK_END)
        if size:
            os.lseek(self._file, size - 1, os.SEEK_SET)
            self._is_torn = os.read(self._file, 1) != b"\n"
        self._num_images = sum(1 for _ in self.folder.glob("images/*"))
        self._write(
            "start",
            format=1,
            project=self.project_name,
            run=self.run_name,
            host=socket.gethostname(),
            process=os.getpid(),
        )

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write a line with the configuration."""
        self._write("config", values=values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write a line with the values of a step.

        Raises:
            TypeError: ``kwargs`` are given.
        """
        _refuse(kwargs)
        self._write("log", step=step, values=plain_config(values))

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images as PNG files, and a line that names them; ``captions`` has one text for each image."""
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
        columns, rows = table.spread()
        self._write("table", step=step, name=name, columns=columns, rows=plain_config({"": rows})[""])

    def finish(self) -> None:
        """Write the last line, and close the file when it is on the disk."""
        if self._file is None:
            return
        self._write("finish")
        os.fsync(self._file)
        os.close(self._file)
        self._file = None

    def _write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            raise ConfigurationError(
                f"jsonl: the run {self.run_name!r} isn't open: it has not been started, or it has ended."
            )
        line = json.dumps(
            {"kind": kind, "time": time.time(), **_finite(fields)}, ensure_ascii=False, allow_nan=False
        )
        # After a torn line, of a crash or a full disk, the next one stands on its own.
        data = (b"\n" if self._is_torn else b"") + line.encode(errors="backslashreplace") + b"\n"
        # One write for the whole line: a process that is killed leaves it whole, or nothing of it.
        written = os.write(self._file, data)
        self._is_torn = written < len(data)
        if self._is_torn:
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes of a line were written")


def _latest(project: Path) -> str | None:
    """Name the run of a project whose file was written last."""
    files = sorted(project.glob("*/events.jsonl"), key=lambda file: file.stat().st_mtime)
    return files[-1].parent.name if files else None


def _safe(name: str) -> str:
    """Return a name as one part of a path.

    >>> _safe("a/b: c"), _safe("..")
    ('a_b_ c', '_')
    """
    return re.sub(r"^\.+", "_", re.sub(r"[^\w.\- ]", "_", name).strip()) or "_"


def _finite(value: Any) -> Any:
    """Write what JSON has no number for as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_finite(one) for one in cast("list[Any]", value)]
    return value


def _refuse(kwargs: Mapping[str, Any]) -> None:
    if kwargs:
        raise TypeError(f"jsonl takes no {', '.join(kwargs)} in log_kwargs. Leave it out.")
