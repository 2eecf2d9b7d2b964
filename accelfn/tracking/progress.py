"""A progress bar that is shown once."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from typing_extensions import Self

from accelfn.context import Context
from accelfn.errors import MissingExtraError
from accelfn.tracking.who import who_is

__all__ = ("ProgressBar", "tqdm")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ProgressBar(Protocol[T_co]):
    """What programs use of tqdm's bars."""

    def __iter__(self) -> Iterator[T_co]:
        """Return the items, and show how many there have been."""
        ...

    def __enter__(self) -> Self:
        """Show the bar."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take leave of it."""
        ...

    def update(self, n: float = 1) -> bool | None:
        """Count ``n`` more."""
        ...

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Change what stands before the bar."""
        ...

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **kwargs: Any) -> None:
        """Change what stands behind it."""
        ...

    def close(self) -> None:
        """End it."""
        ...


def tqdm(
    iterable: Iterable[T] | None = None,
    *args: Any,
    ctx: Context | None = None,
    main_process_only: bool = True,
    **options: Any,
) -> ProgressBar[T]:
    """Show a progress bar on the main process, and none elsewhere; the loop is the same on all.

    Ranks: any; doesn't communicate.

    Args:
        iterable: What is gone through; None for a bar that ``update`` moves.
        ctx: The world; None: what the launcher's variables say.
        main_process_only: False shows a bar on every rank.
        *args: For ``tqdm.auto.tqdm``: what stands before the bar, the number of items, and so on.
        **options: For it too; it, which refuses names that it doesn't know. With ``disable=True``
            there is no bar anywhere.

    Raises:
        MissingExtraError: tqdm isn't installed.
        TypeError: ``iterable`` is True or False, as in an older form of Accelerate's.

    >>> [number for number in tqdm(range(3), disable=True)]
    [0, 1, 2]
    """
    if isinstance(cast("object", iterable), bool):
        raise TypeError(
            f"tqdm: the first argument is what is gone through, got {iterable}. Pass "
            f"main_process_only={iterable} by its name."
        )
    try:
        package: Any = importlib.import_module("tqdm.auto")
    except ImportError as error:
        raise MissingExtraError("tqdm needs tqdm: pip install 'accelfn[progress]'.") from error
    if main_process_only and not who_is(ctx).is_main:
        options["disable"] = True
    return package.tqdm(iterable, *args, **options)
