"""Launchers whose ranks import accelfn under Accelerate's name too."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import accelfn.launch.functions as functions
from accelfn.compat.alias import child_variables
from accelfn.compat.helpers import patch_environment

T = TypeVar("T")


def notebook_launcher(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "0",
    **options: Any,
) -> list[T]:
    """Run ``function(*args)`` on several fresh processes; see :func:`accelfn.notebook_launcher`."""
    with patch_environment(**child_variables(os.environ)):
        return functions.notebook_launcher(
            function, args, num_processes, mixed_precision, use_port, **options
        )


def debug_launcher(function: Callable[..., T], args: Sequence[Any] = (), num_processes: int = 2) -> list[T]:
    """Run ``function(*args)`` on fresh CPU processes; see :func:`accelfn.debug_launcher`."""
    with patch_environment(**child_variables(os.environ)):
        return functions.debug_launcher(function, args, num_processes)
