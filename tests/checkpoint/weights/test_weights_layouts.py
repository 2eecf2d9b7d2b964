"""The weights of a prepared model leave every layout whole, and come back into any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn.context import Context
from accelfn.testing import run_ranks
from tests.checkpoint.meshes import LAYOUTS
from tests.parallel.tensor_models import GPT

State = dict[str, torch.Tensor]


def prepared(ctx: Context, seed: int) -> Any:
    model: nn.Module = GPT(seed=seed)
    return af.prepare(ctx, model)


def whole(model: nn.Module) -> State:
    """Give all that is in a model. Ranks: every rank."""
    state = af.unwrap_model(model).state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in state.items()
    }


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", [*LAYOUTS])
def test_weights_leave_every_layout_whole_and_come_back(name: str, tmp_path: Path) -> None:
    expected = dict(GPT().state_dict())

    def work(ctx: Context) -> tuple[bool, bool]:
        model = prepared(ctx, 0)
        state = af.get_state_dict(ctx, model)
        files = af.save_model(ctx, model, tmp_path / "functions", max_shard_size=4000)
        assert len(files) > 3
        assert all(path.is_file() for path in files)
        fresh = prepared(ctx, 1)
        af.load_model(fresh, tmp_path / "functions")
        assert equal(whole(fresh), expected)
        other = prepared(ctx, 2)
        af.load_checkpoint_in_model(other, tmp_path / "functions")
        assert equal(whole(other), expected)

        accelerator = af.Accelerator(context=ctx)
        ours: Any = accelerator.prepare(GPT())
        theirs = accelerator.get_state_dict(ours)
        accelerator.save_model(ours, tmp_path / "shim")
        return equal(state, expected), equal(theirs, expected)

    sizes = LAYOUTS[name]
    ranks = run_ranks(work, sizes.num_ranks, "processes", timeout_s=120.0, **sizes.options())
    is_spread = sizes.shard * sizes.tp > 1  # then the main rank alone has the state dict
    for rank, found in enumerate(ranks):
        assert found == ((True, True) if rank == 0 or not is_spread else (False, False))
    index = json.loads((tmp_path / "functions" / "model.safetensors.index.json").read_text())
    stored = {
        key: value
        for file in sorted(set(index["weight_map"].values()))
        for key, value in load_file(tmp_path / "functions" / file).items()
    }
    once = {key: value for key, value in expected.items() if key != "head.weight"}
    assert equal(stored, once)
    assert equal(load_file(tmp_path / "shim" / "model.safetensors"), once)
