"""The state of a model that DeepSpeed trains, as a plain module and optimizer with row shards.

ZeRO keeps each rank's part of flattened parameters. Its own functions join and split one tensor at a time;
here these become ``DTensor``s with the rows of the logical tensors, so that checkpoints neither depend on the
stage nor on the number of ranks.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.optim import Optimizer

from accelfn.errors import NotAvailableError
from accelfn.parallel.engines.engine import EngineState
from accelfn.tree import is_dtensor


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
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise NotAvailableError(
            "DeepSpeed keeps the optimizer's state on an NVMe disk, from where it can't be saved. Use "
            "model.save_checkpoint() of DeepSpeed, or offload to the CPU."
        )
    if hasattr(engine.optimizer, "partition_all_parameters"):  # shards that DeepSpeed doesn't step
        engine.optimizer.partition_all_parameters()
    zero = _Zero(engine, stage, groups)
    gathered: Any = importlib.import_module("deepspeed.runtime.zero").GatheredParameters
    module: nn.Module = engine.module
    named = dict(module.named_parameters())
    model = _empty_model(module)
    rows: dict[int, nn.Parameter] = {}
    for name, one in named.items():
        if name in zero.trained:
            value = zero.rows(one)
        else:
            with gathered(one):
                value = one.detach().to(dtypes.get(name, one.dtype)).clone()
        rows[id(one)] = nn.Parameter(value, requires_grad=one.requires_grad)
    for name, one in module.named_parameters(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent).register_parameter(last, rows[id(one)])
    buffers: dict[str, torch.Tensor] = {}
    saved = set(module.state_dict())
    for name, buffer in module.named_buffers():
        if name in saved:
            parent, _, last = name.rpartition(".")
            buffers[name] = buffer.to(dtypes.get(name, buffer.dtype)).clone()
            model.get_submodule(parent).register_buffer(last, buffers[name])
    optimizer = _plain_optimizer(zero, groups, rows) if groups else None

    @torch.no_grad()
    def write_back() -> None:
        for name, buffer in module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        if zero.trained and stage == 3:
            engine.optimizer.checkpoint_event_prologue()  # releases gathered parameters
        for one in zero.trained.values():
            zero.write(one, rows[id(one)])
        if zero.trained and stage == 3:
            engine.optimizer.checkpoint_event_epilogue()
        elif zero.trained:
            engine.optimizer.update_lp_params()
        for name, one in named.items():
            if name not in zero.trained:
                with gathered(one, modifier_rank=0):
                    one.copy_(rows[id(one)])
        if optimizer is not None:
            _write_optimizer(zero, rows, optimizer)

    return EngineState(model, optimizer, write_back)


class _Zero:
    """ZeRO's float32 tensors and states of parameters, by its own functions. All is collective."""

    def __init__(self, engine: Any, stage: int, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self.stage = stage
        self._zero = engine.optimizer
        self.base: Any = engine.optimizer.optimizer if groups else None  # the optimizer inside
        in_groups = {id(one) for group in groups for one in group}
        named = cast("nn.Module", engine.module).named_parameters()
        self.trained = {name: one for name, one in named if one.requires_grad and id(one) in in_groups}
        by_stage = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        self._flats: Sequence[torch.Tensor] = getattr(self._zero, by_stage) if groups else ()
        device = self._flats[0].device if self._flats else torch.device(engine.device)
        self._device = device  # the host, where ZeRO offloads the state
        self._mesh = DeviceMesh.from_group(cast("dist.ProcessGroup", dist.group.WORLD), device.type)

    def flat(self, parameter: Any) -> torch.Tensor | None:
        """Return the flat tensor with this rank's part of a parameter; None where it has none."""
        if self.stage == 3:
            return self._flats[int(self._zero.grad_position[self._zero.get_param_id(parameter)][0])]
        mapping = parameter._hp_mapping
        return None if mapping is None else self._flats[int(mapping.param_group_index)]

    def link(self) -> None:
        """Let ZeRO find the optimizer's present states, as it does in its first step."""
        if self.stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
            self._zero._hp_optimizer_states_linked = False  # the next step may make others

    def rows(self, parameter: Any, key: str | None = None) -> torch.Tensor:
        """Return this rank's rows of a parameter, or of its state ``key``."""
        from torch.distributed.tensor import Shard, distribute_tensor  # adds filters of warnings

        if self.stage == 3:
            full = self._zero.get_full_hp_param(parameter, key)
        else:
            full = parameter.get_full_hp_param(key)
        full = full.detach().to(self._device)
        return distribute_tensor(full, self._mesh, [Shard(0)], src_data_rank=None) if full.dim() else full

    def write(self, parameter: Any, rows: Any, key: str | None = None) -> None:
        """Set a parameter, or its state ``key``, from the rows of all ranks."""
        value: torch.Tensor = rows.detach().full_tensor() if is_dtensor(rows) else rows.detach()
        if self.stage < 3:
            parameter.set_full_hp_param(value, key)
            return
        numel, rank, size = parameter.ds_tensor.numel(), dist.get_rank(), dist.get_world_size()
        # Not set_full_hp_param, which doesn't fill up the last rank's part.
        part = F.pad(value.flatten(), (0, numel * size - value.numel())).narrow(0, numel * rank, numel)
        self._zero.set_local_hp_param(part, parameter, key)
        if key is None:
            parameter.ds_tensor.data.copy_(part)

    def states(self) -> dict[str, tuple[list[str], dict[str, Any]]]:
        """Return, of each trained parameter, the keys of states by element, and its other states."""
        own: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for name, one in self.trained.items():
            flat = self.flat(one)
            keys, others = list[str](), dict[str, Any]()
            state: dict[str, Any] = {} if flat is None else self.base.state.get(flat, {})
            for key, value in state.items():
                is_tensor = isinstance(value, torch.Tensor)
                if flat is not None and is_tensor and value.shape == flat.shape:
                    keys.append(key)
                else:
                    others[key] = value.detach().cpu() if is_tensor else value
            own[name] = sorted(keys), others
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, own)  # pyright: ignore[reportUnknownMemberType]
        # Of the first rank that has a part.
        return {name: next((one[name] for one in by_rank if any(one[name])), own[name]) for name in own}


def _empty_model(module: nn.Module) -> nn.Module:
    """Return a module without parameters, with the submodules' names."""
    model = nn.Module()
    for name in dict(cast("Iterable[tuple[str, nn.Module]]", module.named_modules())):
        if name:
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent).add_module(last, nn.Module())
    return model.train(module.training)


def _plain_optimizer(
    zero: _Zero, groups: Sequence[Sequence[torch.Tensor]], rows: Mapping[int, nn.Parameter]
) -> Optimizer:
    base: Optimizer = zero.base
    kind = type(base)
    if kind.__name__ == "DeepSpeedCPUAdagrad":
        kind = torch.optim.Adagrad
    elif kind.__name__ in ("DeepSpeedCPUAdam", "FusedAdam"):
        kind = torch.optim.AdamW if getattr(base, "adam_w_mode", True) else torch.optim.Adam
    plain = kind.__new__(kind)
    Optimizer.__init__(
        plain, [{"params": [rows[id(one)] for one in group]} for group in groups], base.defaults
    )
    for own, group in zip(plain.param_groups, base.param_groups, strict=True):
        own.update({key: value for key, value in group.items() if key != "params"})
    plain.state = defaultdict(dict)
    zero.link()
    for name, (keys, others) in zero.states().items():
        if not keys and not others:
            continue
        state = plain.state[rows[id(zero.trained[name])]]
        state.update({key: zero.rows(zero.trained[name], key) for key in keys})
        state.update(others)
        if isinstance(state.get("step"), (int, float)):  # of DeepSpeed's, which count in numbers
            state["step"] = torch.tensor(float(state["step"]))
    return plain


def _write_optimizer(zero: _Zero, rows: Mapping[int, nn.Parameter], plain: Optimizer) -> None:
    """Write the states and options of a plain optimizer into DeepSpeed's. Collective."""
    base: Optimizer = zero.base
    for own, group in zip(base.param_groups, plain.param_groups, strict=True):
        own.update({key: value for key, value in group.items() if key not in ("params", "param_names")})
    counts_in_numbers = type(base).__name__.startswith(("DeepSpeedCPU", "FusedAdam"))
    by_element: dict[str, dict[str, Any]] = {}
    base.state.clear()
    for name, one in zero.trained.items():
        target = rows[id(one)]
        by_element[name] = {}
        for key, value in plain.state.get(target, {}).items():
            flat = zero.flat(one)
            if isinstance(value, torch.Tensor) and value.shape == target.shape and key != "step":
                by_element[name][key] = value
                if flat is not None and key not in base.state[flat]:
                    base.state[flat][key] = torch.zeros_like(flat)
            elif flat is not None:
                is_number = counts_in_numbers and isinstance(value, torch.Tensor)
                base.state[flat][key] = int(value.item()) if is_number else value
    zero.link()
    for name, values in by_element.items():
        for key in sorted(values):
            zero.write(zero.trained[name], values[key], key)
