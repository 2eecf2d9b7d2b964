# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from typing import Any, cast

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from accelfn import Context
from accelfn.config import GradScalerKwargs
from accelfn.testing import run_ranks
from tests.training.test_train_step import begin, make_rows, mean_loss

compiled = cast("Any", torch.compile)  # torch types its backends by name only


# Torch warns of much in itself while it compiles.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]


def graphs_of(kind: str, ranks: int, backend: str, mode: str = "no", **options: Any) -> list[list[int]]:
    """Train twins, one compiled; return each rank's number of graphs after each step."""

    def run(ctx: Context) -> list[int]:
        counter = CompileCounterWithBackend(backend)
        one, other = (begin(ctx, kind, mean_loss, 1, by_adam=True, max_norm=1.0) for _ in range(2))
        fast = compiled(other.step, backend=counter, **options)
        state, same = one.state, other.state
        graphs: list[int] = []
        for seed in range(4):
            rows = make_rows(4, seed + 10 * ctx.rank)
            state, metrics = one.step(state, rows)
            same, found = fast(same, rows)
            expected = (one.params(state), metrics)
            torch.testing.assert_close((other.params(same), found), expected, rtol=1e-4, atol=1e-5)
            graphs.append(counter.frame_count)
        return graphs

    # In forked processes: what torch leaves in modules and caches ends with them.
    handlers = [GradScalerKwargs(init_scale=8.0)]
    asked: dict[str, Any] = {"mixed_precision": mode, "kwargs_handlers": handlers, "timeout_s": 100}
    return run_ranks(run, ranks, "processes", gradient_accumulation_steps=2, **asked)


@pytest.mark.parametrize(("mode", "backend"), [("no", "aot_eager"), ("fp16", "eager")])
def test_a_pure_step_is_one_graph_which_is_made_once(mode: str, backend: str) -> None:
    assert graphs_of("trees", 1, backend, mode, fullgraph=True) == [[1] * 4]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shorter_last_batch_is_traced_too(ranks: int) -> None:
    def run(ctx: Context) -> None:
        one, other = (begin(ctx, "modules", mean_loss, 1) for _ in range(2))
        fast = compiled(other.step, backend="eager")
        state, same = one.state, other.state
        for number in (6, 4, 5):
            rows = make_rows(number, number + 10 * ctx.rank)
            state, _ = one.step(state, rows)
            same, _ = fast(same, rows)
            torch.testing.assert_close(other.params(same), one.params(state), rtol=1e-4, atol=1e-5)

    run_ranks(run, ranks, "processes", gradient_accumulation_steps=2, timeout_s=100)


@pytest.mark.parametrize(
    ("kind", "ranks", "backend"),
    [
        ("modules", 1, "aot_eager"),
        ("trees", 2, "eager"),  # what communicates stays outside of the graphs
        ("modules", 2, "eager"),
    ],
)
def test_a_step_isnt_compiled_again(kind: str, ranks: int, backend: str) -> None:
    for graphs in graphs_of(kind, ranks, backend):
        assert graphs == [graphs[0]] * 4
        assert graphs[0] > 0
