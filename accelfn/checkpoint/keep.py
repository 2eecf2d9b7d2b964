"""Retention: choose the checkpoints that stay, as a pure function, and remove the others."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from accelfn.checkpoint.commit import (
    describe_extra,
    extra_in,
    find_leftovers,
    is_dead,
    remove_checkpoint,
)
from accelfn.checkpoint.find import Found, scan
from accelfn.errors import ConfigurationError
from accelfn.storage.address import as_path
from accelfn.storage.disk import Disk
from accelfn.storage.object_store import disk_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Rules of retention: a checkpoint stays if any rule keeps it, and the newest always stays.

    Attributes:
        last: The number of newest checkpoints to keep.
        every: Keep those whose step is a multiple of this.
        best: The number of checkpoints with the best metric to keep; of equal ones the newer.
        mode: Whether a low or a high metric is good: ``"min"`` or ``"max"``.

    Without any rule all of them stay.

    Raises:
        ConfigurationError: A number is below 1, or the mode is unknown.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Check the numbers and the mode."""
        for name in ("last", "every", "best"):
            value: object = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(
                    f"Keep: {name} must be a whole number from 1 on, or None, got {value!r}."
                )
        if self.mode not in ("min", "max"):
            raise ConfigurationError(f"Keep: mode must be 'min' or 'max', got {self.mode!r}.")


def plan_retention(
    checkpoints: Sequence[tuple[int, float | None]], keep: Keep, *, saved: int | None = None
) -> tuple[int, ...]:
    """Choose the checkpoints that stay. Pure.

    Args:
        checkpoints: Step and metric of each, in any order; of equal steps the later one counts as newer. A
            metric that is None or NaN is never among the best.
        keep: The rules.
        saved: Index of the one that was just saved, which stays too: after a return to an older checkpoint it
            isn't the newest.

    Returns:
        The indices of those that stay, in order. The newest is always among them.

    >>> plan_retention([(100, 0.5), (200, 0.3), (300, 0.4), (400, 0.9)], Keep(last=1, best=1))
    (1, 3)
    """
    order = sorted(range(len(checkpoints)), key=lambda index: (checkpoints[index][0], index))
    return _choose(order, checkpoints, keep, saved)


def _choose(
    order: Sequence[int], checkpoints: Sequence[tuple[int, float | None]], keep: Keep, saved: int | None
) -> tuple[int, ...]:
    """Choose those that stay; ``order`` lists the indices, oldest first."""
    if keep.last is None and keep.every is None and keep.best is None:
        return tuple(range(len(checkpoints)))
    stay = set(order[-max(keep.last or 1, 1) :])
    if saved is not None:
        stay.add(saved)
    if keep.every is not None:
        stay |= {index for index in order if checkpoints[index][0] % keep.every == 0}
    if keep.best is not None:
        sign = 1 if keep.mode == "min" else -1
        scored = [
            (sign * metric, -age, index)
            for age, index in enumerate(order)
            if (metric := checkpoints[index][1]) is not None and not math.isnan(metric)
        ]
        stay |= {index for _, _, index in sorted(scored)[: keep.best]}
    return tuple(sorted(stay))


class PrunePlan(NamedTuple):
    """What a removal would do.

    Attributes:
        stay: Checkpoints that a rule keeps, that were just saved, or that contain a user's files; oldest
            first.
        remove: Checkpoints to remove; oldest first.
        dead: Directories that saves and removals left that were killed, which are removed too.
        extra: Of the checkpoints that stay only because of a user's files: path of each, and the files.
    """

    stay: tuple[Found, ...]
    remove: tuple[Found, ...]
    dead: tuple[str, ...]
    extra: tuple[tuple[str, tuple[str, ...]], ...]


def plan_prune(
    directory: str | os.PathLike[str],
    keep: Keep,
    *,
    saved: str | os.PathLike[str] | None = None,
    disk: Disk | None = None,
) -> PrunePlan:
    """List what :func:`prune_checkpoints` would remove. Nothing is changed.

    Ranks: any; nothing is exchanged.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    disk, parent = disk or disk_at(directory), str(as_path(directory))
    found, _ = scan(disk, parent)
    just_saved = None if saved is None else str(as_path(saved))
    index = next((index for index, item in enumerate(found) if item.path == just_saved), None)
    scored = [(item.number, item.metric) for item in found]
    stay = set(_choose(range(len(found)), scored, keep, index))
    extra = {index: tuple(extra_in(disk, item.path)) for index, item in enumerate(found) if index not in stay}
    extra = {index: files for index, files in extra.items() if files}
    stay |= extra.keys()
    newest_s = max((item.modified_s for item in found), default=0.0)
    return PrunePlan(
        stay=tuple(item for index, item in enumerate(found) if index in stay),
        remove=tuple(item for index, item in enumerate(found) if index not in stay),
        dead=tuple(path for path in find_leftovers(disk, parent) if is_dead(disk, path, newest_s)),
        extra=tuple((found[index].path, files) for index, files in extra.items()),
    )


def prune_checkpoints(
    directory: str | os.PathLike[str],
    keep: Keep,
    *,
    saved: str | os.PathLike[str] | None = None,
    disk: Disk | None = None,
) -> tuple[Path, ...]:
    """Remove the checkpoints in a directory that no rule keeps, and what saves left behind that were killed.

    The newest are the last ones of ``find_checkpoints``. The step of a checkpoint is that of its manifest if
    each has a step; else the last whole number in its name that isn't the same in all names, if each name has
    one; else its place in that order. What isn't a checkpoint is left alone, and so is a damaged one, and one
    that is being replaced. One that contains a user's files stays, with a warning; what systems leave
    everywhere, such as ``.DS_Store``, is removed with the checkpoint.

    Ranks: one; the others must not read what is removed.

    Args:
        directory: In which the checkpoints are.
        keep: The rules.
        saved: The one that was just saved, if any: it stays, whatever the rules say.
        disk: The operations on files; None for those of the system, or of an object store.

    Returns:
        The checkpoints that were removed.

    Raises:
        FileNotFoundError: There is no such directory.
        OSError: The manifest of a checkpoint can't be removed. Those that stay are whole.
    """
    disk = disk or disk_at(directory)
    plan = plan_prune(directory, keep, saved=saved, disk=disk)
    for path, extra in plan.extra:
        warnings.warn(
            f"{path} was not removed. {describe_extra(path, extra)} Move them away to let it be removed.",
            stacklevel=2,
        )
    for path in plan.dead:
        remove_checkpoint(disk, path, is_unused=True)
    return tuple(as_path(item.path) for item in plan.remove if remove_checkpoint(disk, item.path))
