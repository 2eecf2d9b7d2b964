"""Offloading on a real device, where copies overlap with what computes. Skipped without one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from accelfn.bigmodel import cpu_offload, disk_offload, dispatch_model, read_offload
from tests.bigmodel.offload.trees import gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def layers() -> Any:
    cast("Any", torch).random.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(4)))


@pytest.mark.parametrize("how", ["cpu", "disk", "both", "buffers"])
def test_an_offloaded_model_on_cuda_equals_the_plain_one(how: str, tmp_path: Path) -> None:
    plain, model = layers().cuda(), layers()
    if how == "cpu":
        cpu_offload(model, 0)
    elif how == "disk":
        disk_offload(model, tmp_path, 0)
    elif how == "buffers":
        cpu_offload(model, 0, offload_buffers=True)
    else:
        dispatch_model(model, {"0": 0, "1": "cpu", "2": "disk", "3": "cpu"}, offload_dir=tmp_path)
    x = torch.randn(8, 64)
    for _ in range(3):
        plain.zero_grad()
        model.zero_grad()
        out = model(x)
        seen = out.detach().clone()  # at once: anything else may wait for the device, and so for the copy
        expected = plain(x.cuda())
        assert out.device == x.device
        assert torch.equal(expected.cpu(), seen)
        expected.sum().backward()
        out.sum().backward()
        for left, right in zip(gradients(plain).values(), gradients(model).values(), strict=True):
            torch.testing.assert_close(cast("Any", left).cpu(), cast("Any", right).cpu())
        with torch.no_grad():
            seen = model(x).clone()
            assert torch.equal(plain(x.cuda()).cpu(), seen)
            assert torch.equal(plain(x.cuda()), model(x.cuda()))
    for (name, left), right in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(left.cpu(), right.cpu()), name
    assert copy.deepcopy(model)(x).device == x.device


def test_memory_on_cuda_stays_within_the_bound() -> None:
    model: Any = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).requires_grad_(False)
    cpu_offload(model, 0)
    x = torch.randn(1, 2048, device="cuda")
    model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        model(x)
    torch.cuda.synchronize()
    (facts,) = read_offload(model)
    # One more may wait for the device to be done with it, and activations are small.
    assert torch.cuda.max_memory_allocated() - before <= 1.5 * facts.bound_bytes + (1 << 20)
