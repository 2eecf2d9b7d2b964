"""Models that don't fit on one device."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.bigmodel import (
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    check_device_map as check_device_map,
    cpu_offload as cpu_offload,
    cpu_offload_with_hook as cpu_offload_with_hook,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
