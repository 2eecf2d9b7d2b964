"""Models in stages, over any number of ranks and cuts: their checkpoint is the one of the whole model.

What the training of them makes is saved and loaded in ``test_layouts``.
"""

# torch leaves manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.checkpoint import LoadReport, verify_checkpoint
from accelfn.context import Context
from accelfn.errors import CheckpointError, CheckpointMismatchError
from accelfn.parallel import plan_stages, read_facts
from accelfn.parallel.pointers import leave_pointers, named, repoint
from accelfn.parallel.strategies.stages import apply_stages
from accelfn.testing import run_ranks
from tests.checkpoint.layouts import differing, step, whole


class Layers(nn.Module):
    """All that stages may share: a weight, parameters and buffers of the model itself."""

    def __init__(self, num_layers: int, *, is_tied: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("positions", torch.randn(2))
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(num_layers)
        )
        self.head = nn.Linear(3, 5, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


class Cut(NamedTuple):
    """A model, and the ranks that have its stages."""

    num_layers: int
    is_tied: bool
    num_ranks: int
    per_rank: int  # stages of a rank
    copies: int  # of the model

    @property
    def config(self) -> af.ParallelismConfig:
        """Return the mesh."""
        return af.ParallelismConfig(pp_size=self.num_ranks, dp_replicate_size=self.copies)


def new(ctx: Context, cut: Cut, seed: int) -> dict[str, Any]:
    """Make what is saved, with the stages of this rank; in a world without stages whole."""
    model = Layers(cut.num_layers, is_tied=cut.is_tied, seed=seed)
    kept = [one for name, one in model.named_parameters() if "bias" not in name]
    biases = [("bias" + name, one) for name, one in model.named_parameters() if "bias" in name]
    optimizer = torch.optim.AdamW(
        [{"params": kept}, {"params": [one for _, one in biases], "lr": 0.01}], lr=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    num_ranks = ctx.axis_size("pp")
    if num_ranks > 1:
        before = named(model)
        plan = plan_stages(read_facts(model), num_ranks * cut.per_rank)
        apply_stages(model, plan, range(ctx.coordinate("pp"), num_ranks * cut.per_rank, num_ranks))
        leave_pointers(before, model)
        repoint(optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 3}


def tensors(ctx: Context, run: dict[str, Any]) -> dict[str, torch.Tensor]:
    return whole(run["model"], run["optimizer"], ctx)


def go(run: dict[str, Any]) -> None:
    step(run["model"], run["optimizer"])
    run["schedule"].step()


def document(path: Path) -> str:
    """Return the tree of a checkpoint, to the letter."""
    return json.dumps(json.loads((path / "manifest.json").read_text().splitlines()[0])["tree"])


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    num_ranks, per_rank = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    num_layers = draw(st.integers(num_ranks * per_rank, num_ranks * per_rank + 2))
    return Cut(num_layers, draw(st.booleans()), num_ranks, per_rank, draw(st.integers(1, 2)))


@settings(max_examples=4)  # of worlds of up to six ranks
@given(cuts())
def test_the_checkpoint_of_stages_is_that_of_one_process_to_the_letter(cut: Cut) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def save(ctx: Context) -> dict[str, torch.Tensor]:
            run = new(ctx, cut, 0)
            go(run)
            af.save_state(ctx, folder / f"of{ctx.num_processes}", run)
            files = af.save_model(ctx, run["model"], folder / f"weights{ctx.num_processes}", 200)
            assert all(file.is_file() for file in files)
            af.comm.check_replicas(ctx, [run["model"], run["optimizer"]])
            return tensors(ctx, run)

        def load(ctx: Context) -> list[dict[str, torch.Tensor]]:
            found: list[dict[str, torch.Tensor]] = []
            for size in (1, cut.num_ranks * cut.copies):
                run = new(ctx, cut, 1)
                assert af.load_state(ctx, folder / f"of{size}", run)["step"] == 3
                found.append(tensors(ctx, run))
                go(run)  # with the rate that the schedule had
                found.append(tensors(ctx, run))
                weights = new(ctx, cut, 2)
                assert af.load_model(weights["model"], folder / f"weights{size}") == ((), ())
                found.append(whole(weights["model"], weights["optimizer"], ctx))
            return found

        (saved,) = run_ranks(save, 1)
        size = cut.num_ranks * cut.copies
        stages = run_ranks(save, size, parallelism_config=cut.config)
        assert document(folder / f"of{size}") == document(folder / "of1")
        verify_checkpoint(folder / f"of{size}")
        for file in (folder / "weights1").iterdir():
            assert file.read_bytes() == (folder / f"weights{size}" / file.name).read_bytes()
        (expected,) = run_ranks(load, 1)
        for found in run_ranks(load, size, parallelism_config=cut.config):
            for one, other in zip(found, expected, strict=True):
                assert not differing(one, other)
        for one in (*stages, expected[0], expected[3]):
            assert not differing(one, saved)


CUT = Cut(2, is_tied=True, num_ranks=2, per_rank=1, copies=1)


@pytest.mark.parametrize("lacks", [False, True], ids=["extra", "missing"])
def test_what_other_stages_have_is_checked_where_it_is_and_every_rank_hears(
    lacks: bool, tmp_path: Path
) -> None:
    """A layer that the checkpoint, or the model, has beyond the other is of the last stage."""
    larger = CUT._replace(num_layers=3)
    saved, made = (CUT, larger) if lacks else (larger, CUT)

    def work(ctx: Context) -> tuple[list[str], str, LoadReport]:
        run, other = new(ctx, made, 1), new(ctx, saved, 0)
        before = tensors(ctx, run)
        af.save_model(ctx, other["model"], tmp_path / "weights")
        of_states: list[str] = []
        for parts in (("model",), ("model", "optimizer")):
            path = tmp_path / str(len(parts))
            af.save_state(ctx, path, {part: other[part] for part in parts})
            with pytest.raises((CheckpointMismatchError, af.errors.RemoteRankError)) as of_state:
                af.load_state(ctx, path, {part: run[part] for part in parts})
            of_states.append(str(of_state.value))
        with pytest.raises(CheckpointMismatchError) as of_model:
            af.load_model(run["model"], tmp_path / "weights")
        assert not differing(tensors(ctx, run), before)
        report = af.load_model(run["model"], tmp_path / "weights", strict=False)
        return of_states, str(of_model.value), report

    for states, weights, report in run_ranks(work, 2, parallelism_config=CUT.config):
        assert all("blocks.2.0.weight" in state for state in states)
        assert "blocks.2.0.weight" in weights
        assert [len(names) for names in report] == ([6, 0] if lacks else [0, 7])
        assert all(name.startswith("blocks.2.") for names in report for name in names)


def test_what_is_left_of_a_model_is_not_saved_alone(tmp_path: Path) -> None:
    def work(ctx: Context) -> None:
        run = new(ctx, CUT, 0)
        go(run)
        with pytest.raises(CheckpointError, match=r"optimizer is .* of no pipelined model in the tree"):
            af.save_state(ctx, tmp_path / "at", {"optimizer": run["optimizer"]})
        alone = ctx.along("dp")
        with pytest.raises(CheckpointError, match="model is split into pipeline stages, and this context"):
            af.save_state(alone, tmp_path / f"at{ctx.rank}", {"model": run["model"]})
        for attempt in (
            lambda: af.save_model(alone, run["model"], tmp_path / "weights"),
            lambda: af.get_state_dict(alone, run["model"]),
        ):
            with pytest.raises(ValueError, match="split into pipeline stages"):
                attempt()

    run_ranks(work, 2, parallelism_config=CUT.config)
    assert not [*tmp_path.iterdir()]
