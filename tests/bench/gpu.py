"""One GPU: the step, the checkpoint and offloading, beside plain torch and Accelerate.

``python -m tests.bench.gpu``. Not a part of ``python -m tests.bench``, which runs on the CPU.
"""

# torch leaves backward and its optimizers partly untyped, and the peer has no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from tests.bench.offload import on_gpu
from tests.bench.precision import GPT, Size, read_text
from tests.bench.timing import Row, compare, print_table

# What is around a short step shows in the first; the second is an ordinary one.
SIZES = {"of 0.3 million parameters": Size(64, 2, 64, 8), "of 118 million": Size(1024, 9, 1024, 8)}


def waiting(work: Callable[[], object]) -> Callable[[], object]:
    """Return ``work`` and a wait for the device."""

    def run() -> None:
        work()
        torch.cuda.synchronize()

    return run


def step_rows() -> list[Row]:
    """Compare 20 steps in bf16, clipped, with fused AdamW; the loss isn't read."""
    theirs: Any = importlib.import_module("accelerate")
    rows: list[Row] = []
    for name, size in SIZES.items():
        data = read_text(size, 20, torch.device("cuda"))

        def parts(size: Size = size) -> tuple[Any, Any]:
            af.set_seed(0)
            model = GPT(size).cuda()
            return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())

        def by_hand(data: torch.Tensor = data) -> Callable[[], object]:
            model, optimizer = parts()

            def run() -> None:
                for ids in data:
                    with torch.autocast("cuda", torch.bfloat16):
                        logits = model(ids[:, :-1])
                    F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

            return waiting(run)

        def by_functions(ctx: af.Context, data: torch.Tensor = data) -> Callable[[], object]:
            model, optimizer = af.prepare(ctx, *parts())

            def run() -> None:
                scaler = af.init_scaler(ctx)
                for ids in data:
                    scaler = af.backward(ctx, loss_of(model, ids), scaler)
                    scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)

            return waiting(run)

        def by_shim(accelerator: Any, data: torch.Tensor = data) -> Callable[[], object]:
            model, optimizer = accelerator.prepare(*parts())

            def run() -> None:
                for ids in data:
                    accelerator.backward(loss_of(model, ids))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

            return waiting(run)

        with af.init_context(mixed_precision="bf16") as ctx:
            ways = {
                "plain torch": by_hand(),
                "functions": by_functions(ctx),
                "Accelerator": by_shim(af.Accelerator(context=ctx)),
                "Accelerate": by_shim(theirs.Accelerator(mixed_precision="bf16")),
            }
            times = compare(ways, rounds=11, calls=1)
        plain = times.pop("plain torch")
        rows.append(Row(f"20 steps of a GPT {name}, plain torch", plain, times))
    return rows


def checkpoint_rows() -> list[Row]:
    """Compare saving and loading a model and its optimizer, 1.4 GB on the device."""
    size = Size(1024, 9, 1024, 8)
    rows: list[Row] = []
    with af.init_context() as ctx, tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        place = Path(folder)
        model: Any = GPT(size)
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = af.prepare(ctx, model, optimizer)
        loss = model(read_text(size, 1, ctx.device)[0, :, :-1]).mean()
        af.optimizer_step(ctx, optimizer, af.backward(ctx, loss, af.init_scaler(ctx)))
        tree = {"model": model, "optimizer": optimizer}

        def plainly() -> None:
            torch.save({name: part.state_dict() for name, part in tree.items()}, place / "plain.pt")

        def read_plainly() -> None:
            found = torch.load(place / "plain.pt", map_location="cuda")
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])

        def ours() -> None:
            shutil.rmtree(place / "ours", ignore_errors=True)
            af.save_state(ctx, place / "ours", tree)

        def stall() -> None:
            handles.append(af.save_state(ctx, place / f"background-{len(handles)}", tree, asynchronous=True))

        def finish() -> None:
            while handles and not handles[-1].done():
                handles[-1].result()
            for number in range(len(handles)):
                shutil.rmtree(place / f"background-{number}", ignore_errors=True)

        handles: list[Any] = []
        saved = compare({"torch.save": plainly, "save_state": waiting(ours)}, rounds=5, calls=1)
        stalled = compare({"stall": stall}, rounds=5, calls=1, before=finish)["stall"]
        finish()
        synced = saved.pop("save_state")
        rows.append(Row("save_state, synced to the disk", synced, saved))
        rows.append(Row("save_state(asynchronous=True) until it returns", stalled, saved))
        loaded = compare(
            {
                "torch.load, load_state_dict": waiting(read_plainly),
                "load_state": waiting(lambda: af.load_state(ctx, place / "ours", tree)),
            },
            rounds=5,
            calls=1,
        )
        rows.append(Row("load_state, verified", loaded.pop("load_state"), loaded))
    return rows


def main() -> None:
    """Print the tables."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print_table(step_rows())
    print(flush=True)
    print_table(checkpoint_rows())
    print(flush=True)
    with torch.no_grad():
        on_gpu(9)


if __name__ == "__main__":
    main()
