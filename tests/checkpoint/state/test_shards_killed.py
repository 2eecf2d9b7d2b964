"""A rank is killed while shards are saved: the checkpoint of before stays, whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.context import Context
from accelfn.errors import MissingRankError
from accelfn.testing import run_ranks
from tests.checkpoint.meshes import LAYOUTS
from tests.checkpoint.watched_disk import CHANGES, installed, watched
from tests.parallel.tensor_models import GPT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")


def prepared(ctx: Context, seed: int) -> nn.Module:
    model: nn.Module = GPT(seed=seed)
    return af.prepare(ctx, model)


@pytest.mark.parametrize(("victim", "change"), [(0, 1), (0, -1), (1, 1), (1, 2)])
def test_the_checkpoint_of_before_stays(victim: int, change: int, tmp_path: Path) -> None:
    """Changes count from the first of a save; -1 is the renaming that commits it."""
    place = tmp_path / "at"
    options = LAYOUTS["fsdp2"].options()

    def save(ctx: Context) -> None:
        af.save_state(ctx, place, prepared(ctx, 0))
        seen = 0

        def kill(kind: str, path: str) -> None:
            nonlocal seen
            del path
            seen += kind in CHANGES
            if ctx.rank == victim and (kind == "rename" if change < 0 else seen == change):
                os.kill(os.getpid(), signal.SIGKILL)

        with installed(watched(kill)):
            af.save_state(ctx, place, prepared(ctx, 1))

    with pytest.raises(MissingRankError):
        run_ranks(save, 2, "processes", timeout_s=60.0, **options)

    def load(ctx: Context) -> bool:
        model = prepared(ctx, 2)
        af.load_state(ctx, place, model)
        state = af.get_state_dict(ctx, model)
        expected = GPT(seed=0).state_dict()
        return all(torch.equal(value, expected[name]) for name, value in state.items())

    assert run_ranks(load, 2, "processes", timeout_s=60.0, **options) == [True, True]
    assert load(Context())
