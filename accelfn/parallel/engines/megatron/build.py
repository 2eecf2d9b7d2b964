"""Build the stages of a model with megatron-core by the provider of the plugin, and their optimizer."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accelfn.config import MegatronLMPlugin
from accelfn.context import Context
from accelfn.errors import ConfigurationError, MissingExtraError, NotAvailableError
from accelfn.parallel.engines.megatron.plan import MegatronPlan


def import_core() -> Any:
    """Return the package ``megatron.core``, with the modules that are used.

    Raises:
        MissingExtraError: It isn't installed.
    """
    try:
        # Its modules warn of every optional package that is missing, and use deprecated parts of torch.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in ("optimizer", "optimizer_param_scheduler", "pipeline_parallel", "models.gpt"):
                importlib.import_module(f"megatron.core.{name}")
            return importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise MissingExtraError(
            "megatron_lm_plugin needs megatron-core: pip install 'accelfn[megatron]'."
        ) from error


def join_groups(ctx: Context, core: Any, plan: MegatronPlan) -> None:
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
    sizes = (plan.tp, plan.pp, plan.num_chunks if plan.num_chunks > 1 else None)
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(*sizes)
        seed = torch.tensor([torch.initial_seed() % 2**30], device=ctx.device)
        dist.broadcast(seed, 0)
        place = 100 * state.get_pipeline_model_parallel_rank() + 10_000 * state.get_data_parallel_rank()
        core.tensor_parallel.model_parallel_cuda_manual_seed(int(seed) + place)
        return
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


def build_stages(ctx: Context, core: Any, plan: MegatronPlan, plugin: MegatronLMPlugin) -> list[nn.Module]:
    """Build this rank's parts of the model by the provider, on its device, inside of Megatron's wrappers.

    Ranks: every rank of ``ctx``.

    Raises:
        ConfigurationError: A part isn't what the options ask for.
    """
    provider: Any = plugin.custom_model_provider_function
    prepare: Any = plugin.custom_prepare_model_function
    if prepare is None:
        chunks = [_build_chunk(core, plan, provider, chunk) for chunk in range(plan.num_chunks)]
    else:
        found = prepare(provider)
        chunks = [found] if isinstance(found, nn.Module) else [*found]
    for chunk in chunks:
        _check_chunk(plan, plugin, chunk)
    return [_wrap_chunk(core, plan, chunk.to(ctx.device), index) for index, chunk in enumerate(chunks)]


def _build_chunk(core: Any, plan: MegatronPlan, provider: Callable[..., Any], chunk: int) -> Any:
    state = core.parallel_state
    place: dict[str, Any] = {"vp_stage": chunk} if plan.num_chunks > 1 else {}
    built = provider(
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


def _wrap_chunk(core: Any, plan: MegatronPlan, chunk: Any, index: int) -> nn.Module:
    """Return a part of the model with its precision, and with its gradients' reduction over replicas."""
    config = chunk.config
    if plan.precision != "no":
        chunk = core.transformer.module.Float16Module(config, chunk)
    options = core.distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=plan.precision != "no", use_distributed_optimizer=plan.shards_state
    )
    wrapped = core.distributed.DistributedDataParallel(
        config=config, ddp_config=options, module=chunk, disable_bucketing=index > 0
    )
    wrapped.broadcast_params()  # replicas may have other random weights
    for parameter in wrapped.parameters():
        core.tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return wrapped


def optimizer_options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the fields of Megatron's OptimizerConfig for a torch optimizer.

    Raises:
        ConfigurationError: It has stepped already, or its groups differ.
        NotAvailableError: It has an option that Megatron's doesn't.
    """
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if optimizer.state:
        raise ConfigurationError(
            f"Megatron-LM: the {kind} has stepped already, and its state can't be moved into Megatron's. "
            "Prepare it before its first step, and load the state afterwards."
        )
    for name in ("amsgrad", "nesterov", "maximize", "dampening"):
        if any(group.get(name) for group in groups):
            raise NotAvailableError(
                f"Megatron-LM: its optimizers have no {name}, which the {kind} has. Leave it out."
            )
    first, *others = ({key: value for key, value in group.items() if "param" not in key} for group in groups)
    if any(group != first for group in others):
        raise ConfigurationError(
            f"Megatron-LM: the groups of the {kind} differ, and which of them the provider's parameters "
            "belong to isn't known. Pass one group; no_wd_decay_cond and scale_lr_cond of the "
            "MegatronLMPlugin choose parameters by name."
        )
    options: dict[str, Any] = {"lr": float(first["lr"]), "weight_decay": first.get("weight_decay", 0.0)}
    if "betas" not in first:
        return {**options, "sgd_momentum": first.get("momentum", 0.0)}
    options["adam_beta1"], options["adam_beta2"] = first["betas"]
    is_decoupled = bool(first.get("decoupled_weight_decay", kind != "Adam"))
    return {**options, "adam_eps": first["eps"], "decoupled_weight_decay": is_decoupled}


def build_optimizer(
    core: Any,
    plan: MegatronPlan,
    plugin: MegatronLMPlugin,
    chunks: list[nn.Module],
    options: dict[str, Any],
) -> Any:
    """Build Megatron's optimizer for parts of a model.

    Ranks: every rank of the context.

    Args:
        core: megatron-core.
        plan: The plan.
        plugin: Its ``no_wd_decay_cond``, ``scale_lr_cond`` and ``lr_mult``.
        chunks: From :func:`build_stages`.
        options: From :func:`optimizer_options`.
    """
    config = core.optimizer.OptimizerConfig(
        **options,
        optimizer=plan.optimizer,
        min_lr=0.0,
        fp16=plan.precision == "fp16",
        bf16=plan.precision == "bf16",
        params_dtype={"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[plan.precision],
        use_distributed_optimizer=plan.shards_state,
        loss_scale=1.0 if plan.precision == "fp16" else None,  # replaced at each step
        clip_grad=plan.max_norm,
    )
    parts = core.optimizer.optimizer_config
    overrides: dict[Any, dict[str, float]] = {}
    for key, factor, condition in (
        ("user_decay_mult", 0.0, plugin.no_wd_decay_cond),
        ("user_lr_mult", plugin.lr_mult, plugin.scale_lr_cond),
    ):
        if condition is not None:
            predicate = parts.ParamWithNamePredicate(name=key, fn=_by_name(condition))
            overrides[parts.ParamKey(with_name_predicate=predicate)] = {key: factor}
    return core.optimizer.get_megatron_optimizer(
        config, chunks, config_overrides=overrides, use_gloo_process_groups=False
    )


def _by_name(condition: Callable[[str, Any], bool]) -> Callable[[torch.Tensor, str], bool]:
    """Return Megatron's kind of condition, whose names have its wrappers' prefixes."""
    return lambda parameter, name: condition(re.sub(r"^(module\.)+", "", name), parameter)
