"""The environment."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.helpers import (
    clear_environment as clear_environment,
    get_int_from_env as get_int_from_env,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    str_to_bool as str_to_bool,
)
from accelfn.compat.available import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    get_current_device_type as get_current_device_type,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
