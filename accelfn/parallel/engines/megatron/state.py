"""The state of a model that Megatron-LM trains, as plain torch objects with the names of the user's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from accelfn.parallel.engines.engine import EngineState
from accelfn.parallel.engines.megatron.weights import Piece, Rule, pack, shard_piece, unpack, unshard_piece
from accelfn.parallel.parameters import set_whole
from accelfn.tree import is_dtensor, local_of

if TYPE_CHECKING:
    from accelfn.parallel.engines.megatron.train import MegatronHandle

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class _Tree(nn.Module):
    """Holds parameters under dotted names."""

    def put(self, name: str, value: nn.Parameter) -> None:
        """Store a parameter."""
        *path, last = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, value)


def plain_state(handle: MegatronHandle, rules: Sequence[Sequence[Rule]]) -> EngineState:
    """Return the state of a model and its optimizer: float32 parameters, sharded as Megatron's are.

    Ranks: every rank of the context.

    Args:
        handle: The model's.
        rules: Of each of this rank's parts of the model.
    """
    tree = _Tree()
    plain: dict[str, nn.Parameter] = {}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    groups: dict[str, int | None] = {}
    for parameter, rule in _parameters(handle, rules):
        packed = _read(handle, parameter)
        for key, value in packed.items():
            parts = unpack(rule, value, handle.plan.shape, handle.plan.tp, handle.tp_rank)
            for piece, part in zip(rule.pieces, parts, strict=True):
                logical = _spread(handle, piece, part)
                if key == "param":
                    plain[piece.name] = nn.Parameter(logical, requires_grad=parameter.requires_grad)
                else:
                    moments.setdefault(piece.name, {})[key] = logical
                groups[piece.name] = handle.group_of(parameter)
    order = [name for name in handle.whole.tensors if name in plain]
    for name in order:
        tree.put(name, plain[name])
    for name, first in handle.whole.first.items():
        if first in plain and name not in plain:
            tree.put(name, plain[first])
    if handle.plan.pp > 1:
        set_whole(tree, handle.whole)
    optimizer = None if handle.optimizer is None else _plain_optimizer(handle, plain, order, moments, groups)

    def write_back() -> None:
        _write_back(handle, rules, plain, optimizer)

    return EngineState(tree, optimizer, write_back)


def _plain_optimizer(
    handle: MegatronHandle,
    plain: dict[str, nn.Parameter],
    order: Sequence[str],
    moments: dict[str, dict[str, torch.Tensor]],
    numbers: dict[str, int | None],
) -> torch.optim.Optimizer:
    owner: Any = handle.optimizer
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(owner.param_groups):
        names = [name for name in order if numbers[name] == number]
        copied = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": [plain[name] for name in names], **copied})
    kind = AdamW if handle.plan.optimizer == "adam" else SGD
    optimizer = kind(groups)
    for name, values in moments.items():
        state: dict[str, Any] = dict(values)
        if "exp_avg" in values:
            state["step"] = torch.tensor(float(owner.num_steps))
        optimizer.state[plain[name]] = state
    return optimizer


def _write_back(
    handle: MegatronHandle,
    rules: Sequence[Sequence[Rule]],
    plain: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    states = {} if optimizer is None else cast("dict[torch.Tensor, dict[str, Any]]", optimizer.state)
    if optimizer is not None:
        owner: Any = handle.optimizer
        steps = [float(state["step"]) for state in states.values() if "step" in state]
        owner.num_steps = int(max(steps, default=owner.num_steps if states else 0))
        for group, loaded in zip(owner.param_groups, optimizer.param_groups, strict=True):
            group.update(
                {key: value for key, value in loaded.items() if key not in ("params", "param_names")}
            )
    for parameter, rule in _parameters(handle, rules):
        pieces = [plain[piece.name] for piece in rule.pieces]
        values = {"param": [one.detach() for one in pieces]}
        for key in _MOMENTS:
            found = [states.get(one, {}).get(key) for one in pieces]
            if all(one is not None for one in found):
                values[key] = cast("list[torch.Tensor]", found)
        packed = {
            key: pack(
                rule,
                [_local(handle, piece, part) for piece, part in zip(rule.pieces, parts, strict=True)],
                handle.plan.shape,
                handle.plan.tp,
            )
            for key, parts in values.items()
        }
        _write(handle, parameter, packed)


def _parameters(handle: MegatronHandle, rules: Sequence[Sequence[Rule]]) -> list[tuple[nn.Parameter, Rule]]:
    """Return this rank's parameters of Megatron with their rules."""
    found: list[tuple[nn.Parameter, Rule]] = []
    for chunk, chunk_rules in zip(handle.model.inner_chunks(), rules, strict=True):
        parameters = dict(chunk.named_parameters())
        found += [(parameters[rule.name], rule) for rule in chunk_rules]
    return found


def _spread(handle: MegatronHandle, piece: Piece, part: torch.Tensor) -> torch.Tensor:
    """Return a parameter of the user's model, of which this rank has ``part``."""
    if piece.dim is None or handle.plan.tp == 1:
        return part.contiguous()
    if piece.blocks > 1:  # no sharding of DTensor
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(handle.plan.tp)]
        cast("Any", dist).all_gather(
            parts, part, group=handle.core.parallel_state.get_tensor_model_parallel_group()
        )
        return unshard_piece(piece, parts)
    from torch.distributed.tensor import DTensor, Shard  # not on import: it changes warning filters

    described = handle.whole.tensors[piece.name]
    assert described is not None
    shape = torch.Size(described[1])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part.contiguous(), handle.mesh, [Shard(piece.dim)], run_check=False, shape=shape, stride=stride
    )


def _local(handle: MegatronHandle, piece: Piece, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter of the user's model."""
    if is_dtensor(value):
        return local_of(value)
    return shard_piece(piece, value, handle.plan.tp, handle.tp_rank)


def _read(handle: MegatronHandle, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return this rank's part of a parameter in float32, and what the optimizer keeps of it.

    Ranks: every replica of it, if replicas shard the optimizer's state.
    """
    part = handle.part_of(parameter)
    if part is None:
        return {"param": parameter.detach().float()}
    if not handle.plan.shards_state:
        main = getattr(parameter, "main_param", parameter)
        state: dict[str, Any] = part.optimizer.state.get(main, {})
        return {"param": main.detach().float(), **_moments(state)}
    held: dict[str, torch.Tensor] = {}
    start = end = 0
    if parameter in part.model_param_group_index_map:
        held = part._get_main_param_and_optimizer_states(parameter)
        place = part._get_model_param_range_map(parameter)["param"]
        start, end = place.start, place.end
    group = handle.core.parallel_state.get_data_parallel_group()
    found: dict[str, torch.Tensor] = {}
    for key in ("param", *handle.moment_names()):
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if key in held:
            whole[start:end] = held[key].detach()
        cast("Any", dist).all_reduce(whole, group=group)  # of disjoint ranges
        found[key] = whole.view_as(parameter)
    return found


def _write(handle: MegatronHandle, parameter: nn.Parameter, values: dict[str, torch.Tensor]) -> None:
    """Write a parameter, and what the optimizer keeps of it."""
    part = handle.part_of(parameter)
    with torch.no_grad():
        parameter.copy_(values["param"])
        if part is None:
            return
        main: Any = getattr(parameter, "main_param", parameter)
        if handle.plan.shards_state:
            if parameter not in part.model_param_group_index_map:
                return
            group, index = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][index]
            place = part._get_model_param_range_map(parameter)["param"]
            values = {key: value.reshape(-1)[place.start : place.end] for key, value in values.items()}
        main.copy_(values["param"])
        state = part.optimizer.state[main]
        state.clear()
        state.update({key: values[key].to(main.device, copy=True) for key in _MOMENTS if key in values})
        if "exp_avg" in state:
            state["step"] = torch.tensor(float(cast("Any", handle.optimizer).num_steps))
        elif not state:
            del part.optimizer.state[main]


def _moments(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: state[key] for key in _MOMENTS if state.get(key) is not None}
