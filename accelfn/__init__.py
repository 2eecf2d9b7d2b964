"""accelfn: distributed PyTorch training as plain functions over one frozen Context.

Importing this module loads nothing: a name or a sub-package is resolved on first use (PEP 562), so that the
command line can answer without importing torch. Type checkers read ``__init__.pyi``.
"""

import opcode
import sys
from importlib import import_module
from types import MappingProxyType
from typing import NoReturn

__version__ = "0.1.0"

_HOMES = MappingProxyType(
    {
        "accelfn.accelerator": """
            Accelerator LocalSGD
        """,
        "accelfn.bigmodel": """
            BnbQuantizationConfig DevicePlan OffloadedWeightsLoader TorchaoQuantizationConfig
            cpu_offload cpu_offload_with_hook disk_offload dispatch_model infer_auto_device_map
            init_empty_weights init_on_device load_and_quantize_model
            load_checkpoint_and_dispatch load_checkpoint_in_model plan_device_map
            prepare_pipeline prepare_pippy
        """,
        "accelfn.checkpoint": """
            Keep SaveHandle find_checkpoints get_state_dict latest_checkpoint load_latest
            load_model load_state load_tree merge_fsdp_weights preemption prune_checkpoints save_model
            save_state save_tree verify_checkpoint
        """,
        "accelfn.comm": """
            TriggerState all_gather all_to_all broadcast broadcast_object_list check_replicas check_trigger
            failing_together gather gather_object local_main_process_first main_process_first
            on_last_process on_local_main_process on_local_process on_main_process on_process
            pad_across_processes permute print_once reduce reduce_scatter scatter set_seed set_trigger shard
            split_between_processes synchronize_rng_states unshard verify_structure wait_for_everyone
        """,
        "accelfn.context": """
            Collectives Context ContextOptions EnvironmentPlan Mesh MeshPlan Precision World
            close_context detect_environment init_context plan_context plan_mesh
        """,
        "accelfn.context.config": """
            AORecipeKwargs AutocastKwargs CanonicalReduction DataLoaderConfiguration
            DeepSpeedPlugin DistributedDataParallelKwargs DistributedType DynamoBackend
            FP8RecipeKwargs FullyShardedDataParallelPlugin GradScalerKwargs
            GradientAccumulationPlugin Guard InitProcessGroupKwargs KwargsHandler LoggerType
            MSAMPRecipeKwargs MegatronLMPlugin ParallelismConfig PrecisionType ProfileKwargs
            ProjectConfiguration RNGType TERecipeKwargs TorchDynamoPlugin
        """,
        "accelfn.data": """
            LoaderState MicroBatch PreparedDataLoader gather_for_metrics
            gather_objects_for_metrics gather_sequence loader_state microbatches prepare_data_loader
            restore_loader shard_sequence skip_first_batches
        """,
        "accelfn.launch.launchers": """
            debug_launcher launch_processes notebook_launcher
        """,
        "accelfn.parallel": """
            Budget ModelPlan convert_sync_batchnorm plan_memory plan_model register_forward_method
        """,
        "accelfn.tracking": """
            GeneralTracker Trackers finish get_logger get_tracker init_trackers
            install_rich_tracebacks log log_images log_table profile tqdm
        """,
        "accelfn.training": """
            LocalSGDState Loss PureOptimizer PureTrainState ScalerState StepMetrics TrainState
            accumulate autocast average_parameters backward clear_device_cache clip_grad_norm_
            clip_grad_value_ find_executable_batch_size forward forward_backward init_scaler
            init_train_state join_uneven_inputs local_sgd_step lomo_backward make_train_step no_sync
            optimizer_step prepare prepare_model prepare_optimizer prepare_scheduler
            release_memory scheduler_step step_was_skipped trigger_sync_in_backward
            unscale_gradients unwrap_model value_and_grad verify_device_map
        """,
        "accelfn.tree": """
            Packed TensorInformation concatenate convert_to_fp32 find_batch_size find_device
            initialize_tensors listify pack pad_input_tensors send_to_device slice_tensors
            tree_structure unpack
        """,
    }
)
_PACKAGES = MappingProxyType(
    {
        "accelerator": "accelfn.accelerator",
        "bigmodel": "accelfn.bigmodel",
        "checkpoint": "accelfn.checkpoint",
        "comm": "accelfn.comm",
        "config": "accelfn.context.config",
        "context": "accelfn.context",
        "data": "accelfn.data",
        "errors": "accelfn.errors",
        "launch": "accelfn.launch",
        "parallel": "accelfn.parallel",
        "testing": "accelfn.testing",
        "tracking": "accelfn.tracking",
        "training": "accelfn.training",
        "tree": "accelfn.tree",
    }
)
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
    *sorted(name for names in _HOMES.values() for name in names.split()),
)


def __getattr__(name: str) -> object:
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None and name not in _PACKAGES:
        _refuse(name)
    value = import_module(_PACKAGES[name]) if home is None else getattr(import_module(home), name)
    globals()[name] = value  # found at once from now on
    return value


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
