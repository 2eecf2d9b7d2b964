# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Each method of the Accelerator gives what its function gives, on every rank."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Accelerator, Context
from accelfn.testing import run_ranks
from accelfn.tree import flatten


class Pair(NamedTuple):
    """One thing, done in two ways: through an Accelerator, and by the functions."""

    method: Callable[[Accelerator], Any]
    function: Callable[[Context], Any]


def tree(rank: int) -> dict[str, Any]:
    return {"x": torch.arange(3.0) + rank, "pair": (torch.tensor([rank]), torch.ones(2, 2))}


def model() -> nn.Linear:
    one = nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.fill_(0.5)
            parameter.grad = torch.full_like(parameter, 3.0)
    return one


def loader() -> Any:
    return DataLoader(torch.arange(7), batch_size=2)  # pyright: ignore[reportArgumentType]


def gradients(one: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in one.parameters() if parameter.grad is not None]


def clipped(prepared: nn.Module, by: Callable[..., Any]) -> tuple[Any, list[torch.Tensor]]:
    prepared(torch.ones(1, 2)).sum().backward()
    return by(prepared.parameters(), 1.0), gradients(prepared)


def newest(ctx: Context, clip: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(clip, ctx, scaler_state=af.init_scaler(ctx))


def trained(backward: Callable[[torch.Tensor], Any], prepared: nn.Module) -> list[torch.Tensor]:
    prepared.zero_grad()
    backward(prepared(torch.ones(1, 2)).sum())
    return gradients(prepared)


def calls(decorate: Callable[..., Any]) -> Any:
    return decorate(lambda: 7)()


def went(block: Any, rank: int) -> int:
    with block:
        return rank


def dtype_of(block: Any) -> torch.dtype:
    with block:
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def metrics_by_method(accelerator: Accelerator) -> list[torch.Tensor]:
    return [accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(loader())]


def metrics_by_function(ctx: Context) -> list[torch.Tensor]:
    prepared = af.prepare(ctx, loader())
    return [af.gather_for_metrics(ctx, batch, micro) for batch, micro in af.microbatches(ctx, prepared)]


PAIRS: dict[str, Pair] = {
    "gather": Pair(lambda a: a.gather(tree(a.process_index)), lambda c: af.gather(c, tree(c.rank))),
    "reduce": Pair(
        lambda a: a.reduce(tree(a.process_index), "sum"),
        lambda c: af.reduce(c, tree(c.rank), "sum"),
    ),
    "pad_across_processes": Pair(
        lambda a: a.pad_across_processes(torch.ones(a.process_index + 1), pad_index=9),
        lambda c: af.pad_across_processes(c, torch.ones(c.rank + 1), pad_index=9),
    ),
    "gather_for_metrics": Pair(metrics_by_method, metrics_by_function),
    "split_between_processes": Pair(
        lambda a: a.split_between_processes([1, 2, 3], apply_padding=True).__enter__(),
        lambda c: af.split_between_processes(c, [1, 2, 3], apply_padding=True),
    ),
    "wait_for_everyone": Pair(lambda a: a.wait_for_everyone(), af.wait_for_everyone),
    "main_process_first": Pair(
        lambda a: went(a.main_process_first(), a.process_index),
        lambda c: went(af.main_process_first(c), c.rank),
    ),
    "local_main_process_first": Pair(
        lambda a: went(a.local_main_process_first(), a.process_index),
        lambda c: went(af.local_main_process_first(c), c.rank),
    ),
    "on_main_process": Pair(lambda a: calls(a.on_main_process), lambda c: calls(af.on_main_process(c))),
    "on_local_main_process": Pair(
        lambda a: calls(a.on_local_main_process), lambda c: calls(af.on_local_main_process(c))
    ),
    "on_last_process": Pair(lambda a: calls(a.on_last_process), lambda c: calls(af.on_last_process(c))),
    "on_process": Pair(lambda a: calls(a.on_process(process_index=0)), lambda c: calls(af.on_process(c, 0))),
    "on_local_process": Pair(
        lambda a: calls(a.on_local_process(local_process_index=0)), lambda c: calls(af.on_local_process(c, 0))
    ),
    "prepare_model": Pair(
        lambda a: trained(lambda loss: loss.backward(), a.prepare_model(model())),
        lambda c: trained(lambda loss: loss.backward(), af.prepare_model(c, model())),
    ),
    "prepare_data_loader": Pair(
        lambda a: [batch.tolist() for batch in a.prepare_data_loader(loader())],
        lambda c: [batch.tolist() for batch in af.prepare_data_loader(c, loader())],
    ),
    "skip_first_batches": Pair(
        lambda a: [batch.tolist() for batch in a.skip_first_batches(a.prepare(loader()), 1)],
        lambda c: [batch.tolist() for batch in af.skip_first_batches(af.prepare(c, loader()), 1)],
    ),
    "unwrap_model": Pair(
        lambda a: type(a.unwrap_model(a.prepare(model()))).__name__,
        lambda c: type(af.unwrap_model(af.prepare(c, model()))).__name__,
    ),
    "backward": Pair(
        lambda a: trained(a.backward, a.prepare(model())),
        lambda c: trained(lambda loss: af.backward(c, loss, af.init_scaler(c)), af.prepare(c, model())),
    ),
    "clip_grad_norm_": Pair(
        lambda a: clipped(a.prepare(model()), a.clip_grad_norm_),
        lambda c: clipped(af.prepare(c, model()), newest(c, af.clip_grad_norm_)),
    ),
    "clip_grad_value_": Pair(
        lambda a: clipped(a.prepare(model()), a.clip_grad_value_),
        lambda c: clipped(af.prepare(c, model()), newest(c, af.clip_grad_value_)),
    ),
    "autocast": Pair(lambda a: dtype_of(a.autocast()), lambda c: dtype_of(af.autocast(c))),
    "check_trigger": Pair(
        lambda a: (a.set_trigger() if a.process_index else None, a.check_trigger(), a.check_trigger())[1:],
        lambda c: triggered(c),
    ),
}


def triggered(ctx: Context) -> tuple[bool, bool]:
    state = af.TriggerState()
    if ctx.rank:
        state = af.set_trigger(state)
    state, first = af.check_trigger(ctx, state)
    return first, af.check_trigger(ctx, state)[1]


def equal(one: Any, other: Any) -> bool:
    (mine, structure), (theirs, also) = flatten(one), flatten(other)
    return structure == also and all(
        torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        for left, right in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_method_gives_what_its_function_gives(name: str, world: int) -> None:
    pair = PAIRS[name]

    def run(ctx: Context) -> bool:
        return equal(pair.method(Accelerator(context=ctx)), pair.function(ctx))

    assert run_ranks(run, world, mixed_precision="bf16") == [True] * world


@pytest.mark.parametrize("safe", [True, False])
def test_what_is_saved_is_the_same(safe: bool, tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        Accelerator(context=ctx).save_model(model(), tmp_path / "method", safe_serialization=safe)
        af.save_model(ctx, model(), tmp_path / "function", safe_serialization=safe)

    run_ranks(run, 2)
    files = [sorted(path.name for path in (tmp_path / way).iterdir()) for way in ("method", "function")]
    assert files[0] == files[1] != []
    for name in files[0]:
        assert (tmp_path / "method" / name).read_bytes() == (tmp_path / "function" / name).read_bytes()


def test_what_is_printed_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(lambda ctx: Accelerator(context=ctx).print("hello", 1), 2)
    by_method = capsys.readouterr().out
    run_ranks(lambda ctx: af.print_once(ctx, "hello", 1), 2)
    assert by_method == capsys.readouterr().out == "hello 1\n"
