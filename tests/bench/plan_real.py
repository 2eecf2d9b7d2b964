"""Plans of memory and traffic beside what really ran, and how long plans for many ranks take.

A GPT on one to four processes of this machine; with a GPU, one on it, as ``torch.cuda.max_memory_allocated``
has it, instead. Plans are timed for a Llama of 70 billion parameters.
"""

# torch leaves its optimizers partly untyped, and transformers has no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.testing import run_ranks
from tests.bench.llama import llama
from tests.bench.precision import GPT, LARGE, Size, read_text
from tests.bench.timing import compare, growth_of, show_table
from tests.parallel.traffic import Traffic

ON_CPU = Size(512, 6, 128, 8)
ON_GPU = {"118 million": Size(1024, 9, 1024, 8), "833 million": LARGE}
FSDP = FullyShardedDataParallelPlugin(fsdp_version=2)
RECOMPUTED = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
STAGES = af.config.PipelineParallelConfig(num_microbatches=4)
Options = dict[str, Any]
CASES: Mapping[str, tuple[int, Options]] = {
    "one process": (1, {}),
    "DistributedDataParallel": (2, {}),
    "FSDP2": (2, {"fsdp_plugin": FSDP}),
    "FSDP2, bf16": (2, {"fsdp_plugin": FSDP, "mixed_precision": "bf16"}),
    "FSDP2, recomputed": (2, {"fsdp_plugin": RECOMPUTED}),
    "FSDP2 ": (4, {"fsdp_plugin": FSDP}),
    "tensor parallelism, a Llama": (2, {"parallelism_config": ParallelismConfig(tp_size=2)}),
    "tensor parallelism and FSDP2, a Llama": (
        4,
        {"parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2)},
    ),
    "pipeline": (2, {"parallelism_config": ParallelismConfig(pp_size=2, pp_handler=STAGES)}),
}
# Names of torch's collectives; what a rank sends to another, it also receives.
SENT = ("allreduce", "all_reduce", "allgather", "all_gather_into_tensor", "reduce_scatter", "send")


class Beside(NamedTuple):
    """A plan and a measurement, in bytes."""

    growth: tuple[int, int]
    received: tuple[int, int]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    output: Any = model(ids[:, :-1])
    return F.cross_entropy(getattr(output, "logits", output).flatten(0, 1), ids[:, 1:].flatten())


def llama_like(size: Size) -> nn.Module:
    """Return a Llama of the size of a GPT: it has a plan for its layers."""
    return llama(size.width, 4 * size.width, size.layers, size.width // 128, 256, use_cache=False)


def on_rank(ctx: Context) -> Beside:
    """Return the growth of a process by its third step, and what the step brings."""
    # So that freed memory goes back to the system at once: M_MMAP_THRESHOLD.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    torch.set_num_threads(1)
    ids = read_text(ON_CPU, 1, torch.device("cpu"))[0]
    make = GPT if ctx.axis_size("tp") == 1 else llama_like
    with torch.device("meta"):
        model: Any = make(ON_CPU)
    alike = af.plan_model(ctx, model)
    budget = af.plan_memory(ctx, model, plan=alike, batch=ids, loss_fn=loss_of)
    traffic = af.parallel.plan_traffic(ctx, model, plan=alike, batch=ids, loss_fn=loss_of)
    model = make(ON_CPU)
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = af.prepare(ctx, model, optimizer)
    scaler, growth, received = af.init_scaler(ctx), 0, 0
    for _ in range(3):
        optimizer.zero_grad()
        gc.collect()

        def passes() -> None:
            nonlocal scaler
            for batch, micro in af.microbatches(ctx, [ids]):
                with af.accumulate(ctx, micro, model):
                    scaler, _ = af.forward_backward(ctx, model, loss_of, batch, scaler, micro)

        with Traffic() as counted:
            growth = growth_of(passes)  # the last one counts
        received = sum(counted.received[name] for name in SENT)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
    planned = budget.peak - budget.parameters - budget.optimizer - budget.buckets
    return Beside((planned, growth), (sum(traffic.moved.values()), received))


def compare_on_cpu() -> None:
    """Print a row for each layout: the rank with the largest growth."""
    rows: list[Sequence[str]] = []
    for name, (size, options) in CASES.items():
        ranks = run_ranks(on_rank, size, on="processes", timeout_s=200, **options)
        (planned, growth), (moved, received) = max(ranks, key=lambda one: one.growth[1])
        off = f"{planned / growth - 1:+.1%}"
        sizes = (
            f"{planned / 1e6:.1f}",
            f"{growth / 1e6:.1f}",
            off,
            f"{moved / 1e6:.3f}",
            f"{received / 1e6:.3f}",
        )
        rows.append((name.strip(), str(size), *sizes))
    columns = (
        *("layout", ">ranks", ">growth: planned, MB", ">measured, MB", ">"),
        *(">received: planned, MB", ">counted, MB"),
    )
    show_table("plan-real", columns, rows)


def on_gpu(size: Size, options: Options) -> tuple[int, int, int]:
    """Return the planned total and peak of a model on one GPU, and the measured peak."""
    with af.init_context(**options) as ctx:
        ids = read_text(size, 1, ctx.device)[0]
        with torch.device("meta"):
            model: Any = GPT(size)
        budget = af.plan_memory(ctx, model, batch=ids, loss_fn=loss_of)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = GPT(size)
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = af.prepare(ctx, model, optimizer)
        scaler = af.init_scaler(ctx)
        for _ in range(3):
            scaler = af.backward(ctx, loss_of(model, ids), scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        torch.cuda.synchronize()
        return budget.total, budget.peak, torch.cuda.max_memory_allocated() - before


def compare_on_gpu() -> None:
    """Print a row for each model and precision."""
    ways: dict[str, Options] = {
        "float32": {},
        "bf16": {"mixed_precision": "bf16"},
        "bf16, recomputed": {"mixed_precision": "bf16", "fsdp_plugin": RECOMPUTED},
        "fp8": {"mixed_precision": "fp8"},
    }
    rows: list[Sequence[str]] = []
    for name, size in ON_GPU.items():
        for way, options in ways.items():
            found = on_gpu(size, options)
            shown = (f"{one / 1e9:.2f}" for one in found)
            rows.append((name, way, *shown, f"{found[1] / found[2] - 1:+.1%}"))
    columns = ("a GPT of", "", ">planned at most, GB", ">planned peak, GB", ">measured, GB", ">")
    show_table("plan-real-gpu", columns, rows)


def time_plans() -> None:
    """Print seconds of plans for a Llama of 70 billion parameters: wall, and of the processor."""
    with torch.device("meta"):
        model: nn.Module = llama(8192, 28672, 80, 64, 128256, num_key_value_heads=8)

    def make_batch(ctx: Context, rows: int) -> Any:
        ids = torch.empty(rows, 8192, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}

    def plan(**sizes: int) -> Callable[[], object]:
        mesh = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})  # pyright: ignore[reportArgumentType]
        ctx = af.plan_context(mesh.total_size, parallelism_config=mesh, mixed_precision="bf16")
        return lambda: af.plan_memory(ctx, model, batch=make_batch(ctx, sizes.get("pp", 1)))

    def search() -> object:
        return af.parallel.search_meshes(
            8192,
            model,
            memory=80 * 10**9,
            num_rows=1024,
            make_batch=make_batch,
            mixed_precision="bf16",
            fsdp_plugin=RECOMPUTED,
        )

    ways: dict[str, Callable[[], object]] = {
        "10,000 ranks: dp_replicate 10 x dp_shard 1000": plan(dp_replicate=10, dp_shard=1000),
        "10,000 ranks: dp_shard 1250 x tp 8": plan(dp_shard=1250, tp=8),
        "8,192 ranks: pp 8 x dp_shard 128 x tp 8": plan(pp=8, dp_shard=128, tp=8),
        "a search of the 560 meshes of 8,192 ranks": search,
    }
    rows: list[Sequence[str]] = []
    for name, way in ways.items():
        way()
        cpu = time.process_time()
        best = compare({name: way}, rounds=3, calls=1)[name].best
        rows.append((name, f"{best:.2f}", f"{(time.process_time() - cpu) / 4:.2f}"))
    show_table("plan-times", ("plan, with a batch", ">best of 3, s", ">of the processor, s"), rows)


def main() -> None:
    time_plans()
    if torch.cuda.is_available():
        compare_on_gpu()
    else:
        compare_on_cpu()


if __name__ == "__main__":
    main()
