# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.hooks import (
    CpuOffload,
    UserCpuOffloadHook,
    add_hook_to_module,
    cpu_offload_with_hook,
    hook_of,
)
from accelfn.weights.places import Place
from tests.bigmodel.offload.trees import same

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def stack(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 3))


class Moves:
    """Stands for the transfers, and writes them down."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Place]] = []

    def __call__(self, module: nn.Module, place: Place) -> None:
        self.seen.append((type(module).__name__, place))


class Counted(CpuOffload):
    """Moves nothing."""

    def __init__(self, moves: Moves, device: Place, previous: UserCpuOffloadHook | None = None) -> None:
        super().__init__(device, previous)
        self.moves = moves

    def move(self, module: nn.Module, place: Place) -> None:
        self.moves(module, place)


class First(nn.Linear): ...


class Second(nn.Linear): ...


class Third(nn.Linear): ...


def chain(moves: Moves, device: Place) -> list[UserCpuOffloadHook]:
    hooks: list[UserCpuOffloadHook] = []
    for kind in (First, Second, Third):
        hook = Counted(moves, device, hooks[-1] if hooks else None)
        hooks.append(UserCpuOffloadHook(add_hook_to_module(kind(3, 3), hook), hook))
    return hooks


def run(hooks: Sequence[UserCpuOffloadHook], x: torch.Tensor = X) -> torch.Tensor:
    for hook in hooks:
        x = hook.model(x)
    return x


@pytest.mark.parametrize("device", ["cpu:3", torch.device("cpu"), None])
def test_outputs_are_unchanged(device: Any) -> None:
    expected = stack()(X)
    model = stack()
    returned, hook = cpu_offload_with_hook(model, device)
    assert returned is model
    assert hook.model is model
    for _ in range(2):
        model.load_state_dict(stack().state_dict())
        assert torch.equal(model(X), expected)
        hook.offload()
    hook.remove()
    assert hook_of(model) is None


def test_training_is_unchanged() -> None:
    def train(model: nn.Module, hook: UserCpuOffloadHook | None) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if hook is not None:
                hook.offload()
        return model.state_dict()

    plain = train(stack(), None)
    ours = train(*cpu_offload_with_hook(stack(), "cpu:0"))
    assert same(plain, ours)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_chain_is_copied_together(again: Any) -> None:
    pairs = [cpu_offload_with_hook(stack(), "cpu:0")]
    pairs.append(cpu_offload_with_hook(stack(1), "cpu:0", prev_module_hook=pairs[0][1]))
    (first, first_hook), (second, second_hook) = again(pairs)
    hook: Any = hook_of(second)
    assert hook is second_hook.hook
    assert hook.prev_module_hook is first_hook
    assert first_hook.model is first
    model = nn.Sequential(first, second).eval()
    assert torch.equal(model(X), nn.Sequential(stack(), stack(1)).eval()(X))


@pytest.mark.parametrize("device", ["disk", -1, "cpu0", "meta", 99, 1.5])
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    model = stack()
    with pytest.raises(ValueError, match="execution_device"):
        cpu_offload_with_hook(model, device)
    assert hook_of(model) is None


# Which model runs, or is sent away: any order keeps at most what the chain promises.
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=12)


@given(steps=STEPS)
def test_a_model_is_where_its_last_move_left_it(steps: list[tuple[bool, int]]) -> None:
    moves = Moves()
    hooks = chain(moves, "cpu:0")
    at = ["cpu"] * 3
    expected: list[tuple[str, Place]] = []

    def go(index: int, place: str) -> None:
        if at[index] != place:
            at[index] = place
            expected.append((("First", "Second", "Third")[index], place))

    for runs, index in steps:
        if runs:
            hooks[index].model(X)
            if index:
                go(index - 1, "cpu")
            go(index, "cpu:0")
        else:
            hooks[index].offload()
            go(index, "cpu")
    assert moves.seen == expected
