"""The names of Accelerate: where each comes from, and what is said of one that isn't here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from accelfn.launch.kinds import suggest

# A line without indent is the module where names come from; one of accelfn begins with a dot. Below it are
# modules of Accelerate, without their first part, and their names; `name=there` if it has another one there.
_TABLE = """
.accelerator
    accelerator optimizer: AcceleratedOptimizer
    accelerator scheduler: AcceleratedScheduler
    local_sgd: LocalSGD
.bigmodel
    accelerate big_modeling: cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_on_device
        load_checkpoint_and_dispatch
    accelerate big_modeling commands.estimate: init_empty_weights
    accelerate inference: prepare_pippy
    accelerate utils.modeling: infer_auto_device_map load_checkpoint_in_model
    big_modeling utils.modeling: attach_layerwise_casting_hooks check_device_map
    commands.estimate utils.modeling: calculate_maximum_sizes
    hooks: AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook
        add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks
        attach_execution_device_hook remove_hook_from_module remove_hook_from_submodules
    hooks utils.modeling: named_module_tensors set_module_tensor_to_device
    utils.bnb: has_4bit_bnb_layers
    utils.dataclasses: CustomDtype
    utils.modeling: align_module_device check_tied_parameters_in_config check_tied_parameters_on_same_device
        clean_device_map compute_module_sizes compute_module_total_buffer_size convert_file_size_to_int
        dtype_byte_size find_tied_parameters get_balanced_memory get_max_layer_size get_max_memory
        get_module_leaves get_non_persistent_buffers get_state_dict_from_offload
        get_state_dict_offloaded_model has_offloaded_params id_tensor_storage load_offloaded_weights
        load_state_dict retie_parameters
    utils.offload: OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight
        offload_state_dict offload_weight save_offload_index
.checkpoint
    utils.fsdp_utils: merge_fsdp_weights
.compat.accelerator
    accelerate accelerator: Accelerator
.compat.available
    accelerate utils.imports: is_rich_available
    commands.estimate utils.imports: is_timm_available is_transformers_available
    utils.environment: check_cuda_fp8_capability check_cuda_p2p_ib_support get_current_device_type
    utils.imports: is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_amdsmi_available
        is_bf16_available is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available
        is_clearml_available is_comet_ml_available is_cuda_available is_datasets_available
        is_deepspeed_available is_dvclive_available is_fp16_available is_fp8_available is_habana_gaudi1
        is_hpu_available is_import_timer_available is_lomo_available is_matplotlib_available
        is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available is_msamp_available
        is_musa_available is_neuron_available is_npu_available is_numpy_available is_pandas_available
        is_peft_available is_pippy_available is_pynvml_available is_pytest_available is_rocm_available
        is_sagemaker_available is_schedulefree_available is_sdaa_available is_swanlab_available
        is_tensorboard_available is_torch_xla_available is_torchao_available
        is_torchdata_available is_torchdata_stateful_dataloader_available is_torchvision_available
        is_tqdm_available is_trackio_available is_transformer_engine_available
        is_transformer_engine_mxfp8_available is_triton_available is_wandb_available is_weights_only_available
        is_xccl_available is_xpu_available
    utils.imports utils.versions utils.constants: STR_OPERATION_TO_FUNC compare_versions is_torch_version
.compat.commands
    accelerate launchers: debug_launcher notebook_launcher
    commands.config commands.config.config_args commands.config.default commands.launch: default_config_file
        load_config_from_file
    commands.config.default utils.other: write_basic_config
    commands.launch: launch_command launch_command_parser main=launch_main
.compat.constants
    accelerate accelerator commands.config.config_args state utils.dataclasses: DistributedType
    checkpointing utils.constants utils.fsdp_utils utils.modeling: FSDP_MODEL_NAME MODEL_NAME OPTIMIZER_NAME
        RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        WEIGHTS_INDEX_NAME WEIGHTS_NAME
    commands.config.config_args utils.dataclasses: ComputeEnvironment FP8BackendType SageMakerDistributedType
    utils.constants: CUDA_DISTRIBUTED_TYPES DEEPSPEED_MULTINODE_LAUNCHERS DTENSOR_PYTORCH_VERSION
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE
        FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_PYTORCH_VERSION FSDP_SHARDING_STRATEGY
        FSDP_STATE_DICT_TYPE MITA_PROFILING_AVAILABLE_PYTORCH_VERSION PROFILE_PATTERN_NAME
        SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_PATTERN_NAME TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_DYNAMO_MODES
        WEIGHTS_PATTERN_NAME XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
.compat.engines
    utils.fsdp_utils: load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer
    utils.deepspeed: DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper
        HfDeepSpeedConfig
.compat.helpers
    utils.bnb: load_and_quantize_model
    commands.estimate utils.other: convert_bytes
    commands.launch utils.environment: patch_environment
    utils.dataclasses: get_module_class_from_name
    utils.environment: clear_environment get_int_from_env parse_choice_from_env parse_flag_from_env
        str_to_bool
    utils.fsdp_utils: get_parameters_from_modules
    utils.modeling: is_peft_model
    utils.other: clean_state_dict_for_safetensors get_free_port get_module_children_bottom_up get_pretty_name
        is_compiled_module is_port_in_use merge_dicts model_has_dtensor recursive_getattr save
.compat.loaders
    data_loader: DataLoaderAdapter=DataLoaderShard DataLoaderDispatcher DataLoaderShard
        DataLoaderStateMixin=DataLoaderShard prepare_data_loader
.compat.operations
    accelerate utils.random: synchronize_rng_states
    utils.operations: CannotPadNestedTensorWarning ConvertOutputsToFp32 DistributedOperationException
        broadcast broadcast_object_list convert_outputs_to_fp32 copy_tensor_to_devices gather gather_object
        get_shape honor_type ignorant_find_batch_size is_namedtuple is_tensor_information
        pad_across_processes recursively_apply reduce slice_tensors
    utils.other: extract_model_from_parallel wait_for_everyone
    utils.random: set_seed synchronize_rng_state
.compat.records
    accelerate accelerator parallelism_config utils: ParallelismConfig
    accelerate accelerator utils.dataclasses: AutocastKwargs DataLoaderConfiguration DeepSpeedPlugin
        DistributedDataParallelKwargs FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs
        ProfileKwargs
    accelerator utils.dataclasses: AORecipeKwargs FP8RecipeKwargs GradientAccumulationPlugin KwargsHandler
        MSAMPRecipeKwargs MegatronLMPlugin ProjectConfiguration TERecipeKwargs TorchDynamoPlugin
    utils.dataclasses: BnbQuantizationConfig DeepSpeedSequenceParallelConfig TorchContextParallelConfig
        TorchTensorParallelConfig
.compat.states
    accelerate accelerator state: PartialState
    accelerator state: AcceleratorState GradientState do_nothing is_initialized
.compat.shards
    data_loader: BatchSamplerShard IterableDatasetShard SeedableRandomSampler get_sampler
.compat.trackers
    logging: get_logger
    tracking: LOGGER_TYPE_TO_CLASS filter_trackers get_available_trackers on_main_process
        register_tracker_class
.config
    accelerate utils.dataclasses: DDPCommunicationHookType
    accelerator utils.dataclasses: DynamoBackend LoggerType PrecisionType RNGType
.data
    accelerate data_loader: skip_first_batches
.data.loader
    data_loader: SkipBatchSampler=Skipped SkipDataLoader=Skipped
.parallel.engines
    utils.deepspeed: DummyOptim DummyScheduler
    utils.megatron_lm: AbstractTrainStep BertTrainStep GPTTrainStep MegatronLMDummyScheduler T5TrainStep
    utils.operations: GatheredParameters=gathered_parameters
.tracking
    logging: MultiProcessAdapter=RankLogger
    tracking: AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker MLflowTracker
        SwanLabTracker TensorBoardTracker TrackioTracker WandBTracker
    utils.tqdm: tqdm
.training
    accelerate memory_utils utils.memory: find_executable_batch_size
    utils.megatron_lm: MegatronLMDummyDataLoader avg_losses_across_data_parallel_group
        gather_across_data_parallel_groups
    utils.memory: clear_device_cache release_memory should_reduce_batch_size=is_out_of_memory
.tree
    utils.dataclasses utils.operations: TensorInformation
    utils.operations: concatenate convert_to_fp32 find_batch_size find_device
        get_data_structure=tree_structure initialize_tensors listify pad_input_tensors send_to_device
builtins
    state: SharedDict=dict
torch
    utils.operations: is_torch_tensor=is_tensor
    utils.other: load
torch.distributed
    utils.imports: is_torch_distributed_available=is_available
torch.utils.data
    data_loader: DataLoader
"""
# Modules without a name here.
_EMPTY = ("commands", "commands.utils")
# Has the names of all the modules inside it too.
_ALL = "accelerate.utils"
# What to use instead of a name that isn't here, whose whole name has this: the first that is found.
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        r"\.test_utils": "To run Accelerate's own test files over accelfn, pip install accelerate.",
        r"commands\.estimate": "Use the command `accelfn estimate-memory`.",
        r"commands\.utils|HelpFormatter|CustomArgument": "Use argparse.ArgumentParser.",
        r"commands\.config|ClusterConfig|SageMakerConfig": "Write the file by write_basic_config or `accelfn "
        "config`; load_config_from_file reads it.",
        r"_launcher$": "Start a script by launch_command(launch_command_parser().parse_args([...])).",
        r"commands\.launch|PrepareForLaunch|prepare_\w+(_env|_inputs|tpu)": "accelfn launch builds the "
        "commands and variables of a launch: see --dry_run.",
        r"\.commands": "Use the commands of accelfn, which `accelfn --help` lists.",
        r"(?i)deepspeed": "Pass deepspeed_plugin to Accelerator.",
        r"(?i)megatron": "Pass megatron_lm_plugin to Accelerator.",
        r"compile": "Use torch.compile, or dynamo_plugin of Accelerator.",
        r"fp8|ao_layers|transformer_engine|linear_layers|convert_model": "Pass an FP8 recipe in "
        "kwargs_handlers of Accelerator.",
        r"fsdp|ensure_weights_retied": "Pass fsdp_plugin to Accelerator, and save by save_state, save_model "
        "or get_state_dict.",
        r"(load|save)_(accelerator|custom)_state": "Use accelfn.checkpoint.",
        r"ThreadLocalSharedDict": "Use threading.local().",
    }
)
_ELSEWHERE = (
    "See 'Programs written for Accelerate' in its documentation, or run the program without accelfn.compat."
)


def names_of(module: str) -> dict[str, tuple[str, str]]:
    """Return the names of a module of Accelerate: where each comes from, and its name there. Pure.

    >>> names_of("accelerate.optimizer")
    {'AcceleratedOptimizer': ('.accelerator', 'AcceleratedOptimizer')}
    """
    found: dict[str, tuple[str, str]] = {}
    for source, modules, names in _rows():
        if any(one == module or (module == _ALL and one.startswith(f"{_ALL}.")) for one in modules):
            for name in names:
                here, _, there = name.partition("=")
                found[here] = (source, there or here)
    return found


def modules() -> frozenset[str]:
    """Return the modules of Accelerate that are here. Pure."""
    return frozenset((*map(_whole, _EMPTY), *(module for _, some, _ in _rows() for module in some)))


def _rows() -> Iterator[tuple[str, Sequence[str], Sequence[str]]]:
    """Yield the table's rows: a source, modules of Accelerate, names."""
    source = ""
    for line in _TABLE.replace("\n        ", " ").split("\n"):  # a row goes on where the indent is deeper
        modules, colon, names = line.partition(":")
        if not colon:
            source = line
        else:
            yield source, [*map(_whole, modules.split())], names.split()


def _whole(module: str) -> str:
    return module if module == "accelerate" else f"accelerate.{module}"


def explain(module: str, name: str, known: Iterable[str]) -> str:
    """Return what to say of a name, or a module, that a module of Accelerate doesn't have here. Pure.

    Args:
        module: The module of Accelerate.
        name: The name.
        known: Names that the module has.
    """
    near = suggest(name, [one for one in known if not one.startswith("_")])
    hints = (hint for pattern, hint in _INSTEAD.items() if re.search(pattern, f"{module}.{name}"))
    hint = f"Did you mean {near}?" if near is not None else next(hints, _ELSEWHERE)
    what = f"no {module}.{name}: accelfn stands in for Accelerate here, and has nothing under this name"
    return f"{what}. {hint}"
