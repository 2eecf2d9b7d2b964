"""What Accelerate's names are here: tables that the two levels of ``accelfn migrate`` read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: The module of each name that is imported, or used as ``accelerate.NAME``, with the same meaning.
HOMES: Mapping[str, str] = MappingProxyType(
    {
        name: home
        for home, names in {
            "accelfn": """
                Accelerator AORecipeKwargs AutocastKwargs BnbQuantizationConfig DataLoaderConfiguration
                DeepSpeedPlugin DistributedDataParallelKwargs DistributedType DummyOptim DummyScheduler
                DynamoBackend FP8RecipeKwargs FullyShardedDataParallelPlugin GeneralTracker GradScalerKwargs
                GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LocalSGD LoggerType
                MSAMPRecipeKwargs MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMPlugin
                OffloadedWeightsLoader ParallelismConfig PrecisionType ProfileKwargs ProjectConfiguration
                RNGType TERecipeKwargs TorchDynamoPlugin broadcast concatenate
                convert_to_fp32 cpu_offload cpu_offload_with_hook debug_launcher disk_offload dispatch_model
                find_executable_batch_size gather gather_object get_logger
                infer_auto_device_map init_empty_weights init_on_device
                load_and_quantize_model load_checkpoint_and_dispatch load_checkpoint_in_model
                merge_fsdp_weights notebook_launcher pad_across_processes reduce release_memory
                send_to_device set_seed skip_first_batches tqdm wait_for_everyone
            """,
            "accelfn.bigmodel": """
                compute_module_sizes find_tied_parameters get_balanced_memory get_max_memory
                load_offloaded_weight named_module_tensors offload_state_dict offload_weight
                set_module_tensor_to_device
            """,
            "accelfn.context.config": """
                DDPCommunicationHookType TorchContextParallelConfig TorchTensorParallelConfig
            """,
        }.items()
        for name in names.split()
    }
)
#: Names whose functions take the context first here, by the arguments that keep Accelerate's defaults.
TAKES_CONTEXT: Mapping[str, str] = MappingProxyType(
    {
        "broadcast": "",
        "gather": "",
        "gather_object": "",
        "pad_across_processes": "",
        "reduce": 'reduction="mean"',
        "wait_for_everyone": "",
    }
)
#: What to do about a name that isn't one of :data:`HOMES`.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "AcceleratorState": "Read the Accelerator, or the context: ctx.num_processes, ctx.device, ...",
        "GradientState": "Use accelfn.microbatches(ctx, loader): it yields the place in the window too.",
        "PartialState": "Write `ctx = accelfn.init_context()`, and pass ctx on.",
        "broadcast_object_list": "accelfn.broadcast_object_list(ctx, objects) returns a new list, and leaves "
        "yours as it was. Assign what it returns.",
        "extract_model_from_parallel": "Use accelfn.unwrap_model.",
        "load_state_dict": "Use accelfn.bigmodel.load_state_dict, or safetensors.",
        "patch_environment": "Pass arguments to accelfn.init_context: the environment is read once.",
        "save": "Use accelerator.save, or accelfn.save_tree.",
        "synchronize_rng_states": "Use accelfn.synchronize_rng_states(ctx, types).",
    }
)
#: What to do about any other name.
ELSEWHERE = "Look it up in the page on names, and import it by hand."

#: Records whose arguments must be named: the order of fields differs between versions of Accelerate.
RECORDS = frozenset(
    (
        *("AORecipeKwargs", "AutocastKwargs", "DataLoaderConfiguration", "DeepSpeedPlugin"),
        *("DistributedDataParallelKwargs", "FP8RecipeKwargs", "FullyShardedDataParallelPlugin"),
        *("GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs"),
        *("MSAMPRecipeKwargs", "MegatronLMPlugin", "ParallelismConfig", "ProfileKwargs"),
        *("ProjectConfiguration", "TERecipeKwargs", "TorchDynamoPlugin"),
    )
)

#: Arguments of the constructor, in Accelerate's order up to where versions of it differ.
POSITIONAL = (
    *("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu"),
    *("dataloader_config", "deepspeed_plugin", "fsdp_plugin"),
)
#: Those that :func:`accelfn.init_context` has too.
CONTEXT_ARGUMENTS = frozenset(
    (
        *("cpu", "dataloader_config", "deepspeed_plugin", "device_placement", "dynamo_backend"),
        *("dynamo_plugin", "fsdp_plugin", "gradient_accumulation_plugin"),
        *("gradient_accumulation_steps", "kwargs_handlers", "log_with", "megatron_lm_plugin"),
        *("mixed_precision", "parallelism_config", "project_config", "project_dir", "rng_types"),
    )
)
#: Further ones that only ``accelfn.Accelerator`` has.
SHIM_ARGUMENTS = frozenset(
    (
        *("dispatch_batches", "even_batches", "split_batches", "step_scheduler_with_optimizer"),
        *("use_seedable_sampler",),
    )
)
#: What to do about the others.
ARGUMENT_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "deepspeed_plugins": "Pass the same dict as deepspeed_plugin=.",
        "torch_tp_plugin": "Pass parallelism_config=ParallelismConfig(tp_size=...).",
        **dict.fromkeys(
            ("dispatch_batches", "even_batches", "split_batches", "use_seedable_sampler"),
            "Pass it as a field of dataloader_config=DataLoaderConfiguration(...).",
        ),
        "step_scheduler_with_optimizer": "Step the scheduler yourself, with accelfn.scheduler_step.",
    }
)

#: Attributes of the Accelerator that are read, and their text with the context.
PROPERTIES: Mapping[str, str] = MappingProxyType(
    {
        **{
            name: f"ctx.{name}"
            for name in (
                *("device", "distributed_type", "gradient_accumulation_steps", "is_last_process"),
                *("is_local_main_process", "is_main_process", "mixed_precision", "num_processes"),
            )
        },
        "local_process_index": "ctx.local_rank",
        "logging_dir": "ctx.project.logging_dir",
        "process_index": "ctx.rank",
        "project_configuration": "ctx.project",
        "project_dir": "ctx.project.project_dir",
        "should_save_model": "ctx.is_local_main_process",
        "state": "ctx",
        "use_distributed": "(ctx.num_processes > 1)",
    }
)
#: Attributes of ``accelerator.state`` that the context has, and their names there.
STATE: Mapping[str, str] = MappingProxyType(
    {
        **{
            name: name
            for name in (
                *("device", "distributed_type", "is_last_process", "is_local_main_process"),
                *("is_main_process", "mixed_precision", "num_processes"),
            )
        },
        "local_process_index": "local_rank",
        "process_index": "rank",
    }
)
#: Methods of the Accelerator that are functions of the context and the same arguments, by their names here.
METHODS: Mapping[str, str] = MappingProxyType(
    {
        **{
            name: name
            for name in (
                *("autocast", "gather", "get_state_dict", "local_main_process_first", "main_process_first"),
                *("pad_across_processes", "prepare_data_loader", "prepare_model", "prepare_optimizer"),
                *("prepare_scheduler", "profile", "reduce", "save_model", "wait_for_everyone"),
            )
        },
        "print": "print_once",
        "save": "checkpoint.save_object",
    }
)
#: Methods that are functions of the same arguments alone.
FREE_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "clear": "release_memory",
        "free_memory": "release_memory",
        "skip_first_batches": "skip_first_batches",
        "unwrap_model": "unwrap_model",
        "verify_device_map": "verify_device_map",
    }
)
#: Names of arguments that differ, and those without a counterpart.
RENAMED_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "data_loader": "loader",
        "dataloader": "loader",
        "save_directory": "directory",
        "tensor": "tree",
    }
)
DROPPED_ARGUMENTS = frozenset({"device_placement", "slice_fn_for_dispatch"})
#: Decorators of the Accelerator.
DECORATORS = frozenset({"on_last_process", "on_local_main_process", "on_main_process"})
#: Attributes of ``accelfn.Accelerator`` with Accelerate's meaning.
SHIM_ATTRIBUTES = frozenset(
    (
        *PROPERTIES,
        *METHODS,
        *FREE_METHODS,
        *DECORATORS,
        *("accumulate", "backward", "check_trigger", "clip_grad_norm_", "clip_grad_value_"),
        *("context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank"),
        *("dataloader_config", "deepspeed_plugin", "device_placement", "dispatch_batches"),
        *("end_training", "even_batches", "fp8_backend", "gather_for_metrics", "get_tracker"),
        *("has_lomo_optimizer", "init_trackers", "is_composable_parallelism_enabled", "is_fsdp2"),
        *("join_uneven_inputs", "load_state", "log", "log_with", "lomo_backward"),
        *("maybe_context_parallel", "multi_device", "native_amp", "no_sync", "non_blocking"),
        *("on_local_process", "on_process", "optimizer_step_was_skipped", "parallelism_config"),
        *("pipeline_parallel_rank", "prepare", "register_for_checkpointing"),
        *("register_load_state_pre_hook", "register_save_state_pre_hook", "rng_types"),
        *("save_iteration", "save_state", "set_trigger", "split_batches"),
        *("split_between_processes", "step", "step_scheduler_with_optimizer", "sync_gradients"),
        *("tensor_parallel_rank", "torch_device_mesh", "trackers", "trigger_sync_in_backward"),
        *("unscale_gradients", "use_seedable_sampler", "use_stateful_dataloader"),
    )
)
#: What to do about methods and attributes that a level doesn't know.
MEMBER_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "check_trigger": "The trigger is a value: `state, fired = accelfn.check_trigger(ctx, state)`.",
        "gradient_state": "The place in the window is in micro: `micro.sync`, `micro.is_last`.",
        "join_uneven_inputs": "Use accelfn.microbatches(ctx, loader, uneven=...), or "
        "accelfn.join_uneven_inputs(ctx, models, loaders).",
        "lomo_backward": "Use accelfn.lomo_backward(ctx, loss, learning_rate, optimizer, micro).",
        "maybe_context_parallel": "Use DataLoaderConfiguration(sequence={...}): the loaders yield shards.",
        "no_sync": "Use accelfn.accumulate, or accelfn.no_sync(ctx, model) with steps of your own.",
        "register_load_state_pre_hook": "Leave out of the tree what the hook loads itself.",
        "register_save_state_pre_hook": "Leave out of the tree what the hook saves itself.",
        "scaler": "The loss scale is in the scaler state: `scaler.scale`.",
        "set_trigger": "The trigger is a value: `state = accelfn.set_trigger(state)`.",
        "split_between_processes": "The function returns the part, without a block: "
        "`part = accelfn.split_between_processes(ctx, inputs)`.",
        "trigger_sync_in_backward": "Use accelfn.trigger_sync_in_backward(ctx, model).",
        "unscale_gradients": "Use `scaler = accelfn.unscale_gradients(ctx, optimizer, scaler)`.",
    }
)
