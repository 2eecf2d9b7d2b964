"""A training program that survives lost ranks, for tests and the campaign.

``python program.py FOLDER KIND STEPS NAP_S [SLOT.ATTEMPT:STEP:FAULT ...]``: each process writes its result to
``FOLDER/result-SLOT.ATTEMPT``, and a line with the step it had reached and the one it goes on from to
``FOLDER/training-SLOT.ATTEMPT`` whenever it begins. A fault is ``kill``, ``stop``, ``raise``, ``late`` (an
operation that times out) or ``disk`` (saves fail from now on), at the end of a step.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.context import Context
from accelfn.errors import CollectiveTimeoutError

Faults = frozenset[tuple[str, int, str]]


def parse_faults(texts: Sequence[str]) -> Faults:
    """Parse faults such as ``1.0:10:kill``: of process 1.0 at step 10."""
    return frozenset((name, int(step), what) for name, step, what in (text.split(":") for text in texts))


class Program(NamedTuple):
    """What a process does.

    Attributes:
        folder: For checkpoints and results.
        kind: How the model is parallelised: replicas in exact mode, or shards.
        steps: Number of optimizer steps.
        nap_s: Extra time of each step.
        every: Steps per snapshot.
        saves: Steps per checkpoint.
        faults: By the name of a process and a step.
        me: Name of this process.
    """

    folder: Path
    kind: str
    steps: int
    nap_s: float = 0.02
    every: int = 4
    saves: int = 15
    faults: Faults = frozenset()
    me: str = "0.0"

    def options(self) -> dict[str, Any]:
        """Return the options of the context."""
        if self.kind == "ddp":
            return {"cpu": True, "reduction": af.config.CanonicalReduction(num_microbatches=12)}
        return {
            "cpu": True,
            "fsdp_plugin": af.FullyShardedDataParallelPlugin(fsdp_version=2),
            "dataloader_config": af.DataLoaderConfiguration(split_batches=True),
        }

    def make_state(self, ctx: Context) -> dict[str, Any]:
        """Make a prepared state."""
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        dropout = nn.Dropout(0.1) if self.kind == "ddp" else nn.Identity()  # exact mode draws by sample
        model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), dropout, nn.Linear(24, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        rows = torch.randn(240, 8, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(rows, rows.sum(1, keepdim=True))
        loader = DataLoader(data, batch_size=2 if self.kind == "ddp" else 24, shuffle=True)
        model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
        scaler = af.init_scaler(ctx)
        return {"model": model, "optimizer": optimizer, "loader": loader, "scaler": scaler, "step": 0}

    def train(self, ctx: Context, state: dict[str, Any]) -> list[float]:
        """Train to the end, and return the weights."""
        reached = self.folder / f"reached-{self.me}"
        with (self.folder / f"training-{self.me}").open("a") as begun:
            begun.write(f"{reached.read_text() if reached.exists() else state['step']} {state['step']}\n")
        model, loader = state["model"], state["loader"]
        while state["step"] < self.steps:
            for (rows, targets), micro in af.microbatches(ctx, loader):
                with af.accumulate(ctx, micro, model):
                    loss = nn.functional.mse_loss(model(rows), targets)
                    state["scaler"] = af.backward(ctx, loss, state["scaler"], micro)
                if micro.sync:
                    state["scaler"] = af.optimizer_step(ctx, state["optimizer"], state["scaler"])
                    self.end_step(ctx, state)
                    if state["step"] == self.steps:
                        break
        weights: list[float] = []
        for one in af.unwrap_model(model).state_dict().values():
            weights += (one.full_tensor() if hasattr(one, "full_tensor") else one).double().flatten().tolist()
        return weights

    def end_step(self, ctx: Context, state: dict[str, Any]) -> None:
        """Count a step, remember it, save it, or fail."""
        state["step"] += 1
        (self.folder / f"reached-{self.me}").write_text(str(state["step"]))
        time.sleep(self.nap_s)
        for kind in ("kill", "stop", "raise", "late", "disk"):
            if (self.me, state["step"], kind) in self.faults:
                if kind == "disk":
                    os.fsync = _refuse
                    continue
                if kind == "late":
                    raise CollectiveTimeoutError("an operation that never ends")
                if kind == "raise":
                    raise ValueError(f"a fault at step {state['step']}")
                os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        af.snapshot(ctx, state, every=self.every)
        if state["step"] % self.saves == 0:
            where = self.folder / "checkpoints" / f"step-{state['step']}"
            af.save_state(ctx, where, state, True, step=state["step"], keep=af.Keep(last=2))

    def run(self) -> None:
        """Run as a process of an elastic launch, or alone."""
        (self.folder / f"pid-{self.me}").write_text(str(os.getpid()))
        found = af.run_elastic(
            self.train,
            self.make_state,
            checkpoints=self.folder / "checkpoints",
            join_timeout=20.0,
            **self.options(),
        )
        if found is not None:
            (self.folder / f"result-{self.me}").write_text(json.dumps(found))


def _refuse(descriptor: object) -> None:
    raise OSError(5, "no disk")


def main(argv: Sequence[str]) -> None:
    """Run the program of a command line."""
    folder, kind, steps, nap, *faults = argv
    me = ".".join(
        os.environ.get(name, "0") for name in ("ACCELFN_ELASTIC_SLOT", "TORCHELASTIC_RESTART_COUNT")
    )
    Program(Path(folder), kind, int(steps), float(nap), faults=parse_faults(faults), me=me).run()


if __name__ == "__main__":
    main(sys.argv[1:])
