"""The state of a model that DeepSpeed trains, as a plain module and optimizer with row shards.

ZeRO keeps each rank's part of flattened parameters. Here they become ``DTensor``s with the rows of the
logical tensors, so that checkpoints neither depend on the stage nor on the number of ranks.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from accelfn.errors import NotAvailableError
from accelfn.parallel.engines.engine import EngineState
from accelfn.parallel.engines.exchange import Range, exchange, rows_of
from accelfn.tree import local_of

T = TypeVar("T")

# torch's classes with the state of DeepSpeed's optimizers on the host.
_PLAIN_CLASSES: Mapping[str, type[Optimizer]] = MappingProxyType({"DeepSpeedCPUAdagrad": torch.optim.Adagrad})


def by_rank(value: T) -> list[T]:
    """Return the values of all ranks of the world. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)  # pyright: ignore[reportUnknownMemberType]
    return found


class Fragment(NamedTuple):
    """This rank's part of a parameter.

    Attributes:
        elements: Which ones of the flattened parameter.
        flat: The optimizer's float32 tensor that they are in, and that its state belongs to.
        offset: Where they begin in it.
        low: The same elements in the dtype of the forward pass, if ZeRO keeps them as a partition.
    """

    elements: Range
    flat: torch.Tensor
    offset: int
    low: torch.Tensor | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that is laid out as ``flat``."""
        return tensor.narrow(0, self.offset, self.elements.numel)


def fragments_of(engine: Any, parameters: Mapping[str, torch.Tensor], stage: int) -> dict[str, Fragment]:
    """Return this rank's part of each trained parameter; parameters of which it has none are left out.

    Raises:
        NotAvailableError: The state is on an NVMe disk.
    """
    found: dict[str, Fragment] = {}
    zero = engine.optimizer
    if getattr(zero, "swap_optimizer", False):
        raise NotAvailableError(
            "DeepSpeed keeps the optimizer's state on an NVMe disk, from where it can't be saved. Use "
            "model.save_checkpoint() of DeepSpeed, or offload to the CPU."
        )
    if stage == 3 and not hasattr(zero, "grad_position"):  # the model isn't trained
        return found
    for name, parameter in parameters.items():
        own = cast("Any", parameter)
        if not parameter.requires_grad:
            continue
        if stage < 3:
            mapping = own._hp_mapping
            if mapping is not None:
                low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
                found[name] = Fragment(Range(low.start, low.numel), flat, high.start)
        else:
            number, offset, numel = zero.grad_position[zero.get_param_id(parameter)]
            start = min(dist.get_rank() * numel, own.ds_numel)
            count = min(numel, own.ds_numel - start)
            if count:
                flat = zero.fp32_partitioned_groups_flat[number]
                found[name] = Fragment(Range(start, count), flat, offset, own.ds_tensor)
    return found


def plain_state(
    engine: Any,
    stage: int,
    groups: Sequence[Sequence[torch.Tensor]],
    dtypes: Mapping[str, torch.dtype],
) -> EngineState:
    """Return the model and the optimizer of an engine as plain objects with row shards.

    Ranks: every rank of the world.

    Args:
        engine: DeepSpeed's, with ZeRO.
        stage: Of ZeRO, from 1.
        groups: The model's parameters in the optimizer's groups; none for a model that isn't trained.
        dtypes: Of the model's tensors before DeepSpeed converted them, by name.

    Raises:
        NotAvailableError: The state is on an NVMe disk.
    """
    if hasattr(engine.optimizer, "partition_all_parameters"):  # shards that DeepSpeed doesn't step
        engine.optimizer.partition_all_parameters()
    layout = _Layout(engine, stage, dtypes)
    model = _empty_model(engine.module)
    by_name = layout.parameters
    rows: dict[int, nn.Parameter] = {}
    masters = layout.to_rows(lambda fragment: fragment.of(fragment.flat))
    for name, parameter in by_name.items():
        value = masters[name] if name in masters else layout.complete(name, parameter)
        rows[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        _set(model, name, rows[id(parameter)])
    buffers: dict[str, torch.Tensor] = {}
    saved = set(engine.module.state_dict())
    for name, buffer in engine.module.named_buffers():
        if name in saved:
            buffers[name] = buffer.to(dtypes.get(name, buffer.dtype)).clone()
            _set(model, name, buffers[name])
    optimizer = _plain_optimizer(layout, engine, groups, rows) if groups else None

    def write_back() -> None:
        layout.from_rows(
            {name: cast("torch.Tensor", rows[id(by_name[name])]) for name in masters},
            lambda fragment: fragment.of(fragment.flat),
        )
        for name, buffer in engine.module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        for name, parameter in by_name.items():
            if name not in masters:
                layout.set_complete(parameter, rows[id(parameter)])
        layout.refresh()
        if optimizer is not None:
            _write_optimizer(layout, engine, groups, rows, optimizer)

    return EngineState(model, optimizer, write_back)


class _Layout:
    """Where each rank has which elements of each parameter."""

    def __init__(self, engine: Any, stage: int, dtypes: Mapping[str, torch.dtype]) -> None:
        """Exchange the ranges of all ranks."""
        self.engine, self.stage, self.dtypes = engine, stage, dtypes
        self.parameters = dict(cast("nn.Module", engine.module).named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.own = fragments_of(engine, self.parameters, stage)
        self.group = cast("dist.ProcessGroup", dist.group.WORLD)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranges = by_rank({name: one.elements for name, one in self.own.items()})
        trained = {name for one in self.ranges for name in one}
        self.shapes = {name: self.shape(self.parameters[name]) for name in sorted(trained)}
        self.rows = [
            {name: rows_of(shape, rank, self.size) for name, shape in self.shapes.items()}
            for rank in range(self.size)
        ]
        self.device = next((one.flat.device for one in self.own.values()), torch.device(engine.device))
        self.mesh = DeviceMesh.from_group(self.group, self.device.type)

    @staticmethod
    def shape(parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the complete parameter."""
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def to_rows(self, part: Callable[[Fragment], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return row shards of what ``part`` returns for each fragment. Collective."""
        parts = {name: part(one) for name, one in self.own.items()}
        given = {name: one for name, one in parts.items() if one is not None}
        dtype = next((one.dtype for one in given.values()), torch.float32)
        local = {
            name: torch.zeros(self.rows[self.rank][name].numel, dtype=dtype, device=self.device)
            for name in self.shapes
        }
        # A parameter that has no such state yet has none on any rank.
        exchange(self.group, given, self._only(given), self.rows, local)
        return {name: self._sharded(name, one) for name, one in local.items()}

    def _only(self, given: Mapping[str, torch.Tensor]) -> list[dict[str, Range]]:
        names = by_rank(sorted(given))
        return [
            {name: ranges[name] for name in known} for ranges, known in zip(self.ranges, names, strict=True)
        ]

    def _sharded(self, name: str, local: torch.Tensor) -> torch.Tensor:
        shape = self.shapes[name]
        if not shape:
            return local.reshape(())
        from torch.distributed.tensor import DTensor, Shard  # adds warnings filters when it is imported

        rows = local.view(-1, *shape[1:]) if local.numel() else local.new_empty((0, *shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            rows, self.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def from_rows(self, values: Mapping[str, torch.Tensor], part: Callable[[Fragment], torch.Tensor]) -> None:
        """Write row shards into what ``part`` returns for each fragment. Collective."""
        local = {name: local_of(values[name]).detach().reshape(-1) for name in values}
        sources = [{name: rows[name] for name in values} for rows in self.rows]
        targets = [{name: one for name, one in ranges.items() if name in values} for ranges in self.ranges]
        results = {name: part(one) for name, one in self.own.items() if name in values}
        with torch.no_grad():
            exchange(self.group, local, sources, targets, results)

    @staticmethod
    def gathered(parameter: torch.Tensor, modifier_rank: int | None = None) -> AbstractContextManager[Any]:
        """Gather a sharded parameter inside."""
        zero: Any = importlib.import_module("deepspeed.runtime.zero")
        return zero.GatheredParameters([parameter], modifier_rank=modifier_rank)

    def complete(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter that isn't trained, which every rank has, or gathers. Collective at stage 3."""
        dtype = self.dtypes.get(name, parameter.dtype)
        if self.stage < 3:
            return parameter.detach().to(dtype).clone()
        with self.gathered(parameter):
            return parameter.detach().to(dtype).clone()

    def set_complete(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Set a parameter that isn't trained. Collective at stage 3."""
        with torch.no_grad():
            if self.stage < 3:
                parameter.copy_(value)
                return
            with self.gathered(parameter, modifier_rank=0):
                parameter.copy_(value)

    def refresh(self) -> None:
        """Set the parameters of the forward pass to the float32 ones. Collective."""
        zero = self.engine.optimizer
        if not self.shapes:  # nothing is trained
            return
        if self.stage < 3:
            zero.update_lp_params()
            return
        zero.checkpoint_event_prologue()  # releases gathered parameters
        with torch.no_grad():
            for one in self.own.values():
                assert one.low is not None
                one.low.narrow(0, 0, one.elements.numel).copy_(one.of(one.flat))
        zero.checkpoint_event_epilogue()


def _empty_model(module: nn.Module) -> nn.Module:
    """Return a module without parameters, with the submodules' names."""
    model = nn.Module()
    for name in dict(cast("Iterable[tuple[str, nn.Module]]", module.named_modules())):
        if name:
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent).add_module(last, nn.Module())
    return model.train(module.training)


def _set(model: nn.Module, name: str, value: torch.Tensor) -> None:
    parent, _, last = name.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(last, value)
    else:
        owner.register_buffer(last, value)


def _base(engine: Any) -> Optimizer:
    return cast("Optimizer", engine.optimizer.optimizer)


def _plain_class(base: Optimizer) -> type[Optimizer]:
    name = type(base).__name__
    if name in ("DeepSpeedCPUAdam", "FusedAdam"):
        return torch.optim.AdamW if getattr(base, "adam_w_mode", True) else torch.optim.Adam
    return _PLAIN_CLASSES.get(name, type(base))


def _keys(layout: _Layout, base: Optimizer) -> list[str]:
    """Return the names of the states that have an entry for each element, on any rank."""
    found = {
        key
        for one in layout.own.values()
        for key, value in cast("Mapping[str, Any]", base.state.get(one.flat, {})).items()
        if isinstance(value, torch.Tensor) and value.shape == one.flat.shape
    }
    return sorted({key for keys in by_rank(sorted(found)) for key in keys})


def _plain_optimizer(
    layout: _Layout, engine: Any, groups: Sequence[Sequence[torch.Tensor]], rows: Mapping[int, nn.Parameter]
) -> Optimizer:
    base = _base(engine)
    kind = _plain_class(base)
    plain = kind.__new__(kind)
    Optimizer.__init__(
        plain, [{"params": [rows[id(one)] for one in group]} for group in groups], base.defaults
    )
    for own, group in zip(plain.param_groups, base.param_groups, strict=True):
        own.update({key: value for key, value in group.items() if key != "params"})
    plain.state = defaultdict(dict)
    scalars = _scalars(layout, base)
    for key in _keys(layout, base):

        def part(fragment: Fragment, key: str = key) -> torch.Tensor | None:
            state = base.state.get(fragment.flat, {})
            return fragment.of(state[key]) if key in state else None

        for name, value in layout.to_rows(part).items():
            plain.state[rows[id(layout.parameters[name])]][key] = value
    for name, values in scalars.items():
        plain.state[rows[id(layout.parameters[name])]].update(values)
    return plain


def _scalars(layout: _Layout, base: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the states that aren't by element, such as the step, of each parameter."""
    own = {
        name: {
            key: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for key, value in cast("Mapping[str, Any]", base.state.get(one.flat, {})).items()
            if not (isinstance(value, torch.Tensor) and value.shape == one.flat.shape)
        }
        for name, one in layout.own.items()
    }
    joined: dict[str, dict[str, Any]] = {}
    for found in by_rank(own):
        for name, values in found.items():
            joined.setdefault(name, values)
    # DeepSpeed's optimizers count in numbers, torch's in tensors.
    return {
        name: {
            key: torch.tensor(float(value)) if key == "step" and isinstance(value, (int, float)) else value
            for key, value in values.items()
        }
        for name, values in joined.items()
    }


def _write_optimizer(
    layout: _Layout,
    engine: Any,
    groups: Sequence[Sequence[torch.Tensor]],
    rows: Mapping[int, nn.Parameter],
    plain: Optimizer,
) -> None:
    """Write the states and options of a plain optimizer into DeepSpeed's. Collective."""
    base = _base(engine)
    for own, group in zip(base.param_groups, plain.param_groups, strict=True):
        own.update({key: value for key, value in group.items() if key not in ("params", "param_names")})
    states = {
        name: cast("Mapping[str, Any]", plain.state.get(rows[id(layout.parameters[name])], {}))
        for name in layout.shapes
    }
    keys = sorted(
        {
            key
            for name, state in states.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and tuple(value.shape) == layout.shapes[name] and key != "step"
        }
    )
    for one in layout.own.values():
        base.state[one.flat] = {key: torch.zeros_like(one.flat) for key in keys}
    for key in keys:
        layout.from_rows(
            {name: cast("torch.Tensor", state[key]) for name, state in states.items() if key in state},
            lambda fragment, key=key: fragment.of(base.state[fragment.flat][key]),
        )
    counts_in_numbers = type(base).__name__.startswith(("DeepSpeedCPU", "FusedAdam"))
    for name, one in layout.own.items():
        for key, value in states[name].items():
            if key not in keys:
                is_number = counts_in_numbers and isinstance(value, torch.Tensor)
                base.state[one.flat][key] = int(value.item()) if is_number else value
    if not any(states.values()):
        base.state.clear()
    if layout.stage < 3:
        engine.optimizer._hp_optimizer_states_linked = False  # the next step links the new tensors
