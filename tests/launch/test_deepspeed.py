"""Launches with DeepSpeed, as a user writes them: one script, with and without the flags."""

import json
import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
inputs = torch.randn(32, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with af.init_context() as ctx:
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    scaler = af.init_scaler(ctx)
    for epoch in range(3):
        for (x, y), micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                scaler = af.backward(ctx, loss, scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
        mean = af.reduce(ctx, loss.detach(), reduction="mean")
        af.print_once(ctx, f"{ctx.distributed_type} on {ctx.num_processes}: {mean.item():.7f}")
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(850),
    pytest.mark.usefixtures("deepspeed_ops"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]


def launch(folder: Path, *flags: str, command: tuple[str, ...] = ("launch",)) -> str:
    """Run a command of accelfn in ``folder``, and give what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCELFN_")}
    done = subprocess.run(
        [sys.executable, "-m", "accelfn", *command, "--cpu", *flags],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str, kind: str) -> list[float]:
    return [float(one) for one in re.findall(rf"{kind} on 2: (\S+)", output)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    # Without a threshold, DeepSpeed keeps parameters as small as these on every rank.
    zero = {"stage": "auto", "stage3_param_persistence_threshold": 0}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    return tmp_path


def test_the_flags_of_deepspeed_change_nothing_but_the_engine(folder: Path) -> None:
    plain = losses(
        launch(folder, "--num_processes=2", "--gradient_accumulation_steps=2", "train.py"), "MULTI_CPU"
    )
    assert len(plain) == 3
    flags = ("--use_deepspeed", "--zero_stage=3", "--deepspeed_config_file=ds.json")
    window = ("--num_processes=2", "--gradient_accumulation_steps=2")
    sharded = launch(folder, *flags, *window, "train.py")
    assert losses(sharded, "DEEPSPEED") == pytest.approx(plain, abs=1e-6)


def test_deepspeeds_launcher_starts_the_ranks_of_a_host(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = ("--num_machines=1", "--machine_rank=0", f"--main_process_port={port}")
    hosts = ("--deepspeed_hostfile=hosts", "--deepspeed_multinode_launcher=nossh", *alone)
    output = launch(folder, "--use_deepspeed", "--zero_stage=1", *hosts, "train.py")
    assert len(losses(output, "DEEPSPEED")) == 3


def test_the_self_test_trains_and_saves_with_deepspeed(folder: Path) -> None:
    (folder / "a.json").write_text(
        json.dumps({"use_deepspeed": True, "num_processes": 2, "deepspeed": {"zero_stage": 2}})
    )
    names = ("ranks and settings", "training, fp32", "training, accumulation", "training, bf16")
    only = [part for name in (*names, "checkpoint round trip") for part in ("--only", name)]
    output = launch(folder, "--config_file", "a.json", *only, command=("test",))
    assert "5 of 5 checks passed" in output
