"""Build the stages of a model with megatron-core, by the provider of the plugin."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from accelfn.context import Context
from accelfn.context.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.parallel.engines.megatron.plan import MegatronPlan


class Core(NamedTuple):
    """The modules of megatron-core that are used."""

    parallel_state: Any
    schedules: Any
    optimizer: Any
    distributed: Any
    tensor_parallel: Any
    transformer: Any
    gpt: Any
    grad_scaler: Any
    param_scheduler: Any


def import_core() -> Core:
    """Import megatron-core.

    Raises:
        MissingExtraError: It isn't installed.
    """
    names = (
        "parallel_state",
        "pipeline_parallel.schedules",
        "optimizer",
        "distributed",
        "tensor_parallel",
        "transformer",
        "models.gpt.gpt_model",
        "optimizer.grad_scaler",
        "optimizer_param_scheduler",
    )
    try:
        # Its modules warn of every optional package that is missing, and use deprecated parts of torch.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Core(*(cast("Any", importlib.import_module(f"megatron.core.{name}")) for name in names))
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise MissingExtraError(
            "megatron_lm_plugin needs megatron-core: pip install 'accelfn[megatron]'."
        ) from error


def require_provider(plugin: MegatronLMPlugin, model: nn.Module) -> None:
    """Refuse a plugin that doesn't say how megatron-core builds the model.

    Raises:
        ConfigurationError: There is no provider.
    """
    if plugin.custom_model_provider_function is None:
        raise ConfigurationError(
            "Megatron-LM trains models of megatron-core, and neither the sizes nor the weights of the "
            f"{type(model).__name__} are converted. Set custom_model_provider_function of the "
            "MegatronLMPlugin: it returns a stage. Megatron-Bridge builds that of a Hugging Face model with "
            "its weights: bridge = AutoBridge.from_hf_pretrained(name); stage = bridge.to_megatron_provider("
            "load_weights=False).provide(pre_process, post_process); bridge.load_hf_weights([stage])."
        )


def join_groups(ctx: Context, core: Core, plan: MegatronPlan) -> None:
    """Make Megatron's process groups and seed its random numbers, unless an equal model has done it.

    The seeds begin with that of rank 0, so that ranks of a replica agree where they must; replicas differ.

    Ranks: every rank of ``ctx``.

    Raises:
        ConfigurationError: The context has only some ranks of torch's world; or a model of other sizes is
            trained in this process, whose groups Megatron keeps in its modules.
    """
    if not dist.is_initialized() or ctx.world.group is not dist.group.WORLD:
        raise ConfigurationError(
            "Megatron-LM makes its process groups from torch's default world, and this context has "
            f"{'none' if ctx.world.group is None else 'another group'}. Start the program with accelfn "
            "launch or torchrun, also for one process."
        )
    state = core.parallel_state
    if state.model_parallel_is_initialized():
        try:
            dist.get_process_group_ranks(state.get_tensor_model_parallel_group())
        except (KeyError, ValueError, RuntimeError):
            state.destroy_model_parallel()  # of a world that has ended
    chunks = plan.num_chunks if plan.num_chunks > 1 else None
    sizes = (plan.tp, plan.pp, chunks)
    if state.model_parallel_is_initialized():
        found = (
            state.get_tensor_model_parallel_world_size(),
            state.get_pipeline_model_parallel_world_size(),
            state.get_virtual_pipeline_model_parallel_world_size(),
        )
        if found != sizes:
            raise ConfigurationError(
                f"Megatron-LM keeps one set of process groups per process, and they are for tp_degree, "
                f"pp_degree and parts per stage of {found}, not {sizes}. Train this model in another program."
            )
        return
    state.initialize_model_parallel(
        tensor_model_parallel_size=plan.tp,
        pipeline_model_parallel_size=plan.pp,
        virtual_pipeline_model_parallel_size=chunks,
    )
    seed = torch.tensor([torch.initial_seed() % 2**30], device=ctx.device)
    dist.broadcast(seed, 0)
    place = 100 * state.get_pipeline_model_parallel_rank() + 10_000 * state.get_data_parallel_rank()
    core.tensor_parallel.model_parallel_cuda_manual_seed(int(seed) + place)


def build_stages(ctx: Context, core: Core, plan: MegatronPlan, plugin: MegatronLMPlugin) -> list[nn.Module]:
    """Build this rank's parts of the model by the provider, on its device.

    Ranks: every rank of ``ctx``.

    Raises:
        ConfigurationError: There is no provider, or a part isn't what the options ask for.
    """
    provider = plugin.custom_model_provider_function
    assert provider is not None  # asked for before
    if plugin.custom_prepare_model_function is not None:
        found = plugin.custom_prepare_model_function(provider)
        chunks = list(cast("Sequence[nn.Module]", found if isinstance(found, (list, tuple)) else [found]))
    else:
        chunks = [_build_chunk(core, plan, provider, chunk) for chunk in range(plan.num_chunks)]
    for chunk in chunks:
        _check_chunk(plan, plugin, chunk)
    return [chunk.to(ctx.device) for chunk in chunks]


def _build_chunk(core: Core, plan: MegatronPlan, provider: Callable[..., nn.Module], chunk: int) -> nn.Module:
    state = core.parallel_state
    place: dict[str, Any] = {"vp_stage": chunk} if plan.num_chunks > 1 else {}
    built: Any = provider(
        pre_process=state.is_pipeline_first_stage(ignore_virtual=False, **place),
        post_process=state.is_pipeline_last_stage(ignore_virtual=False, **place),
        **place,
    )
    if place:
        # With two stages the next rank is the previous one too, and batches of messages would be mixed up.
        built.config.overlap_p2p_comm, built.config.batch_p2p_comm = True, False
    return built


def _check_chunk(plan: MegatronPlan, plugin: MegatronLMPlugin, chunk: Any) -> None:
    """Refuse a part of a model that the provider has built otherwise than the options ask for."""
    config = chunk.config
    has_rotary, longest = plugin.use_rotary_position_embeddings, getattr(chunk, "max_sequence_length", None)
    asked = {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "virtual_pipeline_model_parallel_size": plan.num_chunks if plan.num_chunks > 1 else None,
        "num_layers_in_last_pipeline_stage": plugin.decoder_last_pipeline_num_layers,
        "fp16": plan.precision == "fp16",
        "bf16": plan.precision == "bf16",
        "sequence_parallel": plugin.sequence_parallelism or None,
        "recompute_granularity": plugin.recompute_granularity,
        "recompute_method": plugin.recompute_method,
        "recompute_num_layers": plugin.recompute_num_layers,
        "attention_dropout": plugin.attention_dropout,
        "hidden_dropout": plugin.hidden_dropout,
        "attention_softmax_in_fp32": plugin.attention_softmax_in_fp32 and None,
        **(plugin.other_megatron_args or {}),
    }
    for name, value in asked.items():
        if value is not None and getattr(config, name, None) != value:
            raise ConfigurationError(
                f"Megatron-LM: the stage of custom_model_provider_function has {name}="
                f"{getattr(config, name, None)!r} in its config, and the options ask for {value!r}. Build it "
                "with that, or change the option."
            )
    if has_rotary is not None and has_rotary == (chunk.position_embedding_type == "learned_absolute"):
        raise ConfigurationError(
            f"Megatron-LM: use_rotary_position_embeddings={has_rotary}, but the provider's stage has "
            f"{chunk.position_embedding_type} positions. Leave it out."
        )
    if plugin.seq_length is not None and longest is not None and plugin.seq_length > longest:
        raise ConfigurationError(
            f"Megatron-LM: seq_length={plugin.seq_length} is above the model's {longest} positions."
        )


def wrap_stages(core: Core, plan: MegatronPlan, chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """Wrap the parts of the model: precision, and the gradients' reduction over replicas."""
    options = core.distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=plan.precision != "no", use_distributed_optimizer=plan.shards_state
    )
    wrapped: list[nn.Module] = []
    for index, chunk in enumerate(chunks):
        config: Any = cast("Any", chunk).config
        inner = chunk
        if plan.precision != "no":
            inner = core.transformer.module.Float16Module(config, chunk)
        wrapped.append(
            core.distributed.DistributedDataParallel(
                config=config, ddp_config=options, module=inner, disable_bucketing=index > 0
            )
        )
        cast("Any", wrapped[-1]).broadcast_params()  # replicas may have other random weights
        for parameter in wrapped[-1].parameters():
            core.tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return wrapped
