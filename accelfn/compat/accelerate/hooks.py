"""Hooks of modules."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.bigmodel import (
    AlignDevicesHook as AlignDevicesHook,
    CpuOffload as CpuOffload,
    LayerwiseCastingHook as LayerwiseCastingHook,
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    UserCpuOffloadHook as UserCpuOffloadHook,
    add_hook_to_module as add_hook_to_module,
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
    named_module_tensors as named_module_tensors,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
