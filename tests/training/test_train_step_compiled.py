# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import accelfn as af
from accelfn import Context, GradScalerKwargs
from accelfn.testing import run_ranks
from tests.training.optimizers import Adam
from tests.training.test_train_step import make_model, make_rows, mean_loss

T = TypeVar("T")

compiled = cast("Any", torch.compile)  # torch types its backends by name only


# Torch warns of much in itself while it compiles.
pytestmark = pytest.mark.filterwarnings("default")


def in_process(action: Callable[[Context], T], ranks: int = 1, **options: Any) -> list[T]:
    """Compile in forked processes: what torch leaves in modules and caches ends with them."""
    return run_ranks(action, ranks, "processes", timeout_s=100, **options)


def pure(ctx: Context, optimizer: Any, backend: str, **options: Any) -> list[int]:
    """Train two twins, one compiled, and give the number of graphs after each step."""
    counter = CompileCounterWithBackend(backend)
    params = {name: item.detach() for name, item in make_model(1).named_parameters()}

    def loss_fn(params: Any, rows: Any) -> torch.Tensor:
        hidden = (rows["x"] @ params["0.weight"].T + params["0.bias"]).tanh()
        return (hidden @ params["2.weight"].T).square().mean() + params["2.bias"].square().sum()

    step = af.make_train_step(ctx, loss_fn, optimizer, max_norm=1.0)
    fast = compiled(step, backend=counter, **options)
    state = other = af.init_train_state(ctx, optimizer, params)
    graphs: list[int] = []
    for seed in range(4):
        rows = make_rows(4, seed + 10 * ctx.rank)
        state, metrics = step(state, rows)
        other, same = fast(other, rows)
        torch.testing.assert_close((other.params, same), (state.params, metrics), rtol=1e-4, atol=1e-5)
        graphs.append(counter.frame_count)
    return graphs


def over_modules(ctx: Context, backend: str, **options: Any) -> list[int]:
    counter = CompileCounterWithBackend(backend)
    twins: list[Any] = []
    for _ in range(2):
        model = af.prepare_model(ctx, make_model(1))
        rate = torch.tensor(0.1)  # as a number it would be part of the graph, and each value another one
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        step = af.make_train_step(
            ctx,
            mean_loss,
            optimizer,
            model=model,
            scheduler=scheduler,
            max_norm=1.0,
        )
        twins.append((model, step, af.init_train_state(ctx, optimizer)))
    (model, step, state), (other_model, other_step, other) = twins
    fast = compiled(other_step, backend=counter, **options)
    graphs: list[int] = []
    for seed in range(4):
        rows = make_rows(4, seed + 10 * ctx.rank)
        state, metrics = step(state, rows)
        other, same = fast(other, rows)
        torch.testing.assert_close((other, same), (state, metrics), rtol=1e-4, atol=1e-5)
        graphs.append(counter.frame_count)
    torch.testing.assert_close(list(other_model.parameters()), list(model.parameters()), rtol=1e-4, atol=1e-5)
    return graphs


@pytest.mark.parametrize(("mode", "backend"), [("no", "aot_eager"), ("fp16", "eager")])
def test_a_pure_step_is_one_graph_which_is_made_once(mode: str, backend: str) -> None:
    handlers = [GradScalerKwargs(init_scale=8.0)] if mode == "fp16" else []
    found = in_process(
        lambda ctx: pure(ctx, Adam(0.1), backend, fullgraph=True),
        mixed_precision=mode,
        gradient_accumulation_steps=2,
        kwargs_handlers=handlers,
    )
    assert found == [[1] * 4]


def test_torchopt_runs_beside_the_graphs() -> None:
    torchopt = pytest.importorskip("torchopt")
    graphs = in_process(lambda ctx: pure(ctx, torchopt.adam(0.1), "eager"))[0]
    assert graphs == [graphs[0]] * 4


def test_a_step_over_modules_isnt_compiled_again() -> None:
    graphs = in_process(lambda ctx: over_modules(ctx, "aot_eager"), gradient_accumulation_steps=2)[0]
    assert graphs == [graphs[0]] * 4
    assert graphs[0] > 0


@pytest.mark.parametrize("kind", ["pure", "modules"])
def test_with_several_ranks_what_communicates_stays_outside_of_the_graphs(kind: str) -> None:
    def run(ctx: Context) -> list[int]:
        return pure(ctx, Adam(0.1), "eager") if kind == "pure" else over_modules(ctx, "eager")

    for graphs in in_process(run, 2, gradient_accumulation_steps=2):
        assert graphs == [graphs[0]] * 4
        assert graphs[0] > 0
