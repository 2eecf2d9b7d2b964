"""The training program of :mod:`tests.bench.elastic` with torchft: replica groups of one process each.

``python -m tests.bench.elastic_torchft FOLDER NAME WIDTH BLOCKS [ROUNDS]``, with the address of a lighthouse
in ``TORCHFT_LIGHTHOUSE``; otherwise as :mod:`tests.bench.elastic_run`. With ROUNDS it times blocks of steps
through torchft's manager and by plain DDP in turn. It needs ``torchft-nightly``.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from tests.bench.elastic_run import Diary
from tests.bench.sharding import GPT, batch_of, loss_of, stepped
from tests.bench.timing import plain

_TIMEOUT = timedelta(seconds=5)
_WARM_UP, _BLOCK = 10, 20


def managed(name: str, size: tuple[int, int], synchronises: bool) -> tuple[Any, Callable[[], bool]]:
    """Return the manager of a replica group, and a step, which returns whether it was committed."""
    torchft: Any = importlib.import_module("torchft")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    model = GPT(*size)
    inner = torch.optim.AdamW(model.parameters(), 1e-3)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        inner.load_state_dict(found["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=_TIMEOUT,
        quorum_timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=name,
        hostname="127.0.0.1",
        init_sync=synchronises,
    )
    manager.kept = store  # it ends with the manager
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    batch = batch_of(int(name))

    def step() -> bool:
        before = manager.current_step()
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()  # pyright: ignore[reportUnknownMemberType]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return manager.current_step() > before

    return manager, step


def by_ddp(name: str, size: tuple[int, int]) -> Callable[[], object]:
    """Return the same step in plain torch."""
    model = nn.parallel.DistributedDataParallel(GPT(*size))
    batch = batch_of(int(name))
    return stepped(lambda: loss_of(model, batch), torch.optim.AdamW(model.parameters(), 1e-3), 1.0)


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Time blocks of steps in turn: the medians of a step by plain DDP, and of what the other adds."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in sorted(ways, reverse=bool(number % 2)):
            plain.barrier()
            start = time.perf_counter()
            for _ in range(_BLOCK if number else _WARM_UP):
                ways[name]()
            plain.barrier()
            if number:
                taken[name].append((time.perf_counter() - start) / _BLOCK)
    pairs = zip(taken["torchft"], taken["DDP"], strict=True)
    without = statistics.median(taken["DDP"])
    return {"without": without, "added": statistics.median(one - other for one, other in pairs)}


def main() -> None:
    """Train until this process is stopped, or measure."""
    torch.set_num_threads(1)
    folder, name, size = Path(sys.argv[1]), sys.argv[2], (int(sys.argv[3]), int(sys.argv[4]))
    rounds = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    (folder / f"pid-{name}").write_text(str(os.getpid()))
    manager, step = managed(name, size, not rounds)
    if rounds:
        address = f"tcp://127.0.0.1:{os.environ['BENCH_PORT']}"
        plain.init_process_group("gloo", init_method=address, rank=int(name), world_size=2)
        found = measure({"torchft": step, "DDP": by_ddp(name, size)}, rounds)
        assert manager.num_participants() == 2
        (folder / f"cost-{name}").write_text(json.dumps(found))
        plain.barrier()
        plain.destroy_process_group()
        manager.shutdown(wait=False)
        return
    diary = Diary(folder / name)
    while True:
        committed = step()
        diary.note("step" if committed else "discarded", manager.current_step())


if __name__ == "__main__":
    main()
