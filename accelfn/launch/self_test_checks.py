"""The checks of the self-test: collectives, loaders, training and checkpoints."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelfn.checkpoint import load_state, save_state, verify_checkpoint
from accelfn.comm import (
    broadcast,
    broadcast_object_list,
    check_replicas,
    gather,
    gather_object,
    on_main_process,
    pad_across_processes,
    reduce,
    scatter,
    set_seed,
    synchronize_rng_states,
)
from accelfn.context import JOINED, Context, World
from accelfn.context.config import DataLoaderConfiguration, GradScalerKwargs
from accelfn.data import gather_for_metrics, loader_state, microbatches, prepare_data_loader, restore_loader
from accelfn.launch.self_test import CHECK_NAMES
from accelfn.training import accumulate, backward, init_scaler, optimizer_step, prepare, unwrap_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Input of a check.

    Attributes:
        ctx: The configured context.
        fault: Fault to inject on the last rank, or "".
        folder: Directory for files; "" for a temporary one.
    """

    ctx: Context
    fault: str = ""
    folder: str = ""

    def injects(self, fault: str) -> bool:
        """Return whether to inject a fault on this rank."""
        return self.fault == fault and self.ctx.rank == self.ctx.num_processes - 1


class Check(NamedTuple):
    """A check.

    Attributes:
        name: Its name.
        run: Runs it on every rank. Returns a remark, or raises.
    """

    name: str
    run: Callable[[Trial], str]


def demand(condition: bool, message: str) -> None:
    """Fail the check unless ``condition`` holds; unlike ``assert``, under ``python -O`` too.

    Raises:
        AssertionError: With ``message``.
    """
    if not condition:
        raise AssertionError(message)


def check_world(trial: Trial) -> str:
    """Ranks are numbered correctly and have the same settings."""
    ctx = trial.ctx
    mine: dict[str, Any] = {
        "precision": ctx.mixed_precision,
        "gradient accumulation": ctx.gradient_accumulation_steps,
        "kind of device": ctx.device.type,
        "torch": torch.__version__,
        "guard": str(ctx.guard.mode),
    }
    if trial.injects("settings"):
        mine["precision"] = "another one"
    gathered = gather_object(ctx, [(ctx.rank, ctx.world.node_rank, ctx.local_rank, mine)])
    ranks = [rank for rank, *_ in gathered]
    demand(ranks == list(range(ctx.num_processes)), f"the ranks are {ranks}")
    local_ranks = [(node, local) for _, node, local, _ in gathered]
    demand(len(set(local_ranks)) == ctx.num_processes, f"repeated (node, local rank): {local_ranks}")
    for name in mine:
        ranks_by_value = {str(settings[name]): rank for rank, *_, settings in gathered}
        shown = ", ".join(f"{value!r} on rank {rank}" for value, rank in ranks_by_value.items())
        demand(len(ranks_by_value) == 1, f"the ranks differ in {name}: {shown}")
    return f"{ctx.device.type}, {ctx.mixed_precision}, {ctx.world.num_nodes} node(s)"


def _numbers(tensor: torch.Tensor) -> list[Any]:
    return cast("list[Any]", tensor.flatten().tolist())  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped


def check_collectives(trial: Trial) -> str:
    """Collectives transfer trees of tensors of several dtypes correctly."""
    ctx = trial.ctx
    size, rank = ctx.num_processes, ctx.rank
    if trial.injects("death"):
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    if trial.injects("hang"):
        time.sleep(3600)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tree = {str(dtype): torch.full((2, 3), rank + 1, dtype=dtype, device=ctx.device) for dtype in dtypes}
    tree["flag"] = torch.tensor([rank % 2 == 0], device=ctx.device)
    if trial.injects("value"):
        tree["torch.float32"][1, 2] += 1
    everything = gather(ctx, tree)
    for dtype in dtypes:
        expected = torch.arange(1, size + 1, dtype=dtype, device=ctx.device).repeat_interleave(2)[:, None]
        gathered = everything[str(dtype)]
        wrong = _numbers((gathered != expected.expand(-1, 3)).any(1).nonzero())
        ranks = sorted({row // 2 for row in wrong})
        demand(not ranks, f"gather returned wrong {dtype} values for rank(s) {ranks}")
    total = reduce(ctx, tree["torch.float32"])
    demand(bool((total == size * (size + 1) / 2).all()), f"the sum over ranks is {_numbers(total)}")
    mean = reduce(ctx, tree["torch.float32"], reduction="mean")
    demand(bool((mean == (size + 1) / 2).all()), f"the mean over ranks is {_numbers(mean)}")
    last = broadcast(ctx, tree, from_process=size - 1)["torch.int64"]
    demand(bool((last == size).all()), f"broadcast from rank {size - 1} returned {_numbers(last)}")
    parts = torch.arange(2 * size, device=ctx.device)
    part = scatter(ctx, parts)
    demand(_numbers(part) == [2 * rank, 2 * rank + 1], f"scatter returned {_numbers(part)} on rank {rank}")
    padded = pad_across_processes(ctx, torch.ones(rank + 1, device=ctx.device))
    demand(
        padded.shape == (size,) and float(padded.sum()) == rank + 1, f"padding returned {_numbers(padded)}"
    )
    return f"backend {ctx.world.backend or 'none, one rank'}"


def check_mesh(trial: Trial) -> str:
    """Collectives along each mesh axis involve exactly the ranks of that axis."""
    ctx = trial.ctx
    plan = ctx.mesh_plan
    mine = torch.tensor([ctx.rank + trial.injects("value")], device=ctx.device)
    axes = plan.active()
    for axis in (*axes, *JOINED):
        along, expected = ctx.along(axis), list(plan.group(ctx.rank, axis))
        ranks = _numbers(gather(along, mine))
        demand(ranks == expected, f"gather along {axis} returned ranks {ranks} instead of {expected}")
        total = _numbers(reduce(along, mine))[0]
        demand(total == sum(expected), f"the sum of {expected} along {axis} is {total}")
        position = (ctx.coordinate(axis), ctx.axis_size(axis))
        demand(position == (along.rank, along.num_processes), f"wrong coordinate along {axis}: {position}")
    return " x ".join(f"{axis} {plan.size(axis)}" for axis in axes)


def check_random(trial: Trial) -> str:
    """Seeds make random numbers equal or different on ranks, and states can be synchronized."""
    ctx = trial.ctx
    set_seed(11 + trial.injects("seed"))
    check_replicas(ctx, torch.rand(4), name="numbers after set_seed(11)")
    set_seed(11, ctx=ctx, device_specific=True)
    along = ctx.along("loss")  # ranks that share a batch share its seed
    numbers = _numbers(gather(along, torch.rand(1, device="cpu").to(ctx.device)))
    demand(len(set(numbers)) == len(numbers), f"device-specific seeds repeat random numbers: {numbers}")
    generator = torch.Generator()
    generator.manual_seed(ctx.rank)
    synchronize_rng_states(ctx, ["torch", "generator"], generator)
    synchronized = (torch.rand(4), torch.rand(4, generator=generator))
    check_replicas(ctx, synchronized, name="numbers after synchronize_rng_states")
    return ""


_SAMPLES = 41  # a prime: no number of ranks and no batch size divides it


def _loader(ctx: Context, batch_size: int, *, shuffle: bool = True, **options: Any) -> Any:
    configured = ctx.replace(dataloader_config=DataLoaderConfiguration(data_seed=5, **options))
    # Two tensors, so that a batch is a tree.
    numbers = torch.arange(_SAMPLES)
    loader: DataLoader[Any] = DataLoader(TensorDataset(numbers, 2 * numbers), batch_size, shuffle=shuffle)
    return configured, prepare_data_loader(configured, loader)


def _read(trial: Trial, ctx: Context, loader: Any) -> list[int]:
    """Return the samples that all ranks read in a pass, in the order of the epoch."""
    samples: list[int] = []
    for (numbers, doubled), micro in microbatches(ctx, loader):
        if trial.injects("data"):
            numbers = numbers.roll(1) + 1
        gathered = gather_for_metrics(ctx, (numbers, doubled), micro)
        demand(numbers.device == ctx.device, f"a batch is on {numbers.device} instead of {ctx.device}")
        samples += gathered[0].tolist()
        is_consistent = torch.equal(2 * gathered[0], gathered[1])
        demand(is_consistent, f"the leaves of a batch are of different samples: {samples[-8:]}")
    return samples


def _read_alone(batch_size: int, epoch: int = 0) -> list[int]:
    """Return the samples that a single process reads in an epoch."""
    ctx, loader = _loader(Context(), batch_size)
    trial = Trial(ctx=ctx)
    for _ in range(epoch):
        _read(trial, ctx, loader)
    return _read(trial, ctx, loader)


def check_shuffled(trial: Trial) -> str:
    """Two shuffled epochs contain each sample once, in the order of one process."""
    ctx, loader = _loader(trial.ctx, 4)
    first, second = _read(trial, ctx, loader), _read(trial, ctx, loader)
    for epoch in (first, second):
        is_complete = sorted(epoch) == list(range(_SAMPLES))
        demand(is_complete, f"an epoch of {_SAMPLES} samples contained {sorted(epoch)}")
    demand(first != second, "two shuffled epochs have the same order")
    demand(first == _read_alone(4), "the order differs from that of one process")
    demand(second == _read_alone(4, 1), "the order of the second epoch differs from that of one process")
    return f"{_SAMPLES} samples, twice"


def check_uneven(trial: Trial) -> str:
    """With even batches, all ranks have the same number of steps; without, each sample is read once."""
    ctx, loader = _loader(trial.ctx, 3, shuffle=False)
    steps = gather_object(ctx, [sum(1 for _ in loader)])
    demand(len(set(steps)) == 1, f"with even batches, the ranks have {steps} batches")
    ctx, loader = _loader(trial.ctx, 3, shuffle=False, even_batches=False)
    mine = [number for numbers, _ in loader for number in numbers.tolist()]
    samples = gather_object(ctx.along("dp"), mine)  # ranks along other axes read the same batches
    demand(sorted(samples) == list(range(_SAMPLES)), f"without even batches, the ranks read {samples}")
    return f"{steps[0]} steps each"


def check_resumed(trial: Trial) -> str:
    """An interrupted epoch resumes in another loader."""
    ctx, loader = _loader(trial.ctx, 3)
    state, head = None, list[int]()
    for count, ((numbers, _), micro) in enumerate(microbatches(ctx, loader)):
        head += gather_for_metrics(ctx, numbers, micro).tolist()
        if count == 1:
            state = loader_state(loader)
            break
    if state is None:  # with many ranks
        return "the epoch was too short"
    _, again = _loader(trial.ctx, 3)
    restore_loader(again, state)
    rest = _read(trial, ctx, again)
    demand(head + rest == _read_alone(3), f"the ranks read {head}, then {rest}")
    return ""


_ROWS_PER_RANK = 4
_STEPS = 6


class _Small(nn.Sequential):
    """The model of all checks, with a tensor-parallel plan."""

    tp_plan: ClassVar[Mapping[str, str]] = MappingProxyType({"0": "colwise", "2": "rowwise"})


def width_for(ctx: Context) -> int:
    """Return a width of the model that the tensor-parallel size divides."""
    return 16 * ctx.axis_size("tp")


def make_parts(ctx: Context, batch_size: int, num_rows: int, width: int) -> tuple[nn.Module, Any, Any]:
    """Return a model, an optimizer with state and a shuffled loader, the same on every rank.

    Args:
        ctx: Determines the device of the model.
        batch_size: Batch size of the loader.
        num_rows: Number of samples.
        width: Width of the hidden layer.
    """
    state = torch.get_rng_state()
    set_seed(3)
    model = _Small(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1)).to(ctx.device)
    inputs = torch.randn(num_rows, 6)
    targets = inputs.sum(1, keepdim=True).sin()
    torch.set_rng_state(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: DataLoader[Any] = DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=True)
    return model, optimizer, loader


def train(trial: Trial, ctx: Context, batch_size: int, num_rows: int) -> dict[str, torch.Tensor]:
    """Train for two epochs, and return the weights on the CPU."""
    ctx = ctx.replace(dataloader_config=DataLoaderConfiguration(data_seed=9))
    parts = make_parts(ctx, batch_size, num_rows, width_for(trial.ctx))
    model, optimizer, loader = prepare(ctx, *parts)
    if trial.injects("model"):
        with torch.no_grad():
            next(iter(model.parameters())).add_(0.5)
    scaler = init_scaler(ctx)
    for _ in range(2):
        for (inputs, targets), micro in microbatches(ctx, loader):
            with accumulate(ctx, micro, model):
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
                scaler = backward(ctx, loss, scaler, micro)
            if micro.sync:
                scaler = optimizer_step(ctx, optimizer, scaler, max_norm=5.0)
    weights = unwrap_model(model).state_dict()
    check_replicas(ctx, weights, name="weights after training")
    return {name: _unsharded(tensor).float().cpu() for name, tensor in weights.items()}


def _unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor. Every rank must call it."""
    full_tensor: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return (tensor if full_tensor is None else full_tensor()).detach()


def _world_of_one(ctx: Context) -> Context:
    """Return a context of one rank on this rank's device, with the same settings."""
    return Context(world=World(device=ctx.device), precision=ctx.precision, accumulation=ctx.accumulation)


def _compare(trial: Trial, ctx: Context, tolerance: float) -> str:
    """Compare the weights after training on all ranks with those of one process with the same batches."""
    size, window = ctx.axis_size("dp"), ctx.gradient_accumulation_steps
    num_rows = _ROWS_PER_RANK * size * window * _STEPS // 2
    together = train(trial, ctx, _ROWS_PER_RANK, num_rows)
    without_fault = dataclasses.replace(trial, fault="")
    alone = train(without_fault, _world_of_one(ctx), _ROWS_PER_RANK * size, num_rows)
    error = max(float((together[name] - alone[name]).abs().max()) for name in alone)
    demand(
        error <= tolerance,
        f"the weights differ from those of one process by {error:.2g}; rounding is at most {tolerance:g}",
    )
    return f"within {error:.1e}"


def check_fp32(trial: Trial) -> str:
    """Training in full precision matches one process."""
    return _compare(trial, trial.ctx.replace(mixed_precision="no", gradient_accumulation_steps=1), 1e-4)


def check_configured(trial: Trial) -> str:
    """Training with the configured precision, accumulation and parallelism matches one process."""
    ctx = trial.ctx
    if ctx.mixed_precision == "fp16":
        # With the default scale, gradients may overflow only on the ranks or only in one process, so that one
        # of the two skips a step.
        ctx = ctx.replace(kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    remark = _compare(trial, ctx, 1e-4 if ctx.mixed_precision == "no" else 5e-2)
    return f"{ctx.mixed_precision}, {ctx.gradient_accumulation_steps} per window, {remark}"


def check_checkpoint(trial: Trial) -> str:
    """Model, optimizer and random states are restored from a checkpoint."""
    ctx = trial.ctx
    # Several machines may share the working directory, but not the temporary one.
    within = trial.folder or (None if ctx.world.num_nodes == 1 else ".")

    def make() -> str:
        return tempfile.mkdtemp(prefix="accelfn-test-", dir=within)

    folder = Path(broadcast_object_list(ctx, [make() if ctx.is_main_process else ""])[0])
    try:
        model, optimizer, _ = prepare(ctx, *make_parts(ctx, 4, 8, width_for(ctx)))
        model(torch.ones(2, 6, device=ctx.device)).sum().backward()
        optimizer.step()
        tree: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 1}
        before = {name: tensor.clone() for name, tensor in unwrap_model(model).state_dict().items()}
        save_state(ctx, folder / "checkpoint", tree)
        drawn = torch.rand(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        back = load_state(ctx, folder / "checkpoint", {**tree, "step": 0})
        after = unwrap_model(model).state_dict()
        other = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
        demand(not other, f"{', '.join(other)} changed in the checkpoint")
        demand(back["step"] == 1, f"the step was saved as 1 and loaded as {back['step']}")
        demand(torch.equal(drawn, torch.rand(3)), "the random states were not restored")

        def count() -> int:
            return verify_checkpoint(folder / "checkpoint").num_bytes

        num_bytes = on_main_process(ctx, share=True)(count)()
        return f"{num_bytes} bytes"
    finally:
        if ctx.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


_RUNS = (
    *(check_world, check_collectives, check_random, check_mesh),
    *(check_shuffled, check_uneven, check_resumed),
    *(check_fp32, check_configured, check_checkpoint),
)
CHECKS = tuple(Check(name, run) for name, run in zip(CHECK_NAMES, _RUNS, strict=True))
