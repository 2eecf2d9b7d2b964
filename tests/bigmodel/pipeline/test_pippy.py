from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed.pipelining as pipelining  # before ranks are forked, which would import it each

import accelfn as af
from accelfn import Context
from accelfn.testing import run_ranks
from tests.bigmodel.pipeline.models import Tied, seeded

IDS = torch.arange(18).remainder(16).reshape(6, 3)


def expected() -> torch.Tensor:
    with torch.no_grad():
        return seeded(Tied())(IDS)


@pytest.mark.parametrize("gather_output", [False, True])
def test_the_model_itself_runs_the_pipeline(gather_output: bool) -> None:
    def run(ctx: Context) -> None:
        model: Any = seeded(Tied())
        # The context is made of the process group that is there.
        found = af.bigmodel.prepare_pippy(model, example_args=(IDS,), gather_output=gather_output)
        assert found is model
        assert model.hf_split_points == ["body.2"]
        assert isinstance(model.pippy_stage, pipelining.PipelineStage)
        out = model(IDS)
        if gather_output or ctx.is_last_process:
            torch.testing.assert_close(out, expected())
        else:
            assert out is None
        assert ("body.2.weight" in dict(model.named_parameters())) == ctx.is_last_process

    run_ranks(run, 2, "processes")


def test_schedules_of_torch_run_the_stages() -> None:
    def run(ctx: Context) -> None:
        model: Any = seeded(Tied())
        af.bigmodel.prepare_pippy(model, example_kwargs={"ids": IDS}, num_chunks=3, ctx=ctx)
        schedule: Any = pipelining.ScheduleGPipe(model.pippy_stage, 3)
        with torch.no_grad():
            outs = schedule.eval(ids=IDS)
        if ctx.is_last_process:
            torch.testing.assert_close(outs, expected())

    run_ranks(run, 2, "processes")


def test_with_one_process_the_model_is_unchanged() -> None:
    model = seeded(Tied())
    found = af.bigmodel.prepare_pippy(model, example_args=(IDS,), ctx=Context())
    assert found is model
    assert "forward" not in vars(model)
    assert cast("Any", model).hf_split_points == []
    assert cast("Any", model).pippy_stage is None
    assert not model.training
    torch.testing.assert_close(model(IDS).detach(), expected())
