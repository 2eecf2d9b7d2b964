"""Steps of a small GPT on sequences that one, two and four ranks share: time, and what they allocate at most.

A sequence four times as long on four ranks should fit the memory of one on one rank. Ring attention stands
beside torch's own ``context_parallel``, which has no kernel for the CPU: it is given one here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn.testing import run_ranks
from tests.bench.sharding import GPT, Step, allocated_by
from tests.bench.timing import Times, Timing, compare, plain, show_beside, show_table

aten: Any = torch.ops.aten

_LENGTH, _ROWS = 512, 2
_SIZE = (128, 2)  # width and blocks
ROTATIONS = ("allgather", "alltoall")


def sequences(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole sequences, with the label of each token."""
    ids = torch.randint(512, (_ROWS, length), generator=torch.Generator().manual_seed(0))
    return ids, ids.roll(-1, 1)


def options(axis: str, num_ranks: int, rotation: str | None = None) -> af.context.ContextOptions:
    """Return the options of a context whose ranks share sequences along "cp" or "sp"."""
    sizes: dict[str, Any] = {f"{axis}_size": num_ranks}
    if rotation is not None:
        sizes["cp_handler"] = af.config.TorchContextParallelConfig(cp_comm_strategy=rotation)
    loading = af.DataLoaderConfiguration(sequence={0: 1, 1: 1})
    return {"cpu": True, "parallelism_config": af.ParallelismConfig(**sizes), "dataloader_config": loading}


def by_functions(ctx: af.Context, length: int, size: tuple[int, int] = _SIZE) -> tuple[nn.Module, Step]:
    """Return a model and its step through the functions; the context says what ranks share."""
    model: nn.Module = GPT(*size)
    model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), 0.1))
    whole = sequences(length)
    states = [af.init_scaler(ctx)]

    def step() -> None:
        for batch, micro in af.microbatches(ctx, [whole]):
            with af.accumulate(ctx, micro, model):
                loss = _sum_of(model, batch)
                states[0] = af.backward(ctx, loss, states[0], micro, batch[1].numel())
            states[0] = af.optimizer_step(ctx, optimizer, states[0])

    return model, step


def _sum_of(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def by_hand(rotation: str, length: int, size: tuple[int, int] = _SIZE) -> tuple[nn.Module, Step]:
    """Return a model and its step in plain torch, with ``context_parallel`` and DDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import set_rotate_method

    model = GPT(*size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    replicated = nn.parallel.DistributedDataParallel(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    whole = list(sequences(length))

    def step() -> None:
        set_rotate_method(rotation)
        with _kernel_on_cpu(), context_parallel(mesh, buffers=whole, buffer_seq_dims=[1, 1]):
            # Ranks have other numbers of labels where some are left out, and DDP takes the mean of ranks.
            count = torch.tensor(float(whole[1].numel()))
            plain.all_reduce(count)
            loss = _sum_of(replicated, whole) * mesh.size() / count
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            optimizer.step()
            optimizer.zero_grad()

    return model, step


@contextmanager
def _kernel_on_cpu() -> Generator[None, None, None]:
    """Let torch's ``context_parallel`` use the CPU's attention inside."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import _context_parallel

    torchs: Any = _context_parallel._attention  # pyright: ignore[reportPrivateUsage]
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def whole(mesh: Any, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(DTensor.from_local(one, mesh, [Shard(2)], run_check=False) for one in parts)

    def forward(operator: Any, args: Any, kwargs: Any) -> Any:
        mesh, local = args[0].device_mesh, [one.to_local() for one in args[:3]]
        rest = {"dropout_p": args[3], "is_causal": args[4], **kwargs}
        found = torchs._templated_ring_attention(mesh.get_group(), 2, forward_op, *local, **rest)
        return whole(mesh, found)

    def backward(operator: Any, args: Any, kwargs: Any) -> Any:
        mesh = args[0].device_mesh
        gradient, *local = (one.to_local() for one in args[:6])
        rest = {"dropout_p": args[6], "is_causal": args[7], **kwargs}
        found = torchs._templated_ring_attention_backward(
            mesh.get_group(), 2, backward_op, gradient, "grad_out", *local, **rest
        )
        return whole(mesh, found[:3])

    handlers: dict[Any, Callable[..., Any]] = {forward_op: forward, backward_op: backward}
    torchs.custom_ops.update(handlers)
    try:
        yield
    finally:
        for one in handlers:
            del torchs.custom_ops[one]


def measure(ctx: af.Context, length: int) -> dict[str, tuple[Timing, float]]:
    """Compare steps, by time and by allocated MB on the slowest rank; every rank must call it."""
    count = ctx.num_processes
    with ExitStack() as stack:

        def by(axis: str, rotation: str | None = None) -> Step:
            shared = stack.enter_context(af.init_context(**options(axis, count, rotation)))
            return by_functions(shared, length)[1]

        ways: dict[str, Step] = {}
        if count == 1:
            ways["plain"] = by_functions(ctx, length)[1]
        else:
            for rotation in ROTATIONS:
                ways[f"cp{count}, {rotation}"] = by("cp", rotation)
                ways[f"`context_parallel`, {rotation}"] = by_hand(rotation, length)[1]
            ways[f"sp{count}"] = by("sp")
        times = compare(ways, rounds=8, calls=1, before=lambda: af.wait_for_everyone(ctx))
        found: dict[str, tuple[Timing, float]] = {}
        for name, step in ways.items():
            megabytes = allocated_by(step, lambda: af.wait_for_everyone(ctx))
            own = torch.tensor([[*times[name], megabytes]])
            best, median, largest = map(float, af.gather(ctx, own).amax(0))
            found[name] = Timing(best, median), largest
        return found


def main() -> None:
    torch.set_num_threads(1)
    rows: list[Sequence[str]] = []
    beside: dict[str, Times] = {}
    for num_ranks, length in ((1, _LENGTH), (1, 4 * _LENGTH), (2, 4 * _LENGTH), (4, 4 * _LENGTH)):
        found: dict[str, tuple[Timing, float]] = run_ranks(
            lambda ctx, length=length: measure(ctx, length), num_ranks, on="processes", timeout_s=300.0
        )[0]
        for name, (timing, megabytes) in found.items():
            rows.append((name, str(num_ranks), f"{length:,}", timing.ms(1), f"{megabytes:.1f}"))
        for one in ROTATIONS if num_ranks > 1 else ():
            ways = (f"cp{num_ranks}, {one}", f"`context_parallel`, {one}")
            beside[ways[0]] = {way: found[way][0] for way in ways}
    columns = ("layout", ">ranks", ">tokens", ">step, median (best) ms", ">peak memory, MB")
    show_table("sequence", columns, rows)
    show_beside("sequence-beside", beside)


if __name__ == "__main__":
    main()
