"""accelfn: distributed PyTorch training as plain functions over one frozen Context.

Importing this module loads nothing: a name or a sub-package is resolved on first use (PEP 562), so that the
command line can answer without importing torch. Type checkers read ``__init__.pyi``.
"""

import gc
import opcode
import re
import sys
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import NoReturn

__version__ = "0.1.0"

# Where each name comes from: type checkers and Python read the same lines.
_HOMES = MappingProxyType(
    {
        name: home
        for home, name in re.findall(
            r"^from (\S+) import (\w+) as",
            Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"),
            re.M,
        )
    }
)
_PACKAGES = (*(name for name, home in _HOMES.items() if home == "accelfn"), "config")
# Names of Accelerate that mean nothing here, by what to use instead.
_ELSEWHERE = MappingProxyType(
    {
        "What it knows is in the Context, which accelfn.init_context() returns and functions take first.": """
            AcceleratorState PartialState state
        """,
        "Use accelfn.microbatches(ctx, loader): it yields the place in the accumulation window too.": """
            GradientState
        """,
        "Use accelfn.NAME, or NAME of accelfn.bigmodel, accelfn.config or accelfn.tree.": """
            utils
        """,
        "Use accelfn.config.{}.": """
            AutoWrapPolicy DDPCommunicationHookType DynamoMode FP8Backend FP8Format ProfileActivity
            TorchContextParallelConfig TorchTensorParallelConfig
        """,
        "Use accelfn.accelerator.{}.": "AcceleratedDataLoader AcceleratedOptimizer AcceleratedScheduler",
        "Use accelfn.accelerator.": "optimizer scheduler",
        "Use accelfn.ParallelismConfig.": "parallelism_config",
        "Use accelfn.prepare_data_loader, which returns an accelfn.PreparedDataLoader.": """
            DataLoaderDispatcher DataLoaderShard data_loader
        """,
        "Use accelfn.bigmodel.{}.": """
            AlignDevicesHook ModelHook PrefixedDataset SequentialHook UserCpuOffloadHook
            add_hook_to_module align_module_device calculate_maximum_sizes check_device_map
            check_tied_parameters_in_config check_tied_parameters_on_same_device compute_module_sizes
            convert_file_size_to_int dtype_byte_size extract_submodules_state_dict
            find_tied_parameters get_balanced_memory get_max_layer_size get_max_memory
            has_4bit_bnb_layers has_offloaded_params id_tensor_storage load_offloaded_weight
            load_offloaded_weights load_state_dict named_module_tensors offload_state_dict
            offload_weight remove_hook_from_module remove_hook_from_submodules retie_parameters
            save_offload_index set_module_tensor_to_device
        """,
        "Use accelfn.bigmodel.": "big_modeling hooks inference",
        "Use accelfn.checkpoint.": "checkpointing",
        "Use accelfn.save_tree and accelfn.load_tree.": "load save",
        "Use accelfn.launch_processes or accelfn.notebook_launcher.": "launchers",
        "Use accelfn.launch.": "commands",
        "Use accelfn.get_logger.": "logging",
        "Use accelfn.find_executable_batch_size and accelfn.release_memory.": "memory_utils",
        "Use accelfn.LocalSGD.": "local_sgd",
        "Use accelfn.testing.": "test_utils",
        "Use accelfn.unwrap_model.": "extract_model_from_parallel",
        "Use accelfn.tree_structure.": "get_data_structure",
        "Use accelfn.convert_to_fp32.": "convert_outputs_to_fp32",
        "Use accelfn.synchronize_rng_states.": "synchronize_rng_state",
    }
)
__all__ = (  # pyright: ignore[reportUnsupportedDunderAll] -- pyright reads the stub
    "__version__",
    *sorted(name for name in _HOMES if name not in _PACKAGES),
)


def __getattr__(name: str) -> object:
    home = _HOMES.get(name) or _refuse(name)
    value = _load(f"accelfn.{name}") if home == "accelfn" else getattr(_load(home), name)
    globals()[name] = value  # found at once from now on
    return value


def _load(module: str) -> ModuleType:
    """Import a module without garbage collections.

    They would take a fifth of the time: they look at torch's many objects, and importing leaves no garbage.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collects:
            gc.enable()


def _refuse(name: str) -> NoReturn:
    hints = (f". {hint.format(name)}" for hint, names in _ELSEWHERE.items() if name in names.split())
    hint = next(hints, "")
    # `from accelfn import name` replaces the text of an AttributeError by its own, and hasattr needs one.
    caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    if hint and caller.f_code.co_code[caller.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        raise ImportError(f"cannot import name {name!r} from 'accelfn'{hint}", name="accelfn")
    text = f"module 'accelfn' has no attribute {name!r}{hint}"
    raise AttributeError(text, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted((*__all__, *_PACKAGES))
