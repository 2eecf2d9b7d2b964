"""Which experiment trackers a run asks for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, cast

from accelfn.context.config.enums import LoggerType
from accelfn.errors import ConfigurationError

__all__ = ("settle_log_with",)


def settle_log_with(log_with: Any) -> tuple[Any, ...]:
    """Return what ``log_with`` asks for as a tuple, each once: names as texts, the rest as it is.

    Trackers of the caller's own are checked where they are started: here nothing is known of them.

    Raises:
        ConfigurationError: There is no built-in tracker of a name.

    >>> settle_log_with(["wandb", LoggerType.TENSORBOARD, "wandb"])
    ('wandb', 'tensorboard')
    """
    if log_with is None:
        return ()
    asked: list[Any] = [log_with]
    if isinstance(log_with, Iterable) and not isinstance(log_with, (str, type)):
        asked = list(cast("Iterable[Any]", log_with))
    settled: list[Any] = []
    for one in asked:
        item = _settle_name(one) if isinstance(one, str) else one
        if not any(item is other or (isinstance(item, str) and item == other) for other in settled):
            settled.append(item)
    return tuple(settled)


def _settle_name(name: str) -> str:
    name = str(name)
    known = LoggerType.values()
    if name.lower() in known:
        return name.lower()
    near = difflib.get_close_matches(name.lower(), known, 1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigurationError(
        f"log_with: there is no tracker {name!r}. {meant}Known are {', '.join(known)}; a tracker of your own "
        "is passed itself, as an instance or as its class."
    )
