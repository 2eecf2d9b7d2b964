"""Build the stages of a model with megatron-core, with the weights of the user's model."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from accelfn.context import Context
from accelfn.context.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.parallel.engines.megatron.plan import MegatronPlan
from accelfn.parallel.engines.megatron.weights import Rule, pack, rules_of, shard_piece

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)


class Core(NamedTuple):
    """The modules of megatron-core that are used."""

    parallel_state: Any
    schedules: Any
    optimizer: Any
    distributed: Any
    tensor_parallel: Any
    transformer: Any
    gpt: Any
    layer_specs: Any
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
        "models.gpt.gpt_layer_specs",
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


def transformer_config(core: Core, plan: MegatronPlan, plugin: MegatronLMPlugin) -> Any:
    """Return megatron-core's configuration of a model."""
    shape = plan.shape
    is_llama = shape.family == "llama"
    dtype = _DTYPES[plan.precision]
    last = plugin.decoder_last_pipeline_num_layers
    is_interleaved = plan.num_chunks > 1
    fields: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_groups,
        "kv_channels": shape.head_size,
        "ffn_hidden_size": shape.ffn_size,
        "layernorm_epsilon": shape.norm_eps,
        "normalization": "RMSNorm" if is_llama else "LayerNorm",
        "gated_linear_unit": is_llama,
        "activation_func": _activation(shape.activation),
        "add_bias_linear": shape.has_bias,
        "hidden_dropout": plan.hidden_dropout,
        "attention_dropout": plan.attention_dropout,
        "attention_softmax_in_fp32": plugin.attention_softmax_in_fp32,
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "virtual_pipeline_model_parallel_size": plan.num_chunks if is_interleaved else None,
        # With two stages the next rank is the previous one too, and batches of messages would be mixed up.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        "num_layers_in_last_pipeline_stage": last,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "fp16": plan.precision == "fp16",
        "bf16": plan.precision == "bf16",
        "masked_softmax_fusion": False,  # its kernels are Apex's
        **plan.recompute,
        **(plugin.other_megatron_args or {}),
    }
    try:
        return core.transformer.TransformerConfig(**fields)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"Megatron-LM: megatron-core refused the configuration: {error}") from error


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return partial(F.gelu, approximate="tanh")
    return {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}[name]


def build_stages(ctx: Context, core: Core, plan: MegatronPlan, plugin: MegatronLMPlugin) -> list[nn.Module]:
    """Build this rank's parts of the model, without weights, on its device.

    Ranks: every rank of ``ctx``.
    """
    provider = plugin.custom_model_provider_function
    if plugin.custom_prepare_model_function is not None:
        found = plugin.custom_prepare_model_function(provider)
        return list(cast("Sequence[nn.Module]", found if isinstance(found, (list, tuple)) else [found]))
    state = core.parallel_state
    if provider is not None:
        first, last = state.is_pipeline_first_stage(), state.is_pipeline_last_stage()
        return [provider(pre_process=first, post_process=last)]
    shape = plan.shape
    config = transformer_config(core, plan, plugin)
    spec = core.layer_specs.get_gpt_layer_local_spec(normalization=config.normalization)
    chunks: list[nn.Module] = []
    size = -(-shape.vocab_size // plan.tp)
    real = shape.vocab_size - size * state.get_tensor_model_parallel_rank()
    for chunk in range(plan.num_chunks):
        virtual = chunk if plan.num_chunks > 1 else None
        place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": virtual}
        built = core.gpt.GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=size * plan.tp,
            max_sequence_length=shape.max_length,
            pre_process=state.is_pipeline_first_stage(**place),
            post_process=state.is_pipeline_last_stage(**place),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.is_tied,
            position_embedding_type="learned_absolute" if shape.rope_base is None else "rope",
            rotary_base=10000 if shape.rope_base is None else shape.rope_base,
            rope_scaling=shape.rope_factor is not None,
            rope_scaling_factor=shape.rope_factor or 8.0,
            vp_stage=virtual,
        )
        if real < size:
            built.compute_language_model_loss = _without_padding(
                built.compute_language_model_loss, max(real, 0)
            )
        chunks.append(built.to(ctx.device))
    return chunks


def _without_padding(compute: Callable[..., Any], size: int) -> Callable[..., Any]:
    """Return the loss of logits whose last ones, from ``size`` on, are of tokens that don't exist."""

    def compute_loss(labels: torch.Tensor, logits: torch.Tensor) -> Any:
        is_padding = torch.arange(logits.shape[-1], device=logits.device) >= size
        return compute(labels, logits.masked_fill(is_padding, torch.finfo(logits.dtype).min))

    return compute_loss


def rules_of_rank(core: Core, plan: MegatronPlan) -> list[tuple[Rule, ...]]:
    """Return the rules of each of this rank's parts of the model."""
    stage = core.parallel_state.get_pipeline_model_parallel_rank()
    return [rules_of(plan, stage, chunk).rules for chunk in range(plan.num_chunks)]


def fill_stages(
    ctx: Context, core: Core, plan: MegatronPlan, chunks: Sequence[nn.Module], model: nn.Module
) -> None:
    """Copy rank 0's weights of the user's model into the parts of all ranks.

    Ranks: every rank of ``ctx``; each parameter is broadcast.

    Args:
        ctx: The world.
        core: megatron-core.
        plan: The plan.
        chunks: Of this rank. Written into.
        model: The user's; on other ranks than rank 0 its values aren't read.
    """
    tp, rank = plan.tp, core.parallel_state.get_tensor_model_parallel_rank()
    uses: dict[str, list[tuple[nn.Parameter, Rule]]] = {}
    for chunk, rules in zip(chunks, rules_of_rank(core, plan), strict=True):
        parameters = dict(chunk.named_parameters())
        _check_names(parameters, rules)
        for rule in rules:
            for piece in rule.pieces:
                uses.setdefault(piece.name, []).append((parameters[rule.name], rule))
    found: dict[int, list[torch.Tensor | None]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        whole = value.detach().to(ctx.device, torch.float32) if ctx.rank == 0 else None
        if whole is None:
            whole = torch.empty(value.shape, device=ctx.device)
        dist.broadcast(whole.contiguous() if ctx.rank == 0 else whole, 0)
        for parameter, rule in uses.get(name, ()):
            parts = found.setdefault(id(parameter), [None] * len(rule.pieces))
            index = next(number for number, piece in enumerate(rule.pieces) if piece.name == name)
            parts[index] = shard_piece(rule.pieces[index], whole, tp, rank)
            complete = [part for part in parts if part is not None]
            if len(complete) == len(parts):
                with torch.no_grad():
                    parameter.copy_(pack(rule, complete, plan.shape, tp))
                del found[id(parameter)]
    if found:
        missing = sorted(
            name for name in uses if name not in dict(model.named_parameters(remove_duplicate=False))
        )
        raise ConfigurationError(
            f"Megatron-LM: the {type(model).__name__} has no parameter {missing[0]}, so it isn't the model "
            "of its config. Pass the model for causal language modelling, without adapters."
        )


def _check_names(parameters: dict[str, nn.Parameter], rules: Sequence[Rule]) -> None:
    """Refuse a stage whose parameters aren't those of the rules, as with another version of megatron-core."""
    names = {rule.name for rule in rules}
    if names != set(parameters):
        different = sorted(names ^ set(parameters))
        raise ConfigurationError(
            f"Megatron-LM: this version of megatron-core builds other parameters than accelfn knows: "
            f"{', '.join(different[:4])}. Install megatron-core 0.16: pip install 'accelfn[megatron]'."
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
        if plan.shape.family == "custom":  # replicas may have other random weights
            cast("Any", wrapped[-1]).broadcast_params()
        for parameter in wrapped[-1].parameters():
            core.tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return wrapped
