"""Files, modules and texts."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.commands import (
    write_basic_config as write_basic_config,
)
from accelfn.compat.helpers import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    convert_bytes as convert_bytes,
    get_free_port as get_free_port,
    get_module_children_bottom_up as get_module_children_bottom_up,
    get_pretty_name as get_pretty_name,
    is_compiled_module as is_compiled_module,
    is_port_in_use as is_port_in_use,
    load as load,
    merge_dicts as merge_dicts,
    model_has_dtensor as model_has_dtensor,
    recursive_getattr as recursive_getattr,
    save as save,
)
from accelfn.compat.operations import (
    extract_model_from_parallel as extract_model_from_parallel,
    wait_for_everyone as wait_for_everyone,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
