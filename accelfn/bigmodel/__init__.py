"""Models that don't fit: a plan of where every tensor lies, loading, offloading, and running."""

from accelfn.bigmodel.hooks.align import AlignDevicesHook
from accelfn.bigmodel.hooks.aligned import align_module_device, has_offloaded_params
from accelfn.bigmodel.hooks.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from accelfn.bigmodel.hooks.casting import LayerwiseCastingHook, attach_layerwise_casting_hooks
from accelfn.bigmodel.hooks.cpu_offload import CpuOffload, UserCpuOffloadHook, cpu_offload_with_hook
from accelfn.bigmodel.hooks.model_hook import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelfn.bigmodel.hooks.real_state import get_state_dict_from_offload, get_state_dict_offloaded_model
from accelfn.bigmodel.places import Place, PlaceLike

__all__ = (
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "Place",
    "PlaceLike",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "cpu_offload_with_hook",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
)
