"""Launchers whose ranks import accelfn under Accelerate's name too."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import accelfn.launch.functions as functions
from accelfn.compat.alias import child_variables
from accelfn.compat.helpers import patch_environment

P = ParamSpec("P")
T = TypeVar("T")


def _with_alias(launcher: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(launcher)
    def launch(*args: P.args, **kwargs: P.kwargs) -> T:
        with patch_environment(**child_variables(os.environ)):
            return launcher(*args, **kwargs)

    return launch


notebook_launcher = _with_alias(functions.notebook_launcher)
debug_launcher = _with_alias(functions.debug_launcher)
