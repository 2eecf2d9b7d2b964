"""The context of ranks that don't exist: as that of a world of the same options, without communication."""

from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.context import AXES
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks

CONFIG = af.ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=2)


def test_it_is_as_that_of_rank_0_in_a_world_of_the_same_options() -> None:
    planned = af.plan_context(12, parallelism_config=CONFIG, mixed_precision="bf16")

    def answers(ctx: af.Context) -> tuple[object, ...]:
        axes = [(ctx.axis_size(one), ctx.coordinate(one), ctx.along(one).num_processes) for one in AXES]
        assert ctx.mesh is not None
        return axes, ctx.mesh.plan, ctx.strategy, ctx.mixed_precision, ctx.num_processes, ctx.rank

    real = run_ranks(answers, 12, parallelism_config=CONFIG, mixed_precision="bf16")[0]
    assert answers(planned) == real


@pytest.mark.parametrize(
    ("given", "kind"),
    [(0, ConfigurationError), (-1, ConfigurationError), (1.5, TypeError), (True, TypeError)],
)
def test_a_number_of_ranks_is_an_int_from_1(given: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"num_processes must be .*, got {given}"):
        af.plan_context(given)


def test_it_communicates_nothing() -> None:
    planned = af.plan_context(12, parallelism_config=CONFIG)
    for ctx in (planned, planned.along("tp"), af.plan_context(2)):
        for call in (af.gather, af.reduce, af.broadcast):
            with pytest.raises(NotAvailableError, match="this context is from plan_context"):
                call(ctx, torch.ones(3))
        with pytest.raises(NotAvailableError, match="is from plan_context"):
            af.wait_for_everyone(ctx)
        with pytest.raises(NotAvailableError, match="is from plan_context"):
            af.prepare_model(ctx, torch.nn.Linear(2, 2))
    assert torch.equal(af.gather(planned.along("cp"), torch.ones(3)), torch.ones(3))  # this rank alone


def test_options_are_those_of_a_context() -> None:
    with pytest.raises(ConfigurationError, match="num_processes=9"):
        af.plan_context(9, parallelism_config=CONFIG)
    with pytest.raises(TypeError, match="unknown option"):
        af.plan_context(2, fsdp=1)  # pyright: ignore[reportCallIssue]
