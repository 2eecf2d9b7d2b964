"""What the objects of a training loop are in a checkpoint: plain trees; and how such a tree is taken up.

A module is its state dict without any wrapper's prefix; an optimizer is the state of each parameter by the
parameter's name, so that neither the order of parameters nor a wrapper matters; a loader is its
``LoaderState``. Whatever else has ``state_dict`` and ``load_state_dict`` speaks for itself.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.checkpoint.document.compare import Shaped, Stored, describe
from accelfn.checkpoint.document.nodes import below, children_of, leaves_of
from accelfn.checkpoint.header import contiguous_copy
from accelfn.checkpoint.manifest import Json
from accelfn.data import LoaderState, PreparedDataLoader
from accelfn.data.loader import passes_of
from accelfn.data.passes import Passes
from accelfn.data.resume import read_state
from accelfn.errors import Misfit
from accelfn.parallel import is_replicated
from accelfn.parallel.handle import is_kept_equal
from accelfn.parallel.parameters import repoint, whole_of
from accelfn.training import unwrap_model
from accelfn.tree import local_of

# Where the class of what steps isn't known: of a proxy around it, and of what another program has saved.
_ANY_OPTIMIZER = ("", "AcceleratedOptimizer", "Optimizer")

# Entries of torch's optimizers that have the shape of their parameter.
_OF_ELEMENTS = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "exp_inf", "ax", "prev", "mu_buffer"),
    }
)


class Names(NamedTuple):
    """How parameters are called.

    Attributes:
        by_identity: Name of each tensor, by ``id``.
        tensors: Keeps what the numbers stand for.
        replicated: Numbers of the parameters that are replicated over ranks.
        optimizers: The optimizers in the tree, with their paths.
        order: Places of the parameters of models whose stages are on several ranks: also of those elsewhere.
        elsewhere: Names of those that other stages have.
    """

    by_identity: Mapping[int, str]
    tensors: tuple[torch.Tensor, ...]
    replicated: frozenset[int]
    optimizers: tuple[tuple[str, Optimizer], ...]
    order: Mapping[str, int]
    elsewhere: frozenset[str]

    def replicated_of(self, stored: Iterable[str]) -> frozenset[str]:
        """Choose the stored tensors that are a replicated parameter, or what an optimizer has of one."""
        if not self.replicated:
            return frozenset()
        parameters = {self.by_identity[number] for number in self.replicated}
        states = {
            below(path, "state", self.by_identity[id(parameter)])
            for path, optimizer in self.optimizers
            for group in _groups(optimizer)
            for parameter in group["params"]
            if id(parameter) in self.replicated
        }
        return frozenset(name for name in stored if name in parameters or name.rpartition("/")[0] in states)


class Pending(NamedTuple):
    """An object, and the state that it is to take up: read and verified."""

    path: str
    thing: Any
    state: Any


def find_names(tree: Any) -> Names:
    """Name the parameters of all modules in a tree, and its own tensors, by their paths."""
    names: dict[int, str] = {}
    tensors: list[torch.Tensor] = []
    replicated: set[int] = set()
    optimizers: list[tuple[str, Optimizer]] = []
    order: dict[str, int] = {}
    # In an order that no dict changes.
    for path, leaf in sorted(leaves_of(tree), key=lambda one: one[0]):
        if isinstance(leaf, nn.Module):
            _reshard(leaf)
            for module in leaf.modules():
                if is_replicated(module):
                    replicated.update(map(id, module.parameters()))
            inner = inner_of(leaf)
            whole = whole_of(inner)
            first: Mapping[str, str] = {} if whole is None else whole.first
            for name in whole.tensors if whole is not None else ():
                order.setdefault(below(path, first.get(name, name)), len(order))
            for name, parameter in inner.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), below(path, first.get(name, name)))
                tensors.append(parameter)
                # Also of a module that stands inside of what was prepared; and whatever several stages have.
                if is_kept_equal(parameter) or whole is not None:
                    replicated.add(id(parameter))
        elif isinstance(leaf, torch.Tensor):
            names.setdefault(id(leaf), path)
            tensors.append(leaf)
            if is_kept_equal(leaf):
                replicated.add(id(leaf))
        elif isinstance(leaf, Optimizer):
            repoint(leaf)  # its model may have been prepared after it
            optimizers.append((path, leaf))
    elsewhere = frozenset(order).difference(names.values())
    return Names(names, tuple(tensors), frozenset(replicated), tuple(optimizers), order, elsewhere)


def _reshard(module: nn.Module) -> None:
    """Let modules under FSDP2 have the parameters again that their optimizer steps.

    After a forward pass without a backward pass they still hold gathered ones, which are other tensors.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody has called fully_shard
        return
    for one in module.modules():
        if isinstance(one, fsdp.FSDPModule):
            cast("Any", one).reshard()


def inner_of(module: nn.Module) -> nn.Module:
    """Return a module without any wrapper."""
    return unwrap_model(module, keep_torch_compile=False)


def state_of(thing: Any, names: Names) -> Any:
    """Return what a checkpoint keeps of an object: a tree of tensors and plain values.

    Returns:
        NotImplemented where the object is none that is known here.

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
        raise TypeError(
            "is a DataLoader that nobody prepared, and says nothing of its place. Prepare it first"
        )
    return NotImplemented


def _values(state: LoaderState) -> dict[str, Any]:
    return {one.name: getattr(state, one.name) for one in dataclasses.fields(state)}


def _passes(thing: Any) -> Passes[Any] | None:
    if not isinstance(thing, PreparedDataLoader):
        return None
    return passes_of(cast("PreparedDataLoader[Any]", thing))


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return optimizer.param_groups


def _names_of(optimizer: Optimizer, names: Names) -> list[list[str]]:
    """Name the parameters of an optimizer, by group; those of no module by their number."""
    count = 0
    found: list[list[str]] = []
    for group in _groups(optimizer):
        found.append([])
        for parameter in group["params"]:
            found[-1].append(names.by_identity.get(id(parameter), f"#{count}"))
            count += 1
    return found


def _optimizer_state(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    packed: dict[str, Any] = optimizer.state_dict()
    by_group = _names_of(optimizer, names)
    flat = [name for group in by_group for name in group]
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    called = dict(zip(numbers, flat, strict=True))
    groups = [
        {"params": own, **{key: value for key, value in group.items() if key != "params"}}
        for own, group in zip(by_group, packed["param_groups"], strict=True)
    ]
    others = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    state = {called.get(number, number): value for number, value in packed["state"].items()}
    return {"state": state, "groups": groups, **({"others": others} if others else {})}


def _packed(optimizer: Optimizer, state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return an optimizer's state as torch takes it: by number, in the order that the parameters have now."""
    by_group = _names_of(optimizer, names)
    number_of = {name: number for number, name in enumerate(name for group in by_group for name in group)}
    known = _known([*number_of])
    groups = [
        # Without "param_names": torch leaves the optimizer its own, which are in the order of its parameters.
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [number_of[name] for name in own],
        }
        for own, group in zip(by_group, cast("list[dict[str, Any]]", state["groups"]), strict=True)
    ]
    values: dict[Any, Any] = {}
    for name, value in cast("Mapping[Any, Any]", state["state"]).items():
        number = known.find(name)
        own = dict(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        values[name if number is None else number] = own
    return {"state": values, "param_groups": groups, **state.get("others", {})}


class KnownNames:
    """Finds parameters by their name, or by the end of it where the checkpoint has one model alone."""

    def __init__(self, number_of: Mapping[str, int]) -> None:
        """Know parameters by these names."""
        self._number_of = dict(number_of)
        ends: dict[str, list[int]] = {}
        for name, number in number_of.items():
            ends.setdefault(name.rpartition("/")[2], []).append(number)
        self._ends = ends

    def find(self, name: object) -> int | None:
        """Return the number of a parameter; None where there is none of that name."""
        if not isinstance(name, str):
            return None
        found = self._number_of.get(name)
        ends = self._ends.get(name.rpartition("/")[2], ())
        return ends[0] if found is None and len(ends) == 1 else found


def _known(names: Sequence[str], first: int = 0) -> KnownNames:
    """Know parameters by their names, and by their places where a program has saved them that has no names.

    Args:
        names: In the optimizer's order.
        first: The place of the first one among all parameters of the optimizer.
    """
    places = {f"#{first + number}": number for number in range(len(names))}
    return KnownNames({**places, **{name: number for number, name in enumerate(names)}})


def _items(node: Json, path: str) -> dict[Any, Json]:
    """Return what a dict of a document has, by key; nothing of another node."""
    is_dict = isinstance(node, dict) and node.get("$") in (None, "dict", "ordereddict", "defaultdict")
    return dict(children_of(node, path) or ()) if is_dict else {}


def is_named_optimizer(stored: Stored) -> bool:
    """Whether a state is that of an optimizer as ``state_of`` has it, and not as torch has it."""
    parts = _items(stored.node, stored.path) if isinstance(stored.thing, Optimizer) else {}
    return "groups" in parts and "param_groups" not in parts


class Fit(NamedTuple):
    """Result of :func:`fit`.

    Attributes:
        rows: What of a state doesn't fit its object.
        targets: By the names of stored tensors, the tensors that they are laid out as: device, cut.
    """

    rows: list[Misfit]
    targets: dict[str, torch.Tensor]


def fit(stored: Stored, names: Names, tensors: Mapping[str, Shaped], *, strict: bool) -> Fit:
    """Compare a state with its object. Of objects that speak for themselves nothing is known.

    Args:
        stored: The state and the object.
        names: Of the tree to load into.
        tensors: What is stored, by name.
        strict: Whether what is missing or extra in a module counts.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    found = Fit([], {})
    if isinstance(stored.thing, nn.Module):
        _fit_module(stored, tensors, strict, found)
    elif isinstance(stored.thing, Optimizer):
        found.rows.extend(_misfits_of_groups(stored, names))
        if not found.rows:
            _fit_states(stored, names, tensors, found)
    return found


def _stored_tensor(node: Json, tensors: Mapping[str, Shaped]) -> tuple[str, Shaped | None]:
    """Return name and form of the stored tensor of a node; None where it is of another kind."""
    if not isinstance(node, dict) or node.get("$") != "tensor":
        return "", None
    name = str(node.get("name"))
    return name, tensors.get(name)


def _fit_module(stored: Stored, tensors: Mapping[str, Shaped], strict: bool, found: Fit) -> None:
    state = _items(stored.node, stored.path)
    own = cast("Mapping[str, Any]", inner_of(stored.thing).state_dict())
    there = {_address(own[name]) for name in state if _has_memory(own.get(name))}
    for name in {**own, **state}:
        place = f"{stored.path}/{name}"
        value = own.get(name)
        called, held = _stored_tensor(state.get(name), tensors)
        said = describe(held) if held is not None else _kind_of(state.get(name))
        wanted = describe(value) if isinstance(value, torch.Tensor) else _kind_of(value)
        if name not in own or name not in state:
            # Files of other programs have a weight that is tied under one of its names.
            is_tied = _has_memory(value) and _address(value) in there
            if strict and not is_tied:
                row = (said, "nothing") if name in state else ("nothing", wanted)
                found.rows.append(Misfit(place, *row))
        elif isinstance(value, torch.Tensor):
            if value.is_meta:
                wanted += " on the meta device; give the module memory with to_empty(device=...) first"
            if said != wanted:
                found.rows.append(Misfit(place, said, wanted))
            found.targets[called] = value


def _kind_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _misfits_of_groups(stored: Stored, names: Names) -> list[Misfit]:
    path, parts = stored.path, _items(stored.node, stored.path)
    if not isinstance(parts.get("groups"), list) or "state" not in parts:
        return [Misfit(path, "another object", "the state of an optimizer")]
    kind = type(_real(stored.thing)).__name__
    if stored.kind not in (kind, *_ANY_OPTIMIZER):
        # torch would take up most of the one into the other, and fail or compute something else later.
        return [Misfit(path, stored.kind, kind)]
    own = _names_of(stored.thing, names)
    groups = [_items(group, path) for group in cast("list[Json]", parts["groups"])]
    if len(groups) != len(own):
        return [Misfit(f"{path}/groups", f"{len(groups)} groups", f"{len(own)} groups")]
    rows: list[Misfit] = []
    for number, (group, wanted) in enumerate(zip(groups, own, strict=True)):
        known = _known(wanted, sum(map(len, own[:number])))
        called = {name: known.find(name) for name in cast("list[str]", group.get("params") or [])}
        place, missing = f"{path}/groups/{number}", set(range(len(wanted))).difference(called.values())
        extra = [name for name, index in called.items() if index is None]
        rows += [Misfit(place, f"parameter {name}", "nothing") for name in extra]
        rows += [Misfit(place, "nothing", f"parameter {wanted[index]}") for index in sorted(missing)]
    return rows


def _fit_states(stored: Stored, names: Names, tensors: Mapping[str, Shaped], found: Fit) -> None:
    path = stored.path
    parameters = [parameter for group in _groups(stored.thing) for parameter in group["params"]]
    flat = [name for group in _names_of(stored.thing, names) for name in group]
    known = _known(flat)
    for name, values in _items(_items(stored.node, path)["state"], path).items():
        number = known.find(name)
        if number is None:
            if isinstance(name, str):
                found.rows.append(Misfit(f"{path}/state/{name}", "a state", "no such parameter"))
            continue
        parameter = parameters[number]
        shape = tuple(parameter.shape)
        for key, node in _items(values, path).items():
            called, held = _stored_tensor(node, tensors)
            if held is None:
                continue
            if tuple(held.shape) == shape:
                if key != "step":  # is never cut as its parameter is, even if that is a single number too
                    found.targets[called] = parameter
            # What is kept for each element of a parameter has its shape; what is kept for all of it is small.
            # Where numbers are the names, only the shapes of what torch keeps tell another order.
            elif (str(name).startswith("#") and key in _OF_ELEMENTS) or (
                len(held.shape) == len(shape) and math.prod(held.shape) >= parameter.numel() > 1
            ):
                found.rows.append(Misfit(f"{path}/state/{name}/{key}", describe(held), f"shape {shape}"))


def is_in_place(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a tree is written into, since others hold it: whatever an optimizer may step."""
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def order_of(pending: Pending) -> int:
    """Return when an object takes up its state: schedules after optimizers, which bring rates with them."""
    return 0 if isinstance(pending.thing, Optimizer) else 1


def untied(pending: Pending) -> list[Misfit]:
    """Return which weights are one in a module, and were saved with different values: one would be lost."""
    if not isinstance(pending.thing, nn.Module):
        return []
    state = cast("Mapping[str, Any]", pending.state)
    own = cast("Mapping[str, Any]", inner_of(pending.thing).state_dict())
    first: dict[Any, str] = {}
    rows: list[Misfit] = []
    for name, value in own.items():
        if not isinstance(value, torch.Tensor) or name not in state or not local_of(value).numel():
            continue
        same = first.setdefault(_address(value), name)
        if same != name and not _same_bits(local_of(state[same]), local_of(state[name])):
            rows.append(Misfit(f"{pending.path}/{name}", f"other values than {same}", f"tied to {same}"))
    return rows


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.data_ptr() == other.data_ptr() or one.shape != other.shape:
        return one.shape == other.shape
    bits = [contiguous_copy(each).view(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*bits)


def is_sure(pending: Pending) -> bool:
    """Whether an object can't refuse its state: a module whose parameters and buffers are written into."""
    return isinstance(pending.thing, nn.Module) and _is_plain(inner_of(pending.thing))


def prepare_undo(pending: Pending) -> Callable[[], None]:
    """Remember what an object is now, and give what brings it back."""
    thing = pending.thing
    if isinstance(thing, Optimizer):
        # load_state_dict puts new tensors in the place of the old ones, so the old ones need no copy.
        owner = _real(thing)
        state = dict(cast("Mapping[Any, Any]", owner.state))
        groups = [dict(group) for group in _groups(owner)]

        def undo_optimizer() -> None:
            owner.state.clear()
            owner.state.update(state)
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
        place = passes.state()
        return lambda: passes.go_to(place)
    before = copy.deepcopy(thing.state_dict())
    return lambda: thing.load_state_dict(before)


def _real(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the state: a proxy passes on what it is asked."""
    inner = vars(optimizer).get("optimizer")
    return inner if isinstance(inner, Optimizer) else optimizer


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's state dict is its own parameters and buffers, so that they can be written into."""
    own = {
        _address(value)
        for values in (module.named_parameters(remove_duplicate=False), module.named_buffers())
        for _, value in values
    }
    return all(
        isinstance(value, torch.Tensor) and _address(value) in own for value in module.state_dict().values()
    )


def _address(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return local_of(tensor).data_ptr(), local_of(tensor).shape


def _has_memory(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.is_meta and local_of(value).numel() > 0


def take_up(pending: Pending, names: Names) -> None:
    """Let an object take up its state. Its tensors are fresh, verified, and laid out as the object's own."""
    thing, state = pending.thing, pending.state
    if isinstance(thing, Optimizer):
        _take_up_optimizer(_real(thing), state, names)
        return
    if isinstance(thing, nn.Module):
        inner = inner_of(thing)
        own = cast("Mapping[str, Any]", inner.state_dict(keep_vars=True))
        state = {name: value for name, value in state.items() if name in own}
        if not _is_plain(inner):
            inner.load_state_dict(state, strict=False)
            return
        with torch.no_grad():
            for name, value in state.items():
                local_of(own[name]).copy_(local_of(value))
        return
    passes = _passes(thing)
    if passes is not None:
        passes.go_to(read_state(state))
        return
    thing.load_state_dict(state)


def _take_up_optimizer(optimizer: Optimizer, state: Mapping[str, Any], names: Names) -> None:
    packed = _packed(optimizer, state, names)
    optimizer.load_state_dict(packed)
    # torch casts states to the dtype of their parameter, which loses bits of a float32 state of bfloat16.
    parameters = [parameter for group in _groups(optimizer) for parameter in group["params"]]
    for number, stored in packed["state"].items():
        held = optimizer.state.get(parameters[number]) if isinstance(number, int) else None
        if not isinstance(held, dict) or not isinstance(stored, dict):
            continue
        for key, value in cast("dict[str, Any]", stored).items():
            now = cast("dict[str, Any]", held).get(key)
            if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                held[key] = value.to(now.device)
