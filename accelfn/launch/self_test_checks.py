"""What each rank checks, in its order: the ranks themselves, loaders, training, checkpoints."""

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

from accelfn.accelerator import Accelerator
from accelfn.checkpoint import load_state, save_state, verify_checkpoint
from accelfn.comm import (
    TriggerState,
    broadcast,
    broadcast_object_list,
    check_replicas,
    check_trigger,
    gather,
    gather_object,
    main_process_first,
    on_main_process,
    pad_across_processes,
    reduce,
    scatter,
    set_seed,
    set_trigger,
    split_between_processes,
    synchronize_rng_states,
)
from accelfn.context import JOINED, Context, World, plan_mesh
from accelfn.context.config import DataLoaderConfiguration, GradScalerKwargs
from accelfn.data import gather_for_metrics, loader_state, microbatches, prepare_data_loader, restore_loader
from accelfn.launch.self_test import CHECK_NAMES
from accelfn.training import accumulate, backward, init_scaler, optimizer_step, prepare, unwrap_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a check is given.

    Attributes:
        ctx: The configured context.
        fault: What is to go wrong on the last rank, or "".
        folder: A directory for files, which is removed afterwards; "": one of the system's.
    """

    ctx: Context
    fault: str = ""
    folder: str = ""

    def spoils(self, fault: str) -> bool:
        """Whether this rank is the one on which ``fault`` is to happen."""
        return self.fault == fault and self.ctx.rank == self.ctx.num_processes - 1


class Check(NamedTuple):
    """One check.

    Attributes:
        name: In the table.
        run: Every rank calls it. It returns what there is to remark, or raises.
    """

    name: str
    run: Callable[[Trial], str]


def demand(condition: bool, message: str) -> None:
    """Fail the check unless ``condition`` holds.

    Raises:
        AssertionError: With ``message``. Unlike ``assert``, under ``python -O`` too.
    """
    if not condition:
        raise AssertionError(message)


def check_world(trial: Trial) -> str:
    """Each rank is one of the world's, and all are configured alike."""
    ctx = trial.ctx
    mine: dict[str, Any] = {
        "precision": ctx.mixed_precision,
        "gradient accumulation": ctx.gradient_accumulation_steps,
        "kind of device": ctx.device.type,
        "torch": torch.__version__,
        "guard": str(ctx.guard.mode),
    }
    if trial.spoils("settings"):
        mine["precision"] = "another one"
    told = gather_object(ctx, [(ctx.rank, ctx.world.node_rank, ctx.local_rank, mine)])
    ranks = [rank for rank, *_ in told]
    demand(ranks == list(range(ctx.num_processes)), f"the ranks are {ranks}, and not each number once")
    places = [(node, local) for _, node, local, _ in told]
    demand(len(set(places)) == len(places), f"two ranks have one place: (node, local rank) are {places}")
    for name in mine:
        found = {str(one[name]): rank for rank, *_, one in told}
        demand(len(found) == 1, f"the ranks differ in {name}: {_by_rank(found)}")
    return f"{ctx.device.type}, {ctx.mixed_precision}, {ctx.world.num_nodes} node(s)"


def _numbers(tensor: torch.Tensor) -> list[Any]:
    return cast("list[Any]", tensor.flatten().tolist())  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped


def _by_rank(found: dict[str, int]) -> str:
    return ", ".join(f"{value!r} on rank {rank}" for value, rank in found.items())


def check_collectives(trial: Trial) -> str:
    """Tensors arrive as they were sent, of several dtypes, in one tree."""
    ctx = trial.ctx
    size, rank = ctx.num_processes, ctx.rank
    if trial.spoils("death"):
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    if trial.spoils("hang"):
        time.sleep(3600)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tree = {str(dtype): torch.full((2, 3), rank + 1, dtype=dtype, device=ctx.device) for dtype in dtypes}
    tree["flag"] = torch.tensor([rank % 2 == 0], device=ctx.device)
    if trial.spoils("value"):
        tree["torch.float32"][1, 2] += 1
    everything = gather(ctx, tree)
    for dtype in dtypes:
        expected = torch.arange(1, size + 1, dtype=dtype, device=ctx.device).repeat_interleave(2)[:, None]
        found = everything[str(dtype)]
        wrong = _numbers((found != expected.expand(-1, 3)).any(1).nonzero())
        ranks = sorted({row // 2 for row in wrong})
        demand(not ranks, f"gather gave other numbers of {dtype} than rank(s) {ranks} sent")
    total = reduce(ctx, tree["torch.float32"])
    demand(bool((total == size * (size + 1) / 2).all()), f"the sum over ranks is {_numbers(total)}")
    mean = reduce(ctx, tree["torch.float32"], reduction="mean")
    demand(bool((mean == (size + 1) / 2).all()), f"the mean over ranks is {_numbers(mean)}")
    last = broadcast(ctx, tree, from_process=size - 1)["torch.int64"]
    demand(bool((last == size).all()), f"broadcast from rank {size - 1} gave {_numbers(last)}")
    parts = torch.arange(2 * size, device=ctx.device)
    part = scatter(ctx, parts)
    demand(_numbers(part) == [2 * rank, 2 * rank + 1], f"scatter gave rank {rank} {_numbers(part)}")
    padded = pad_across_processes(ctx, torch.ones(rank + 1, device=ctx.device))
    demand(padded.shape == (size,) and float(padded.sum()) == rank + 1, f"padding gave {_numbers(padded)}")
    return f"over {ctx.world.backend or 'nothing: a world of one'}"


def check_objects(trial: Trial) -> str:
    """Python objects arrive too, and inputs are shared out."""
    ctx = trial.ctx
    got = gather_object(ctx, [{"rank": ctx.rank, "text": "ä" * ctx.rank}])
    demand([one["rank"] for one in got] == list(range(ctx.num_processes)), f"gather_object gave {got}")
    sent = broadcast_object_list(ctx, [("from", ctx.rank), {ctx.rank: None}])
    demand(sent == [("from", 0), {0: None}], f"broadcast_object_list gave {sent}")
    items = list(range(3 * ctx.num_processes + 1))
    shares = gather_object(ctx, list(split_between_processes(ctx, items)))
    demand(shares == items, f"the shares of {items} are {shares}")
    return ""


def check_process_control(trial: Trial) -> str:
    """The main process goes first, and what it alone computes all can have."""
    ctx = trial.ctx
    with main_process_first(ctx):
        pass

    def number() -> int:
        return ctx.rank + 7

    shared = on_main_process(ctx, share=True)(number)()
    demand(shared == 7, f"on_main_process(share=True) gave {shared}, and the main process computed 7")
    return ""


def check_trigger_state(trial: Trial) -> str:
    """A flag that one rank sets is seen by all, once."""
    ctx = trial.ctx
    state = set_trigger(TriggerState()) if ctx.rank == ctx.num_processes - 1 else TriggerState()
    state, fired = check_trigger(ctx, state)
    demand(fired, "the last rank has set the flag, and this one does not see it")
    _, fired = check_trigger(ctx, state)
    demand(not fired, "the flag is seen a second time")
    return ""


def check_mesh(trial: Trial) -> str:
    """Along each axis of the mesh, ranks hear from those beside them and from no other."""
    ctx = trial.ctx
    plan = plan_mesh(None, ctx.num_processes) if ctx.mesh is None else ctx.mesh.plan
    mine = torch.tensor([ctx.rank + trial.spoils("value")], device=ctx.device)
    axes = plan.active()
    for axis in (*axes, *JOINED):
        beside, expected = ctx.along(axis), list(plan.group(ctx.rank, axis))
        found = _numbers(gather(beside, mine))
        demand(found == expected, f"along {axis}, rank {ctx.rank} heard from {found} and not from {expected}")
        total = _numbers(reduce(beside, mine))[0]
        demand(total == sum(expected), f"along {axis}, the ranks {expected} add up to {total}")
        place = (ctx.coordinate(axis), ctx.axis_size(axis))
        demand(place == (beside.rank, beside.num_processes), f"along {axis}, the place of a rank is {place}")
    return " x ".join(f"{axis} {plan.size(axis)}" for axis in axes)


def check_random(trial: Trial) -> str:
    """One seed gives one sequence on all ranks; states can be brought together, and held apart."""
    ctx = trial.ctx
    set_seed(11 + trial.spoils("seed"))
    check_replicas(ctx, torch.rand(4), name="numbers after set_seed(11)")
    set_seed(11, ctx=ctx, device_specific=True)
    others = ctx.along("loss")  # who shares a batch shares its seed
    drawn = _numbers(gather(others, torch.rand(1, device="cpu").to(ctx.device)))
    demand(len(set(drawn)) == len(drawn), f"ranks with seeds of their own have drawn the same: {drawn}")
    generator = torch.Generator()
    generator.manual_seed(ctx.rank)
    synchronize_rng_states(ctx, ["torch", "generator"], generator)
    numbers = (torch.rand(4), torch.rand(4, generator=generator))
    check_replicas(ctx, numbers, name="numbers after synchronize_rng_states")
    return ""


_SAMPLES = 41  # a prime: no number of ranks and no batch size divides it


def _loader(ctx: Context, batch_size: int, *, shuffle: bool = True, **options: Any) -> Any:
    configured = ctx.replace(dataloader_config=DataLoaderConfiguration(data_seed=5, **options))
    # Twice the same numbers, so that a batch is a tree.
    numbers = torch.arange(_SAMPLES)
    loader: DataLoader[Any] = DataLoader(TensorDataset(numbers, 2 * numbers), batch_size, shuffle=shuffle)
    return configured, prepare_data_loader(configured, loader)


def _read(trial: Trial, ctx: Context, loader: Any) -> list[int]:
    """Return the samples of a pass over all ranks, in the order of the epoch."""
    found: list[int] = []
    for (numbers, doubled), micro in microbatches(ctx, loader):
        if trial.spoils("data"):
            numbers = numbers.roll(1) + 1
        told = gather_for_metrics(ctx, (numbers, doubled), micro)
        demand(numbers.device == ctx.device, f"a batch lies on {numbers.device}, and not on {ctx.device}")
        found += told[0].tolist()
        demand(
            torch.equal(2 * told[0], told[1]), f"the leaves of a batch don't belong together: {found[-8:]}"
        )
    return found


def _alone(batch_size: int, epoch: int = 0) -> list[int]:
    """Return the order in which one process reads."""
    ctx, loader = _loader(Context(), batch_size)
    trial = Trial(ctx=ctx)
    for _ in range(epoch):
        _read(trial, ctx, loader)
    return _read(trial, ctx, loader)


def check_shuffled(trial: Trial) -> str:
    """Two shuffled epochs have each sample once, in the order of one process."""
    ctx, loader = _loader(trial.ctx, 4)
    first, second = _read(trial, ctx, loader), _read(trial, ctx, loader)
    for found in (first, second):
        demand(sorted(found) == list(range(_SAMPLES)), f"an epoch of {_SAMPLES} samples had {sorted(found)}")
    demand(first != second, "two shuffled epochs have the same order")
    demand(first == _alone(4), "the order is another than that of one process")
    demand(second == _alone(4, 1), "the order of the second epoch is another than that of one process")
    return f"{_SAMPLES} samples, twice"


def check_uneven(trial: Trial) -> str:
    """With even batches ranks take equally many steps; without, the last ranks may have less."""
    ctx, loader = _loader(trial.ctx, 3, shuffle=False)
    steps = gather_object(ctx, [sum(1 for _ in loader)])
    demand(len(set(steps)) == 1, f"with even batches, the ranks have {steps} batches")
    ctx, loader = _loader(trial.ctx, 3, shuffle=False, even_batches=False)
    mine = [number for numbers, _ in loader for number in numbers.tolist()]
    everything = gather_object(ctx.along("dp"), mine)  # ranks beside each other on other axes read alike
    demand(sorted(everything) == list(range(_SAMPLES)), f"without even batches, the ranks read {everything}")
    return f"{steps[0]} steps each"


def check_split(trial: Trial) -> str:
    """A batch of the loader, cut into one part per rank."""
    batch_size = 2 * trial.ctx.axis_size("dp")
    ctx, loader = _loader(trial.ctx, batch_size, split_batches=True)
    found = _read(trial, ctx, loader)
    demand(found == _alone(batch_size), f"the ranks together read {found}")
    return ""


def check_dispatched(trial: Trial) -> str:
    """Batches that rank 0 reads and sends to the others."""
    ctx, loader = _loader(trial.ctx, 4, dispatch_batches=True)
    found = _read(trial, ctx, loader)
    demand(sorted(found) == list(range(_SAMPLES)), f"the ranks together read {sorted(found)}")
    return ""


def check_resumed(trial: Trial) -> str:
    """A pass that is broken off goes on with the rest, in another loader."""
    ctx, loader = _loader(trial.ctx, 3)
    state, head = None, list[int]()
    for count, ((numbers, _), micro) in enumerate(microbatches(ctx, loader)):
        head += gather_for_metrics(ctx, numbers, micro).tolist()
        if count == 1:
            state = loader_state(loader)
            break
    if state is None:  # so many ranks that two steps are the epoch
        return "the epoch was too short"
    _, again = _loader(trial.ctx, 3)
    restore_loader(again, state)
    rest = _read(trial, ctx, again)
    demand(head + rest == _alone(3), f"{head} was read, then {rest}")
    return ""


_ROWS_PER_RANK = 4
_STEPS = 6


class _Small(nn.Sequential):
    """What all checks train. It says how ranks along tp share its layers."""

    tp_plan: ClassVar[Mapping[str, str]] = MappingProxyType({"0": "colwise", "2": "rowwise"})


def width_for(ctx: Context) -> int:
    """Return a width of the model that the ranks along tp can share."""
    return 16 * ctx.axis_size("tp")


def make_parts(ctx: Context, batch_size: int, num_rows: int, width: int) -> tuple[nn.Module, Any, Any]:
    """Make a small model, an optimizer with memory and a shuffled loader, the same on every rank.

    Args:
        ctx: Says where the model lies until it is prepared.
        batch_size: Of the loader.
        num_rows: Of the data.
        width: Of the hidden layer.
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
    """Train for two epochs; give the weights on the CPU."""
    ctx = ctx.replace(dataloader_config=DataLoaderConfiguration(data_seed=9))
    parts = make_parts(ctx, batch_size, num_rows, width_for(trial.ctx))
    model, optimizer, loader = prepare(ctx, *parts)
    if trial.spoils("model"):
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
    return {name: _whole(tensor).float().cpu() for name, tensor in weights.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Bring together what ranks hold of a tensor. Every rank gets it."""
    gather: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)  # of a DTensor
    return (tensor if gather is None else gather()).detach()


def _world_of_one(ctx: Context) -> Context:
    """Return a world of one on this rank's device, configured alike."""
    return Context(world=World(device=ctx.device), precision=ctx.precision, accumulation=ctx.accumulation)


def _compare(trial: Trial, ctx: Context, tolerance: float) -> str:
    """Train on all ranks, and on this one alone with the batches of all, and compare the weights."""
    size, window = ctx.axis_size("dp"), ctx.gradient_accumulation_steps
    num_rows = _ROWS_PER_RANK * size * window * _STEPS // 2
    together = train(trial, ctx, _ROWS_PER_RANK, num_rows)
    quiet = dataclasses.replace(trial, fault="")
    alone = train(quiet, _world_of_one(ctx), _ROWS_PER_RANK * size, num_rows)
    furthest = max(float((together[name] - alone[name]).abs().max()) for name in alone)
    demand(
        furthest <= tolerance,
        f"the weights are {furthest:.2g} away from those of one process; at most {tolerance:g} is rounding",
    )
    return f"within {furthest:.1e}"


def check_fp32(trial: Trial) -> str:
    """In full precision."""
    return _compare(trial, trial.ctx.replace(mixed_precision="no", gradient_accumulation_steps=1), 1e-4)


def check_accumulation(trial: Trial) -> str:
    """Over windows of three batches."""
    return _compare(trial, trial.ctx.replace(mixed_precision="no", gradient_accumulation_steps=3), 1e-4)


def check_bf16(trial: Trial) -> str:
    """In bf16."""
    return _compare(trial, trial.ctx.replace(mixed_precision="bf16", gradient_accumulation_steps=1), 5e-2)


def check_configured(trial: Trial) -> str:
    """With all that is configured: precision, accumulation, and how models are prepared."""
    ctx = trial.ctx
    if ctx.mixed_precision == "fp16":
        # The first scale of a long run overflows now and then, and what overflows is another thing with
        # gradients of ranks than with those of one process: then one of the two skips a step.
        ctx = ctx.replace(kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    said = _compare(trial, ctx, 1e-4 if ctx.mixed_precision == "no" else 5e-2)
    return f"{ctx.mixed_precision}, {ctx.gradient_accumulation_steps} per window, {said}"


def check_accelerator(trial: Trial) -> str:
    """The Accelerator trains to the same bits as the functions."""
    ctx = trial.ctx.replace(mixed_precision="no", gradient_accumulation_steps=1)
    num_rows = _ROWS_PER_RANK * ctx.axis_size("dp") * _STEPS
    expected = train(trial, ctx, _ROWS_PER_RANK, num_rows)
    accelerator = Accelerator(
        mixed_precision="no",
        gradient_accumulation_steps=1,
        dataloader_config=DataLoaderConfiguration(data_seed=9),
    )
    try:
        parts = make_parts(ctx, _ROWS_PER_RANK, num_rows, width_for(ctx))
        model, optimizer, loader = accelerator.prepare(*parts)
        for _ in range(2):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(inputs).float(), targets))
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()
                    optimizer.zero_grad()
        found = accelerator.unwrap_model(model).state_dict()
        other = [
            name for name, tensor in expected.items() if not torch.equal(tensor, _whole(found[name]).cpu())
        ]
    finally:
        accelerator.close()
    demand(not other, f"{', '.join(other)} have other bits")
    return "the same bits"


def check_checkpoint(trial: Trial) -> str:
    """A model, its optimizer and the random states are saved, changed, and loaded."""
    ctx = trial.ctx
    # Several machines share the working directory rather than the system's own for such files.
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
        demand(not other, f"{', '.join(other)} came back with other bits")
        demand(back["step"] == 1, f"the number that was saved as 1 came back as {back['step']}")
        demand(torch.equal(drawn, torch.rand(3)), "the random states did not come back")

        def count() -> int:
            return verify_checkpoint(folder / "checkpoint").num_bytes

        num_bytes = on_main_process(ctx, share=True)(count)()
        return f"{num_bytes} bytes"
    finally:
        if ctx.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


CHECKS = tuple(
    Check(name, run)
    for name, run in zip(
        CHECK_NAMES,
        (
            *(check_world, check_collectives, check_objects, check_process_control, check_trigger_state),
            *(check_random, check_mesh, check_shuffled, check_uneven, check_split, check_dispatched),
            check_resumed,
            *(check_fp32, check_accumulation, check_bf16, check_configured, check_accelerator),
            check_checkpoint,
        ),
        strict=True,
    )
)
