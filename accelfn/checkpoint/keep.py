"""Which checkpoints stay, as a pure function; and the removal of the others."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from accelfn.checkpoint.commit import (
    Leftover,
    clean,
    describe_extra,
    find_leftovers,
    find_visible_extra,
    is_dead,
    leftover_path,
    make_nonce,
)
from accelfn.checkpoint.disk import REAL_DISK, Disk, naming, remove_tree
from accelfn.checkpoint.find import Found, scan
from accelfn.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints stay: those that any of the rules wants, and always the newest.

    Attributes:
        last: So many of the newest.
        every: Those whose step is a multiple of it.
        best: So many of those with the best metric; of equal ones the newer.
        mode: Whether a low or a high metric is good: ``"min"`` or ``"max"``.

    Without any rule all of them stay.

    Raises:
        ConfigurationError: A number is below 1, or the mode is another.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
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
            metric that is None or no number is never among the best.
        keep: The rules.
        saved: Index of the one that was just saved, which stays besides those that the rules want: after
            going back to an older checkpoint it isn't the newest.

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
        stay: Checkpoints that a rule wants, that were just saved or are just being replaced, or with files
            of somebody's own in them; oldest first.
        remove: Checkpoints that go; oldest first.
        dead: What dead saves and removals left, which goes too.
        extra: Of those that stay for files of somebody's own alone: path of the checkpoint, and the files.
    """

    stay: tuple[Found, ...]
    remove: tuple[Found, ...]
    dead: tuple[Leftover, ...]
    extra: tuple[tuple[str, tuple[str, ...]], ...]


def plan_prune(
    directory: str | os.PathLike[str],
    keep: Keep,
    *,
    saved: str | os.PathLike[str] | None = None,
    disk: Disk = REAL_DISK,
) -> PrunePlan:
    """List what :func:`prune_checkpoints` would remove. Nothing is changed.

    Ranks: any; nothing is exchanged.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    parent = os.path.abspath(directory)
    found, _ = scan(disk, parent)
    leftovers = find_leftovers(disk, parent)
    dead = tuple(one for one in leftovers if is_dead(disk, one))
    busy = {one.name for one in leftovers if one not in dead and one.kind != "trash"}
    just_saved = None if saved is None else os.path.abspath(saved)
    index = next((index for index, one in enumerate(found) if one.path == just_saved), None)
    scored = [(one.number, one.metric) for one in found]
    wanted = set(_choose(range(len(found)), scored, keep, index))
    stay = {index for index, one in enumerate(found) if index in wanted or os.path.basename(one.path) in busy}
    others = {
        index: tuple(find_visible_extra(disk, one.resolved))
        for index, one in enumerate(found)
        if index not in stay
    }
    stay |= {index for index, extra in others.items() if extra}
    return PrunePlan(
        stay=tuple(one for index, one in enumerate(found) if index in stay),
        remove=tuple(one for index, one in enumerate(found) if index not in stay),
        dead=dead,
        extra=tuple((found[index].path, extra) for index, extra in others.items() if extra),
    )


def prune_checkpoints(
    directory: str | os.PathLike[str],
    keep: Keep,
    *,
    saved: str | os.PathLike[str] | None = None,
    disk: Disk = REAL_DISK,
) -> tuple[Path, ...]:
    """Remove the checkpoints in a directory that no rule wants to stay, and what dead saves left behind.

    The newest are the last ones of ``find_checkpoints``. The step of a checkpoint is that of its manifest
    where every one has a step; else the last whole number in its name that isn't the same in all names, where
    every name has one; else its place in that order. What isn't a checkpoint is left alone, and so is one
    that is damaged or just being replaced. One that somebody has put files into stays, with a warning; hidden
    files, such as systems leave, go with the checkpoint.

    Ranks: one; the others must not read what is removed.

    Args:
        directory: In which the checkpoints are.
        keep: The rules.
        saved: The one that was just saved, if any: it stays, whatever the rules say.
        disk: The operations on files.

    Returns:
        The checkpoints that are gone.

    Raises:
        FileNotFoundError: There is no such directory.
        OSError: A checkpoint can't be moved away. Those that stay are whole.
    """
    parent = os.path.abspath(directory)
    clean(disk, parent)
    plan = plan_prune(parent, keep, saved=saved, disk=disk)
    for path, extra in plan.extra:
        warnings.warn(
            f"{path} stays, though no rule keeps it. {describe_extra(path, extra)} Move them away.",
            stacklevel=2,
        )
    # What couldn't be cleaned away is as good as busy.
    left = {one.name for one in plan.dead if one.kind != "trash"}
    doomed = [one.path for one in plan.remove if os.path.basename(one.path) not in left]
    nonce = make_nonce()
    trash = [(path, leftover_path(path, "trash", nonce)) for path in doomed]
    try:
        for path, moved in trash:
            disk.rename(path, moved)
    finally:
        if trash:
            # Or a power cut could bring a name back, and not the files.
            with naming(parent):
                disk.sync_folder(parent)
    for _, moved in trash:
        with suppress(OSError):  # it is no checkpoint any more; the next removal takes the rest
            remove_tree(disk, moved)
    return tuple(Path(path) for path in doomed)
