"""A real architecture, loaded in less memory than it needs, generates the same tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import accelfn as af
from tests.bigmodel.real import MIB, build, tokens_of

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def test_tokens_are_equal_and_memory_stays_within_the_bound(tmp_path: Path) -> None:
    torch.random.manual_seed(7)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    model = build()
    with af.init_context(cpu=True) as ctx:
        af.save_model(ctx, model, tmp_path, max_shard_size="30MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    # A simulated device's memory is the C library's, which would keep what is freed, in pieces.
    frugal = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(
        (sys.executable, "-m", "tests.bigmodel.real", str(tmp_path)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **frugal},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == tokens_of(model)
    assert {"cpu:0", "cpu", "disk"} <= set(found["places"])
    slack = 20 * MIB
    assert found["taken"] <= found["budgets"] + found["streamed"] + slack
    assert found["loaded"] <= found["budgets"] + found["largest"] + slack
    assert found["peak"] <= found["streamed"]
