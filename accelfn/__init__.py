"""accelfn: distributed PyTorch training as plain functions over one frozen Context.

Importing this module loads nothing: a name is resolved on first use (PEP 562), so that the command line can
answer without importing torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers see; a test holds it equal to the table below
    from accelfn.comm import (
        TriggerState,
        broadcast,
        broadcast_object_list,
        check_trigger,
        gather,
        gather_object,
        local_main_process_first,
        main_process_first,
        on_last_process,
        on_local_main_process,
        on_local_process,
        on_main_process,
        on_process,
        pad_across_processes,
        print_once,
        reduce,
        scatter,
        set_seed,
        set_trigger,
        split_between_processes,
        synchronize_rng_states,
        verify_structure,
        wait_for_everyone,
    )
    from accelfn.context import (
        Collectives,
        Context,
        ContextOptions,
        EnvironmentPlan,
        Precision,
        World,
        close_context,
        detect_environment,
        init_context,
    )
    from accelfn.tree import (
        Packed,
        TensorInformation,
        concatenate,
        convert_to_fp32,
        find_batch_size,
        find_device,
        initialize_tensors,
        listify,
        pack,
        pad_input_tensors,
        send_to_device,
        slice_tensors,
        tree_structure,
        unpack,
    )

__version__ = "0.1.0"

_HOMES = MappingProxyType(
    {
        "accelfn.comm": (
            "TriggerState",
            "broadcast",
            "broadcast_object_list",
            "check_trigger",
            "gather",
            "gather_object",
            "local_main_process_first",
            "main_process_first",
            "on_last_process",
            "on_local_main_process",
            "on_local_process",
            "on_main_process",
            "on_process",
            "pad_across_processes",
            "print_once",
            "reduce",
            "scatter",
            "set_seed",
            "set_trigger",
            "split_between_processes",
            "synchronize_rng_states",
            "verify_structure",
            "wait_for_everyone",
        ),
        "accelfn.context": (
            "Collectives",
            "Context",
            "ContextOptions",
            "EnvironmentPlan",
            "Precision",
            "World",
            "close_context",
            "detect_environment",
            "init_context",
        ),
        "accelfn.tree": (
            "Packed",
            "TensorInformation",
            "concatenate",
            "convert_to_fp32",
            "find_batch_size",
            "find_device",
            "initialize_tensors",
            "listify",
            "pack",
            "pad_input_tensors",
            "send_to_device",
            "slice_tensors",
            "tree_structure",
            "unpack",
        ),
    }
)
__all__ = (
    "Collectives",
    "Context",
    "ContextOptions",
    "EnvironmentPlan",
    "Packed",
    "Precision",
    "TensorInformation",
    "TriggerState",
    "World",
    "__version__",
    "broadcast",
    "broadcast_object_list",
    "check_trigger",
    "close_context",
    "concatenate",
    "convert_to_fp32",
    "detect_environment",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "init_context",
    "initialize_tensors",
    "listify",
    "local_main_process_first",
    "main_process_first",
    "on_last_process",
    "on_local_main_process",
    "on_local_process",
    "on_main_process",
    "on_process",
    "pack",
    "pad_across_processes",
    "pad_input_tensors",
    "print_once",
    "reduce",
    "scatter",
    "send_to_device",
    "set_seed",
    "set_trigger",
    "slice_tensors",
    "split_between_processes",
    "synchronize_rng_states",
    "tree_structure",
    "unpack",
    "verify_structure",
    "wait_for_everyone",
)


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(module), name)
            globals()[name] = value  # found at once from now on
            return value
    raise AttributeError(f"module 'accelfn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
