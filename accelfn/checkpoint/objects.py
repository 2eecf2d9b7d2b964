"""Convert the objects of a training loop to trees for a checkpoint, and restore objects from such trees.

A module is stored as its state dict without wrappers' prefixes; an optimizer as the state of each parameter
by the parameter's name, so that neither the order of parameters nor wrappers matter; a loader as its
``LoaderState``. Any other object with ``state_dict`` and ``load_state_dict`` is stored by these.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.checkpoint.document.compare import Shaped, Stored, describe
from accelfn.checkpoint.document.nodes import children_of, join_path, leaves_of
from accelfn.checkpoint.low_bit import fit_low_bit, is_low_bit, may_have_low_bits, plain_states, with_low_bits
from accelfn.checkpoint.manifest import Json
from accelfn.data import LoaderState, PreparedDataLoader
from accelfn.data.loader import passes_of
from accelfn.data.passes import Passes
from accelfn.data.resume import read_state
from accelfn.errors import Misfit
from accelfn.parallel import is_replicated
from accelfn.parallel.handle import is_kept_equal
from accelfn.parallel.optimizers import hidden_state
from accelfn.parallel.pointers import repoint, whole_of
from accelfn.training import unwrap_model
from accelfn.tree import local_of
from accelfn.weights.assign import loads_in_its_own_way
from accelfn.weights.dtypes import contiguous_copy

# Stored class names that match any optimizer: a proxy's, and those from converted checkpoints.
_ANY_OPTIMIZER = ("", "AcceleratedOptimizer", "Optimizer")

# Entries in the states of torch's optimizers that have the shape of their parameter.
_ELEMENTWISE = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "exp_inf", "ax", "prev", "mu_buffer"),
    }
)


class Names(NamedTuple):
    """Names of the parameters in a tree.

    Attributes:
        by_identity: Name of each tensor, by ``id``.
        tensors: Keeps the tensors alive, so that their ids stay unique.
        replicated: Ids of the parameters that are replicated over ranks.
        optimizers: The optimizers in the tree, with their paths.
        order: Position of each parameter in the complete models, of models split into pipeline stages.
        elsewhere: Names of the parameters that only other stages have.
    """

    by_identity: Mapping[int, str]
    tensors: tuple[torch.Tensor, ...]
    replicated: frozenset[int]
    optimizers: tuple[tuple[str, Optimizer], ...]
    order: Mapping[str, int]
    elsewhere: frozenset[str]

    def replicated_of(self, stored: Iterable[str]) -> frozenset[str]:
        """Return the stored tensors that are replicated parameters, or an optimizer's state of these."""
        if not self.replicated:
            return frozenset()
        parameters = {self.by_identity[identity] for identity in self.replicated}
        states = {
            join_path(path, "state", self.by_identity[id(parameter)])
            for path, optimizer in self.optimizers
            for group in _groups(optimizer)
            for parameter in group["params"]
            if id(parameter) in self.replicated
        }
        return frozenset(name for name in stored if name in parameters or _is_below(name, states))


def _is_below(path: str, ancestors: Collection[str]) -> bool:
    """Return whether one of ``ancestors`` contains a path."""
    while path and path not in ancestors:
        path = path.rpartition("/")[0]
    return path in ancestors


class Pending(NamedTuple):
    """An object, and the state to restore, which has been read and verified."""

    path: str
    thing: Any
    state: Any


def find_names(tree: Any) -> Names:
    """Name the parameters of all modules in a tree, and the tree's own tensors, by their paths."""
    names: dict[int, str] = {}
    tensors: list[torch.Tensor] = []
    replicated: set[int] = set()
    optimizers: list[tuple[str, Optimizer]] = []
    order: dict[str, int] = {}
    # Sorted, because the order of keys may differ between ranks.
    for path, leaf in sorted(leaves_of(tree), key=lambda item: item[0]):
        if isinstance(leaf, nn.Module):
            _reshard(leaf)
            for module in leaf.modules():
                if is_replicated(module):
                    replicated.update(map(id, module.parameters()))
            inner = inner_of(leaf)
            whole = whole_of(inner)
            first: Mapping[str, str] = {} if whole is None else whole.first
            for name in whole.tensors if whole is not None else ():
                order.setdefault(join_path(path, first.get(name, name)), len(order))
            for name, parameter in inner.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), join_path(path, first.get(name, name)))
                tensors.append(parameter)
                # Also a parameter within a prepared model, or that several stages have.
                if is_kept_equal(parameter) or whole is not None:
                    replicated.add(id(parameter))
        elif isinstance(leaf, torch.Tensor):
            names.setdefault(id(leaf), path)
            tensors.append(leaf)
            if is_kept_equal(leaf):
                replicated.add(id(leaf))
        elif isinstance(leaf, Optimizer):
            repoint(leaf)  # the model may have been prepared after the optimizer
            optimizers.append((path, leaf))
    elsewhere = frozenset(order).difference(names.values())
    return Names(names, tuple(tensors), frozenset(replicated), tuple(optimizers), order, elsewhere)


def _reshard(module: nn.Module) -> None:
    """Make FSDP2 modules hold the sharded parameters that their optimizer steps.

    After a forward pass without a backward pass, they still hold the gathered ones, which are other tensors.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # fully_shard was never called
        return
    for submodule in module.modules():
        if isinstance(submodule, fsdp.FSDPModule):
            cast("Any", submodule).reshard()


def inner_of(module: nn.Module) -> nn.Module:
    """Return a module without any wrapper."""
    return unwrap_model(module, keep_torch_compile=False)


def state_of(thing: Any, names: Names) -> Any:
    """Return the state of an object for a checkpoint.

    Returns:
        A tree of tensors and plain values; NotImplemented for an object of an unknown class.

    Raises:
        TypeError: The object has to be prepared first.
    """
    if isinstance(thing, nn.Module):
        return dict(inner_of(thing).state_dict())
    if isinstance(thing, Optimizer):
        return _optimizer_state(thing, names)
    passes = _passes(thing)
    if passes is not None:
        return _values(passes.state())
    if isinstance(thing, LoaderState):
        return _values(thing)
    if isinstance(thing, torch.utils.data.DataLoader) and not hasattr(cast("Any", thing), "state_dict"):
        raise TypeError("is a DataLoader without a position. Prepare it first")
    return NotImplemented


def _values(state: LoaderState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _passes(thing: Any) -> Passes[Any] | None:
    if not isinstance(thing, PreparedDataLoader):
        return None
    return passes_of(cast("PreparedDataLoader[Any]", thing))


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return optimizer.param_groups


def _names_of(optimizer: Optimizer, names: Names) -> list[list[str]]:
    """Name an optimizer's parameters by group; a parameter of no module has its number as name."""
    numbers = itertools.count()
    return [
        [names.by_identity.get(id(parameter), f"#{next(numbers)}") for parameter in group["params"]]
        for group in _groups(optimizer)
    ]


def _optimizer_state(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    packed: dict[str, Any] = optimizer.state_dict()
    by_group = _names_of(optimizer, names)
    flat = [name for group in by_group for name in group]
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, flat, strict=True))
    groups = [
        {"params": params, **{key: value for key, value in group.items() if key != "params"}}
        for params, group in zip(by_group, packed["param_groups"], strict=True)
    ]
    inner = _unwrapped(optimizer)
    others = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    others |= hidden_state(inner)
    has_low_bits = may_have_low_bits(inner)
    state = {
        name_of.get(number, number): plain_states(value) if has_low_bits else value
        for number, value in packed["state"].items()
    }
    return {"state": state, "groups": groups, **({"others": others} if others else {})}


def _packed(optimizer: Optimizer, state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return an optimizer's state in torch's form: by number, in the current order of the parameters."""
    by_group = _names_of(optimizer, names)
    number_of = {name: number for number, name in enumerate(name for group in by_group for name in group)}
    known = _known_names([*number_of])
    groups = [
        # Without "param_names", which torch keeps in the order of the optimizer's parameters.
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [number_of[name] for name in params],
        }
        for params, group in zip(by_group, cast("list[dict[str, Any]]", state["groups"]), strict=True)
    ]
    values: dict[Any, Any] = {}
    parameters = [parameter for group in _groups(optimizer) for parameter in group["params"]]
    has_low_bits = may_have_low_bits(optimizer)
    for name, value in cast("Mapping[Any, Any]", state["state"]).items():
        number = known.find(name)
        own: Any = dict(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        if number is not None and has_low_bits:
            own = with_low_bits(own, parameters[number])
        values[name if number is None else number] = own
    return {"state": values, "param_groups": groups, **state.get("others", {})}


class KnownNames:
    """Finds parameters by name, or by the last part of the name if it is unique."""

    def __init__(self, number_of: Mapping[str, int]) -> None:
        """Index parameters by their names."""
        self._number_of = dict(number_of)
        ends: dict[str, list[int]] = {}
        for name, number in number_of.items():
            ends.setdefault(name.rpartition("/")[2], []).append(number)
        self._ends = ends

    def find(self, name: object) -> int | None:
        """Return the number of a parameter; None for an unknown name."""
        if not isinstance(name, str):
            return None
        found = self._number_of.get(name)
        ends = self._ends.get(name.rpartition("/")[2], ())
        return ends[0] if found is None and len(ends) == 1 else found


def _known_names(names: Sequence[str], first: int = 0) -> KnownNames:
    """Index an optimizer's parameters by name, and by position for checkpoints without names.

    Args:
        names: In the optimizer's order.
        first: Position of the first name among all parameters of the optimizer.
    """
    positions = {f"#{first + number}": number for number in range(len(names))}
    return KnownNames({**positions, **{name: number for number, name in enumerate(names)}})


def _items(node: Json, path: str) -> dict[Any, Json]:
    """Return the children of a dict in a document, by key; none for another node."""
    is_dict = isinstance(node, dict) and node.get("$") in (None, "dict", "ordereddict", "defaultdict")
    return dict(children_of(node, path) or ()) if is_dict else {}


def is_named_optimizer(stored: Stored) -> bool:
    """Whether a state is an optimizer's in the form of :func:`state_of`, and not in torch's form."""
    parts = _items(stored.node, stored.path) if isinstance(stored.thing, Optimizer) else {}
    return "groups" in parts and "param_groups" not in parts


class Fit(NamedTuple):
    """Result of :func:`fit`.

    Attributes:
        rows: Differences between a state and its object.
        targets: The tensors whose device and sharding stored tensors get, by the names of the stored tensors.
        in_place: Names of stored tensors with the tensors of the object that may get their values.
    """

    rows: list[Misfit]
    targets: dict[str, torch.Tensor]
    in_place: list[tuple[str, torch.Tensor]]


def fit(stored: Stored, names: Names, tensors: Mapping[str, Shaped], *, strict: bool) -> Fit:
    """Compare the state of a module or optimizer with the object. Other objects aren't compared.

    Args:
        stored: The state and the object.
        names: Of the tree to load into.
        tensors: The stored tensors, by name.
        strict: Whether missing and extra entries of a module are differences.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    result = Fit([], {}, [])
    if isinstance(stored.thing, nn.Module):
        _fit_module(stored, tensors, strict, result)
    elif isinstance(stored.thing, Optimizer):
        result.rows.extend(_misfits_of_groups(stored, names))
        if not result.rows:
            _fit_states(stored, names, tensors, result)
    return result


def _stored_tensor(node: Json, tensors: Mapping[str, Shaped]) -> tuple[str, Shaped | None]:
    """Return the name of a node's tensor and the tensor; None if the node is of another kind."""
    if not isinstance(node, dict) or node.get("$") != "tensor":
        return "", None
    name = str(node.get("name"))
    return name, tensors.get(name)


def _fit_module(stored: Stored, tensors: Mapping[str, Shaped], strict: bool, result: Fit) -> None:
    state = _items(stored.node, stored.path)
    inner = inner_of(stored.thing)
    own, is_plain = cast("Mapping[str, Any]", inner.state_dict(keep_vars=True)), _is_plain(inner)
    addresses = {address_of(own[name]) for name in state if _has_memory(own.get(name))}
    for name in {**own, **state}:
        path = f"{stored.path}/{name}"
        value = own.get(name)
        tensor_name, tensor = _stored_tensor(state.get(name), tensors)
        in_checkpoint = describe(tensor) if tensor is not None else _kind_of(state.get(name))
        wanted = describe(value) if isinstance(value, torch.Tensor) else _kind_of(value)
        if name not in own or name not in state:
            # Other programs store tied weights under one of their names.
            is_tied = _has_memory(value) and address_of(value) in addresses
            if strict and not is_tied:
                row = (in_checkpoint, "nothing") if name in state else ("nothing", wanted)
                result.rows.append(Misfit(path, *row))
        elif isinstance(value, torch.Tensor):
            if value.is_meta:
                wanted += " on the meta device; allocate the module's memory with to_empty(device=...) first"
            if in_checkpoint != wanted:
                result.rows.append(Misfit(path, in_checkpoint, wanted))
            result.targets[tensor_name] = value
            if is_plain:
                result.in_place.append((tensor_name, value))


def _kind_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _misfits_of_groups(stored: Stored, names: Names) -> list[Misfit]:
    path, parts = stored.path, _items(stored.node, stored.path)
    if not isinstance(parts.get("groups"), list) or "state" not in parts:
        return [Misfit(path, "another object", "the state of an optimizer")]
    kind = type(_unwrapped(stored.thing)).__name__
    if stored.kind not in (kind, *_ANY_OPTIMIZER):
        # torch would load most of one into the other, and fail or compute something else later.
        return [Misfit(path, stored.kind, kind)]
    own = _names_of(stored.thing, names)
    groups = [_items(group, path) for group in cast("list[Json]", parts["groups"])]
    if len(groups) != len(own):
        return [Misfit(f"{path}/groups", f"{len(groups)} groups", f"{len(own)} groups")]
    rows: list[Misfit] = []
    for number, (group, wanted) in enumerate(zip(groups, own, strict=True)):
        known = _known_names(wanted, sum(map(len, own[:number])))
        index_of = {name: known.find(name) for name in cast("list[str]", group.get("params") or [])}
        group_path, missing = f"{path}/groups/{number}", set(range(len(wanted))).difference(index_of.values())
        extra = [name for name, index in index_of.items() if index is None]
        rows += [Misfit(group_path, f"parameter {name}", "nothing") for name in extra]
        rows += [Misfit(group_path, "nothing", _wanted(wanted[index])) for index in sorted(missing)]
    return rows


def _wanted(name: str) -> str:
    unknown = ", whose name isn't known: put its model in the tree too" if name.startswith("#") else ""
    return f"parameter {name}{unknown}"


def _fit_states(stored: Stored, names: Names, tensors: Mapping[str, Shaped], result: Fit) -> None:
    path = stored.path
    parameters = [parameter for group in _groups(stored.thing) for parameter in group["params"]]
    flat = [name for group in _names_of(stored.thing, names) for name in group]
    known = _known_names(flat)
    optimizer = _unwrapped(stored.thing)
    has_low_bits, is_plain = may_have_low_bits(optimizer), _loads_as_torch(optimizer)
    for name, values in _items(_items(stored.node, path)["state"], path).items():
        number = known.find(name)
        if number is None:
            if isinstance(name, str):
                result.rows.append(Misfit(f"{path}/state/{name}", "a state", "no such parameter"))
            continue
        parameter = parameters[number]
        shape = tuple(parameter.shape)
        for key, node in _items(values, path).items():
            if has_low_bits and is_low_bit(node):
                rows, targets = fit_low_bit(f"{path}/state/{name}/{key}", node, parameter, tensors)
                result.rows.extend(rows)
                result.targets.update(targets)
                continue
            tensor_name, tensor = _stored_tensor(node, tensors)
            if tensor is None:
                continue
            if tuple(tensor.shape) == shape:
                if key != "step":  # is never sharded, even if the parameter is a single number too
                    result.targets[tensor_name] = parameter
                    own = optimizer.state.get(parameter, {}).get(key) if is_plain else None
                    if not isinstance(own, torch.Tensor) or own.device != parameter.device:
                        continue
                    if describe(own) == describe(tensor):
                        result.in_place.append((tensor_name, own))
            # An entry per element has the parameter's shape; an entry per parameter is small. If parameters
            # have numbers instead of names, only the shapes of torch's entries reveal another order.
            elif (str(name).startswith("#") and key in _ELEMENTWISE) or (
                len(tensor.shape) == len(shape) and math.prod(tensor.shape) >= parameter.numel() > 1
            ):
                result.rows.append(Misfit(f"{path}/state/{name}/{key}", describe(tensor), f"shape {shape}"))


def is_in_place(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a tree is loaded in place, because an optimizer may hold it."""
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def address_of(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    """Return a key that tensors share if they are the same memory."""
    local = local_of(tensor)
    return local.data_ptr(), local.shape


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor, or this rank's part of it, into another one, unless they are the same memory."""
    if address_of(target) != address_of(source):
        with torch.no_grad():
            local_of(target).copy_(local_of(source))


def restore_order(pending: Pending) -> int:
    """Return the sort key for restoring: schedules come after optimizers, whose states set learning rates."""
    return 0 if isinstance(pending.thing, Optimizer) else 1


def untied_weights(pending: Pending) -> list[Misfit]:
    """List weights that are tied in a module, but were saved with different values, so one would be lost."""
    if not isinstance(pending.thing, nn.Module):
        return []
    state = cast("Mapping[str, Any]", pending.state)
    own = cast("Mapping[str, Any]", inner_of(pending.thing).state_dict())
    first: dict[Any, str] = {}
    rows: list[Misfit] = []
    for name, value in own.items():
        if not isinstance(value, torch.Tensor) or name not in state or not local_of(value).numel():
            continue
        same = first.setdefault(address_of(value), name)
        if same != name and not same_bits(local_of(state[same]), local_of(state[name])):
            rows.append(Misfit(f"{pending.path}/{name}", f"other values than {same}", f"tied to {same}"))
    return rows


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have equal shapes and bits."""
    if one.data_ptr() == other.data_ptr() or one.shape != other.shape:
        return one.shape == other.shape
    bits = [contiguous_copy(tensor).view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


def cannot_fail(pending: Pending) -> bool:
    """Whether restoring an object can't fail: a module whose parameters and buffers are loaded in place."""
    return isinstance(pending.thing, nn.Module) and _is_plain(inner_of(pending.thing))


def prepare_undo(pending: Pending) -> Callable[[], None]:
    """Keep the current state of an object, and return the function that restores it."""
    thing = pending.thing
    if isinstance(thing, Optimizer):
        # load_state_dict replaces the tensors, so the old ones needn't be copied.
        owner = _unwrapped(thing)
        state = dict(cast("Mapping[Any, Any]", owner.state))
        groups = [dict(group) for group in _groups(owner)]
        hidden = hidden_state(owner)

        def undo_optimizer() -> None:
            owner.state.clear()
            owner.state.update(state)
            for name, value in hidden.items():
                setattr(owner, name, value)
            for group, before in zip(_groups(owner), groups, strict=True):
                group.clear()
                group.update(before)

        return undo_optimizer
    if isinstance(thing, nn.Module):
        inner = inner_of(thing)
        before = copy.deepcopy(inner.state_dict())
        return lambda: cast("None", inner.load_state_dict(before))
    passes = _passes(thing)
    if passes is not None:
        position = passes.state()
        return lambda: passes.go_to(position)
    before = copy.deepcopy(thing.state_dict())
    return lambda: thing.load_state_dict(before)


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state; a proxy only forwards to it."""
    inner = vars(optimizer).get("optimizer")
    return inner if isinstance(inner, Optimizer) else optimizer


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's state dict is its parameters and buffers, and loading only fills these."""
    if any(loads_in_its_own_way(part) for part in module.modules()):
        return False
    own = {
        address_of(value)
        for values in (module.named_parameters(remove_duplicate=False), module.named_buffers())
        for _, value in values
    }
    return all(
        isinstance(value, torch.Tensor) and address_of(value) in own for value in module.state_dict().values()
    )


def _loads_as_torch(optimizer: Optimizer) -> bool:
    """Whether loading a state only makes its tensors the optimizer's own, without looking at their values."""
    kind, state = cast("Any", type(optimizer)), vars(optimizer)
    hooks = (
        state.get("_optimizer_load_state_dict_pre_hooks"),
        state.get("_optimizer_load_state_dict_post_hooks"),
    )
    ways = kind.load_state_dict, kind.__setstate__
    return not any(hooks) and all(way.__module__.startswith("torch.optim.") for way in ways)


def _has_memory(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.is_meta and local_of(value).numel() > 0


def restore_object(pending: Pending, names: Names) -> None:
    """Restore an object. The state's tensors are new, verified, and laid out like the object's own."""
    thing, state = pending.thing, pending.state
    if isinstance(thing, Optimizer):
        _restore_optimizer(_unwrapped(thing), state, names)
        return
    if isinstance(thing, nn.Module):
        inner = inner_of(thing)
        own = cast("Mapping[str, Any]", inner.state_dict(keep_vars=True))
        state = {name: value for name, value in state.items() if name in own}
        if not _is_plain(inner):
            inner.load_state_dict(state, strict=False)
            return
        for name, value in state.items():
            write(own[name], value)
        return
    passes = _passes(thing)
    if passes is not None:
        passes.go_to(read_state(state))
        return
    thing.load_state_dict(state)


def _placed_like(value: Any, before: Any) -> Any:
    """Return a loaded value, a dict's tensors on the devices of those that they replace."""
    if not isinstance(value, dict):
        return value
    own = cast("dict[str, torch.Tensor]", value)
    return {name: one.to(before[name].device) if name in before else one for name, one in own.items()}


def _restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any], names: Names) -> None:
    packed = _packed(optimizer, state, names)
    for name, before in hidden_state(optimizer).items():
        if name in packed:
            setattr(optimizer, name, _placed_like(packed.pop(name), before))
    optimizer.load_state_dict(packed)
    # torch casts a state to the dtype of its parameter, which would round a float32 state to bfloat16.
    parameters = [parameter for group in _groups(optimizer) for parameter in group["params"]]
    for number, stored in packed["state"].items():
        loaded = optimizer.state.get(parameters[number]) if isinstance(number, int) else None
        if not isinstance(loaded, dict) or not isinstance(stored, dict):
            continue
        for key, value in cast("dict[str, Any]", stored).items():
            cast_value = cast("dict[str, Any]", loaded).get(key)
            if (
                isinstance(cast_value, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and cast_value.dtype != value.dtype
            ):
                loaded[key] = value.to(cast_value.device)
