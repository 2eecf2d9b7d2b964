"""Options of fully sharded data parallelism, both versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from accelfn.config.checks import (
    FrozenOptions,
    Record,
    in_range,
    settle,
    settle_fields,
    unchecked,
    where,
    wrong_type,
)
from accelfn.config.enums import AutoWrapPolicy, BackwardPrefetch, ShardingStrategy, StateDictType
from accelfn.errors import ConfigurationError, NotAvailableError

_POLICY_WORDS = ("fp8", "fp16", "bf16", "fp32")
# By whether they free parameters after the forward.
_STRATEGIES = (
    (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2),
    (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD),
)
_STRATEGIES_OF_2 = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
_DTYPES = MappingProxyType(
    {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
)


@dataclass(frozen=True, slots=True)
class FullyShardedDataParallelPlugin(Record):
    """How FSDP shards a model. Some fields belong to one version only.

    Attributes:
        fsdp_version: 1 (``FullyShardedDataParallel``) or 2 (``fully_shard``). Default 1.
        sharding_strategy: Version 1: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or
            HYBRID_SHARD_ZERO2; a name, its position from 1, or torch's enum. Version 2: the first two.
            ``None``: as ``reshard_after_forward`` says. Default None.
        reshard_after_forward: Whether parameters are freed after the forward (or the name of a strategy).
            ``None``: as ``sharding_strategy`` says, else yes; see :attr:`reshards`. Default None.
        backward_prefetch: Version 1: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH; ``None`` for the last.
            Default None.
        mixed_precision_policy: "fp8", "fp16", "bf16" or "fp32"; a mapping with param_dtype, reduce_dtype
            and buffer_dtype (version 1) or output_dtype (version 2), each fp32, fp16, bf16 or a torch dtype;
            torch's ``MixedPrecision`` (1) or ``MixedPrecisionPolicy`` (2). ``None``: from the precision of
            the context. Default None.
        auto_wrap_policy: Which modules are units, gathered and freed one by one: TRANSFORMER_BASED_WRAP,
            SIZE_BASED_WRAP, NO_WRAP (the whole model is one), or a callable that is given a module and says
            whether it is one (or takes what torch's policies take). ``None``: the model's blocks, which are
            of the classes in its ``_no_split_modules`` or else the items of lists of modules. Default None.
        transformer_cls_names_to_wrap: Class names of the blocks that are units, as an iterable or with
            commas; ``None``: those that the model names. Default None.
        min_num_params: Parameters in the smallest unit, for SIZE_BASED_WRAP. Default 0.
        cpu_offload: Whether parameters and gradients rest in host memory; or torch's ``CPUOffload`` (1),
            ``CPUOffloadPolicy`` or ``OffloadPolicy`` (2). Default False.
        ignored_modules: Modules that are not sharded, or a regular expression for their names. Default None.
        state_dict_type: FULL_STATE_DICT, SHARDED_STATE_DICT or (version 1) LOCAL_STATE_DICT; a name, its
            position from 1 in (full, local, sharded), or torch's enum. Default None. The first two are
            carried out alike: checkpoints are written in shards, and are read by any number of ranks, or as
            a whole.
        state_dict_config: Torch's config object for that type; ``None`` makes one. Default None.
        optim_state_dict_config: The same for the optimizer. Default None.
        limit_all_gathers: Version 1: whether the host waits rather than gather too far ahead. Default True.
        use_orig_params: Version 1: whether ``parameters()`` gives the original parameters. Version 2
            always does. Default None.
        param_init_fn: Version 1: called with a module on the meta device, gives it storage. Default None.
        sync_module_states: Version 1: whether rank 0 sends its weights at construction; always with
            ``cpu_ram_efficient_loading``. Default None.
        forward_prefetch: Version 1: whether the next parameters are asked for before this forward. Default
            None.
        activation_checkpointing: Whether units keep their inputs alone, and compute the rest again in the
            backward. Default False.
        activation_checkpointing_offload: Version 2: whether those inputs are kept in host memory. Needs
            ``activation_checkpointing``. Default False.
        cpu_ram_efficient_loading: Whether only rank 0 holds real weights while the model is loaded. Default
            False. With either, models are prepared whose parameters are on the meta device on other ranks,
            or on all.

    A real request of a field that the version does not have is an error.
    """

    fsdp_version: int = field(default=1, metadata=in_range(1, 2))
    sharding_strategy: ShardingStrategy | str | int | None = None
    reshard_after_forward: bool | ShardingStrategy | str | None = None
    backward_prefetch: BackwardPrefetch | str | int | None = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: AutoWrapPolicy | str | Callable[..., Any] | None = None
    _: KW_ONLY
    transformer_cls_names_to_wrap: Iterable[str] | None = None
    min_num_params: int = 0
    cpu_offload: Any = False
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: StateDictType | str | int | None = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    cpu_ram_efficient_loading: bool = False

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_fields(self)
        if self.backward_prefetch == BackwardPrefetch.NO_PREFETCH:
            settle(self, backward_prefetch=None)
        asked = self.reshard_after_forward
        fitting = _STRATEGIES[asked] if isinstance(asked, bool) else (asked,)
        if asked is not None and self.sharding_strategy not in (None, *fitting):
            raise ConfigurationError(
                f"{where(self, 'sharding_strategy')} and reshard_after_forward contradict each other, got "
                f"{self.sharding_strategy!s} and {asked!s}. Pass one of the two."
            )
        if not isinstance(asked, bool):  # the name of a strategy
            settle(self, reshard_after_forward=None, sharding_strategy=asked or self.sharding_strategy)
        if self.auto_wrap_policy == AutoWrapPolicy.SIZE_BASED_WRAP and self.min_num_params == 0:
            raise ConfigurationError(
                f"{where(self, 'min_num_params')} must be at least 1 for SIZE_BASED_WRAP, got 0. "
                "Pass the number of parameters of the smallest unit, such as 100_000_000."
            )
        ignored = self.ignored_modules
        if ignored is not None and not isinstance(ignored, str):
            settle(self, ignored_modules=tuple(ignored))
        offload = unchecked(self, "cpu_offload")
        if not isinstance(offload, bool) and "Offload" not in type(offload).__name__:
            raise wrong_type(self, "cpu_offload", "True, False or torch's CPUOffload or policy")
        if self.activation_checkpointing_offload and not (
            self.fsdp_version == 2 and self.activation_checkpointing
        ):
            raise ConfigurationError(
                f"{where(self, 'activation_checkpointing_offload')} keeps in host memory what FSDP version 2 "
                "keeps to recompute units. Pass activation_checkpointing=True and fsdp_version=2 too, or "
                "leave it out."
            )
        self._settle_precision()
        if self.fsdp_version == 2:
            self._refuse_options_of_version_1()

    @property
    def offloads_params(self) -> bool:
        """Whether parameters are kept in host memory, whichever way that was asked for."""
        offload = unchecked(self, "cpu_offload")
        if isinstance(offload, bool):
            return offload
        return type(offload).__name__ == "CPUOffloadPolicy" or bool(getattr(offload, "offload_params", False))

    @property
    def reshards(self) -> bool:
        """Whether parameters are freed after the forward pass, whichever way that was asked for."""
        asked = self.reshard_after_forward
        return asked if isinstance(asked, bool) else self.sharding_strategy in (None, *_STRATEGIES[True])

    def _refuse_options_of_version_1(self) -> None:
        for name, is_asked in (
            ("sharding_strategy", self.sharding_strategy not in (None, *_STRATEGIES_OF_2)),
            ("backward_prefetch", self.backward_prefetch is not None),
            ("forward_prefetch", bool(self.forward_prefetch)),
            # Loading with rank 0 only is synchronised by version 2 itself.
            ("sync_module_states", bool(self.sync_module_states) and not self.cpu_ram_efficient_loading),
            ("param_init_fn", self.param_init_fn is not None),
        ):
            if is_asked:
                raise ConfigurationError(
                    f"{where(self, name)} belongs to FSDP version 1, got {getattr(self, name)!s} with "
                    "fsdp_version=2. Leave it out, or use fsdp_version=1. For replicas of shards pass "
                    "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)."
                )

    def _settle_precision(self) -> None:
        policy = unchecked(self, "mixed_precision_policy")
        place = where(self, "mixed_precision_policy")
        if isinstance(policy, str):
            if policy.lower() not in _POLICY_WORDS:
                raise ConfigurationError(
                    f"{place} does not know {policy!r}. Use one of {', '.join(_POLICY_WORDS)}."
                )
            settle(self, mixed_precision_policy=str(policy).lower())
        elif isinstance(policy, Mapping):
            dtypes = cast("Mapping[str, object]", policy)
            keys = (
                "param_dtype",
                "reduce_dtype",
                "output_dtype" if self.fsdp_version == 2 else "buffer_dtype",
            )
            if set(dtypes) != set(keys):
                raise ConfigurationError(
                    f"{place} must have exactly {', '.join(keys)} for fsdp_version={self.fsdp_version}, got "
                    f"{', '.join(map(str, dtypes)) or 'none'}. Name all three."
                )
            named = {key: _dtype_name(place, dtypes[key]) for key in keys}
            settle(self, mixed_precision_policy=FrozenOptions(named))
        elif policy is not None and not hasattr(policy, "param_dtype"):
            raise wrong_type(
                self,
                "mixed_precision_policy",
                f"one of {', '.join(_POLICY_WORDS)}, a mapping or a policy of torch",
            )


def check_fsdp(plugin: FullyShardedDataParallelPlugin, num_replicas: int) -> None:
    """Refuse what version 2, by which both versions are carried out, does not do.

    Of version 1 it does what these ask for: sharding_strategy, cpu_offload, mixed_precision_policy, the
    wrapping and what is ignored, forward_prefetch, activation_checkpointing. It always sends rank 0's
    weights, to ranks that have loaded none too, gives original parameters, prefetches in the backward and
    limits what is gathered ahead; and checkpoints are always written in shards and read as whole models, so
    that these fields need nothing.

    Args:
        plugin: What was asked for.
        num_replicas: Size of the mesh's axis dp_replicate.

    Raises:
        ConfigurationError: A strategy that shards nothing, or one of replicas on a mesh without any.
        NotAvailableError: Anything else.
    """
    if plugin.sharding_strategy == ShardingStrategy.NO_SHARD:
        raise ConfigurationError(
            "fsdp_plugin: sharding_strategy=NO_SHARD keeps the whole model on every rank. Leave the plugin "
            "out: that is what DistributedDataParallel does."
        )
    hybrid = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)
    if plugin.sharding_strategy in hybrid and num_replicas == 1:
        raise ConfigurationError(
            f"fsdp_plugin: sharding_strategy={plugin.sharding_strategy!s} keeps replicas of shards, and the "
            "mesh has none. Pass parallelism_config=ParallelismConfig(dp_replicate_size=..., "
            "dp_shard_size=...), such as the number of nodes and of ranks in a node."
        )
    for name, is_asked in (
        ("state_dict_type", plugin.state_dict_type == StateDictType.LOCAL_STATE_DICT),
        ("state_dict_config", plugin.state_dict_config is not None),
        ("optim_state_dict_config", plugin.optim_state_dict_config is not None),
        ("param_init_fn", plugin.param_init_fn is not None),
        ("backward_prefetch", plugin.backward_prefetch == BackwardPrefetch.BACKWARD_POST),
        ("limit_all_gathers", not plugin.limit_all_gathers),
    ):
        if is_asked:
            raise NotAvailableError(
                f"fsdp_plugin: {name}={getattr(plugin, name)!s} is not supported yet. Leave it out."
            )


def _dtype_name(place: str, value: object) -> str:
    text = str(value).lower().removeprefix("torch.")
    name = _DTYPES.get(text, text)
    if name not in _DTYPES.values():
        raise ConfigurationError(f"{place} does not know the dtype {value!r}. Use fp32, fp16 or bf16.")
    return name
