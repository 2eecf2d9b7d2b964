"""Plans of memory and traffic beside what really ran, and how long plans for many ranks take.

``python -m tests.bench.plan_real``: a GPT on one to four processes of this machine; with a GPU, one on it, as
``torch.cuda.max_memory_allocated`` has it, instead. ``python -m tests.bench.plan_real times`` times plans of
a Llama of 70 billion parameters.
"""

# torch leaves its optimizers partly untyped, and transformers has no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.testing import run_ranks
from tests.bench.data import memory_of
from tests.bench.precision import GPT, LARGE, Size, read_text
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


def llama(size: Size) -> nn.Module:
    """Return a Llama of the size of a GPT: it has a plan for its layers."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 128,
        vocab_size=256,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def on_rank(ctx: Context) -> Beside:
    """Return the growth of a process by its third step, and what the step brings."""
    # So that freed memory goes back to the system at once: M_MMAP_THRESHOLD.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    torch.set_num_threads(1)
    ids = read_text(ON_CPU, 1, torch.device("cpu"))[0]
    make = GPT if ctx.axis_size("tp") == 1 else llama
    with torch.device("meta"):
        model: Any = make(ON_CPU)
    alike = af.plan_model(ctx, model)
    budget = af.plan_memory(ctx, model, plan=alike, batch=ids, loss_fn=loss_of)
    traffic = af.plan_traffic(ctx, model, plan=alike, batch=ids, loss_fn=loss_of)
    model = make(ON_CPU)
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = af.prepare(ctx, model, optimizer)
    scaler, growth, received = af.init_scaler(ctx), 0, 0
    for number in range(3):
        optimizer.zero_grad()
        gc.collect()
        before = memory_of("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        with Traffic() as counted:
            for batch, micro in af.microbatches(ctx, [ids]):
                with af.accumulate(ctx, micro, model):
                    scaler, _ = af.forward_backward(ctx, model, loss_of, batch, scaler, micro)
        if number == 2:
            growth = memory_of("VmHWM") - before
            received = sum(counted.received[name] for name in SENT)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
    planned = budget.peak - budget.parameters - budget.optimizer - budget.buckets
    return Beside((planned, growth), (sum(traffic.moved.values()), received))


def compare_on_cpu() -> None:
    """Print a row for each layout: the rank with the largest growth."""
    count = sum(parameter.numel() for parameter in GPT(ON_CPU).parameters())
    print(f"A GPT of {count / 1e6:.1f} million parameters, {ON_CPU.rows} rows of {ON_CPU.length} tokens\n")
    print("| layout | ranks | growth: planned, MB | measured, MB | | received: planned, MB | counted, MB |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name, (size, options) in CASES.items():
        ranks = run_ranks(on_rank, size, on="processes", timeout_s=200, **options)
        found = max(ranks, key=lambda one: one.growth[1])
        (planned, growth), (moved, received) = found
        off = planned / growth - 1
        print(
            f"| {name.strip()} | {size} | {planned / 1e6:.1f} | {growth / 1e6:.1f} | {off:+.1%} "
            f"| {moved / 1e6:.3f} | {received / 1e6:.3f} |",
            flush=True,
        )


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
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| a GPT of | | planned at most, GB | planned peak, GB | measured, GB | |")
    print("| --- | --- | --: | --: | --: | --: |")
    ways: dict[str, Options] = {
        "float32": {},
        "bf16": {"mixed_precision": "bf16"},
        "bf16, recomputed": {"mixed_precision": "bf16", "fsdp_plugin": RECOMPUTED},
        "fp8": {"mixed_precision": "fp8"},
    }
    for name, size in ON_GPU.items():
        for way, options in ways.items():
            total, planned, peak = on_gpu(size, options)
            print(
                f"| {name} | {way} | {total / 1e9:.2f} | {planned / 1e9:.2f} | {peak / 1e9:.2f} "
                f"| {planned / peak - 1:+.1%} |",
                flush=True,
            )


def time_plans() -> None:
    """Print seconds of plans for a Llama of 70 billion parameters: wall, and of the processor."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)

    def make_batch(ctx: Context, rows: int) -> Any:
        ids = torch.empty(rows, 8192, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}

    def plan(**sizes: int) -> Callable[[], object]:
        mesh = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})  # pyright: ignore[reportArgumentType]
        ctx = af.plan_context(mesh.total_size, parallelism_config=mesh, mixed_precision="bf16")
        return lambda: af.plan_memory(ctx, model, batch=make_batch(ctx, sizes.get("pp", 1)))

    def search() -> object:
        return af.search_meshes(
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
        "a search of 560 meshes of 8,192 ranks": search,
    }
    print("| plan, with a batch | best of 3, s | of the processor, s |")
    print("| --- | --: | --: |")
    for name, way in ways.items():
        way()
        walls: list[float] = []
        processor: list[float] = []
        for _ in range(3):
            started, cpu = time.perf_counter(), time.process_time()
            way()
            walls.append(time.perf_counter() - started)
            processor.append(time.process_time() - cpu)
        print(f"| {name} | {min(walls):.2f} | {min(processor):.2f} |", flush=True)


def main() -> None:
    if sys.argv[1:] == ["times"]:
        time_plans()
    elif torch.cuda.is_available():
        compare_on_gpu()
    else:
        compare_on_cpu()


if __name__ == "__main__":
    main()
