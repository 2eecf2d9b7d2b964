"""Options of fully sharded data parallelism, both versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, cast

from accelfn.context.config.checks import (
    as_choice,
    check_bools,
    check_callables,
    check_ints,
    settle,
    settle_choice,
    settle_names,
    unchecked,
    where,
    wrong_type,
)
from accelfn.context.config.enums import AutoWrapPolicy, BackwardPrefetch, ShardingStrategy, StateDictType
from accelfn.context.config.options import FrozenOptions
from accelfn.errors import ConfigurationError, NotAvailableError

if TYPE_CHECKING:
    from torch import nn

__all__ = ("FullyShardedDataParallelPlugin", "check_fsdp")

_POLICY_WORDS = ("fp8", "fp16", "bf16", "fp32")
# Spellings of a dtype, torch's own repr included, so that torch need not be imported to read one.
_DTYPE_SPELLINGS = (
    ("fp32", ("fp32", "float32", "float", "torch.float32")),
    ("fp16", ("fp16", "float16", "half", "torch.float16")),
    ("bf16", ("bf16", "bfloat16", "torch.bfloat16")),
)


@dataclass(frozen=True, slots=True)
class FullyShardedDataParallelPlugin:
    """How FSDP shards a model. Some fields belong to one version only.

    Attributes:
        fsdp_version: 1 (``FullyShardedDataParallel``) or 2 (``fully_shard``). Default 1.
        sharding_strategy: Version 1: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or
            HYBRID_SHARD_ZERO2; a name, its position from 1, or torch's enum. Default FULL_SHARD. Version 2:
            the first two are translated into ``reshard_after_forward``, and the field is ``None``.
        reshard_after_forward: Version 2: whether parameters are freed after the forward. Default True.
            Version 1: translated into ``sharding_strategy`` (True: FULL_SHARD, False: SHARD_GRAD_OP, or the
            name of a strategy), and the field is ``None``.
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
            position from 1 in (full, local, sharded), or torch's enum. Default: full for version 1,
            sharded for version 2. The first two are carried out alike: checkpoints are written in shards,
            and are read by any number of ranks, or as a whole.
        state_dict_config: Torch's config object for that type; ``None`` makes one. Default None.
        optim_state_dict_config: The same for the optimizer. Default None.
        limit_all_gathers: Version 1: whether the host waits rather than gather too far ahead. Default True.
        use_orig_params: Version 1: whether ``parameters()`` gives the original parameters. Default False.
            Version 2 always does; the field is ``None`` there.
        param_init_fn: Version 1: called with a module on the meta device, gives it storage. Default None.
        sync_module_states: Version 1: whether rank 0 sends its weights at construction; always with
            ``cpu_ram_efficient_loading``. Default False. ``None`` in version 2.
        forward_prefetch: Version 1: whether the next parameters are asked for before this forward. Default
            False. ``None`` in version 2.
        activation_checkpointing: Whether units keep their inputs alone, and compute the rest again in the
            backward. Default False.
        cpu_ram_efficient_loading: Whether only rank 0 holds real weights while the model is loaded. Default
            False. With either, models are prepared whose parameters are on the meta device on other ranks,
            or on all.

    A field that the version does not have may hold the value that asks for nothing, so that
    ``dataclasses.replace(plugin, fsdp_version=2)`` works; a real request there is an error.
    """

    fsdp_version: int = 1
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
    cpu_ram_efficient_loading: bool = False

    def __post_init__(self) -> None:
        """Check and normalise the fields, and fill in what depends on the version."""
        check_ints(self, "fsdp_version", minimum=1, maximum=2)
        check_ints(self, "min_num_params", minimum=0)
        check_bools(self, "limit_all_gathers", "activation_checkpointing", "cpu_ram_efficient_loading")
        check_bools(self, "use_orig_params", "sync_module_states", "forward_prefetch", optional=True)
        check_callables(self, "param_init_fn")
        settle_choice(self, "sharding_strategy", ShardingStrategy, numbered=True, optional=True)
        settle_choice(self, "backward_prefetch", BackwardPrefetch, numbered=True, optional=True)
        settle_choice(self, "state_dict_type", StateDictType, numbered=True, optional=True)
        settle_names(self, "transformer_cls_names_to_wrap")
        if self.backward_prefetch == BackwardPrefetch.NO_PREFETCH:
            settle(self, backward_prefetch=None)
        self._settle_wrapping()
        self._settle_ignored()
        self._settle_precision()
        self._check_offload()
        if self.fsdp_version == 2:
            self._settle_version_2()
        else:
            self._settle_version_1()

    @property
    def offloads_params(self) -> bool:
        """Whether parameters rest in host memory, whichever way that was asked for."""
        offload = unchecked(self, "cpu_offload")
        if isinstance(offload, bool):
            return offload
        return type(offload).__name__ == "CPUOffloadPolicy" or bool(getattr(offload, "offload_params", False))

    def _settle_version_1(self) -> None:
        asked = _strategy_of(where(self, "reshard_after_forward"), self.reshard_after_forward)
        given = self.sharding_strategy
        # A bool says less than a strategy: HYBRID_SHARD reshards as well.
        agree = (
            given is None
            or asked is None
            or asked == given
            or (
                isinstance(self.reshard_after_forward, bool)
                and _reshards(given) == self.reshard_after_forward
            )
        )
        if not agree:
            raise self._contradiction()
        settle(
            self, sharding_strategy=given or asked or ShardingStrategy.FULL_SHARD, reshard_after_forward=None
        )
        settle(
            self,
            use_orig_params=bool(self.use_orig_params),
            forward_prefetch=bool(self.forward_prefetch),
            # With real weights on rank 0 only, the others must receive theirs.
            sync_module_states=bool(self.sync_module_states) or self.cpu_ram_efficient_loading,
            state_dict_type=self.state_dict_type or StateDictType.FULL_STATE_DICT,
        )

    def _settle_version_2(self) -> None:
        asked = self.reshard_after_forward
        if asked is not None and not isinstance(asked, bool):
            strategy = as_choice(where(self, "reshard_after_forward"), asked, ShardingStrategy)
            asked = self._reshards_in_version_2(strategy)
        given = (
            None if self.sharding_strategy is None else self._reshards_in_version_2(self.sharding_strategy)
        )
        if asked is not None and given is not None and asked != given:
            raise self._contradiction()
        reshard = next((value for value in (asked, given) if value is not None), True)
        settle(self, reshard_after_forward=reshard, sharding_strategy=None)
        if self.state_dict_type == StateDictType.LOCAL_STATE_DICT:
            raise ConfigurationError(
                f"{where(self, 'state_dict_type')} LOCAL_STATE_DICT does not exist in FSDP version 2, got "
                "fsdp_version=2. Use SHARDED_STATE_DICT or FULL_STATE_DICT."
            )
        for name, asks in (
            ("backward_prefetch", self.backward_prefetch is not None),
            ("forward_prefetch", bool(self.forward_prefetch)),
            # Loading with rank 0 only is synchronised by version 2 itself.
            ("sync_module_states", bool(self.sync_module_states) and not self.cpu_ram_efficient_loading),
            ("param_init_fn", self.param_init_fn is not None),
        ):
            if asks:
                raise ConfigurationError(
                    f"{where(self, name)} belongs to FSDP version 1, got {getattr(self, name)!r} with "
                    "fsdp_version=2. Leave it out, or use fsdp_version=1."
                )
        settle(
            self,
            use_orig_params=None,
            forward_prefetch=None,
            sync_module_states=None,
            state_dict_type=self.state_dict_type or StateDictType.SHARDED_STATE_DICT,
        )

    def _reshards_in_version_2(self, strategy: object) -> bool:
        if strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            raise ConfigurationError(
                f"{where(self, 'sharding_strategy')} {strategy!s} does not exist in FSDP version 2, got "
                "fsdp_version=2. Use reshard_after_forward, and ParallelismConfig(dp_replicate_size=..., "
                "dp_shard_size=...) for replicas of shards."
            )
        return strategy == ShardingStrategy.FULL_SHARD

    def _contradiction(self) -> ConfigurationError:
        return ConfigurationError(
            f"{where(self, 'sharding_strategy')} and reshard_after_forward contradict each other, got "
            f"{self.sharding_strategy!s} and {self.reshard_after_forward!s}. Pass "
            f"{'reshard_after_forward' if self.fsdp_version == 2 else 'sharding_strategy'} only."
        )

    def _settle_wrapping(self) -> None:
        policy = self.auto_wrap_policy
        # An enum class or member is a str here; anything else that can be called is a policy.
        if policy is not None and (isinstance(policy, str) or not callable(policy)):
            chosen = as_choice(where(self, "auto_wrap_policy"), policy, AutoWrapPolicy)
            settle(self, auto_wrap_policy=chosen)
        if self.auto_wrap_policy == AutoWrapPolicy.SIZE_BASED_WRAP and self.min_num_params == 0:
            raise ConfigurationError(
                f"{where(self, 'min_num_params')} must be at least 1 for SIZE_BASED_WRAP, got 0. "
                "Pass the number of parameters of the smallest unit, such as 100_000_000."
            )

    def _settle_ignored(self) -> None:
        ignored = unchecked(self, "ignored_modules")
        if ignored is None:
            return
        if isinstance(ignored, str):
            try:
                re.compile(ignored)
            except re.error as error:
                raise ConfigurationError(
                    f"{where(self, 'ignored_modules')} is not a regular expression: got {ignored!r} "
                    f"({error}). "
                    "Pass one that matches whole module names, or the modules."
                ) from error
            return
        if not isinstance(ignored, Iterable):
            raise wrong_type(self, "ignored_modules", "an iterable of modules, a regular expression or None")
        settle(self, ignored_modules=tuple(cast("Iterable[object]", ignored)))

    def _settle_precision(self) -> None:
        policy = unchecked(self, "mixed_precision_policy")
        place = where(self, "mixed_precision_policy")
        if policy is None:
            return
        if isinstance(policy, str):
            if policy.lower() not in _POLICY_WORDS:
                raise ConfigurationError(
                    f"{place} does not know {policy!r}. Use one of {', '.join(_POLICY_WORDS)}."
                )
            settle(self, mixed_precision_policy=str(policy).lower())
        elif isinstance(policy, Mapping):
            self._settle_dtypes(cast("Mapping[str, object]", policy))
        else:
            # By name, because the two classes live in torch and this module does not load it.
            expected = "MixedPrecisionPolicy" if self.fsdp_version == 2 else "MixedPrecision"
            if expected not in [kind.__name__ for kind in type(policy).__mro__]:
                raise ConfigurationError(
                    f"{place} must be a torch {expected} for "
                    f"fsdp_version={self.fsdp_version}, got {policy!r}. "
                    f"Pass that, or one of {', '.join(_POLICY_WORDS)}."
                )

    def _settle_dtypes(self, policy: Mapping[str, object]) -> None:
        place = where(self, "mixed_precision_policy")
        third = "output_dtype" if self.fsdp_version == 2 else "buffer_dtype"
        keys = ("param_dtype", "reduce_dtype", third)
        if set(policy) != set(keys):
            raise ConfigurationError(
                f"{place} must have exactly {', '.join(keys)} for fsdp_version={self.fsdp_version}, got "
                f"{', '.join(map(str, policy)) or 'none'}. Name all three."
            )
        settle(
            self, mixed_precision_policy=FrozenOptions({key: _dtype_name(place, policy[key]) for key in keys})
        )

    def _check_offload(self) -> None:
        offload = unchecked(self, "cpu_offload")
        if isinstance(offload, bool):
            return
        known = ("CPUOffloadPolicy", "OffloadPolicy") if self.fsdp_version == 2 else ("CPUOffload",)
        if type(offload).__name__ not in known:
            raise ConfigurationError(
                f"{where(self, 'cpu_offload')} must be True, False or a torch {' or '.join(known)} for "
                f"fsdp_version={self.fsdp_version}, got {offload!r}. Pass True or False."
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
    policy = plugin.mixed_precision_policy
    for name, is_asked in (
        ("state_dict_type", plugin.state_dict_type == StateDictType.LOCAL_STATE_DICT),
        ("state_dict_config", plugin.state_dict_config is not None),
        ("optim_state_dict_config", plugin.optim_state_dict_config is not None),
        ("param_init_fn", plugin.param_init_fn is not None),
        ("backward_prefetch", plugin.backward_prefetch == BackwardPrefetch.BACKWARD_POST),
        ("limit_all_gathers", not plugin.limit_all_gathers),
        ("mixed_precision_policy", policy == "fp8" if isinstance(policy, str) else False),
    ):
        if is_asked:
            raise NotAvailableError(
                f"fsdp_plugin: {name}={getattr(plugin, name)!s} is not supported yet. Leave it out."
            )


def _reshards(strategy: object) -> bool:
    return strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def _strategy_of(place: str, value: object) -> ShardingStrategy | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return ShardingStrategy.FULL_SHARD if value else ShardingStrategy.SHARD_GRAD_OP
    return as_choice(place, value, ShardingStrategy)


def _dtype_name(place: str, value: object) -> str:
    text = str(value).lower()
    for name, spellings in _DTYPE_SPELLINGS:
        if text in spellings:
            return name
    raise ConfigurationError(f"{place} does not know the dtype {value!r}. Use fp32, fp16 or bf16.")
