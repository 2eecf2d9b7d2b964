# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Each method of the Accelerator gives what its function gives, on every rank."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Accelerator, Context
from accelfn.testing import run_ranks
from accelfn.tree import flatten
from tests.training.models import filled, gradients


class Given(NamedTuple):
    """Arguments of a method, which are those of its function behind the context."""

    args: tuple[Any, ...]
    options: dict[str, Any]


def given(*args: Any, **options: Any) -> Given:
    return Given(args, options)


def model() -> nn.Linear:
    one = filled(nn.Linear(2, 1))
    for parameter in one.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    return one


def loader() -> Any:
    return DataLoader(torch.arange(7), batch_size=2)  # pyright: ignore[reportArgumentType]


# What each method is given on a rank.
CALLS: dict[str, Callable[[int], Given]] = {
    "gather": lambda rank: given(
        {"x": torch.arange(3.0) + rank, "pair": (torch.tensor([rank]), torch.ones(2))}
    ),
    "reduce": lambda rank: given({"x": torch.arange(3.0) + rank}, "sum"),
    "pad_across_processes": lambda rank: given(torch.ones(rank + 1), pad_index=9),
    "split_between_processes": lambda rank: given([1, 2, 3], apply_padding=True),
    "wait_for_everyone": lambda rank: given(),
    "main_process_first": lambda rank: given(),
    "local_main_process_first": lambda rank: given(),
    "autocast": lambda rank: given(),
    "prepare": lambda rank: given(model()),
    "prepare_model": lambda rank: given(model()),
    "prepare_data_loader": lambda rank: given(loader()),
    "skip_first_batches": lambda rank: given([1, 2, 3], 1),
}


def seen(result: Any) -> Any:
    """Use a result, and return what it comes to."""
    if isinstance(result, nn.Module):
        result.zero_grad()
        result(torch.ones(1, 2)).sum().backward()
        return gradients(result)
    if hasattr(result, "__enter__"):
        with result as entered:
            dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            return entered if isinstance(entered, list) else dtype
    is_iterated = isinstance(result, Iterable) and not isinstance(result, (dict, torch.Tensor))
    return [*cast("Iterable[Any]", result)] if is_iterated else result


def equal(one: Any, other: Any) -> bool:
    (mine, structure), (theirs, also) = flatten(one), flatten(other)
    return structure == also and all(
        torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        for left, right in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_method_gives_what_its_function_gives(name: str) -> None:
    def run(ctx: Context) -> bool:
        (args, options), (same_args, same_options) = CALLS[name](ctx.rank), CALLS[name](ctx.rank)
        by_method = seen(getattr(Accelerator(context=ctx), name)(*args, **options))
        context = () if name == "skip_first_batches" else (ctx,)
        function = getattr(af if hasattr(af, name) else af.comm, name)
        return equal(by_method, seen(function(*context, *same_args, **same_options)))

    assert run_ranks(run, 2, mixed_precision="bf16") == [True] * 2
