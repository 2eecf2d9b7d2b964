"""The self-test on one rank: checks whose results are known, with a new world after a failure."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelfn.checkpoint import load_state, save_state, verify_checkpoint
from accelfn.comm import (
    broadcast,
    broadcast_object_list,
    check_replicas,
    failing_together,
    gather,
    gather_object,
    on_main_process,
    reduce,
    set_seed,
    synchronize_rng_states,
    wait_for_everyone,
)
from accelfn.config import DataLoaderConfiguration, GradScalerKwargs, Guard, InitProcessGroupKwargs
from accelfn.context import JOINED, Context, World, close_context, init_context, text_of
from accelfn.data import gather_for_metrics, loader_state, microbatches, prepare_data_loader, restore_loader
from accelfn.errors import AccelfnError, RemoteRankError
from accelfn.launch.command_line import read_arguments
from accelfn.launch.self_test import CHECK_NAMES, make_parser
from accelfn.training import accumulate, backward, init_scaler, optimizer_step, prepare, unwrap_model

_SAMPLES = 41  # a prime: no number of ranks and no batch size divides it
_ROWS_PER_RANK = 4
_STEPS = 6
_WIDTH = 100  # of the lines of an error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the self-test as one rank of the world that the environment variables describe.

    Args:
        argv: Arguments of the program; None for those of this process.

    Returns:
        The exit status: 1 if a check failed.

    Raises:
        SystemExit: The rank can't be set up; it says why.
    """
    options = read_arguments(make_parser(), sys.argv[1:] if argv is None else argv)
    timeout = timedelta(seconds=options.timeout)

    def open_context() -> Context:
        guard = Guard(timeout=timeout, long_timeout=timeout)
        return init_context(guard=guard, kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])

    try:
        ctx = open_context()
    except AccelfnError as error:
        sys.exit(f"accelfn test: the ranks can't be set up: {_describe(error)}")
    prints = ctx.is_main_process
    if prints:
        where = f"{ctx.num_processes} process(es) on {ctx.world.num_nodes} node(s), {ctx.device.type}"
        print(f"accelfn test: {where}", flush=True)
    checks = {name: run for name, run in CHECKS.items() if not options.only or name in options.only}
    passed = 0
    for result in run_checks(Trial(ctx, options.fault, options.folder), open_context, checks):
        passed += result[1] == "pass"
        if prints:
            print(format_result(result), flush=True)
    if prints:
        print(f"{passed} of {len(checks)} checks passed")
    return int(passed < len(checks))


@dataclass(frozen=True, slots=True)
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


#: Runs on every rank. Returns a remark, or raises.
Check = Callable[[Trial], str]


#: Name of a check; ``"pass"``, ``"FAIL"`` or ``"not run"``; duration in seconds; details or the error.
Result = tuple[str, str, float, str]


def run_checks(
    trial: Trial, open_context: Callable[[], Context], checks: Mapping[str, Check]
) -> Iterator[Result]:
    """Run checks in order on all ranks, yield the results on this rank, and close the context.

    A check that fails on one rank fails on all, and closes their world. The next check gets a new one; if the
    ranks can't open it, neither that check nor any after it is run.

    Ranks: every rank of the context.

    Args:
        trial: Input of the first check.
        open_context: Opens a context with the same configuration.
        checks: The checks, by name.
    """
    current: Context | None = trial.ctx
    for name, check in checks.items():
        start_s = time.perf_counter()
        try:
            current = current or open_context()
        except (AccelfnError, OSError) as error:
            yield name, "not run", 0.0, f"nor any after it: the ranks could not reconnect: {text_of(error)}"
            return
        try:
            with failing_together(current, name):
                remark = check(replace(trial, ctx=current))
                wait_for_everyone(current)
            verdict = "pass"
        except Exception as error:  # noqa: BLE001 -- any error is a result of the test
            verdict, remark = "FAIL", _describe(error)
            with contextlib.suppress(Exception):  # the check has failed already
                close_context(current)
            current = None
        yield name, verdict, time.perf_counter() - start_s, remark
    if current is not None:
        close_context(current)


def format_result(result: Result) -> str:
    """Format a result as a line, with an error below it. Pure.

    >>> print(format_result(("mesh", "FAIL", 0.5, "the sum is 4")))
      FAIL     mesh                       0.50 s
        the sum is 4
    """
    name, verdict, seconds, remark = result
    passed, width = verdict == "pass", max(map(len, CHECK_NAMES))
    line = f"  {verdict:<7}  {name:<{width}}  {seconds:6.2f} s  {remark if passed else ''}".rstrip()
    below = [] if passed else remark.splitlines()
    wrapped = (textwrap.fill(text, _WIDTH - 4, subsequent_indent="  ") for text in below)
    return "\n".join([line, *(textwrap.indent(text, "    ") for text in wrapped)])


def _describe(error: Exception) -> str:
    if isinstance(error, RemoteRankError):
        return f"rank {error.rank}: {error.cause}: {error.message}"
    name = "" if isinstance(error, AssertionError) else type(error).__name__
    return ": ".join(filter(None, (name, text_of(error)))) or type(error).__name__


def demand(condition: bool, message: str) -> None:
    """Fail the check unless ``condition`` holds; unlike ``assert``, under ``python -O`` too.

    Raises:
        AssertionError: With ``message``.
    """
    if not condition:
        raise AssertionError(message)


def _numbers(tensor: torch.Tensor) -> list[Any]:
    return cast("list[Any]", tensor.flatten().tolist())  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped


def check_world(trial: Trial) -> str:
    """Ranks are numbered correctly and have the same settings."""
    ctx = trial.ctx
    mine: dict[str, object] = {
        "precision": "another one" if trial.injects("settings") else ctx.mixed_precision,
        "gradient accumulation": ctx.gradient_accumulation_steps,
        "kind of device": ctx.device.type,
        "torch": torch.__version__,
        "guard": str(ctx.guard.mode),
    }
    everyone = gather_object(ctx, [(ctx.rank, mine)])
    ranks = [rank for rank, _ in everyone]
    demand(ranks == list(range(ctx.num_processes)), f"the ranks are {ranks}")
    for name in mine:
        ranks_by_value = {str(settings[name]): rank for rank, settings in everyone}
        shown = ", ".join(f"{value!r} on rank {rank}" for value, rank in ranks_by_value.items())
        demand(len(ranks_by_value) == 1, f"the ranks differ in {name}: {shown}")
    return f"{ctx.device.type}, {ctx.mixed_precision}, {ctx.world.num_nodes} node(s)"


def check_collectives(trial: Trial) -> str:
    """Collectives transfer trees of tensors of several dtypes correctly."""
    ctx, size, rank = trial.ctx, trial.ctx.num_processes, trial.ctx.rank
    if trial.injects("death"):
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    if trial.injects("hang"):
        time.sleep(3600)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tree = {str(dtype): torch.full((2,), rank % 100, dtype=dtype, device=ctx.device) for dtype in dtypes}
    tree["torch.float32"] += trial.injects("value")
    expected = [each % 100 for each in range(size) for _ in range(2)]
    for name, gathered in gather(ctx, tree).items():
        wrong = {number // 2 for number, value in enumerate(_numbers(gathered)) if value != expected[number]}
        demand(not wrong, f"gather returned wrong {name} values for rank(s) {sorted(wrong)}")
    mine = torch.tensor([rank + 1], device=ctx.device)
    total, last = _numbers(reduce(ctx, mine)), _numbers(broadcast(ctx, mine, from_process=size - 1))
    demand(total == [size * (size + 1) // 2], f"the sum over ranks is {total}")
    demand(last == [size], f"the broadcast from rank {size - 1} returned {last}")
    return f"backend {ctx.world.backend or 'none, one rank'}"


def check_mesh(trial: Trial) -> str:
    """Collectives along each mesh axis involve exactly the ranks of that axis."""
    ctx, plan = trial.ctx, trial.ctx.mesh_plan
    mine = torch.tensor([ctx.rank + trial.injects("value")], device=ctx.device)
    axes = plan.active()
    for axis in (*axes, *JOINED):
        along, expected = ctx.along(axis), list(plan.group(ctx.rank, axis))
        ranks, total = _numbers(gather(along, mine)), _numbers(reduce(along, mine))
        demand(ranks == expected, f"gather along {axis} returned ranks {ranks} instead of {expected}")
        demand(total == [sum(expected)], f"the sum of {expected} along {axis} is {total}")
    return " x ".join(f"{axis} {plan.size(axis)}" for axis in axes)


def check_random(trial: Trial) -> str:
    """Seeds make random numbers equal on all ranks, and states can be synchronized."""
    ctx = trial.ctx
    set_seed(11 + trial.injects("seed"))
    check_replicas(ctx, torch.rand(4), name="numbers after set_seed(11)")
    generator = torch.Generator()
    generator.manual_seed(ctx.rank)
    synchronize_rng_states(ctx, ["torch", "generator"], generator)
    synchronized = (torch.rand(4), torch.rand(4, generator=generator))
    check_replicas(ctx, synchronized, name="numbers after synchronize_rng_states")
    return ""


def check_shuffled(trial: Trial) -> str:
    """Two shuffled epochs contain each sample once, in the order of one process."""
    ctx, loader = _loader(trial.ctx, 4)
    _, alone = _loader(Context(), 4)
    epochs: list[list[int]] = []
    for which in ("first", "second"):
        epochs.append(_read(trial, ctx, loader))
        is_complete = sorted(epochs[-1]) == list(range(_SAMPLES))
        demand(is_complete, f"an epoch of {_SAMPLES} samples contained {sorted(epochs[-1])}")
        is_same = epochs[-1] == _read(Trial(Context()), Context(), alone)
        demand(is_same, f"the order of the {which} epoch differs from that of one process")
    demand(epochs[0] != epochs[1], "two shuffled epochs have the same order")
    return f"{_SAMPLES} samples, twice"


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
        numbers = numbers.roll(1) + 1 if trial.injects("data") else numbers
        gathered = gather_for_metrics(ctx, (numbers, doubled), micro)
        demand(numbers.device == ctx.device, f"a batch is on {numbers.device} instead of {ctx.device}")
        samples += gathered[0].tolist()
        is_consistent = torch.equal(2 * gathered[0], gathered[1])
        demand(is_consistent, f"the leaves of a batch are of different samples: {samples[-8:]}")
    return samples


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
    head: list[int] = []
    for count, ((numbers, _), micro) in enumerate(microbatches(ctx, loader)):
        head += gather_for_metrics(ctx, numbers, micro).tolist()
        if count == 1:
            _, again = _loader(trial.ctx, 3)
            restore_loader(again, loader_state(loader))
            rest = _read(trial, ctx, again)
            demand(sorted(head + rest) == list(range(_SAMPLES)), f"the ranks read {head}, then {rest}")
            return ""
    return "the epoch was too short"  # with many ranks


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


def _compare(trial: Trial, ctx: Context, tolerance: float) -> str:
    """Compare the weights after training on all ranks with those of one process with the same batches."""
    size, window = ctx.axis_size("dp"), ctx.gradient_accumulation_steps
    num_rows = _ROWS_PER_RANK * size * window * _STEPS // 2
    together = _train(trial, ctx, _ROWS_PER_RANK, num_rows)
    one = Context(world=World(device=ctx.device), precision=ctx.precision, accumulation=ctx.accumulation)
    alone = _train(replace(trial, fault=""), one, _ROWS_PER_RANK * size, num_rows)
    error = max(float((together[name] - alone[name]).abs().max()) for name in alone)
    demand(
        error <= tolerance,
        f"the weights differ from those of one process by {error:.2g}; rounding is at most {tolerance:g}",
    )
    return f"within {error:.1e}"


def _train(trial: Trial, ctx: Context, batch_size: int, num_rows: int) -> dict[str, torch.Tensor]:
    """Train for two epochs, and return the weights on the CPU."""
    ctx = ctx.replace(dataloader_config=DataLoaderConfiguration(data_seed=9))
    model, optimizer, loader = prepare(ctx, *_make_parts(trial, ctx, batch_size, num_rows))
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
    full = {
        name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
        for name, tensor in weights.items()
    }
    return {name: tensor.detach().float().cpu() for name, tensor in full.items()}


class _Small(nn.Sequential):
    """The model of all checks, with a tensor-parallel plan."""

    tp_plan: ClassVar[Mapping[str, str]] = MappingProxyType({"0": "colwise", "2": "rowwise"})


def _make_parts(trial: Trial, ctx: Context, batch_size: int, num_rows: int) -> tuple[nn.Module, Any, Any]:
    """Return a model, an optimizer and a shuffled loader, the same on every rank."""
    state = torch.get_rng_state()
    set_seed(3)
    width = 16 * trial.ctx.axis_size("tp")  # which divides it
    model = _Small(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1)).to(ctx.device)
    inputs = torch.randn(num_rows, 6)
    targets = inputs.sum(1, keepdim=True).sin()
    torch.set_rng_state(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: DataLoader[Any] = DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=True)
    return model, optimizer, loader


def check_checkpoint(trial: Trial) -> str:
    """Model, optimizer and random states are restored from a checkpoint."""
    ctx = trial.ctx
    # Several machines may share the working directory, but not the temporary one.
    within = trial.folder or (None if ctx.world.num_nodes == 1 else ".")
    made = tempfile.mkdtemp(prefix="accelfn-test-", dir=within) if ctx.is_main_process else ""
    folder = Path(broadcast_object_list(ctx, [made])[0])
    try:
        model, optimizer, _ = prepare(ctx, *_make_parts(trial, ctx, 4, 8))
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
        verified = on_main_process(ctx, share=True)(verify_checkpoint)(folder / "checkpoint")
        return f"{verified.num_bytes} bytes"
    finally:
        if ctx.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


_RUNS: tuple[Check, ...] = (
    *(check_world, check_collectives, check_random, check_mesh),
    *(check_shuffled, check_uneven, check_resumed),
    *(check_fp32, check_configured, check_checkpoint),
)
CHECKS: Mapping[str, Check] = MappingProxyType(dict(zip(CHECK_NAMES, _RUNS, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
