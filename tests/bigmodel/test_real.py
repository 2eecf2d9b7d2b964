"""Real architectures, loaded in less memory than they need, and trained there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import accelfn as af
from tests.bigmodel.real import MIB, NAMES, build, tokens_of

ROOT = Path(__file__).parents[2]
Saved: TypeAlias = tuple[str, Any, Path]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=NAMES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.random.manual_seed(7)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    model = build(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    # By the names of the model itself: transformers' own save_pretrained writes Mixtral's experts one by one.
    with af.init_context(cpu=True) as ctx:
        af.save_model(ctx, model, folder, max_shard_size="30MB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return request.param, model, folder


def test_tokens_are_equal_and_memory_stays_within_the_bound(saved: Saved) -> None:
    name, model, folder = saved
    # A simulated device's memory is the C library's, which would keep what is freed, in pieces.
    frugal = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(
        (sys.executable, "-m", "tests.bigmodel.real", name, str(folder)),
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
