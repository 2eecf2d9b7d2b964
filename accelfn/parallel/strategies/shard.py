"""Fully sharded data parallelism: each rank stores a shard of every parameter, by torch's ``fully_shard``."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from accelfn.comm import Call
from accelfn.context import Context, MeshPlan, Precision
from accelfn.context.config import AutoWrapPolicy, FullyShardedDataParallelPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, modules_of, owner_of
from accelfn.parallel.handle import (
    HANDLE,
    IN_NO_SYNC,
    Communication,
    EngineName,
    Gathering,
    Handle,
    handle_of,
    raise_explained,
)
from accelfn.parallel.parameters import WaitingGradients, refuse_hook_of_shard
from accelfn.parallel.strategies.experts import ExpertPlan
from accelfn.parallel.strategies.precision import autocast_in
from accelfn.tree import is_dtensor, local_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
            has no policy, and there are no pipeline stages.
        offload: Whether shards and their gradients are kept in host memory.
        prefetch: Whether a unit's forward starts to gather the next unit.
        ignored: Names of the parameters that every rank keeps unsharded.
        unshared: Names of the expert parameters that no other rank has, and that FSDP leaves out.
        shard_bytes: Bytes of parameters on this rank, including the padding of uneven shards.
        gathered_bytes: Bytes of the largest gathered unit.
        unreduced_bytes: Bytes of the unsharded gradients that each rank holds in an accumulation window,
            until its last batch; with ``sync_each_batch`` it holds ``shard_bytes`` of them.
        in_full: Units that are gathered in the dtype of their parameters: those with running statistics,
            which torch doesn't compute in a lower one.
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

    def shard_numel(self, facts: ModelFacts, name: str) -> int:
        """Return the elements of a parameter on each rank, including the padding of uneven shards."""
        num_shards = self.shards_of(name)
        if num_shards == 1 or name in self.expert_dims:
            return facts.numel(name) // num_shards
        rows, *rest = facts.shapes[name]
        return -(-rows // num_shards) * prod(rest)


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
    # Not in the stages of a pipeline, where torch 2.13 crashes in the backward passes of some.
    autocasts = plugin.mixed_precision_policy is None and param_dtype is not None
    if mesh_plan.size("pp") > 1:
        autocasts, cast_inputs = False, cast_inputs or autocasts
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


def apply_shard(
    model: nn.Module,
    plan: ShardPlan,
    device_mesh: DeviceMesh,
    device: torch.device,
    expert_mesh: DeviceMesh | None = None,
) -> list[nn.Module]:
    """Shard a model as planned. Writes into it: its modules get new parameters of the same names.

    Ranks: every rank of ``device_mesh``, with equal models; doesn't communicate.

    Args:
        model: Its parameters are on the meta device, and stay there.
        plan: From :func:`plan_shard`.
        device_mesh: With the dims of the plan.
        device: On which this rank computes.
        expert_mesh: With the plan's dims for experts, of one root with the mesh that these are spread over;
            None without experts.

    Returns:
        The units.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard

    pin = device.type != "cpu"  # pinning is for copies to a device, and needs one
    offload = CPUOffloadPolicy(pin_memory=pin) if plan.offload else OffloadPolicy()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ignored = {parameters[name] for name in plan.left_out}
    expert_units = plan.expert_units
    placements = {parameters[name]: Shard(dim) for name, dim in plan.expert_dims.items()}
    units: list[nn.Module] = []
    model.register_forward_hook(_own_memory)  # before FSDP's own hook
    for name in plan.units:
        module = model.get_submodule(name)
        are_experts = name in expert_units
        precision = MixedPrecisionPolicy(
            param_dtype=None if name in plan.in_full else plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            # Only the last unit casts: a cast of a block's output would give the next block two dtypes.
            output_dtype=None if name else plan.output_dtype,
            # The block around experts has cast their inputs, except for the router's weights.
            cast_forward_inputs=plan.cast_inputs and not are_experts,
        )
        fully_shard(
            module,
            mesh=expert_mesh if are_experts else device_mesh,
            shard_placement_fn=placements.get if are_experts else None,
            reshard_after_forward=plan.reshard if name else None,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=ignored or None,
        )
        units.append(module)
    if plan.prefetch:
        in_order = [module for module in model.modules() if any(module is unit for unit in units)][1:]
        for unit, following in pairwise(in_order):
            cast("Any", unit).set_modules_to_forward_prefetch([following])
    if plan.autocasts and device.type == "cpu":
        # Autocast knows fewer operations there: a norm or a recurrent layer would get two dtypes.
        for name, module in modules_of(model).items():
            has_own = next(module.parameters(recurse=False), None) is not None
            if has_own and name not in plan.in_full and type(module).__module__.startswith("torch.nn."):
                module.register_forward_pre_hook(_in_own_dtype)
    return units


def _in_own_dtype(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook before the forward of a layer: cast floating inputs to the dtype of its parameters."""
    dtype = next(module.parameters(recurse=False)).dtype
    return cast("tuple[Any, ...]", tree_map(partial(_cast, dtype), args))


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def register_forward_method(model: nn.Module, *names: str) -> None:
    """Make methods of a prepared model begin as its ``forward`` does. Writes into ``model``.

    A sharded model gathers its parameters, and buffers that have changed are set to rank 0's. Only for
    methods that use parameters or buffers directly: a method that calls the model needs nothing.

    Ranks: local; the same on every rank.

    Args:
        model: From :func:`accelfn.prepare_model`.
        *names: Names of the methods.

    Raises:
        ConfigurationError: The model has no such method.
    """
    for name in names:
        if not callable(getattr(model, name, None)):
            raise ConfigurationError(
                f"register_forward_method: {type(model).__name__} has no method {name!r}."
            )
        handle = handle_of(model)
        if isinstance(handle, ShardHandle):
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(model, name)
        if isinstance(handle, ShardHandle) or (handle is not None and handle.buffers is not None):
            method = getattr(model, name)
            setattr(model, name, wraps(method)(partial(handle.compute_method, method)))


def _compute_scales(model: nn.Module, args: Any) -> None:
    """Hook before a forward pass."""
    del args
    from accelfn.parallel.engines.torchao import compute_scales

    compute_scales(model)


def _own_memory(model: nn.Module, args: Any, output: Any) -> Any:
    """Hook after the model: copy outputs that are views.

    FSDP puts a hook on each output for its gathering in the backward pass. An operation in place on a view
    would drop the hook silently, and a layer that ranks share returns views.
    """
    from torch.utils._pytree import tree_map_only

    def owned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor

    return tree_map_only(torch.Tensor, owned, output) if torch.is_grad_enabled() else output


class ShardHandle(Handle):
    """The handle of a sharded model, whose gradients FSDP averages in the backward pass.

    FSDP sets gradients on its shards itself. Gradients from autograd come from a loss that used shards
    outside of a forward pass; they would not be averaged, and are refused.
    """

    engine: ClassVar[EngineName] = "shard"
    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True
    gathers_in_fp8: bool = False

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        ctx: Context,
        plan: ShardPlan,
    ) -> None:
        """Watch the shards of ``model``.

        Args:
            model: A sharded model.
            units: Its sharded modules; the model is the last one.
            ctx: The world, and where the model computes.
            plan: By which it was sharded. Gradients of experts that FSDP leaves out are autograd's.
        """
        super().__init__(model, model.parameters())
        self._waits = ctx.device.type == "cpu"  # on accelerators streams wait, and the forward pass goes on
        precision = ctx.precision if plan.autocasts else Precision()
        self._autocast = partial(autocast_in, precision, ctx.device.type)
        self._units = [weakref.ref(unit) for unit in units]
        self._groups: list[weakref.ref[Any]] = []  # FSDP's, of the parameters of each unit
        self._depth = 0  # of nested calls: a registered method may call the model
        self._gathered: list[Any] = []  # FSDP's groups of the parameters that wait for a backward pass
        self._waiting = WaitingGradients[Any]()  # unsharded ones, of an open window
        self._num_passed = 0  # of units whose forward had ended when the current forward pass began
        self._identities: list[int] = []  # of the groups whose units the latest forward pass gathered
        self._is_reversible = False  # whether the latest backward pass may be reversed in turn
        self._keeps = False  # whether what is gathered stays in memory for that
        self._accumulates: bool | None = None  # whether it sets gradients; None for unknown
        self._gathering = Call("forward")
        self._usual = ""  # order of all units
        self._unused: list[Any] = []  # FSDP's records of parameters without a gradient in this backward pass
        for unit in cast("Sequence[Any]", units):
            # There are no public functions; a test checks these names.
            state = unit._get_fsdp_state()
            vars(unit)["__deepcopy__"] = _refuse_copy  # in place of FSDP's, which is an assertion
            state._register_root_post_backward_final_callback = partial(self._enter_backward, state)
            for group in _groups_of(state):
                group.post_backward = partial(self._leave_unit, group)
                if self._waits:
                    group._all_gather_comm = _MonitoredAllGather(ctx, group._all_gather_comm)
                self._groups.append(weakref.ref(group))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and is_dtensor(parameter) and name not in plan.unshared:
                cast("Any", parameter).register_hook(_refusal_of(name))

    def gather_in_fp8(self) -> None:
        """Compute the scales of weights that are gathered in 8 bits before each forward pass."""
        self.gathers_in_fp8 = True
        # Before FSDP's own hook, which gathers; the agreement of the ranks on the pass comes first.
        cast("nn.Module", self._model()).register_forward_pre_hook(_compute_scales, prepend=True)

    def _living_units(self) -> list[Any]:
        found = [reference() for reference in self._units]
        return [unit for unit in found if unit is not None]

    def _living_groups(self) -> list[Any]:
        found = [reference() for reference in self._groups]
        return [group for group in found if group is not None]

    def _set_syncs(self, syncs: bool) -> None:
        if syncs == self._syncs:
            return
        self._syncs = syncs
        for unit in self._living_units():
            unit.set_requires_gradient_sync(syncs, recurse=False)
        model = cast("Any", self._model())
        if model is not None:
            model.set_is_last_backward(syncs)

    def reduce(self) -> None:
        """Average gradients that were accumulated under :meth:`without_sync`, without a backward pass."""
        self._release()
        self._accumulates = True
        with self._syncing(True):
            self._reduce_rest()
        self._leave_backward()

    def _reduce_rest(self) -> None:
        # As torch's pipelines do it; there is no public function. A test checks these names.
        for group in self._living_groups():
            group.post_backward()
        cast("Any", self._model())._get_fsdp_state()._root_post_backward_final_callback()

    def compute(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that uses gathered parameters, which are gathered anew."""
        if self._depth == 0 and self._gathered:
            self._free()
        return self.compute_part(call, *args, **kwargs)

    def compute_part(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that uses gathered parameters, and free them if no backward pass will.

        Torch keeps the last unit, and with ``reshard`` off all of them, gathered until the backward pass,
        which may never come. Until then the model shows its shards, which have the gradients and which
        optimizers step; and :meth:`compute` gathers again, since a step may lie in between. Parts of one
        batch, with no step between them, use what was gathered for the first.
        """
        if self._depth == 0:
            self._show_gathered()
            self._num_passed = len(self._passed())
        self._depth += 1
        try:
            output = call(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            if _has_backward(output):
                self._show_shards()
            else:
                self._free()
        return output

    def _free(self) -> None:
        """Free what is still gathered. A backward pass that follows all the same gathers it again."""
        self._gathered.clear()
        for unit in self._living_units():
            unit.reshard()

    def _keep(self, keeps: bool) -> None:
        """Keep the memory of gathered parameters when they are freed, or no longer.

        A backward pass that reverses another one reads parameters from its beginning, and other forward
        passes may come before it. Each of them gathers anew, into the same memory.
        """
        self._keeps = keeps
        for group in self._living_groups():
            for record in group.fsdp_params:
                if keeps:
                    record.free_unsharded_param = _keep_memory
                else:
                    del record.free_unsharded_param

    def _show_shards(self) -> None:
        """Let modules have the shards of the parameters that stay gathered. Local, and frees nothing."""
        self._gathered += [one for one in self._living_groups() if one.is_unsharded]
        for group in self._gathered:
            for record in group.fsdp_params:
                record._setattr_on_modules(record.sharded_param)

    def _show_gathered(self) -> None:
        """Undo :meth:`_show_shards`: a backward pass may recompute with what its forward pass gathered."""
        for group in self._gathered:
            for record in group.fsdp_params if group.is_unsharded else ():
                record._setattr_on_modules(record.unsharded_param)
        self._gathered.clear()

    def _enter_backward(self, state: Any) -> None:
        """Run in place of FSDP's method of the same unit that notices a backward pass."""
        if state._state_ctx.post_backward_final_callback_queued:
            return
        self._show_gathered()
        self._release()
        self._is_reversible = torch.is_grad_enabled()  # with create_graph
        if self._is_reversible:
            self._keep(True)
        self._accumulates = None
        cast("Any", type(state))._register_root_post_backward_final_callback(state)
        cast("Any", torch.autograd.Variable)._execution_engine.queue_callback(self._leave_backward)

    def _leave_unit(self, group: Any, *unused: Any) -> None:
        """Run in place of FSDP's method that reduces the gradients of a unit, on parameters that have one.

        Ranks may use different ones, and must reduce the same: minus zeros count for nothing in a sum, and
        show where no rank has a gradient.
        """
        if group._orig_dtype is None:  # of what was trained in the first forward pass: then nothing was
            group._init_mp_dtypes()
        has_accumulated, new = False, list[Any]()
        for record in group.fsdp_params:
            if len(record.sharded_param._backward_hooks or ()) > 1:
                refuse_hook_of_shard("backward", record._param_fqn, record.sharded_param)
        for record in group.fsdp_params if group.reduce_grads else ():
            if record.unsharded_accumulated_grad is not None:
                has_accumulated = True
                continue
            whole = getattr(record, "_unsharded_param", None)
            if whole is None:
                continue
            if whole.grad is None:
                if not (record.sharded_param.requires_grad and self._sets_gradients()):
                    continue
                whole.grad = torch.zeros_like(whole).neg_()
                self._unused.append(record)
            new.append(record)
        # Gradients of earlier batches of a window are in the dtype in which all are reduced.
        for record in new if has_accumulated else ():
            record.to_accumulated_grad_if_needed()
        cast("Any", type(group)).post_backward(group, *unused)

    def _sets_gradients(self) -> bool:
        """Return whether the backward pass sets gradients of parameters, unlike ``torch.autograd.grad``."""
        if self._accumulates is None:
            wholes = [
                record._unsharded_param
                for group in self._living_groups()
                for record in group.fsdp_params
                if record.sharded_param.requires_grad and hasattr(record, "_unsharded_param")
            ]
            nodes = (torch.autograd.graph.get_gradient_edge(whole).node for whole in wholes)
            self._accumulates = any(cast("Any", torch)._C._will_engine_execute_node(node) for node in nodes)
        return self._accumulates

    def _leave_backward(self) -> None:
        """Run after a backward pass."""
        if self._keeps and not self._is_reversible:
            self._keep(False)
            if self._syncs and self._accumulates:  # gradients of the passes that it has reversed come last
                self._reduce_rest()
            self._free()
        for record in self._unused:
            shard = record.sharded_param
            # Twice, where the forward pass has called the unit twice.
            if shard.grad is not None and _is_minus_zero(local_of(shard.grad)):
                shard.grad = None
        self._unused.clear()
        if not self._syncs:
            self._hold()

    def _hold(self) -> None:
        """Let whoever clears the gradients of shards drop the unsharded ones that wait, too."""
        for record in self._unreduced():
            self._waiting.hold(record, record.sharded_param)

    def _release(self) -> None:
        """Undo :meth:`_hold`, and drop the gradients that were cleared."""
        for record in self._waiting.release():
            _drop(record)

    def compute_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that gathers parameters itself, in place of a forward pass."""
        if self.gathers_in_fp8:
            _compute_scales(cast("nn.Module", self._model()), args)
        with self._autocast():
            return self.compute(partial(super().compute_method, method), *args, **kwargs)

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass communicate."""
        gradients = self._syncs and torch.is_grad_enabled()
        buffers = self.buffers is not None and self.buffers.is_due()
        return Communication(gradients, buffers, parameters=True, at_once=self._waits or buffers)

    def _passed(self) -> list[Any]:
        """Return FSDP's groups whose forward has ended, in order, since a backward pass cleared the list."""
        state = cast("Any", self._model())._get_fsdp_state()
        return getattr(state._comm_ctx, "post_forward_order", [])  # which the first forward pass makes

    def gathering(self) -> Gathering | None:
        """Return the units that the forward pass gathered, in order: torch pairs those of ranks by order."""
        groups = self._passed()[self._num_passed :]
        identities = [*map(id, groups)]
        is_new = identities != self._identities
        if is_new:
            order = ", ".join(group._module_fqn or "the rest of the model" for group in groups)
            skipped = ", ".join(one._module_fqn for one in self._living_groups() if one not in groups)
            self._usual = self._usual or ("" if skipped else order)
            through = f" through all units but {skipped}" if skipped else f" through {order}"
            text = "forward" if order == self._usual else f"forward{through}"
            self._identities, self._gathering = identities, Call(text, order)
        return Gathering(self._gathering, is_new)

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are only this rank's own; None where they are averaged."""
        self._release()
        self._hold()
        return IN_NO_SYNC if self._waiting else None

    def discard(self) -> None:
        """Drop accumulated gradients that were not averaged yet."""
        self._release()
        for record in self._unreduced():
            _drop(record)

    def scale_held(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply accumulated gradients of ``parameters`` that were not averaged yet."""
        self._release()
        wanted = {id(parameter) for parameter in parameters}
        for record in self._unreduced():
            for held in (record.unsharded_accumulated_grad, record._unsharded_param.grad):
                if held is not None and id(record.sharded_param) in wanted:
                    held.mul_(factor.to(held))

    def _unreduced(self) -> Generator[Any, None, None]:
        """Yield FSDP's records of the parameters with unsharded gradients."""
        for group in self._living_groups():
            for record in group.fsdp_params:
                whole = getattr(record, "_unsharded_param", None)
                if record.unsharded_accumulated_grad is not None or (
                    whole is not None and whole.grad is not None
                ):
                    yield record


_SOON = timedelta(seconds=0.2)


class _MonitoredAllGather:
    """FSDP's gathering of a unit, which waits on the host and notices there that a rank won't come."""

    def __init__(self, ctx: Context, comm: Any) -> None:
        """Call ``comm``."""
        self._ctx = ctx
        self._comm = comm
        # Stages of a pipeline gather different numbers of units, so these say nothing there.
        self._inside = "" if ctx.axis_size("pp") > 1 else "units in the forward or backward pass of"
        self.allocate = comm.allocate

    def __call__(self, *, async_op: bool = False, **arguments: Any) -> None:
        """Gather, and wait."""
        del async_op
        work, call_log = self._comm(async_op=True, **arguments), self._ctx.collectives.call_log
        try:
            work.wait(_SOON)
        except RuntimeError:  # it goes on, or has failed, which shows again
            call_log.inside = self._inside
            try:
                self._ctx.collectives.finish(work, self._ctx.device)
            finally:
                call_log.inside = ""
        call_log.gathers += 1


def _refuse_copy(memo: Any) -> Any:
    del memo
    raise ConfigurationError(
        "deepcopy: torch can't copy a model that FSDP has sharded. Copy it before prepare, and prepare both: "
        "they are sharded alike, so that an average of the weights is computed shard by shard."
    )


def _keep_memory() -> None:
    pass


def _is_minus_zero(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) & torch.signbit(tensor)).all())


def _drop(record: Any) -> None:
    """Drop the unsharded gradient of a parameter."""
    record.unsharded_accumulated_grad = None
    record._unsharded_param.grad = None


def _groups_of(state: Any) -> Sequence[Any]:
    """Return FSDP's groups of parameters of a unit."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch before 2.13


def _has_backward(output: Any) -> bool:
    """Return whether a backward pass may follow; True for outputs of unknown classes."""
    if not torch.is_grad_enabled():
        return False
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return not tensors or any(tensor.requires_grad for tensor in tensors)


def _refusal_of(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(gradient: torch.Tensor) -> None:
        del gradient
        raise ConfigurationError(
            f"backward: the loss used {name}, a shard, outside of its model's forward pass, so the parameter "
            "wasn't gathered and its gradient would not be averaged over the ranks. Compute the loss in the "
            "model's forward, or in a method registered by register_forward_method(model, name). For a "
            "penalty on the weights use the optimizer's weight_decay, or add its gradient after the backward "
            "pass: parameter.grad.add_(parameter.detach(), alpha=2 * factor) for factor * "
            "parameter.square().sum()."
        )

    return refuse


class _NamedCall:
    """A model's call, whose errors name the lost ranks that it waited for.

    It holds the model weakly; a copied model gets a copy that calls it.
    """

    def __init__(self, model: nn.Module, translate_error: Callable[[Exception], Exception]) -> None:
        self._model = weakref.ref(model)
        self._translate_error = translate_error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = cast("Any", self._model())
        kind = cast("Any", type(own))
        handle = getattr(own, HANDLE, None)
        try:
            if isinstance(handle, ShardHandle):
                return handle.compute(kind._call_impl, own, *args, **kwargs)
            return kind._call_impl(own, *args, **kwargs)
        except RuntimeError as error:
            raise_explained(error, self._translate_error)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NamedCall:
        return _NamedCall(cast("nn.Module", copy.deepcopy(self._model(), memo)), self._translate_error)


def with_named_errors(model: nn.Module, translate_error: Callable[[Exception], Exception]) -> None:
    """Make errors of a model's calls name the lost ranks that they waited for. Writes into ``model``."""
    # FSDP waits in hooks, around and inside of ``forward``; all of them run inside of _call_impl.
    vars(model)["_call_impl"] = _NamedCall(model, translate_error)
