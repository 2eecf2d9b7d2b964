"""How ranks are kept in agreement, and how long they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from accelfn.context.config.checks import (
    check_bools,
    check_ints,
    settle_choice,
    unchecked,
    where,
    wrong_type,
)
from accelfn.context.config.enums import GuardMode
from accelfn.errors import ConfigurationError

__all__ = ("Guard",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What is checked before ranks communicate, and when waiting ends.

    Attributes:
        mode: ``"full"`` checks every operation. ``"sampled"`` checks every operation in worlds of up to 8
            ranks, and in larger ones as many as keep the cost per operation the same: the first 50, then
            each ``P / 8``-th of those that need an exchange of their own for it. What is left out is counted,
            and found by the next check. ``"off"`` compares nothing: errors of other ranks still arrive.
            ``None`` says nothing: a context takes ``"full"`` where ``debug=True`` or the environment asks for
            it, and else keeps what it has, which is ``"sampled"`` at first. Default None.
        call_sites: Whether calls of the same form are distinguished by line, in operations to which each rank
            brings data of its own (not in broadcast or scatter): so swapped and skipped ones are found. One
            that stands in two branches of a function still meets, if it is the first of its form; name others
            with ``ctx.tagged("...")``. Default True.
        timeout: How long an operation waits for the other ranks. Default 5 minutes.
        long_timeout: The same for what may take long on one rank alone: ``main_process_first``, saving, and
            the first forward pass of a model. Never less than ``timeout``. Default 30 minutes.
        watchdog: Whether every rank prints the Python stacks of all its threads before an operation is given
            up. Costs one thread that sleeps. Default False.
        check_replicas_every: Steps of an optimizer between two checks that its parameters are equal on all
            ranks, bit by bit; ``None`` for none. Default None.
        check_gradients: Whether each step of an optimizer looks for gradients that are infinite or NaN
            before it changes anything, and raises an error that names their parameters. Waits for the device.
            With float16 the loss scale follows such gradients instead. Default False.
        check_replicas_before_saving: Whether weights are checked so before they are saved. Default True.
    """

    mode: str | GuardMode | None = None
    call_sites: bool = True
    timeout: timedelta = timedelta(minutes=5)
    long_timeout: timedelta = timedelta(minutes=30)
    watchdog: bool = False
    check_replicas_every: int | None = None
    check_gradients: bool = False
    check_replicas_before_saving: bool = True

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_choice(self, "mode", GuardMode, optional=True)
        check_bools(self, "call_sites", "watchdog", "check_gradients", "check_replicas_before_saving")
        check_ints(self, "check_replicas_every", minimum=1, optional=True)
        for name in ("timeout", "long_timeout"):
            value = unchecked(self, name)
            if not isinstance(value, timedelta):
                raise wrong_type(self, name, "a datetime.timedelta such as timedelta(minutes=5)")
            if value <= timedelta(0):
                raise ConfigurationError(
                    f"{where(self, name)} must be longer than zero, got {value!r}. Pass a positive timedelta."
                )

    @property
    def timeout_s(self) -> float:
        """Seconds that an operation waits for the other ranks."""
        return self.timeout.total_seconds()

    @property
    def long_timeout_s(self) -> float:
        """Seconds that a long operation waits; never less than ``timeout_s``."""
        return max(self.timeout, self.long_timeout).total_seconds()
