"""Which units of a model FSDP gathers, and how their parameters are sharded."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.config import AutoWrapPolicy, FullyShardedDataParallelPlugin
from accelfn.context import MeshPlan
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, list_text, modules_of, owner_of
from accelfn.parallel.strategies.experts import ExpertPlan
from accelfn.parallel.strategies.strategy import Planning
from accelfn.tree.structure import size_text


def choose_units(
    plugin: FullyShardedDataParallelPlugin, facts: ModelFacts, wrapped: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Choose the FSDP units, by name: inner ones before those around them; the model itself, "", is last.

    Without a policy the model's blocks are units, and the rest of the model is the last one.

    Args:
        plugin: Has the policy.
        facts: Of the model.
        wrapped: The choice of a policy that is a callable, from :func:`names_of_wrapped`.

    Raises:
        ConfigurationError: The model has no module of a class that should be a unit, or tied parameters would
            be in two units.
    """
    policy = plugin.auto_wrap_policy
    if wrapped is not None:
        chosen = set(wrapped)
    elif policy == AutoWrapPolicy.NO_WRAP:
        chosen: set[str] = set()
    elif policy == AutoWrapPolicy.SIZE_BASED_WRAP:
        chosen = _by_size(facts, plugin.min_num_params)
    elif plugin.transformer_cls_names_to_wrap:
        chosen = _by_class(facts, tuple(plugin.transformer_cls_names_to_wrap))
    else:
        chosen = set(facts.blocks)
        if not chosen and policy == AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
            raise ConfigurationError(
                f"auto_wrap_policy=TRANSFORMER_BASED_WRAP: {facts.kinds['']} names no blocks "
                "(_no_split_modules) and has no list of modules of one class. Pass "
                "transformer_cls_names_to_wrap."
            )
    # A list of modules has no forward that could gather anything.
    chosen -= facts.containers | {""}
    if wrapped is None and not plugin.transformer_cls_names_to_wrap:  # not requested by name
        _keep_ties_together(facts, chosen)
    units = (*(name for name in reversed(tuple(facts.kinds)) if name in chosen), "")
    _check_ties(facts, frozenset(units))
    return units


def _by_class(facts: ModelFacts, classes: tuple[str, ...]) -> set[str]:
    known = sorted(set(facts.kinds.values()))
    for name in classes:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(
                f"transformer_cls_names_to_wrap names {name!r}, but {facts.kinds['']} has no module of that "
                f"class.{hint} Its classes are {', '.join(known)}."
            )
    return {name for name, kind in facts.kinds.items() if kind in classes}


def _by_size(facts: ModelFacts, least: int) -> set[str]:
    """Find modules with at least ``least`` parameters outside of the units inside them."""
    modules = frozenset(facts.kinds)
    left = dict.fromkeys(facts.kinds, 0)
    for name in facts.own_names:
        left[owner_of(name, modules) or ""] += facts.numel(name)
    chosen: set[str] = set()
    for name in reversed(tuple(facts.kinds)):  # inner modules come after outer ones
        if not name:
            continue
        if left[name] >= least and name not in facts.containers:
            chosen.add(name)
        else:
            left[owner_of(name.rpartition(".")[0], modules) or ""] += left[name]
    return chosen


def _keep_ties_together(facts: ModelFacts, chosen: set[str]) -> None:
    """Remove units that would separate tied parameters."""
    torn = True
    while torn:
        torn = False
        for group in facts.ties:
            owners = {owner_of(name, chosen) for name in group}
            if len(owners) > 1:
                torn = True
                chosen.difference_update(owner for owner in owners if owner is not None)


def _check_ties(facts: ModelFacts, units: frozenset[str]) -> None:
    for group in facts.ties:
        owners = {name: owner_of(name, units) for name in group}
        if len(set(owners.values())) > 1:
            first, second = next(
                (name, other) for name in group for other in group if owners[name] != owners[other]
            )
            raise ConfigurationError(
                f"{first} and {second} are one tied parameter, but the policy puts them into two units: "
                f"{owners[first] or 'the model'!s} and {owners[second] or 'the model'!s}. FSDP gathers a "
                "parameter with one unit: leave both modules to the unit around them, or untie them."
            )


def names_of_wrapped(policy: Callable[..., Any], model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that a callable policy chooses.

    Args:
        policy: Called with each module except the model itself, and returns whether it is a unit. A policy
            with an argument ``recurse`` is called as torch does, with ``recurse=False`` and
            ``nonwrapped_numel``.
        model: Real or meta.
    """
    takes = inspect.signature(policy).parameters
    as_torch = "recurse" in takes

    def wants(module: nn.Module) -> bool:
        if not as_torch:
            return bool(policy(module))
        return bool(policy(module, False, sum(parameter.numel() for parameter in module.parameters())))

    return tuple(name for name, module in modules_of(model).items() if name and wants(module))


def names_of_ignored(
    ignored: Iterable[nn.Module] | str | None, model: nn.Module, facts: ModelFacts
) -> tuple[str, ...]:
    """Return the names of the parameters that FSDP ignores.

    Raises:
        ConfigurationError: Nothing in the model matches, or an ignored parameter is trained: its gradient
            would not be averaged.
    """
    if ignored is None:
        return ()
    if isinstance(ignored, str):
        pattern = re.compile(ignored)
        modules = {name for name in facts.kinds if pattern.fullmatch(name)}
    else:
        names: Mapping[int, str] = {id(module): name for name, module in modules_of(model).items()}
        items = tuple(ignored)
        unknown = [type(module).__name__ for module in items if id(module) not in names]
        if unknown:
            raise ConfigurationError(
                f"ignored_modules has a {unknown[0]} that is not in the {facts.kinds['']}. Pass modules of "
                "the model, or a regular expression for their names."
            )
        modules = {names[id(module)] for module in items}
    found = tuple(name for name in facts.names if owner_of(name, modules) is not None)
    if not modules:
        raise ConfigurationError(
            f"ignored_modules={ignored!r} matches no module of the {facts.kinds['']}. It must match a full "
            f"name, such as {next(iter(name for name in facts.kinds if name), '')!r}."
        )
    trained = [name for name in found if name in facts.trainable]
    if trained:
        raise ConfigurationError(
            f"ignored_modules has {trained[0]}, which is trained: FSDP doesn't average the gradients of "
            "ignored parameters, so ranks would drift apart. Freeze it, or leave it out of ignored_modules."
        )
    return found


# Beside products in fp8, everything is in bf16.
_DTYPES = (
    ("fp32", torch.float32),
    ("fp16", torch.float16),
    ("bf16", torch.bfloat16),
    ("fp8", torch.bfloat16),
)


class ShardPlan(NamedTuple):
    """How a model is sharded. A value.

    Attributes:
        num_replicas: Copies of the shards, whose gradients are averaged too; 1 for none.
        num_shards: Ranks that share each parameter.
        units: Names of the modules that are gathered and freed one by one, inner ones first; "", the rest
            of the model, is the last.
        reshard: Whether units are freed after their forward, and gathered again in the backward. The last
            unit never is: its backward comes first.
        param_dtype: Dtype in which units are gathered and compute; None for that of the parameters.
        reduce_dtype: Dtype in which gradients are averaged; None for ``param_dtype``.
        output_dtype: Dtype to which floating outputs of the model are cast; None for no cast.
        cast_inputs: Whether floating inputs of units are cast to ``param_dtype``.
        autocasts: Whether forward passes run under autocast, as in layouts without shards: where the plugin
            has no policy.
        offload: Whether shards and their gradients are kept in host memory.
        prefetch: Whether a unit's forward starts to gather the next unit.
        ignored: Names of the parameters that every rank keeps unsharded.
        unshared: Names of the expert parameters that no other rank has, and that FSDP leaves out.
        shard_bytes: Bytes of parameters on this rank, including the padding of uneven shards.
        gathered_bytes: Bytes of the largest gathered unit.
        unreduced_bytes: Bytes of gradients that each rank holds until the last batch of an accumulation
            window, when they are reduced to shards. With ``sync_each_batch`` each batch is reduced, and it
            holds ``shard_bytes``.
        in_full: Units that are gathered in the dtype of their parameters instead of ``param_dtype``: those
            with running statistics, which torch doesn't compute in a lower one.
        num_expert_shards: Ranks that share each expert.
        expert_dims: The dim along which each expert parameter is sharded over these ranks, by name. Their
            modules are units. Empty without expert parallelism, or where FSDP leaves experts out.
    """

    num_replicas: int
    num_shards: int
    units: tuple[str, ...]
    reshard: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_inputs: bool
    autocasts: bool
    offload: bool
    prefetch: bool
    ignored: tuple[str, ...]
    unshared: tuple[str, ...]
    shard_bytes: int
    gathered_bytes: int
    unreduced_bytes: int
    in_full: frozenset[str]
    num_expert_shards: int
    expert_dims: Mapping[str, int]

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the device mesh dims that the model is sharded on."""
        return ("dp_replicate", "shard") if self.num_replicas > 1 else ("shard",)

    @property
    def expert_dims_of_mesh(self) -> tuple[str, ...]:
        """Names of the device mesh dims that experts are sharded on."""
        return (*self.dims[:-1], "eshard")

    @property
    def expert_units(self) -> frozenset[str]:
        """Names of the units that hold experts."""
        return frozenset(name.rpartition(".")[0] for name in self.expert_dims)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the parameters that FSDP doesn't manage."""
        return self.ignored + self.unshared

    def shards_of(self, name: str) -> int:
        """Return how many ranks share a parameter."""
        if name in self.left_out:
            return 1
        return self.num_expert_shards if name in self.expert_dims else self.num_shards

    def shard_shape(self, facts: ModelFacts, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter on each rank, including the padding of uneven shards."""
        shape, num_shards = facts.shapes[name], self.shards_of(name)
        if num_shards == 1:
            return shape
        dim = self.expert_dims.get(name, 0)
        return (*shape[:dim], -(-shape[dim] // num_shards), *shape[dim + 1 :])

    def shard_numel(self, facts: ModelFacts, name: str) -> int:
        """Return the elements of a parameter on each rank, including the padding of uneven shards."""
        return prod(self.shard_shape(facts, name))

    def rows(self, averaged: str) -> list[tuple[str, str]]:
        """Return the lines of the model plan's table; ``averaged`` names the axes of gradients."""
        rest = "the rest of the model" if len(self.units) > 1 else "the complete model"
        units = [*reversed(self.units[:-1])]
        freed = "freed after its forward" if self.reshard else "kept until its backward"
        kept = size_text(self.shard_bytes) + (" in host memory" if self.offload else "")
        largest = f"the largest unit is {size_text(self.gathered_bytes)} while it computes"
        whole = (
            f"until the last batch of a window each rank holds {size_text(self.unreduced_bytes)}, unsharded"
        )
        rows = [
            ("gradients", f"averaged over {averaged} by FSDP, and sharded over {self.num_shards}"),
            ("units", ", ".join([list_text(units), rest]) if units else rest),
            (
                "parameters",
                f"{kept} on each rank; {largest}, and {freed if units else 'kept until its backward'}",
            ),
            ("windows", f"{whole}; with sync_each_batch its shard of them"),
        ]
        if self.prefetch:
            rows.append(("prefetch", "each unit's forward starts to gather the next one"))
        if self.ignored:
            rows.append(("ignored", f"unsharded on each rank: {list_text(self.ignored)}"))
        return rows


def plan_shard(
    plugin: FullyShardedDataParallelPlugin,
    facts: ModelFacts,
    mesh_plan: MeshPlan,
    units: Iterable[str],
    *,
    mixed_precision: str = "no",
    ignored: Iterable[str] = (),
    experts: ExpertPlan | None = None,
    in_fp8: Iterable[str] = (),
) -> ShardPlan:
    """Plan how a model is sharded on a mesh. Pure.

    Args:
        plugin: The options. Those of FSDP version 1 have their meaning in version 2.
        facts: Of the model before sharding; of experts, those of one rank.
        mesh_plan: Sharded over its axes dp_shard, cp and sp; replicated over dp_replicate.
        units: Names of the modules that are gathered and freed one by one, from ``choose_units``.
        mixed_precision: The context's, used if the plugin has no policy: parameters are gathered and compute
            in it, and gradients are averaged in float32.
        ignored: Names of the parameters that every rank keeps unsharded.
        experts: Experts that are spread over ranks. Their modules become units, sharded over the ranks that
            have the same ones. With a single such rank and neither dtypes nor offloading, FSDP leaves them
            out.
        in_fp8: Names of the layers whose weights are gathered in 8 bits.

    Raises:
        ConfigurationError: A parameter can't be sharded.
    """
    num_replicas, num_expert_shards = mesh_plan.size("dp_replicate"), mesh_plan.size("eshard")
    param_dtype, reduce_dtype, output_dtype, cast_inputs = _dtypes(plugin, mixed_precision)
    autocasts = plugin.mixed_precision_policy is None and param_dtype is not None
    grad_dtype = reduce_dtype or param_dtype
    ignored, unshared = tuple(ignored), tuple[str, ...]()
    chosen = set(units) - {""}
    if experts is not None:
        has_work = num_replicas * num_expert_shards > 1 or plugin.offloads_params or grad_dtype is not None
        if has_work:
            chosen |= set(experts.modules)
        else:
            unshared = tuple(name for name in experts.names if name not in ignored)
            chosen -= set(experts.modules)
            experts = None
    in_full = _in_full(facts) if param_dtype is not None else frozenset[str]()
    chosen |= in_full
    units = (*(name for name in reversed(tuple(facts.kinds)) if name in chosen), "")
    left_out = frozenset((*ignored, *unshared))
    sharded = tuple(name for name in facts.own_names if name not in left_out)
    of_unit: dict[str, list[str]] = {name: [] for name in units}
    for name in sharded:
        of_unit[cast("str", owner_of(name, frozenset(units)))].append(name)
    _check_parameters(facts, of_unit)

    in_bytes = frozenset(f"{name}.weight" for name in in_fp8)

    def width(name: str) -> int:
        dtype = None if name.rpartition(".")[0] in in_full else param_dtype
        return 1 if name in in_bytes else (dtype or facts.dtypes[name]).itemsize

    plan = ShardPlan(
        num_replicas=num_replicas,
        num_shards=mesh_plan.size("shard"),
        units=units,
        reshard=plugin.reshards,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=output_dtype,
        cast_inputs=cast_inputs,
        autocasts=autocasts,
        offload=plugin.offloads_params,
        prefetch=bool(plugin.forward_prefetch),
        ignored=ignored,
        unshared=unshared,
        shard_bytes=0,
        gathered_bytes=max(
            sum(facts.numel(name) * width(name) for name in names) for names in of_unit.values()
        ),
        unreduced_bytes=sum(
            facts.numel(name) * (grad_dtype or facts.dtypes[name]).itemsize
            for name in sharded
            if name in facts.trainable
        ),
        in_full=in_full,
        num_expert_shards=num_expert_shards,
        expert_dims={} if experts is None else _expert_dims(experts, facts, num_expert_shards),
    )
    kept = sum(plan.shard_numel(facts, name) * facts.dtypes[name].itemsize for name in (*sharded, *unshared))
    return plan._replace(shard_bytes=kept)


def _in_full(facts: ModelFacts) -> frozenset[str]:
    """Return the names of the batch norms, which have parameters and running statistics."""
    return frozenset(
        name
        for name, kind in facts.kinds.items()
        if re.fullmatch(r"(Sync)?BatchNorm(\dd)?", kind) and f"{name}.weight" in facts.own_names
    )


def _expert_dims(experts: ExpertPlan, facts: ModelFacts, num_shards: int) -> dict[str, int]:
    """Choose the dim along which each expert parameter is sharded: the first that divides evenly.

    Torch pads uneven shards along dim 0 only, and can't join those of what is split there already.
    """
    found: dict[str, int] = {}
    for name in experts.names:
        shape = facts.shapes[name]
        dim = next((dim for dim, size in enumerate(shape) if size % num_shards == 0), None)
        if dim is None:
            raise ConfigurationError(
                f"{name} can't be sharded over the {num_shards} ranks with the same experts: no dim of its "
                f"shape {shape} on one rank is divisible by {num_shards}. Raise ep_size, or use "
                "dp_replicate_size instead of some of dp_shard_size."
            )
        found[name] = dim
    return found


def _check_parameters(facts: ModelFacts, of_unit: Mapping[str, list[str]]) -> None:
    for unit, names in of_unit.items():
        dtypes = {facts.dtypes[name]: name for name in names if name in facts.trainable}
        if len(dtypes) > 1:
            (dtype, first), (other_dtype, second) = tuple(dtypes.items())[:2]
            raise ConfigurationError(
                f"fsdp_plugin: the unit {unit or 'of the model itself'!s} has trained parameters of several "
                f"dtypes, whose gradients can't be reduced together: {first} is {dtype}, {second} is "
                f"{other_dtype}. Convert them to one dtype, and use mixed_precision to compute in a lower "
                "one."
            )
        for name in names:
            if not facts.shapes[name]:
                raise ConfigurationError(
                    f"fsdp_plugin: {name} is a scalar, of shape (), and can't be sharded. Give it shape "
                    "(1,), or make it a buffer if it isn't trained."
                )


def _dtypes(
    plugin: FullyShardedDataParallelPlugin, mixed_precision: str
) -> tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None, bool]:
    """Return the dtypes of parameters, reductions and outputs, and whether inputs are cast."""
    policy: Any = plugin.mixed_precision_policy
    if isinstance(policy, str) and policy == "fp8" and mixed_precision != "fp8":
        raise ConfigurationError(
            f"fsdp_plugin: mixed_precision_policy='fp8' contradicts mixed_precision={mixed_precision!r}, "
            "which computes no products in 8 bits. Use mixed_precision='fp8', or the policy 'bf16'."
        )
    if policy is None:
        dtype = _dtype(mixed_precision)
        # As under autocast: gradients of the model's dtype, and outputs in float32.
        return (None, None, None, True) if dtype is None else (dtype, torch.float32, torch.float32, False)
    if isinstance(policy, str):
        dtype = _dtype(policy)
        return dtype, dtype, dtype, True
    if hasattr(policy, "items"):
        third = policy.get("output_dtype", policy.get("buffer_dtype"))
        return _dtype(policy["param_dtype"]), _dtype(policy["reduce_dtype"]), _dtype(third), True
    output = getattr(policy, "output_dtype", None)  # torch's policy of version 1 has none
    cast_inputs = getattr(policy, "cast_forward_inputs", True)
    return policy.param_dtype, policy.reduce_dtype, output, cast_inputs


def _dtype(word: str) -> torch.dtype | None:
    return next((dtype for name, dtype in _DTYPES if name == word), None)


def units_at(at: Planning) -> tuple[str, ...]:
    """Return the units of a rank's stages, as :func:`choose_units` does."""
    plugin = at.ctx.strategy.fsdp or FullyShardedDataParallelPlugin(fsdp_version=2)
    return choose_units(plugin, at.facts, wrapped_at(at, plugin))


def wrapped_at(at: Planning, plugin: FullyShardedDataParallelPlugin) -> tuple[str, ...] | None:
    """Return the names of the modules that the plugin's policy selects; None where it is no callable."""
    policy = plugin.auto_wrap_policy
    if policy is None or isinstance(policy, str):
        return None
    return names_of_wrapped(policy, _needed(at.model, "auto_wrap_policy"))


def ignored_at(at: Planning) -> tuple[str, ...]:
    """Return the names of the parameters of a rank's stages that FSDP ignores."""
    plugin = at.ctx.strategy.fsdp
    if at.engine != "shard" or plugin is None or plugin.ignored_modules is None:
        return ()
    names = names_of_ignored(plugin.ignored_modules, _needed(at.model, "ignored_modules"), at.whole)
    return tuple(name for name in names if name in at.facts.shapes)


def of_rank(whole: None, at: Planning) -> ShardPlan | None:
    """Return how the parameters of a rank's stages are sharded; None where they aren't."""
    del whole
    if at.engine != "shard":
        return None
    fp8 = at.plans["fp8"]
    return plan_shard(
        at.ctx.strategy.fsdp or FullyShardedDataParallelPlugin(fsdp_version=2),
        at.facts,
        at.mesh,
        units_at(at),
        mixed_precision=at.ctx.mixed_precision,
        ignored=ignored_at(at),
        experts=at.plans["experts"],
        in_fp8=fp8.converted if fp8 is not None and fp8.gathers else (),
    )


def _needed(model: nn.Module | None, field: str) -> nn.Module:
    if model is None:
        raise ConfigurationError(
            f"plan_model: {field} needs the model's modules, which its facts don't have. Pass the model."
        )
    return model
