"""Running models whose weights lie elsewhere, beside the same models in memory and beside Accelerate.

Pages of files are warm, as the first round isn't counted.
"""

import copy
import importlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import accelfn as af
from accelfn.bigmodel import read_offload
from accelfn.bigmodel.block_hooks import attach_prefetcher
from accelfn.bigmodel.block_stream import BlockPrefetcher
from accelfn.bigmodel.blocks import plan_blocks
from accelfn.bigmodel.transfer import Link, Packing, pack
from accelfn.weights.assign import refs_of
from tests.bench.llama import llama
from tests.bench.timing import compare, show_against, show_table

_BLOCKS, _SLEEP_S = 24, 0.005


class Layer(nn.Module):
    """12.6 million parameters at a width of 1024."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.mix(self.norm(x))[..., : x.shape[-1]])
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    """A block that costs little more than being called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Sleeper(nn.Module):
    """A block that computes for 5 ms, on a device that isn't the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(_SLEEP_S)
        return self.other(self.inner(x))


def from_disk(rounds: int) -> None:
    """Compare forward passes of 1.2 GB from the disk, on the CPU, with those in memory."""
    plain = nn.Sequential(*(Layer(1024) for _ in range(_BLOCKS))).requires_grad_(False)
    x = torch.randn(1, 32, 1024)
    with tempfile.TemporaryDirectory() as folder:
        ours = af.disk_offload(copy.deepcopy(plain), folder)
        bounded = af.disk_offload(copy.deepcopy(plain), folder, cache_bytes=0)
        peer: Any = accelerate().disk_offload(copy.deepcopy(plain), f"{folder}/accelerate")
        ways: dict[str, Callable[[], object]] = {
            "in memory": lambda: plain(x),
            "accelfn, `disk_offload`": lambda: ours(x),
            "accelfn, `disk_offload(cache_bytes=0)`": lambda: bounded(x),
            "Accelerate, `disk_offload`": lambda: peer(x),
        }
        show_against("offload-disk", compare(ways, rounds=rounds, calls=1))
        (facts,) = read_offload(bounded)
        sizes = (facts.peak_bytes, facts.bound_bytes, facts.num_bytes)
        columns = ("MB", ">in memory at a time", ">stated bound", ">all")
        row = ["`disk_offload(cache_bytes=0)`", *(f"{size / 1e6:.0f}" for size in sizes)]
        show_table("offload-memory", columns, [row])


def simulated_link(rounds: int) -> None:
    """Run 24 blocks, each of which travels for 5 ms and computes for 5 ms."""
    model = nn.Sequential(*(Sleeper() for _ in range(_BLOCKS))).requires_grad_(False)
    worker = ThreadPoolExecutor(1)

    def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Callable[[], torch.Tensor]:
        def carry() -> torch.Tensor:
            time.sleep(_SLEEP_S)
            memory = torch.empty(packing.num_bytes, dtype=torch.uint8)
            pack(hosts, packing, memory)
            return memory

        return worker.submit(carry).result

    names = [name for name, _ in refs_of(model)]
    blocks = plan_blocks(model, names)
    stream = BlockPrefetcher(blocks, "cpu:0", link=Link(device=torch.device("cpu"), begin=begin))
    attach_prefetcher(model, stream)
    x = torch.randn(1, 2)
    whole = 2 * _SLEEP_S * _BLOCKS
    timing = compare({"ours": lambda: model(x)}, rounds=rounds, calls=1)["ours"]
    share = f"{timing.median / whole:.2f} ({timing.best / whole:.2f})"
    columns = (
        f"{_BLOCKS} blocks that travel for 5 ms and compute for 5 ms",
        "of the sum",
        "blocks at a time, at most",
    )
    show_table("offload-link", columns, [(f"{timing.ms(0)} ms", share, str(stream.facts().peak_blocks))])


def overhead(rounds: int) -> None:
    """Compare 48 tiny blocks in the host's memory, run on the CPU and on a simulated device."""
    plain = nn.Sequential(*(Tiny() for _ in range(48))).requires_grad_(False)
    ours = af.cpu_offload(copy.deepcopy(plain))
    simulated = af.cpu_offload(copy.deepcopy(plain), "cpu:0")
    peer: Any = accelerate().cpu_offload(copy.deepcopy(plain))
    x = torch.randn(4, 32)
    times = compare(
        {
            "plain": lambda: plain(x),
            "accelfn, `cpu_offload` to the CPU: the weights are used where they are": lambda: ours(x),
            "accelfn, `cpu_offload` to a simulated device: each block is copied": lambda: simulated(x),
            "Accelerate, `cpu_offload` to the CPU": lambda: peer(x),
        },
        rounds=rounds,
        calls=5,
    )
    show_against("offload-tiny", times, 2)


def training(rounds: int) -> None:
    """Compare a training step through a simulated device with a plain one; Accelerate gives no gradients."""
    plain = nn.Sequential(*(Layer(512) for _ in range(8)))
    ours = af.cpu_offload(copy.deepcopy(plain), "cpu:0")
    x = torch.randn(4, 64, 512)

    def step(model: nn.Module) -> Callable[[], object]:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)

        def run() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return run

    ways = {"plain": step(plain), "accelfn, `cpu_offload` to a simulated device": step(ours)}
    show_against("offload-training", compare(ways, rounds=rounds, calls=1))


def generating(rounds: int) -> None:
    """Compare 20 tokens of a Llama of 381 MB whose checkpoint stays on the disk with those in memory."""
    options: dict[str, Any] = {"max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0}

    def make() -> Any:
        return llama(768, 2048, 10, 12, 16000, **options)

    ids = torch.arange(1, 9)[None]

    def ready(folder: str, at: str, main: str, cache_bytes: int | None = None) -> Callable[[], object]:
        with af.init_empty_weights():
            model = make().eval()
        af.bigmodel.load_checkpoint_in_model(model, folder, device_map={"": at})
        af.dispatch_model(model, {"": at}, main, cache_bytes=cache_bytes)
        return lambda: model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )

    with tempfile.TemporaryDirectory() as folder:
        make().save_pretrained(folder)
        times = compare(
            {
                "in memory": ready(folder, "cpu", "cpu"),
                "on disk: the checkpoint is mapped, and its pages stay": ready(folder, "disk", "cpu"),
                "on disk, `cache_bytes=0`": ready(folder, "disk", "cpu", 0),
                "in memory, to a simulated device": ready(folder, "cpu", "cpu:0"),
                "on disk, to a simulated device": ready(folder, "disk", "cpu:0"),
                "on disk, to a simulated device, `cache_bytes=0`": ready(folder, "disk", "cpu:0", 0),
            },
            rounds=rounds,
            calls=1,
        )
    show_against("offload-generating", times)


def on_gpu(rounds: int) -> None:
    """Compare forward passes from the host's memory on a GPU, with Accelerate and with the link itself."""
    plain = nn.Sequential(*(Layer(4096) for _ in range(_BLOCKS))).half().requires_grad_(False)
    num_bytes = sum(parameter.nbytes for parameter in plain.parameters())
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device="cuda")
    ours = af.cpu_offload(copy.deepcopy(plain), 0)
    peer: Any = accelerate().cpu_offload(copy.deepcopy(plain), torch.device("cuda", 0))
    x = torch.randn(1, 16, 4096, dtype=torch.float16, device="cuda")

    def ready(work: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return run

    ways: Mapping[str, Callable[[], object]] = {
        "accelfn, `cpu_offload`": ready(lambda: ours(x)),
        "Accelerate, `cpu_offload`": ready(lambda: peer(x)),
        "256 MiB over the link": ready(lambda: target.copy_(pinned, non_blocking=True)),
    }
    times = compare(ways, rounds=rounds, calls=1)
    link = pinned.numel() / times.pop("256 MiB over the link").median
    show_against("gpu-offload", times, 1)
    used = num_bytes / times["accelfn, `cpu_offload`"].median / link
    columns = ("the link carries", "of which forward passes use")
    show_table("gpu-link", columns, [(f"{link / 1e9:.1f} GB/s", f"{used:.0%}")])


def accelerate() -> Any:
    return importlib.import_module("accelerate")


def main() -> None:
    rounds = 9
    with torch.no_grad():
        from_disk(rounds)
        simulated_link(rounds)
        overhead(3 * rounds)
        generating(rounds)
    training(rounds)


if __name__ == "__main__":
    main()
