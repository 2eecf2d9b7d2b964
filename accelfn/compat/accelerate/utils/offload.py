"""Weights in files."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.bigmodel import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    PrefixedDataset as PrefixedDataset,
    extract_submodules_state_dict as extract_submodules_state_dict,
    load_offloaded_weight as load_offloaded_weight,
    offload_state_dict as offload_state_dict,
    offload_weight as offload_weight,
    save_offload_index as save_offload_index,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
