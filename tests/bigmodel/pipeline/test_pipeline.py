from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.bigmodel import Pipeline, plan_pipeline
from accelfn.bigmodel.empty import init_empty_weights
from accelfn.comm import catch
from accelfn.errors import CheckpointMismatchError, MissingRankError, RemoteRankError
from accelfn.testing import run_ranks
from accelfn.weights import load as applying
from tests.bigmodel.pipeline.models import Net, Skipping, Tied, seeded


def run_processes(run: Callable[[Context], Any], size: int, **options: Any) -> list[Any]:
    """Run on ranks of which torch's schedules can send to each other."""
    return run_ranks(run, size, "processes" if size > 1 else "memory", **options)


def a_call(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(rows)
    options = {
        "add": torch.rand(rows, 3, generator=generator),
        "ids": torch.arange(rows),
        "keep": "all",
    }
    return (torch.rand(rows, 8, generator=generator), torch.linspace(0, 1, 8)), {"options": options}


def plain(model: nn.Module, rows: int) -> Any:
    args, kwargs = a_call(rows)
    with torch.no_grad():
        return seeded(copy.deepcopy(model)).eval()(*args, **kwargs)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_close(now: Any, expected: Any) -> None:
    assert type(now) is type(expected)
    torch.testing.assert_close(now.y, expected.y)
    assert now.parts.keys() == expected.parts.keys()
    torch.testing.assert_close(now.parts["h"], expected.parts["h"])
    assert torch.equal(now.parts["ids"], expected.parts["ids"])
    assert now.parts["kind"] == "net"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_outputs_are_those_of_the_model(size: int) -> None:
    def run(ctx: Context) -> None:
        args, kwargs = a_call(6)
        model = seeded(Net())
        pipeline = af.bigmodel.prepare_pipeline(ctx, model, args, example_kwargs=kwargs)
        assert isinstance(pipeline, Pipeline)
        assert len(pipeline.plan.stages) == size
        for rows in (6, 5, 1, 13):  # not divisible, fewer than ranks, more than the example
            args, kwargs = a_call(rows)
            out = pipeline(*args, **kwargs) if ctx.is_main_process else pipeline()
            if ctx.is_last_process:
                assert_close(out, plain(Net(), rows))
                assert not out.y.requires_grad
            else:
                assert out is None

    run_processes(run, size)


def test_each_rank_holds_its_own_stage_only() -> None:
    def run(ctx: Context) -> set[str]:
        args, kwargs = a_call(4)
        model = seeded(Net())
        before = tensors_of(model)
        pipeline = af.bigmodel.prepare_pipeline(ctx, model, args, example_kwargs=kwargs)
        own = set(pipeline.plan.stages[ctx.rank].parameters)
        held = tensors_of(model)
        assert {name for name in held if name in dict(model.named_parameters())} == own
        assert all(one is before[name] for name, one in held.items())  # on the CPU nothing is copied
        assert {id(one) for one in tensors_of(pipeline).values()} == {id(one) for one in held.values()}
        return set(held)

    first, second = run_processes(run, 2)
    assert first | second == set(tensors_of(Net()))
    assert not first & second


def test_the_plan_is_the_same_without_values_and_for_any_rank() -> None:
    args, kwargs = a_call(4)
    with torch.device("meta"):
        empty = Net()
    planned = plan_pipeline(empty, 2)
    assert planned == plan_pipeline(Net(), 2)
    assert planned.split == ("blocks.1",)

    def run(ctx: Context) -> Any:
        return af.bigmodel.prepare_pipeline(ctx, seeded(Net()), args, example_kwargs=kwargs).plan

    assert run_processes(run, 2) == [planned, planned]


def test_split_points_and_classes_are_kept_to() -> None:
    plan = plan_pipeline(Net(), 3, split_points=["blocks.1", "last"])
    assert plan.split == ("blocks.1", "last")
    assert plan.stages[2].parameters == ("last.weight", "last.bias")
    with pytest.raises(ValueError, match=r"names blocks\.1\.norm, but it can name"):
        plan_pipeline(Net(), 2, split_points=["blocks.1.norm"])
    with pytest.raises(ValueError, match="Net has 3 blocks, but 7 stages need at least one each"):
        plan_pipeline(Net(), 7)
    with pytest.raises(ValueError, match=r'must be "auto" or a list of module names, got \'even\''):
        plan_pipeline(Net(), 2, split_points="even")
    by_class = plan_pipeline(Net(), 4, no_split_module_classes=["Block", "Linear"])
    assert by_class.split == ("blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize(
    ("model", "example", "options", "says"),
    [
        # Found before the model is split.
        (nn.Linear(4, 4), torch.ones(4, 4), {}, "Linear has 0 blocks, but 2 stages need"),
        (Tied(), torch.tensor(1.0), {}, "no such dimension"),
        (Tied(), (), {}, "no such dimension"),
        (Tied(), torch.ones(4, 4), {"num_chunks": 0}, "num_chunks must be an int of at least 1"),
        # Found when the stages run the example.
        (Skipping(), torch.ones(4, 4), {}, "output of the model depends on modules of other stages"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)),
            torch.ones(4, 4),
            {},
            r"has shape \(8,\) for a microbatch of 2 rows",
        ),
    ],
    ids=["no blocks", "a number", "nothing", "no chunks", "skips", "loses rows"],
)
def test_models_and_examples_that_cannot_run_in_stages_are_refused(
    model: nn.Module, example: Any, options: dict[str, Any], says: str
) -> None:
    def run(ctx: Context) -> None:
        mine = copy.deepcopy(model)
        with pytest.raises((ValueError, RemoteRankError), match=says):
            af.bigmodel.prepare_pipeline(ctx, mine, example, **options)
        if not isinstance(model, (Skipping, nn.Sequential)):
            assert dict(mine.named_parameters()).keys() == dict(model.named_parameters()).keys()
            assert mine.training
        af.wait_for_everyone(ctx)

    run_processes(run, 2)


def test_a_bad_batch_is_an_error_on_all_ranks_and_the_next_one_runs() -> None:
    def run(ctx: Context) -> str:
        model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
        pipeline = af.bigmodel.prepare_pipeline(ctx, model, torch.ones(4, 4))
        with pytest.raises(ValueError, match="this one has no rows"):
            pipeline(torch.ones(0, 4))
        with pytest.raises((RuntimeError, RemoteRankError), match="shapes cannot be multiplied") as caught:
            pipeline(torch.ones(4, 5))
        out = pipeline(torch.ones(2, 7, 4))  # of another shape than the example
        assert (out is None) == (not ctx.is_last_process)
        return type(caught.value).__name__

    assert run_processes(run, 3) == ["RuntimeError", "RemoteRankError", "RemoteRankError"]


def test_an_exception_in_a_stage_is_raised_on_all_ranks() -> None:
    """An index that isn't in the table: only the first stage can know."""

    def run(ctx: Context) -> str:
        pipeline = af.bigmodel.prepare_pipeline(ctx, seeded(Tied()), torch.zeros(4, 3, dtype=torch.int64))
        wrong = torch.zeros(4, 3, dtype=torch.int64)
        wrong[3] = 99  # in the last micro-batch
        with pytest.raises((IndexError, RemoteRankError), match="index out of range") as caught:
            pipeline(wrong)
        ids = torch.arange(12).reshape(4, 3)
        out = pipeline(ids)
        if ctx.is_last_process:
            with torch.no_grad():
                torch.testing.assert_close(out, seeded(Tied())(ids))
        return type(caught.value).__name__

    assert run_processes(run, 2) == ["IndexError", "RemoteRankError"]


class Deadly(nn.Linear):
    """Ends its process in the second microbatch of the second batch."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- as torch names it
        self.calls += 1
        if self.calls == 6:  # before: one microbatch to find out shapes, and three of the example
            os._exit(3)
        return super().forward(input)


def test_a_rank_that_dies_during_a_batch_is_named() -> None:
    def run(ctx: Context) -> None:
        model = nn.Sequential(nn.Linear(4, 4), Deadly(4, 4), nn.Linear(4, 4))
        pipeline = af.bigmodel.prepare_pipeline(ctx, model, torch.ones(6, 4), split_points=["1", "2"])
        pipeline(torch.ones(6, 4))

    with pytest.raises(MissingRankError, match="rank 1"):
        run_processes(run, 3)


def test_ranks_that_are_threads_are_refused() -> None:
    def run(ctx: Context) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises(af.errors.NotAvailableError, match='on="processes"'):
            af.bigmodel.prepare_pipeline(ctx, model, torch.ones(4, 4))
        assert len(list(model.parameters())) == 4

    run_ranks(run, 2)


# --- from a checkpoint ---------------------------------------------------------------------------


def saved(model: nn.Module, folder: Path) -> Path:
    af.save_model(Context(), model, folder, max_shard_size="1KB")
    return folder


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_read_their_own_stage_of_a_checkpoint(size: int, tmp_path: Path) -> None:
    folder = saved(seeded(Tied()), tmp_path)

    def run(ctx: Context) -> None:
        with init_empty_weights():
            model = Tied()
        example = torch.zeros(4, 3, dtype=torch.int64)
        with mock.patch.object(applying, "read_tensors", side_effect=applying.read_tensors) as read:
            pipeline = af.bigmodel.prepare_pipeline(ctx, model, example, checkpoint=folder)
        if size == 2:
            # Tied weights are in the file once, under the first name, and both stages need them.
            own = {
                "embed.weight" if name == "head.weight" else name
                for name in pipeline.plan.stages[ctx.rank].parameters
            }
            assert {one.source.name for call in read.call_args_list for one in call.args[0]} == own
        ids = torch.arange(12).reshape(4, 3)
        out = pipeline(ids)
        if ctx.is_last_process:
            with torch.no_grad():
                torch.testing.assert_close(out, seeded(Tied())(ids))

    run_processes(run, size)


def test_a_model_without_values_needs_a_checkpoint_that_fits(tmp_path: Path) -> None:
    folder = saved(nn.Linear(3, 3), tmp_path)

    def run(ctx: Context) -> list[str]:
        with torch.device("meta"):
            model = Tied()
        example = torch.zeros(4, 3, dtype=torch.int64)
        caught = [
            catch(lambda message=message: af.bigmodel.prepare_pipeline(ctx, model, example, **message))[1]
            for message in cast("list[dict[str, Any]]", [{}, {"checkpoint": folder}])
        ]
        assert "body.0.weight, body.0.bias, " in str(caught[0])
        assert "are on the meta device and have no values. Pass checkpoint=" in str(caught[0])
        assert isinstance(caught[1], (CheckpointMismatchError, RemoteRankError))
        return [type(one).__name__ for one in caught]

    assert run_processes(run, 1) == [["ValueError", "CheckpointMismatchError"]]
    assert run_processes(run, 2) == [["ValueError", "CheckpointMismatchError"]] * 2


class Backwards(nn.Module):
    """Its norm is registered before the blocks, and called after them, where the source doesn't show it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.end(x)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def test_modules_after_the_blocks_may_be_named() -> None:
    def run(ctx: Context) -> torch.Tensor:
        with pytest.raises((ValueError, RemoteRankError), match=r"name it in .*last="):
            af.bigmodel.prepare_pipeline(ctx, seeded(Backwards()), torch.ones(4, 4))
        made = af.bigmodel.prepare_pipeline(
            ctx, seeded(Backwards()), torch.ones(4, 4), last=["norm"], gather_output=True
        )
        assert made.plan.stages[1].modules == ("norm",)
        return made(torch.ones(4, 4))

    for found in run_processes(run, 2):
        torch.testing.assert_close(found, seeded(Backwards())(torch.ones(4, 4)).detach())
