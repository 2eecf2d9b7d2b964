"""Runs that the JSONL tracker has written, as records. Needs no torch: the command line reads them too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from accelfn.errors import ConfigurationError

_FORMAT = 1
_FILE = "events.jsonl"
# What JSON has no number for.
_WORDS: Mapping[str, float] = MappingProxyType(
    {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
)


class Curve(NamedTuple):
    """Values of one name, by step. Steps grow.

    Attributes:
        steps: Number of each step; a value without one has that behind the last, or 0.
        values: What was logged last for each.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]


class RunTable(NamedTuple):
    """A table that was logged."""

    name: str
    step: int | None
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run, as its file tells it.

    Attributes:
        folder: Of the run.
        project: What it belongs to.
        name: Of the run.
        started_s: When it began, in seconds since 1970.
        last_s: When the last line was written.
        is_finished: Whether it has ended by itself. If not it is at work, or was killed.
        num_starts: How often it was begun: more than once if it was gone on with.
        config: Its configuration.
        curves: Numbers by name; ``/`` joins names of nested ones.
        texts: What was last logged of each name that isn't a number.
        images: Files by name, relative to the folder.
        tables: In the order in which they were logged.
        num_damaged: Lines that can't be read, as one is torn where a program was killed.
    """

    folder: Path
    project: str = ""
    name: str = ""
    started_s: float = math.nan
    last_s: float = math.nan
    is_finished: bool = False
    num_starts: int = 0
    config: Mapping[str, Any]
    curves: Mapping[str, Curve]
    texts: Mapping[str, str]
    images: Mapping[str, tuple[str, ...]]
    tables: tuple[RunTable, ...] = ()
    num_damaged: int = 0

    @property
    def num_steps(self) -> int:
        """Steps of the longest curve."""
        return max((len(curve.steps) for curve in self.curves.values()), default=0)


def find_runs(folder: str | Path) -> list[Path]:
    """Return the folders of all runs below a folder, by the names of their projects and their own.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    top = Path(folder)
    if not top.is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}. Runs lie where logging_dir said.")
    return sorted(file.parent for file in top.rglob(_FILE))


def read_run(folder: str | Path) -> RunRecord:
    """Read a run that the JSONL tracker has written, also while it is at work.

    A step that was logged twice, as when a run is gone on with from a checkpoint, counts as it was logged
    last.

    Args:
        folder: Of the run, or its ``events.jsonl``.

    Raises:
        FileNotFoundError: There is no run.
        ConfigurationError: A newer version of accelfn has written it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "events.jsonl").write_text('{"kind": "log", "step": 0, "values": {"loss": 0.5}}')
    ...     read_run(folder).curves["loss"]
    Curve(steps=(0,), values=(0.5,))
    """
    path = Path(folder)
    file = path if path.name == _FILE else path / _FILE
    if not file.is_file():
        raise FileNotFoundError(f"there is no run in {str(folder)!r}: it has no {_FILE}.")
    reading = _Reading()
    with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            reading.add(line)
    return reading.record(file.parent)


class _Points:
    """What was logged of one name."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.last = -1
        self.are_in_order = True

    def add(self, step: int | None, value: float) -> None:
        at = self.last + 1 if step is None else step
        if at <= self.last and self.steps:
            self.are_in_order = False
        self.last = at
        self.steps.append(at)
        self.values.append(value)

    def curve(self) -> Curve:
        if self.are_in_order:
            return Curve(tuple(self.steps), tuple(self.values))
        pairs = sorted(dict(zip(self.steps, self.values, strict=True)).items())
        return Curve(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))


class _Reading:
    """What the lines so far have said."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.points: dict[str, _Points] = {}
        self.texts: dict[str, str] = {}
        self.images: dict[str, list[str]] = {}
        self.tables: list[RunTable] = []
        self.num_damaged = 0
        self._decode = json.JSONDecoder().decode
        self._kinds = {
            "start": self._start,
            "config": self._config,
            "log": self._log,
            "images": self._images,
            "table": self._table,
            "finish": self._finish,
        }

    def add(self, line: str) -> None:
        try:
            entry: dict[str, Any] = self._decode(line)
            take = self._kinds.get(entry.get("kind", ""))
            self.facts["last_s"] = float(entry.get("time", math.nan))
            if take is not None:  # kinds of later versions are passed by
                take(entry)
        except ConfigurationError:
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
            self.num_damaged += 1  # no JSON, or not of the form that the tracker writes

    def _start(self, entry: dict[str, Any]) -> None:
        if entry.get("format", _FORMAT) > _FORMAT:
            raise ConfigurationError(
                f"the run {entry.get('run')!r} is of format {entry['format']}, and this version of accelfn "
                f"reads {_FORMAT}. Read it with a newer version."
            )
        self.facts.setdefault("started_s", entry.get("time", math.nan))
        self.facts["num_starts"] = self.facts.get("num_starts", 0) + 1
        self.facts.update(
            project=str(entry.get("project", "")), name=str(entry.get("run", "")), is_finished=False
        )

    def _config(self, entry: dict[str, Any]) -> None:
        self.config.update(entry.get("values") or {})

    def _log(self, entry: dict[str, Any]) -> None:
        step = None if entry.get("step") is None else int(entry["step"])
        for name, value in _flat(entry.get("values") or {}):
            number = _WORDS.get(value, value) if isinstance(value, str) else value
            if isinstance(number, (int, float)):
                points = self.points.get(name)
                if points is None:
                    points = self.points[name] = _Points()
                points.add(step, float(number))
            elif value is not None:
                self.texts[name] = str(value)

    def _images(self, entry: dict[str, Any]) -> None:
        files = [str(file) for file in entry["files"]]
        if files:
            self.images.setdefault(str(entry.get("name")), []).extend(files)

    def _table(self, entry: dict[str, Any]) -> None:
        rows = tuple(tuple(row) for row in entry.get("rows") or ())
        columns = tuple(map(str, entry.get("columns") or ()))
        self.tables.append(RunTable(str(entry.get("name")), entry.get("step"), columns, rows))

    def _finish(self, entry: dict[str, Any]) -> None:
        del entry
        self.facts["is_finished"] = True

    def record(self, folder: Path) -> RunRecord:
        return RunRecord(
            folder=folder,
            config=MappingProxyType(self.config),
            curves=MappingProxyType({name: points.curve() for name, points in self.points.items()}),
            texts=MappingProxyType(self.texts),
            images=MappingProxyType({name: tuple(files) for name, files in self.images.items()}),
            tables=tuple(self.tables),
            num_damaged=self.num_damaged,
            **cast("dict[str, Any]", {"name": folder.name, **self.facts}),
        )


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{above}/{name}" if above else name
        if isinstance(value, dict):
            yield from _flat(cast("dict[str, Any]", value), path)
        else:
            yield path, value
