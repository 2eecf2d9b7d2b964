"""What a step, a batch, a device map, a load and an import cost, in numbers that don't depend on the machine.

Calls are those of Python functions as ``sys.setprofile`` reports them, resumed generators included; of steps
and batches those beyond the same in plain torch. Budgets are upper bounds: Python from 3.12 on inlines some
calls. What each test found is printed (``pytest -s``). Seconds are measured in ``tests/bench``.
"""

# torch leaves backward and its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import accelfn as af
from accelfn import Context
from accelfn.bigmodel import infer_auto_device_map, load_checkpoint_in_model
from accelfn.checkpoint.plan import Box, Group, Held, plan_save
from accelfn.context.peer_monitor import PeerMonitor
from accelfn.testing import run_ranks
from tests.bench import pipeline
from tests.bench.sharding import by_functions, fsdp_by_hand
from tests.parallel.traffic import traffic_of

Action = Callable[[], object]

WAIT = PeerMonitor.wait.__code__

importlib.import_module("numpy.random")  # whose generator a loader then saves, too


def calls_of(action: Action) -> int:
    """Count the calls of Python functions in ``action``, except while it waits for other ranks."""
    num_calls = depth = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls, depth
        if event == "call":
            num_calls += not depth
        if frame.f_code is WAIT:
            depth += {"call": 1, "return": -1}.get(event, 0)

    gc.disable()  # a collection calls what weak references ask for
    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return num_calls - 1  # that of `action` itself


def settled(action: Action) -> int:
    """Count the calls of ``action`` once it has run a few times, and has nothing left to set up."""
    for _ in range(3):
        action()
    return calls_of(action)


def test_calls_are_counted() -> None:
    def twice(then: Action) -> None:
        for _ in range(2):
            then()

    assert calls_of(lambda: None) == 0
    assert calls_of(lambda: twice(int)) == 1
    assert calls_of(lambda: twice(lambda: None)) == 3
    assert calls_of(lambda: list(one for one in range(4))) == 5  # noqa: C400 -- a generator is resumed


# --- a step --------------------------------------------------------------------------------------


class Work(NamedTuple):
    """A model, its optimizer and a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, torch.Tensor]

    def loss(self) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(self.batch[0]), self.batch[1])


def work(num_layers: int = 2) -> Work:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Work(model, optimizer, (torch.randn(3, 4), torch.randint(4, (3,))))


def by_hand(max_norm: float | None, num_layers: int = 2) -> Action:
    """Return a step in plain torch."""
    own = work(num_layers)
    parameters = list(own.model.parameters())

    def step() -> None:
        own.loss().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        own.optimizer.step()
        own.optimizer.zero_grad()

    return step


def through_functions(max_norm: float | None, num_layers: int = 2) -> Action:
    """Return the step of README's loop, without reading the batch."""
    ctx, own = Context(), work(num_layers)
    model, optimizer = af.prepare(ctx, own.model, own.optimizer)
    ((_, micro),) = af.microbatches(ctx, [0])
    scalers = [af.init_scaler(ctx)]

    def step() -> None:
        with af.accumulate(ctx, micro, model):
            scalers[0] = af.backward(ctx, own.loss(), scalers[0], micro)
        if micro.sync:
            scalers[0] = af.optimizer_step(ctx, optimizer, scalers[0], max_norm=max_norm)

    return step


def through_the_shim(max_norm: float | None, num_layers: int = 2) -> Action:
    """Return the same step in the words of Accelerate, amid a loop over a prepared loader."""
    accelerator, own = af.Accelerator(cpu=True), work(num_layers)
    model, optimizer, loader = accelerator.prepare(own.model, own.optimizer, DataLoader[Any](Rows()))
    parameters = list(own.model.parameters())
    loop = iter(loader)
    next(loop)

    def step(loop: Iterator[Any] = loop) -> None:  # which keeps the loop
        with accelerator.accumulate(model):
            accelerator.backward(own.loss())
            if max_norm is not None:
                accelerator.clip_grad_norm_(parameters, max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return step


@pytest.mark.parametrize("max_norm", [1.0, None])
@pytest.mark.parametrize(("way", "budget"), [(through_functions, 25), (through_the_shim, 40)])
def test_calls_of_a_step(way: Callable[[float | None], Action], budget: int, max_norm: float | None) -> None:
    beyond = settled(way(max_norm)) - settled(by_hand(max_norm))
    print(f"{way.__name__}, {max_norm=}: {beyond} calls a step beyond plain torch")
    assert beyond <= budget


@pytest.mark.parametrize("way", [through_functions, through_the_shim])
def test_calls_of_a_step_dont_grow_with_the_model(way: Callable[[float, int], Action]) -> None:
    small, large = (settled(way(1.0, num)) - settled(by_hand(1.0, num)) for num in (2, 20))
    print(f"{way.__name__}: {small} calls beyond plain torch for 2 layers, {large} for 20")
    assert large <= small


# --- a batch -------------------------------------------------------------------------------------


class Rows(Dataset[torch.Tensor]):
    """A few hundred rows in memory."""

    def __init__(self) -> None:
        self.rows = list(torch.rand(400, 4).unbind())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def plain_loader() -> Iterable[Any]:
    return DataLoader(Rows(), batch_size=4)


def prepared_loader() -> Iterable[Any]:
    return af.prepare_data_loader(Context(), DataLoader(Rows(), batch_size=4))


def prepared_tensors() -> Iterable[Any]:
    tensors = TensorDataset(torch.stack(Rows().rows))
    return af.prepare_data_loader(Context(), DataLoader(tensors, batch_size=4))


def plain_tensors() -> Iterable[Any]:
    return DataLoader(TensorDataset(torch.stack(Rows().rows)), batch_size=4)


def with_microbatches() -> Iterable[Any]:
    return af.microbatches(Context(), prepared_loader())


def of_the_shim() -> Iterable[Any]:
    return af.Accelerator(cpu=True).prepare(DataLoader(Rows(), batch_size=4))


@pytest.mark.parametrize(
    ("make", "plain", "budget"),
    [
        (prepared_loader, plain_loader, 6),
        (with_microbatches, plain_loader, 8),
        (of_the_shim, plain_loader, 9),
        (prepared_tensors, plain_tensors, 2),  # nothing draws random numbers, so none are kept apart
    ],
)
def test_calls_of_a_batch(
    make: Callable[[], Iterable[Any]], plain: Callable[[], Iterable[Any]], budget: int
) -> None:
    ours, theirs = iter(make()), iter(plain())
    beyond = settled(lambda: next(ours)) - settled(lambda: next(theirs))
    print(f"{make.__name__}: {beyond} calls a batch beyond plain torch")
    assert beyond <= budget + (sys.version_info >= (3, 12))  # torch's own list comprehension is inlined


# --- a step of several ranks ---------------------------------------------------------------------


class Cost(NamedTuple):
    """What a rank does in a step.

    Attributes:
        calls: Calls of Python functions.
        collectives: torch's collectives by name.
        received: Bytes that this rank gets of others in them.
        exchanges: Calls of the context's own collectives.
    """

    calls: int
    collectives: dict[str, int]
    received: int
    exchanges: int


Way = Callable[[Context], Action]


def with_ddp(ctx: Context) -> Action:
    own = work()
    model, optimizer = af.prepare(ctx, own.model, own.optimizer)
    own = own._replace(model=model)
    ((_, micro),) = af.microbatches(ctx, [0])
    scalers = [af.init_scaler(ctx)]

    def step() -> None:
        with af.accumulate(ctx, micro, model):
            scalers[0] = af.backward(ctx, own.loss(), scalers[0], micro)
        scalers[0] = af.optimizer_step(ctx, optimizer, scalers[0], max_norm=1.0)

    return step


def ddp_by_hand(ctx: Context) -> Action:
    own = work()
    own = own._replace(model=nn.parallel.DistributedDataParallel(own.model))
    parameters = list(own.model.parameters())

    def step() -> None:
        own.loss().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        own.optimizer.step()
        own.optimizer.zero_grad()

    return step


SIZE = (16, 2)  # width and blocks of a GPT


class Layout(NamedTuple):
    """A step on two processes beside the one by hand.

    Attributes:
        options: Of the context.
        ours: Makes our step.
        by_hand: Makes the one in plain torch.
        calls: Budget of calls beyond it.
        exchanges: Budget of our own exchanges.
        left_out: Collectives of the step by hand that ours doesn't make.
    """

    options: Any
    ours: Way
    by_hand: Way
    calls: int
    exchanges: int
    left_out: Mapping[str, int] = MappingProxyType({})


def staged(ctx: Context) -> Action:
    return pipeline.by_functions(ctx, SIZE)[1]


def stages_by_hand(ctx: Context) -> Action:
    return pipeline.by_hand(pipeline.schedule_of(ctx), ctx.rank, SIZE)[1]


def sharded(ctx: Context) -> Action:
    return by_functions(ctx, SIZE)


def shards_by_hand(ctx: Context) -> Action:
    return fsdp_by_hand(ctx.rank, SIZE)


FSDP2 = {"fsdp_plugin": af.FullyShardedDataParallelPlugin(fsdp_version=2)}
LAYOUTS = {
    "DDP": Layout({}, with_ddp, ddp_by_hand, calls=140, exchanges=1),
    # Torch's norm is an all-reduce, and ours an exchange.
    "FSDP2": Layout(FSDP2, sharded, shards_by_hand, calls=450, exchanges=2, left_out={"all_reduce": 1}),
    "stages": Layout(pipeline.options_of("1f1b", 2, 2), staged, stages_by_hand, calls=1050, exchanges=2),
}


def counting(ctx: Context, calls: Counter[str]) -> Context:
    """Return a context whose exchanges are counted."""

    def count(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return call(*arguments)

        return counted

    seam = ctx.collectives
    names = ("all_gather_bytes", "start_all_gather_bytes", "all_gather", "all_reduce", "broadcast", "barrier")
    wrapped = {name: count(name, getattr(seam, name)) for name in names if getattr(seam, name) is not None}
    return dataclasses.replace(ctx, collectives=dataclasses.replace(seam, **wrapped))


@pytest.mark.parametrize("name", ["DDP", pytest.param("FSDP2", marks=pytest.mark.slow), "stages"])
def test_calls_and_collectives_of_a_step_of_two_ranks(name: str) -> None:
    layout = LAYOUTS[name]

    def cost(ctx: Context, way: Way) -> Cost:
        exchanges: Counter[str] = Counter()
        plain, counted = way(ctx), way(counting(ctx, exchanges))
        calls = settled(plain)
        for _ in range(3):
            counted()
        exchanges.clear()
        traffic = traffic_of(counted)
        return Cost(calls, dict(traffic.calls), traffic.received.total(), exchanges.total())

    costs = run_ranks(
        lambda ctx: (cost(ctx, layout.ours), cost(ctx, layout.by_hand)), 2, on="processes", **layout.options
    )
    for rank, (ours, by_hand) in enumerate(costs):
        print(f"{name}, rank {rank}: {ours}, by hand {by_hand}")
        assert ours.calls - by_hand.calls <= layout.calls
        assert ours.exchanges <= layout.exchanges
        assert Counter(ours.collectives) == Counter(by_hand.collectives) - Counter(layout.left_out)
        assert ours.received <= by_hand.received


# --- a device map --------------------------------------------------------------------------------


def calls_of_a_map(make: Callable[[int], list[nn.Module]], num_layers: int) -> int:
    with torch.device("meta"):
        model = nn.Sequential(*make(num_layers))
    budget = sum(one.nbytes for one in model.parameters()) // 4
    budgets: dict[int | str, int] = {0: budget, 1: budget, "cpu": budget}
    return calls_of(lambda: infer_auto_device_map(model, budgets))


def layers(num: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(num)]


def one_layer_again_and_again(num: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 4))] * num


def tied_in_pairs(num: int) -> list[nn.Module]:
    made = [nn.Linear(4, 4) for _ in range(num)]
    for one, other in zip(made[: num // 2], reversed(made), strict=False):
        other.weight = one.weight
    return list[nn.Module](made)


@pytest.mark.parametrize("make", [layers, one_layer_again_and_again, tied_in_pairs])
def test_calls_of_a_device_map_grow_with_the_layers(make: Callable[[int], list[nn.Module]]) -> None:
    small, large = calls_of_a_map(make, 100), calls_of_a_map(make, 200)
    print(f"{make.__name__}: {small} calls for 100 layers, {large} for 200, {large / 200:.0f} a layer")
    assert large <= 2.05 * small
    assert large <= 120 * 200


# --- the plan of a save ---------------------------------------------------------------------------


def calls_of_a_plan(num_tensors: int, size: int) -> int:
    part = Held("float32", (size, 4), 4, layout=0)
    held = {f"layer.{number}.weight": part for number in range(num_tensors)}
    group = Group(range(size), held, [((Box((rank, 0), (1, 4)),),) for rank in range(size)])
    return calls_of(lambda: plan_save(size, [group]))


def test_calls_of_a_plan_for_a_tensor_do_not_grow_with_the_ranks() -> None:
    small, large = (calls_of_a_plan(60, size) - calls_of_a_plan(20, size) for size in (8, 64))
    print(f"a plan: {small / 40:.0f} calls for each tensor on 8 ranks, {large / 40:.0f} on 64")
    assert large <= small <= 8 * 40


def memory_of_a_plan(num_tensors: int, size: int) -> int:
    """Return the bytes of Python's objects at the peak, where each rank has random states of its own too."""
    held = {f"layer.{number}.weight": Held("float32", (4,), 4) for number in range(num_tensors)}
    randoms = [
        Group((rank,), {"random": Held("uint8", (4,), 1, content=f"{rank}")}, [()]) for rank in range(size)
    ]
    group = Group(range(size), held, [() for _ in range(size)])
    tracemalloc.start()
    plan_save(size, [group, *randoms])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_memory_of_a_plan_for_a_tensor_does_not_grow_with_the_ranks() -> None:
    small, large = (memory_of_a_plan(600, size) - memory_of_a_plan(200, size) for size in (8, 64))
    print(f"a plan: {small / 400:.0f} bytes for each tensor on 8 ranks, {large / 400:.0f} on 64")
    assert large <= 1.1 * small


def size_of_manifest(num_layers: int, size: int, folder: Path) -> int:
    """Return the bytes of the manifest of a sharded model with its optimizer."""
    at = folder / f"{num_layers}-{size}"

    def save(ctx: Context) -> None:
        plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
        model, optimizer = af.prepare(ctx, plain, torch.optim.AdamW(plain.parameters()))
        scaler = af.backward(ctx, model(torch.ones(1, 8)).sum(), af.init_scaler(ctx))
        af.optimizer_step(ctx, optimizer, scaler)
        af.save_state(ctx, at, {"model": model, "optimizer": optimizer})

    plugin = af.FullyShardedDataParallelPlugin()
    run_ranks(save, size, on="processes", fsdp_plugin=plugin)
    return (at / "manifest.json").stat().st_size


def test_a_manifest_does_not_grow_with_tensors_times_ranks(tmp_path: Path) -> None:
    on_two, on_four = (
        size_of_manifest(8, size, tmp_path) - size_of_manifest(4, size, tmp_path) for size in (2, 4)
    )
    print(f"four layers take {on_two} bytes on 2 ranks, and {on_four} on 4")
    assert on_four <= 1.01 * on_two


# --- a load --------------------------------------------------------------------------------------


def read_bytes() -> int:
    """Return how many bytes this process has read, mapped ones not among them."""
    return int(Path("/proc/self/io").read_text().split()[1])


class Reading(NamedTuple):
    """What an action reads: how often it opens each file, by name, and how many bytes it reads."""

    opened: dict[str, int]
    num_bytes: int


def reading_of(action: Action) -> Reading:
    """Return what a second run of ``action`` reads, in a process of its own: hooks can't be removed."""

    def measure(ctx: Context) -> Reading:
        names: Counter[str] = Counter()
        is_on = False

        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and is_on:
                names[Path(str(arguments[0])).name] += 1

        sys.addaudithook(hear)
        action()
        before, is_on = read_bytes(), True
        action()
        is_on, after = False, read_bytes()
        return Reading(dict(names), after - before)

    return run_ranks(measure, 1, on="processes")[0]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what a process reads")
def test_files_of_a_load_are_opened_and_read_once(tmp_path: Path) -> None:
    ctx, model = Context(), nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    tree = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    af.save_model(ctx, model, tmp_path / "weights", max_shard_size="200KB")
    af.save_state(ctx, tmp_path / "state", tree)
    weights, state = (
        {one.name: one.stat().st_size for one in (tmp_path / name).iterdir()} for name in ("weights", "state")
    )
    assert len(weights) == 4
    more = 20_000  # headers, which are read first, to plan; and a buffer of Python's

    def check(action: Action, files: dict[str, int], times: int, num_bytes: int) -> None:
        found = reading_of(action)
        print(f"{found}, of {sum(files.values())} bytes")
        assert set(files) <= set(found.opened)
        assert max(found.opened.values()) <= times
        assert found.num_bytes <= num_bytes + more

    for load in (af.load_model, load_checkpoint_in_model):
        check(partial(load, model, tmp_path / "weights"), weights, 2, sum(weights.values()))
    check(lambda: af.load_state(ctx, tmp_path / "state", tree), state, 1, sum(state.values()))


# --- an import -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_modules_that_prepare_imports() -> None:
    code = """
import json, sys
import torch, torch.distributed, torch.utils.data
before = set(sys.modules)
import accelfn
accelfn.prepare
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    own = [name for name in found if name.partition(".")[0] == "accelfn"]
    heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"}
    print(f"{len(own)} modules of accelfn, {len(found) - len(own)} others")
    assert heavy.isdisjoint(found)
    unneeded = ("accelfn.parallel.planning", "accelfn.parallel.engines.megatron")
    unneeded += ("accelfn.parallel.engines.deepspeed", "accelfn.training.engines")
    assert not [name for name in own if name.startswith(unneeded)]
    assert len(own) <= 136  # a file for each strategy, kind of option and kind of tree is among them
    assert len(found) - len(own) <= 30
