"""Fully sharded data parallelism: each rank keeps a part of every parameter, by torch's ``fully_shard``."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial, wraps
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import nn

from accelfn.context import MeshPlan
from accelfn.context.config import AutoWrapPolicy, FullyShardedDataParallelPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel.experts import ExpertPlan
from accelfn.parallel.facts import ModelFacts, modules_of, owner_of
from accelfn.parallel.handle import HANDLE, IN_NO_SYNC, Communication, Handle, handle_of, raise_explained
from accelfn.tree import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def choose_units(
    plugin: FullyShardedDataParallelPlugin, facts: ModelFacts, wrapped: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Return the names of the units, inner ones before those around them; the model itself, "", is last.

    Without a policy the model's blocks are units, and what is left of it is the last one.

    Args:
        plugin: Says the policy.
        facts: Of the model.
        wrapped: What a policy that is a callable has chosen: :func:`names_of_wrapped`.

    Raises:
        ConfigurationError: A class that should be a unit isn't in the model, or tied parameters would be in
            two units.
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
                "(_no_split_modules), and has no list of modules of one class. Pass "
                "transformer_cls_names_to_wrap."
            )
    # A list of modules has no forward that could gather anything.
    chosen -= facts.containers | {""}
    if wrapped is None and not plugin.transformer_cls_names_to_wrap:  # nobody has asked for these by name
        _leave_ties_together(facts, chosen)
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
                f"transformer_cls_names_to_wrap names {name!r}, and {facts.kinds['']} has no module of that "
                f"class.{hint} Its classes are {', '.join(known)}."
            )
    return {name for name, kind in facts.kinds.items() if kind in classes}


def _by_size(facts: ModelFacts, least: int) -> set[str]:
    """Find modules with at least so many parameters that aren't in units inside of them."""
    modules = frozenset(facts.kinds)
    left = dict.fromkeys(facts.kinds, 0)
    for name in facts.own_names:
        left[owner_of(name, modules) or ""] += facts.numel(name)
    chosen: set[str] = set()
    for name in reversed(tuple(facts.kinds)):  # what is inside of a module comes after it
        if not name:
            continue
        if left[name] >= least and name not in facts.containers:
            chosen.add(name)
        else:
            left[owner_of(name.rpartition(".")[0], modules) or ""] += left[name]
    return chosen


def _leave_ties_together(facts: ModelFacts, chosen: set[str]) -> None:
    """Let units go that a tied parameter would be in together with another one."""
    torn = True
    while torn:
        torn = False
        for group in facts.ties:
            owners = {owner_of(name, chosen) for name in group}
            if len(owners) > 1:
                torn = True
                chosen.difference_update(one for one in owners if one is not None)


def _check_ties(facts: ModelFacts, units: frozenset[str]) -> None:
    for group in facts.ties:
        owners = {name: owner_of(name, units) for name in group}
        if len(set(owners.values())) > 1:
            first, second = next(
                (one, other) for one in group for other in group if owners[one] != owners[other]
            )
            raise ConfigurationError(
                f"{first} and {second} are one tied parameter, and the policy puts them into two units: "
                f"{owners[first] or 'the model'!s} and {owners[second] or 'the model'!s}. FSDP gathers a "
                "parameter with one unit: leave both modules to the unit around them, or untie them."
            )


def names_of_wrapped(policy: Callable[..., Any], model: nn.Module) -> tuple[str, ...]:
    """Return the modules that a policy of the user's chooses.

    Args:
        policy: Called with each module but the model itself, and says whether it is a unit. One that takes
            ``recurse`` is called as torch's policies are, with ``recurse=False`` and ``nonwrapped_numel``.
        model: Real or meta.
    """
    takes = inspect.signature(policy).parameters
    as_torch = "recurse" in takes

    def wants(module: nn.Module) -> bool:
        if not as_torch:
            return bool(policy(module))
        return bool(policy(module, False, sum(one.numel() for one in module.parameters())))

    return tuple(name for name, module in modules_of(model).items() if name and wants(module))


def names_of_ignored(
    ignored: Iterable[nn.Module] | str | None, model: nn.Module, facts: ModelFacts
) -> tuple[str, ...]:
    """Return the names of the parameters that FSDP shall leave alone.

    Raises:
        ConfigurationError: Nothing in the model matches, or an ignored parameter is trained: nobody would
            average its gradient.
    """
    if ignored is None:
        return ()
    if isinstance(ignored, str):
        pattern = re.compile(ignored)
        modules = {name for name in facts.kinds if pattern.fullmatch(name)}
    else:
        names: Mapping[int, str] = {id(module): name for name, module in modules_of(model).items()}
        given = tuple(ignored)
        strangers = [type(one).__name__ for one in given if id(one) not in names]
        if strangers:
            raise ConfigurationError(
                f"ignored_modules holds a {strangers[0]} that is not in the {facts.kinds['']}. Pass its own "
                "modules, or a regular expression for their names."
            )
        modules = {names[id(one)] for one in given}
    found = tuple(name for name in facts.names if owner_of(name, modules) is not None)
    if not modules:
        raise ConfigurationError(
            f"ignored_modules={ignored!r} matches no module of the {facts.kinds['']}. It must match a whole "
            f"name, such as {next(iter(name for name in facts.kinds if name), '')!r}."
        )
    trained = [name for name in found if name in facts.trainable]
    if trained:
        raise ConfigurationError(
            f"ignored_modules holds {trained[0]}, which is trained: FSDP doesn't average the gradients of "
            "what it ignores, so ranks would drift apart. Freeze it, or leave it out of ignored_modules."
        )
    return found


_DTYPES = (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16))


class ShardPlan(NamedTuple):
    """How a model is sharded. A value; ``str`` of it says it in a line.

    Attributes:
        num_replicas: Copies of the shards, whose gradients are averaged too; 1 for none.
        num_shards: Ranks that share each parameter.
        units: Names of the modules that are gathered and freed one by one, inner ones first; "", the rest
            of the model, is the last.
        reshard: Whether units are freed after their forward, and gathered again in the backward. The last
            unit never is: its backward comes first.
        param_dtype: In which units are gathered and compute; None for that of the parameters.
        reduce_dtype: In which gradients are averaged; None for ``param_dtype``.
        output_dtype: To which floating outputs of the model are cast; None for as they are.
        cast_inputs: Whether floating inputs of units are cast to ``param_dtype``.
        offload: Whether shards and their gradients rest in host memory.
        prefetch: Whether a unit's forward asks for the next unit.
        ignored: Names of the parameters that every rank keeps whole.
        unshared: Names of the parameters of experts that no other rank has, and that FSDP has nothing to do
            for: it leaves them out.
        shard_bytes: That this rank keeps of the parameters, the padding of uneven ones included.
        gathered_bytes: Of the largest unit while it computes.
        unreduced_bytes: Of the gradients that each rank holds whole in an accumulation window, until its
            last batch; with ``sync_each_batch`` it holds ``shard_bytes`` of them.
        num_expert_shards: Ranks that share each expert.
        expert_dims: The dim along which each parameter of experts is sharded over these, by its name. Their
            modules are units. Empty where no experts are spread over ranks, or FSDP leaves them out.
    """

    num_replicas: int
    num_shards: int
    units: tuple[str, ...]
    reshard: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_inputs: bool
    offload: bool
    prefetch: bool
    ignored: tuple[str, ...]
    unshared: tuple[str, ...]
    shard_bytes: int
    gathered_bytes: int
    unreduced_bytes: int
    num_expert_shards: int
    expert_dims: Mapping[str, int]

    @property
    def dims(self) -> tuple[str, ...]:
        """Dims of the device mesh that it is sharded on."""
        return ("dp_replicate", "shard") if self.num_replicas > 1 else ("shard",)

    @property
    def expert_dims_of_mesh(self) -> tuple[str, ...]:
        """Dims of the device mesh that experts are sharded on."""
        return (*self.dims[:-1], "eshard")

    @property
    def expert_units(self) -> frozenset[str]:
        """Names of the units that hold experts."""
        return frozenset(name.rpartition(".")[0] for name in self.expert_dims)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the parameters that FSDP has nothing to do with."""
        return self.ignored + self.unshared

    def shards_of(self, name: str) -> int:
        """Return how many ranks share a parameter."""
        if name in self.left_out:
            return 1
        return self.num_expert_shards if name in self.expert_dims else self.num_shards

    def shard_numel(self, facts: ModelFacts, name: str) -> int:
        """Return how many elements of a parameter a rank keeps, the padding of uneven shards included."""
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
) -> ShardPlan:
    """Return how a model is sharded on a mesh. Pure.

    Args:
        plugin: What was asked for. Its fields of version 1 have their meaning in version 2.
        facts: Of the model, before sharding; of experts, what one rank holds.
        mesh_plan: Sharded over its axes dp_shard, cp and sp; replicated over dp_replicate.
        units: Names of the modules that are gathered and freed one by one: those of ``choose_units``.
        mixed_precision: Of the context, where the plugin has no policy of its own: parameters are gathered
            and compute in it, and gradients are averaged in float32.
        ignored: Names of the parameters that every rank keeps whole.
        experts: Those that are spread over ranks. Their modules become units, sharded over the ranks that
            have the same ones. Where there are none, and neither dtypes nor offloading are asked for, FSDP
            leaves them out.

    Raises:
        ConfigurationError: A parameter can't be sharded.
    """
    num_replicas, num_expert_shards = mesh_plan.size("dp_replicate"), mesh_plan.size("eshard")
    param_dtype, reduce_dtype, output_dtype, cast_inputs = _dtypes(plugin, mixed_precision)
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
    units = (*(name for name in reversed(tuple(facts.kinds)) if name in chosen), "")
    left_out = frozenset((*ignored, *unshared))
    sharded = tuple(name for name in facts.own_names if name not in left_out)
    of_unit: dict[str, list[str]] = {name: [] for name in units}
    for name in sharded:
        of_unit[cast("str", owner_of(name, frozenset(units)))].append(name)
    _check_parameters(facts, of_unit)

    def width(name: str) -> int:
        return (param_dtype or facts.dtypes[name]).itemsize

    plan = ShardPlan(
        num_replicas=num_replicas,
        num_shards=mesh_plan.size("shard"),
        units=units,
        reshard=plugin.reshards,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=output_dtype,
        cast_inputs=cast_inputs,
        offload=plugin.offloads_params,
        prefetch=bool(plugin.forward_prefetch),
        ignored=ignored,
        unshared=unshared,
        shard_bytes=0,
        gathered_bytes=max(sum(facts.numel(one) * width(one) for one in names) for names in of_unit.values()),
        unreduced_bytes=sum(
            facts.numel(one) * (grad_dtype or facts.dtypes[one]).itemsize
            for one in sharded
            if one in facts.trainable
        ),
        num_expert_shards=num_expert_shards,
        expert_dims={} if experts is None else _expert_dims(experts, facts, num_expert_shards),
    )
    kept = sum(plan.shard_numel(facts, name) * facts.dtypes[name].itemsize for name in (*sharded, *unshared))
    return plan._replace(shard_bytes=kept)


def _expert_dims(experts: ExpertPlan, facts: ModelFacts, num_shards: int) -> dict[str, int]:
    """Choose along which dim each parameter of experts is sharded: the first one that divides evenly.

    Torch pads uneven shards along dim 0 alone, and can't put those together of what is split there already.
    """
    found: dict[str, int] = {}
    for name in experts.names:
        shape = facts.shapes[name]
        dim = next((dim for dim, size in enumerate(shape) if size % num_shards == 0), None)
        if dim is None:
            raise ConfigurationError(
                f"{name} can't be sharded over the {num_shards} ranks that have the same experts: of each, "
                f"which has {shape}, no dim is divisible by {num_shards}. Raise ep_size, or use "
                "dp_replicate_size in the place of some of dp_shard_size."
            )
        found[name] = dim
    return found


def _check_parameters(facts: ModelFacts, of_unit: Mapping[str, list[str]]) -> None:
    for unit, names in of_unit.items():
        dtypes = {facts.dtypes[name]: name for name in names if name in facts.trainable}
        if len(dtypes) > 1:
            (one, first), (other, second) = tuple(dtypes.items())[:2]
            raise ConfigurationError(
                f"fsdp_plugin: the unit {unit or 'of the model itself'!s} has trained parameters of several "
                f"dtypes, whose gradients can't be reduced together: {first} is {one}, {second} is {other}. "
                "Bring them to one dtype, and compute in a lower one by mixed_precision."
            )
        for name in names:
            if not facts.shapes[name]:
                raise ConfigurationError(
                    f"fsdp_plugin: {name} is a single number, of shape (), and can't be sharded. Give it "
                    "shape (1,), or make it a buffer if it isn't trained."
                )


def _dtypes(
    plugin: FullyShardedDataParallelPlugin, mixed_precision: str
) -> tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None, bool]:
    """Return the dtypes of parameters, reductions and outputs, and whether inputs are cast."""
    policy: Any = plugin.mixed_precision_policy
    if policy is None:
        dtype = _dtype(mixed_precision)
        # As under autocast: gradients of the model's dtype, and outputs in float32.
        return (None, None, None, True) if dtype is None else (dtype, torch.float32, torch.float32, True)
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
    """Shard a model as planned: writes into it. Its modules keep their names, and get new parameters.

    Ranks: every rank of ``device_mesh``, with equal models; doesn't communicate.

    Args:
        model: Its parameters are on the meta device, and stay there.
        plan: From :func:`plan_shard`.
        device_mesh: Of the dims of the plan.
        device: On which this rank computes.
        expert_mesh: Of the dims of the plan for experts, and of one root with the mesh that these are spread
            over; None where there are none.

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
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            # Blocks hand on what they compute: a cast there gives the next one two dtypes.
            output_dtype=None if name else plan.output_dtype,
            # The block around experts has cast what they take, but for the weights that a router gives.
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
        in_order = [module for module in model.modules() if any(module is one for one in units)][1:]
        for one, following in pairwise(in_order):
            cast("Any", one).set_modules_to_forward_prefetch([following])
    return units


def register_forward_method(model: nn.Module, *names: str) -> None:
    """Let methods of a sharded model gather its parameters, as its ``forward`` does. Writes into ``model``.

    For a method that computes with parameters by itself. One that calls the model needs nothing, and neither
    does a model that isn't sharded, for which this does nothing.

    Ranks: local; the same on every rank.

    Args:
        model: What :func:`accelfn.prepare_model` returned.
        *names: Of its methods.

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
            gathering = getattr(model, name)
            setattr(model, name, wraps(gathering)(partial(handle.compute, gathering)))


def _own_memory(model: nn.Module, args: Any, output: Any) -> Any:
    """Hook after the model: give outputs that are views memory of their own.

    FSDP puts a hook on each output, which an operation in place on a view would drop in silence, and with it
    the gathering for the backward pass. A layer that ranks share gives views.
    """
    from torch.utils._pytree import tree_map_only

    def owned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor

    return tree_map_only(torch.Tensor, owned, output) if torch.is_grad_enabled() else output


class ShardHandle(Handle):
    """Of a model whose parameters are shards, and whose gradients FSDP averages in the backward pass.

    FSDP puts gradients on its shards itself. Those that autograd would put there come from a loss that has
    used shards outside of a forward pass, and nobody averages them: they are refused.
    """

    engine: ClassVar[Literal["none", "ddp", "shard", "pipeline"]] = "shard"
    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        device: torch.device,
        unshared: Collection[str] = (),
    ) -> None:
        """Watch the shards of ``model``, whose units (the model is the last one) are sharded.

        Args:
            model: Sharded.
            units: Its sharded modules.
            device: Where it computes.
            unshared: Names of the parameters of experts that FSDP leaves out: their gradients are autograd's.
        """
        super().__init__(model, model.parameters())
        self._waits = device.type == "cpu"  # else a forward pass goes on, and its streams wait
        self._units = [weakref.ref(unit) for unit in units]
        self._depth = 0  # of calls inside of each other: a registered method may call the model
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and is_dtensor(parameter) and name not in unshared:
                cast("Any", parameter).register_hook(_refusal_of(name))

    def _living_units(self) -> list[Any]:
        found = [reference() for reference in self._units]
        return [unit for unit in found if unit is not None]

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
        """Average gradients that have added up under :meth:`without_sync`, with no backward pass to come."""
        model = cast("Any", self._model())
        with self._syncing(True):
            # As torch's own pipelines do it, which has no public way; a test holds these names.
            state = model._get_fsdp_state()
            for one in state._state_ctx.all_states:
                for group in one._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()

    def compute(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what computes with gathered parameters, and free them where no backward pass will.

        Torch keeps the last unit, and with ``reshard`` off all of them, gathered until the backward pass.
        After an evaluation they would stay: ``parameters()`` would list them in the place of the shards, and
        the next forward pass would not see what was written into the shards meanwhile.
        """
        self._depth += 1
        try:
            output = call(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0 and not _has_backward(output):
            for unit in self._living_units():
                unit.reshard()
        return output

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass communicate."""
        gradients = self._syncs and torch.is_grad_enabled()
        return Communication(gradients=gradients, parameters=True, at_once=self._waits)

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""
        return IN_NO_SYNC if any(True for _ in self._unreduced()) else None

    def discard(self) -> None:
        """Release gradients that have added up and were not averaged yet."""
        for parameter in self._unreduced():
            parameter.unsharded_accumulated_grad = None
            parameter._unsharded_param.grad = None

    def _unreduced(self) -> Generator[Any, None, None]:
        """Return FSDP's records of the parameters that hold whole gradients."""
        for unit in self._living_units():
            # Torch has no public way to ask; a test holds these names.
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    whole = getattr(one, "_unsharded_param", None)
                    if one.unsharded_accumulated_grad is not None or (
                        whole is not None and whole.grad is not None
                    ):
                        yield one


def _has_backward(output: Any) -> bool:
    """Whether a backward pass may follow; for an output of a class that torch can't look into, it may."""
    if not torch.is_grad_enabled():
        return False
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return not tensors or any(one.requires_grad for one in tensors)


def _refusal_of(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(gradient: torch.Tensor) -> None:
        del gradient
        raise ConfigurationError(
            f"backward: the loss has used {name}, a shard, outside of the forward pass of its model, where "
            "it isn't gathered and nobody averages its gradient over the ranks. Compute the loss in the "
            "model's forward, or in a method that register_forward_method(model, name) was told of."
        )

    return refuse


class _NamedCall:
    """A model's call, whose errors say which of the ranks that it waits for are lost.

    It keeps nothing alive, and belongs to the model that it is stored in: that of a copy calls the copy.
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
    """Let calls of a model that wait for other ranks say which of them are lost. Writes into ``model``."""
    # FSDP waits in hooks, around and inside of ``forward``; this is what a call runs all of them in.
    vars(model)["_call_impl"] = _NamedCall(model, translate_error)
