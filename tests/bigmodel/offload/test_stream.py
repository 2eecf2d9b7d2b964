"""What is on the device while an offloaded model runs, in which order, and after errors."""

# torch leaves what hooks get untyped.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import checkpoint as checkpoints

from accelfn.bigmodel import cpu_offload, disk_offload, read_offload
from tests.bigmodel.offload.trees import (
    WIDTH,
    Tree,
    assert_same_gradients,
    build,
    double,
    doubled,
    inputs,
    is_at_rest,
    offloaded,
    trees,
)

checkpoint = cast("Any", checkpoints).checkpoint


class Layer(nn.Sequential):
    """A block: modules of this class are more than one, and have modules in them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def layers(count: int = 4, kind: type[nn.Sequential] = nn.Sequential) -> Any:
    cast("Any", torch).random.manual_seed(0)
    return kind(*(Layer() for _ in range(count)))


def pair(count: int = 4, kind: type[nn.Sequential] = nn.Sequential) -> tuple[Any, Any]:
    """A plain model, and the same one offloaded, which computes with what it has on the device alone."""
    return doubled(layers(count, kind)), offloaded(layers(count, kind), double)


def assert_trains_alike(plain: Any, model: Any, seed: int = 0) -> None:
    for one in (plain, model):
        one.zero_grad()
    expected, out = plain(inputs(seed)), model(inputs(seed))
    assert torch.equal(expected, out)
    expected.sum().backward()
    out.sum().backward()
    assert_same_gradients(plain, model)
    assert is_at_rest(model)


# --- what is computed ----------------------------------------------------------------------------


@given(tree=trees(), num_ahead=st.integers(0, 2), is_training=st.booleans())
def test_only_copies_on_the_device_are_used(tree: Tree, num_ahead: int, is_training: bool) -> None:
    plain, model = doubled(build(tree)), offloaded(build(tree), double, num_ahead=num_ahead)
    for one in (plain, model):
        one.train(is_training)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.enable_grad):
        with mode():
            expected, out = plain(inputs()), model(inputs())
        assert torch.equal(expected, out)
    if expected.requires_grad:
        expected.sum().backward()
        out.sum().backward()
    assert_same_gradients(plain, model, exact=False)
    assert is_at_rest(model)
    assert all(facts.peak_bytes <= facts.bound_bytes for facts in read_offload(model))


class Cached(nn.Module):
    """Lets go of a buffer, and gets one again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.cache: torch.Tensor | None
        self.register_buffer("cache", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if self.cache is None:
            self.cache = torch.full((WIDTH,), 2.0)
            return out
        out = out * self.cache
        self.cache = None
        return out


def test_a_buffer_may_be_deleted_and_assigned_again() -> None:
    plain = Cached()
    model = cpu_offload(copy.deepcopy(plain), "cpu:0", offload_buffers=True)
    for _ in range(4):
        assert torch.equal(plain(inputs()), model(inputs()))
        assert (plain.cache is None) == (model.cache is None)


class Clipped(nn.Linear):
    """Writes into its weight in forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - its name
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(input)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_writes_of_forward_to_a_weight_are_kept(mode: Callable[[], Any]) -> None:
    plain = Clipped(WIDTH, WIDTH)
    model = cpu_offload(copy.deepcopy(plain), "cpu:0")
    x = inputs().requires_grad_()
    with mode():
        expected, out = plain(x), model(x)
    assert torch.equal(expected, out)
    assert torch.equal(plain.weight, model.weight)
    if out.requires_grad:
        slopes = [torch.autograd.grad(one.sum(), x)[0] for one in (expected, out)]
        assert torch.equal(*slopes)


def test_hooks_of_the_user_see_the_weights_that_compute() -> None:
    """Hooks that were attached before; later ones run around ours."""
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weight = model[0].weight.detach().clone()
    seen: list[torch.Tensor] = []

    def look(module: Any, *_: object) -> None:
        seen.append(module.weight.detach() / weight)

    model[0].register_forward_pre_hook(look)
    model[0].register_forward_hook(look)
    offloaded(model, double)
    model[0].register_forward_hook(look)
    model(inputs())
    assert [float(one.mean()) for one in seen] == [2, 2, 1]


# --- training ------------------------------------------------------------------------------------


class Within(nn.Module):
    """Checkpoints a part of a block."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(checkpoint(self.first, x, use_reentrant=self.use_reentrant)))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("within", [True, False])
def test_checkpointed_activations_are_computed_again(use_reentrant: bool, within: bool) -> None:
    plain: Any = nn.Sequential(*(Within(use_reentrant) for _ in range(3)))
    model = offloaded(copy.deepcopy(plain), double)
    doubled(plain)
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            x = inputs().requires_grad_()
            for part in one:
                x = part(x) if within else checkpoint(part, x, use_reentrant=use_reentrant)
            x.sum().backward()
        assert_same_gradients(plain, model)
    assert is_at_rest(model)


def test_the_graph_holds_no_copies_of_weights_and_no_checkpointed_activations() -> None:
    copies: list[weakref.ref[Any]] = []
    model = offloaded(layers(), lambda one: copies.append(weakref.ref(one.untyped_storage())))
    activations: list[weakref.ref[torch.Tensor]] = []
    model[1][1].register_forward_hook(lambda *seen: activations.append(weakref.ref(seen[-1])))
    for out in (model(inputs()), checkpoint(model, inputs().requires_grad_(), use_reentrant=False)):
        gc.collect()
        assert copies
        assert all(one() is None for one in copies)
        out.sum().backward()
    assert activations[1]() is None


def test_hooks_of_saved_tensors_around_the_model_see_activations_and_no_weights() -> None:
    plain, model = pair()
    seen: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        out = model(inputs())
    assert seen
    assert torch.Size((WIDTH, WIDTH)) not in seen
    out.sum().backward()
    plain(inputs()).sum().backward()
    assert_same_gradients(plain, model)


def twice(model: Any) -> None:
    loss = model(inputs()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def gradients_of_gradients(model: Any) -> None:
    x = inputs().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (slope.square().sum() + model(x).sum()).backward()


def frozen_but_for_one(model: Any) -> None:
    model.requires_grad_(False)
    model[1].requires_grad_(True)
    model(inputs()).sum().backward()


def with_weights_of_the_call(model: Any) -> None:
    other = {name: one.detach() + 1 for name, one in layers().named_parameters()}
    x = inputs().requires_grad_()
    torch.func.functional_call(model, other, (x,)).sum().backward()
    model(x.grad).sum().backward()


def partly_without_gradients(model: Any) -> None:
    with torch.no_grad():
        x = model(inputs())
    model(x + model[1](x)).sum().backward()


@pytest.mark.parametrize(
    "train",
    [twice, gradients_of_gradients, frozen_but_for_one, with_weights_of_the_call, partly_without_gradients],
)
def test_ways_to_train(train: Callable[[Any], None]) -> None:
    plain, model = layers(), offloaded(layers())
    for one in (plain, model):
        train(one)
    assert_same_gradients(plain, model)
    assert is_at_rest(model)


def test_a_weight_that_was_changed_before_backward_is_an_error() -> None:
    plain, model = layers(), offloaded(layers())
    out = model(inputs()).sum()
    with torch.no_grad():
        model[2][0].weight.add_(1)
    with pytest.raises(RuntimeError, match="weight of block '2' was modified between forward and backward"):
        out.backward()
    assert is_at_rest(model)
    model.load_state_dict(plain.state_dict())
    assert_trains_alike(plain, model)


def test_a_weight_modified_after_prefetching_is_fetched_again() -> None:
    plain, model = layers(), offloaded(layers())
    for one in (plain, model):

        def change(*_: object, one: Any = one) -> None:
            with torch.no_grad():
                one[2][0].weight.mul_(3)

        one[1].register_forward_hook(change)
    with torch.no_grad():
        assert torch.equal(plain(inputs()), model(inputs()))


# --- what is where, when -------------------------------------------------------------------------


class Backwards(nn.Sequential):
    """Runs its layers the other way round, each of them twice."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - its name
        x = input
        for part in reversed(list(self)):
            x = part(part(x))
        return x


def test_blocks_are_fetched_ahead_in_an_order_that_is_learned() -> None:
    events: list[str] = []
    model = layers(4, Backwards)
    numbers = {float(one[0].bias.detach()[0]): number for number, one in enumerate(model)}
    for number, one in enumerate(model):
        one[1].register_forward_hook(lambda *_, number=number: events.append(f"compute {number}"))

    def arrived(tensor: torch.Tensor) -> None:
        if tensor.dim() == 1:
            events.append(f"fetch {numbers[float(tensor.detach()[0])]}")

    offloaded(model, arrived)
    with torch.no_grad():
        model(inputs())
        del events[:]
        model(inputs())
    expected = [f"{what} {number}" for number in (3, 2, 1, 0) for what in ("fetch", "compute", "compute")]
    assert events == expected  # each once, though it is used twice
    assert read_offload(model)[0].peak_blocks == 2
    del events[:]
    model(inputs()).sum().backward()
    fetched = [event for event in events if event.startswith("fetch")]
    assert fetched == [f"fetch {number}" for number in (3, 2, 1, 0, 0, 1, 2, 3)]


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 5])
def test_device_memory_stays_within_the_bound(num_ahead: int) -> None:
    model = cpu_offload(layers(6), "cpu:0", num_ahead=num_ahead)
    for _ in range(2):
        model(inputs()).sum().backward()
    (facts,) = read_offload(model)
    most = min(6, num_ahead + 1)
    assert facts.num_blocks == 6
    assert facts.peak_blocks == most
    assert facts.peak_bytes == facts.bound_bytes == most * facts.num_bytes // 6


def test_cached_mapped_blocks_count_in_the_bound(tmp_path: Path) -> None:
    model = disk_offload(layers(4), tmp_path, "cpu", cache_bytes=0)
    (bare,) = read_offload(model)
    size = bare.num_bytes // 4
    assert bare.bound_bytes == 2 * size
    model = disk_offload(layers(4), tmp_path, "cpu", cache_bytes=2 * size)
    with torch.no_grad():
        model(inputs())
        model(inputs())
    (facts,) = read_offload(model)
    assert 2 * size <= facts.peak_bytes <= facts.bound_bytes == 4 * size


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [(), (0, 1, 2), (1,)], ids=["none", "all", "one"])
def test_threads_share_blocks(trained: tuple[int, ...]) -> None:
    plain, model = pair(5)
    start = threading.Barrier(3)
    wrong: list[object] = []

    def run(number: int) -> None:
        start.wait()
        for seed in range(5):
            x = inputs(10 * number + seed).requires_grad_()
            with torch.set_grad_enabled(number in trained):
                outs = [one(x) for one in (plain, model)]
            if number in trained:
                outs += [torch.autograd.grad(out.sum(), x)[0] for out in outs]
            if not all(map(torch.equal, outs[::2], outs[1::2])):
                wrong.append((number, seed))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert is_at_rest(model)
    assert read_offload(model)[0].peak_blocks <= 2 * 3


# --- errors -----------------------------------------------------------------------------


class OopsError(Exception):
    pass


def raising(error: type[BaseException]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        raise error("here")

    return hook


@contextmanager
def removed(handle: Any) -> Generator[None]:
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("error", [OopsError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "where", ["leaf before", "leaf after", "block before", "block after", "root after", "early"]
)
def test_after_a_failed_pass_the_model_is_restored(
    where: str, error: type[BaseException], grads: bool
) -> None:
    plain, model = pair()
    target: nn.Module = {"leaf": model[2][0], "bloc": model[2], "root": model, "earl": model[2]}[where[:4]]
    handle: Any = (
        target.register_forward_hook(raising(error))
        if where.endswith("after")
        else target.register_forward_pre_hook(raising(error), prepend=where == "early")
    )
    with removed(handle), torch.set_grad_enabled(grads), pytest.raises(error):
        model(inputs())
    assert is_at_rest(model)
    assert_trains_alike(plain, model)
    assert read_offload(model)[0].peak_blocks == 2


@pytest.mark.parametrize("number", range(6))
def test_a_transfer_that_fails(number: int) -> None:
    """Backward begins with the fourth; each has a weight and a bias."""
    count = iter(range(1_000))

    def fail(_: torch.Tensor) -> None:
        if next(count) == 2 * number:
            raise OopsError

    model = offloaded(layers(), fail)
    with pytest.raises(OopsError):
        model(inputs()).sum().backward()
    assert is_at_rest(model)
    assert_trains_alike(layers(), model)


@pytest.mark.parametrize("error", [OopsError, KeyboardInterrupt])
def test_a_backward_pass_that_fails(error: type[BaseException]) -> None:
    plain, model = pair()
    x = model[0](inputs())
    x.register_hook(raising(error))
    with pytest.raises(error):
        model[3](model[2](model[1](x))).sum().backward()
    assert is_at_rest(model)
    assert_trains_alike(plain, model)


def test_weights_that_lost_their_values_are_named() -> None:
    model = offloaded(layers(2))
    model[1][0].weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
    with pytest.raises(RuntimeError, match=r"block '1' is on the meta.*load_checkpoint_in_model"):
        model(inputs())
    assert is_at_rest(model)


def test_a_model_is_not_copied_during_a_pass() -> None:
    plain, model = pair()
    with removed(model[1][1].register_forward_hook(lambda *_: copy.deepcopy(model))):
        with torch.no_grad(), pytest.raises(RuntimeError, match="copied or pickled during a forward"):
            model(inputs())
    with removed(model[1][1].register_forward_hook(raising(KeyboardInterrupt))):
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(inputs())
    with pytest.raises(RuntimeError, match=r"was interrupted.*again"):
        copy.deepcopy(model)
    assert torch.equal(doubled(copy.deepcopy(model))(inputs()), plain(inputs()))
