"""The prefetcher: what is on the device while a model runs, in which order, and after errors."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import checkpoint as checkpoints

from accelfn.bigmodel.assign import refs_of
from accelfn.bigmodel.block_hooks import attach_prefetcher
from accelfn.bigmodel.block_stream import BlockPrefetcher
from accelfn.bigmodel.blocks import Block
from accelfn.bigmodel.offload_folder import write_mapped
from accelfn.bigmodel.transfer import Arrival, Link, Packing, open_link, thread_link
from tests.bigmodel.offload.trees import (
    WIDTH,
    Tree,
    build,
    doubling,
    gradients,
    inputs,
    same,
    stream_of,
    trees,
    values,
)

seed = cast("Any", torch).random.manual_seed
checkpoint = cast("Any", checkpoints).checkpoint


def layer() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def layers(count: int = 4) -> Any:
    seed(0)
    return nn.Sequential(*(layer() for _ in range(count)))


def blocks_of(model: nn.Sequential) -> list[Block]:
    return [
        Block(name=str(number), module=one, refs=tuple(ref for _, ref in refs_of(one)))
        for number, one in enumerate(model)
    ]


def by_layers(
    model: nn.Sequential, link: Link | None = None, num_ahead: int = 1, *, ahead_of: str = "cpu:0"
) -> BlockPrefetcher:
    """Attach a stream whose blocks are the model's layers."""
    blocks = blocks_of(model)
    stream = BlockPrefetcher(blocks, ahead_of, num_ahead=num_ahead, link=link)
    attach_prefetcher(model, stream)
    return stream


def pair(count: int = 4, **options: Any) -> tuple[Any, Any, BlockPrefetcher]:
    plain, model = layers(count), layers(count)
    return plain, model, by_layers(model, **options)


def _into(found: list[Any], what: Callable[[Any], Any]) -> Callable[..., None]:
    """A hook after forward that remembers outputs."""

    def hook(module: nn.Module, args: object, out: object) -> None:
        found.append(what(out))

    return hook


def assert_trains_alike(plain: Any, model: Any, seed: int = 0) -> None:
    for one in (plain, model):
        one.zero_grad()
    expected, out = plain(inputs(seed)), model(inputs(seed))
    assert torch.equal(expected, out)
    expected.sum().backward()
    out.sum().backward()
    assert same(gradients(plain), gradients(model))


class Log:
    """A link and a model that record what they do."""

    def __init__(self, model: Any, inner: Link | None = None) -> None:
        self.events: list[str] = []
        self.pointers: dict[int, int] = {one[0].weight.data_ptr(): number for number, one in enumerate(model)}
        inner = inner or open_link("cpu:0", 1)

        def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
            self.events.append(f"begin {self.pointers[hosts[0].data_ptr()]}")
            return inner.begin(hosts, packing)

        def release(hosts: Sequence[torch.Tensor]) -> None:
            self.events.append(f"release {self.pointers[hosts[0].data_ptr()]}")

        self.link = Link(device=inner.device, begin=begin, release=release)
        for number, one in enumerate(model):
            one[1].register_forward_hook(self._compute(number))

    def _compute(self, number: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self.events.append(f"compute {number}")

        return hook

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


# --- what is computed ----------------------------------------------------------------------------


@given(tree=trees(), num_ahead=st.integers(0, 2), is_training=st.booleans())
def test_only_copies_on_the_device_are_used(tree: Tree, num_ahead: int, is_training: bool) -> None:
    plain, model = build(tree), build(tree)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    stream = stream_of(model, doubling(), buffers=False, num_ahead=num_ahead)
    attach_prefetcher(model, stream)
    for one in (plain, model):
        one.train(is_training)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            expected, out = plain(inputs()), model(inputs())
        assert torch.equal(expected, out)
    expected, out = plain(inputs()), model(inputs())
    if expected.requires_grad:
        expected.sum().backward()
        out.sum().backward()
    for left, right in zip(gradients(plain).values(), gradients(model).values(), strict=True):
        torch.testing.assert_close(left, right)
    assert stream.resident == ()
    assert stream.facts().peak_bytes <= stream.facts().bound_bytes


@given(tree=trees(), is_training=st.booleans())
def test_writes_to_offloaded_buffers_are_kept(tree: Tree, is_training: bool) -> None:
    plain, model = build(tree), build(tree)
    attach_prefetcher(model, stream_of(model))
    for one in (plain, model):
        one.train(is_training)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            expected, out = plain(inputs()), model(inputs())
        assert torch.equal(expected, out)
        assert same(values(plain), values(model))
        if out.requires_grad:
            expected.sum().backward()
            out.sum().backward()
            for left, right in zip(gradients(plain).values(), gradients(model).values(), strict=True):
                torch.testing.assert_close(left, right)


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
    plain, model = Cached(), Cached()
    model.load_state_dict(plain.state_dict())
    attach_prefetcher(model, stream_of(model))
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
    plain, model = (Clipped(WIDTH, WIDTH) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    attach_prefetcher(model, stream_of(model))
    with mode():
        expected, out = plain(inputs()), model(inputs())
    assert torch.equal(expected, out)
    assert torch.equal(plain.weight, model.weight)
    if out.requires_grad:
        x = inputs().requires_grad_()
        assert_gradients_reach_inputs(plain, model, x)


def assert_gradients_reach_inputs(plain: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    expected = torch.autograd.grad(plain(x).sum(), x)
    assert torch.equal(expected[0], torch.autograd.grad(model(x).sum(), x)[0])


def test_weights_of_another_call_may_take_their_place() -> None:
    plain, model, stream = pair(link=None)
    other = {name: torch.randn_like(one).requires_grad_() for name, one in plain.named_parameters()}
    found: list[Any] = []
    for one in (plain, model):
        out = torch.func.functional_call(one, other, (inputs(),))
        found.append((out, torch.autograd.grad(out.sum(), list(other.values()))))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(left, right) for left, right in zip(found[0][1], found[1][1], strict=True))
    assert stream.resident == ()
    assert torch.equal(plain(inputs()), model(inputs()))


def test_hooks_of_the_user_see_the_weights_that_compute() -> None:
    """Hooks that were attached before; later ones run around ours."""
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weight = model[0].weight.detach().clone()
    seen: list[torch.Tensor] = []

    def look(module: Any, *_: object) -> None:
        seen.append(module.weight.detach().clone())

    model[0].register_forward_pre_hook(look)
    model[0].register_forward_hook(look)
    attach_prefetcher(model, stream_of(model, doubling()))
    model(inputs())
    assert all(torch.equal(one, 2 * weight) for one in seen)
    assert len(seen) == 2
    model[0].register_forward_hook(look)
    model(inputs())
    assert torch.equal(seen[-1], weight)


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("link", [None, doubling])
def test_checkpointed_activations_are_computed_again(
    use_reentrant: bool, link: Callable[[], Link] | None
) -> None:
    plain, model, stream = pair(link=None if link is None else link())
    if link is not None:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(2)

    def run(one: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for part in one:
            x = checkpoint(part, x, use_reentrant=use_reentrant)
        return x

    for one in (plain, model):
        run(one, inputs().requires_grad_()).sum().backward()  # pyright: ignore[reportUnknownMemberType]
    assert same(gradients(plain), gradients(model))
    assert stream.resident == ()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_within_a_block(use_reentrant: bool) -> None:
    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = checkpoint(self.first, x, use_reentrant=use_reentrant)
            return self.second(torch.tanh(inner))

    plain = nn.Sequential(*(Within() for _ in range(3)))
    model = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    stream = by_layers(model, doubling())
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            one(inputs().requires_grad_()).sum().backward()
        assert same(gradients(plain), gradients(model))
    assert stream.resident == ()


def test_checkpointing_frees_activations_around_blocks() -> None:
    """Hooks of saved tensors nest only innermost; those of the stream ask the ones around them."""
    _, model, _ = pair()
    kept: list[weakref.ref[torch.Tensor]] = []
    model[1][1].register_forward_hook(_into(kept, weakref.ref))
    out = checkpoint(model, inputs().requires_grad_(), use_reentrant=False)
    gc.collect()
    assert kept[0]() is None
    out.sum().backward()


def test_hooks_of_saved_tensors_around_the_model_see_activations_and_no_weights() -> None:
    plain, model, _ = pair()
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
    assert same(gradients(plain), gradients(model))


def test_the_graph_holds_no_copies_of_weights() -> None:
    _, model, stream = pair()
    memories: list[weakref.ref[Any]] = []
    inner = stream.link.begin

    def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
        arrive = inner(hosts, packing)

        def arrived() -> torch.Tensor:
            memory = arrive()
            memories.append(weakref.ref(memory.untyped_storage()))
            return memory

        return arrived

    model = layers()
    by_layers(model, Link(device=torch.device("cpu"), begin=begin))
    out = model(inputs())
    gc.collect()
    assert memories
    assert all(memory() is None for memory in memories)
    out.sum().backward()


def test_backward_may_run_twice() -> None:
    plain, model, stream = pair()
    for one in (plain, model):
        loss = one(inputs()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert same(gradients(plain), gradients(model))
    assert stream.resident == ()


def test_gradients_have_gradients() -> None:
    plain, model, stream = pair()
    for one in (plain, model):
        x = inputs().requires_grad_()
        (slope,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        (slope.square().sum() + one(x).sum()).backward()
    assert same(gradients(plain), gradients(model))
    assert stream.resident == ()


def test_frozen_weights_pass_gradients_on() -> None:
    plain, model, _ = pair()
    for one in (plain, model):
        one.requires_grad_(False)
        one[1].requires_grad_(True)
    assert_trains_alike(plain, model)
    assert model[0][0].weight.grad is None


def test_a_weight_that_was_changed_before_backward_is_an_error() -> None:
    plain, model, stream = pair()
    out = model(inputs()).sum()
    with torch.no_grad():
        model[2][0].weight.add_(1)
    with pytest.raises(RuntimeError, match="weight of block '2' was modified between forward and backward"):
        out.backward()
    assert stream.resident == ()
    model.load_state_dict(plain.state_dict())
    assert_trains_alike(plain, model)


def test_saved_weights_can_be_looked_at_by_hand() -> None:
    _, model, stream = pair()
    out = model[0][0](inputs().requires_grad_())
    saved = out.grad_fn._saved_mat2
    assert torch.equal(saved, model[0][0].weight.T)
    assert stream.resident == ()


def test_a_weight_modified_after_prefetching_is_fetched_again() -> None:
    plain, model, _ = pair()

    def change(one: Any) -> Callable[..., None]:
        def hook(*_: object) -> None:
            with torch.no_grad():
                one[2][0].weight.mul_(3)

        return hook

    for one in (plain, model):
        one[1].register_forward_hook(change(one))
    with torch.no_grad():
        assert torch.equal(plain(inputs()), model(inputs()))


def test_modules_that_compute_with_and_without_gradients() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = x + self.inner(x)
            with torch.enable_grad():
                return self.inner(x)

    plain = nn.Sequential(*(Mixed() for _ in range(3)))
    model = copy.deepcopy(plain)
    by_layers(model)
    for mode in (torch.enable_grad, torch.no_grad):
        for one in (plain, model):
            one.zero_grad()
            with mode():
                out = one(inputs())
            out.sum().backward()
        assert same(gradients(plain), gradients(model))


# --- what is where, when -------------------------------------------------------------------------


def test_the_next_block_is_prefetched() -> None:
    model = layers(4)
    log = Log(model)
    by_layers(model, log.link)
    with torch.no_grad():
        model(inputs())
    assert log.take() == [
        "begin 0",
        "begin 1",
        "compute 0",
        "release 0",
        "begin 2",
        "compute 1",
        "release 1",
        "begin 3",
        "compute 2",
        "release 2",
        "compute 3",
        "release 3",
    ]


def test_backward_fetches_the_blocks_the_other_way_round() -> None:
    model = layers(4)
    log = Log(model)
    by_layers(model, log.link)
    out: Any = model(inputs()).sum()
    log.take()
    out.backward()
    begun = [events for events in log.take() if events.startswith("begin")]
    # The gradient of the first layer's input isn't asked for, so nothing needs its weight; it came ahead.
    assert begun == ["begin 3", "begin 2", "begin 1", "begin 0"]


def test_a_block_that_is_used_twice_in_a_row_is_fetched_once() -> None:
    class Again(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - its name
            x = input
            for part in self:
                x = part(part(x))
            return x

    model = Again(*layers(3))
    log = Log(model)
    stream = by_layers(model, log.link)
    with torch.no_grad():
        model(inputs())
    assert sum(events.startswith("begin") for events in log.take()) == 3
    assert stream.facts().peak_blocks == 2


def test_the_order_is_learned() -> None:
    class Backwards(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - its name
            x = input
            for part in reversed(list(self)):
                x = part(x)
            return x

    model = Backwards(*layers(4))
    log = Log(model)
    by_layers(model, log.link)
    with torch.no_grad():
        model(inputs())
        log.take()
        model(inputs())
    second = log.take()
    assert [events for events in second if events.startswith("begin")] == [
        "begin 3",
        "begin 2",
        "begin 1",
        "begin 0",
    ]
    assert second.index("begin 2") < second.index("compute 3")


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 5])
def test_device_memory_stays_within_the_bound(num_ahead: int) -> None:
    model = layers(6)
    stream = by_layers(model, num_ahead=num_ahead)
    for _ in range(2):
        model(inputs()).sum().backward()
    size = stream.facts().num_bytes // 6
    assert stream.facts().bound_bytes == min(6, num_ahead + 1) * size
    assert stream.facts().peak_blocks == min(6, num_ahead + 1)
    assert stream.facts().peak_bytes == stream.facts().bound_bytes


def test_cached_mapped_blocks_count_in_the_bound(tmp_path: Path) -> None:
    model = layers(4)
    for name, mapped in write_mapped(tmp_path, dict(model.named_parameters())).items():
        model.get_parameter(name).data = mapped
    blocks = blocks_of(model)
    size = BlockPrefetcher(blocks, "cpu").facts().num_bytes // 4
    stream = BlockPrefetcher(blocks, "cpu", cache_bytes=2 * size)
    attach_prefetcher(model, stream)
    with torch.no_grad():
        model(inputs())
        model(inputs())
    assert stream.facts().bound_bytes == 4 * size
    assert 2 * size <= stream.facts().peak_bytes <= 4 * size
    assert BlockPrefetcher(blocks, "cpu").facts().bound_bytes == 2 * size


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("grads", [False, True])
def test_threads_share_blocks(count: int, grads: bool) -> None:
    plain, model, stream = pair(5, link=doubling())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    start = threading.Barrier(count)
    wrong: list[object] = []

    def run(number: int) -> None:
        start.wait()
        for seed in range(5):
            x = inputs(10 * number + seed).requires_grad_()
            with torch.set_grad_enabled(grads):
                expected, out = plain(x), model(x)
            if not torch.equal(expected, out):
                wrong.append((number, seed))
            if grads:
                (left,) = torch.autograd.grad(expected.sum(), x)
                (right,) = torch.autograd.grad(out.sum(), x)
                if not torch.equal(left, right):
                    wrong.append((number, seed, "gradients"))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert stream.resident == ()
    assert stream.facts().peak_blocks <= 2 * count


def test_a_thread_that_trains_and_one_that_does_not() -> None:
    plain, model, stream = pair(4)
    entered, done = threading.Event(), threading.Event()
    outs: list[torch.Tensor] = []

    def within(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        thread.start()
        done.wait(30)

    def other() -> None:
        entered.set()
        with torch.no_grad():
            outs.append(model(inputs(1)))
        done.set()

    thread = threading.Thread(target=other)
    model[2][0].register_forward_hook(within)
    model(inputs()).sum().backward()
    thread.join()
    plain(inputs()).sum().backward()
    assert same(gradients(plain), gradients(model))
    assert torch.equal(outs[0], plain(inputs(1)))
    assert not outs[0].requires_grad
    assert stream.resident == ()


# --- errors -----------------------------------------------------------------------------


class OopsError(Exception):
    pass


def at_rest(model: nn.Module) -> bool:
    return all(type(parameter) is nn.Parameter for parameter in model.parameters()) and all(
        isinstance(one, nn.Parameter)
        for module in model.modules()
        for one in vars(module)["_parameters"].values()
    )


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
@pytest.mark.parametrize("error", [OopsError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    "where",
    ["leaf before", "leaf after", "block before", "block after", "root before", "root after", "early"],
)
def test_after_a_failed_pass_the_model_is_restored(
    where: str, error: type[BaseException], grads: bool
) -> None:
    plain, model, stream = pair()
    target: nn.Module = {"leaf": model[2][0], "bloc": model[2], "root": model, "earl": model[2]}[where[:4]]
    handle: Any = (
        target.register_forward_pre_hook(raising(error), prepend=where == "early")
        if where.endswith("before") or where == "early"
        else target.register_forward_hook(raising(error))
    )
    with removed(handle), torch.set_grad_enabled(grads), pytest.raises(error):
        model(inputs())
    assert stream.resident == ()
    assert at_rest(model)
    assert_trains_alike(plain, model)
    assert stream.resident == ()
    assert stream.facts().peak_blocks == 2


@pytest.mark.parametrize("grads", [False, True])
def test_a_single_block_that_was_interrupted_uses_new_weights_in_the_next_pass(grads: bool) -> None:
    plain, model, stream = pair()
    with removed(model[1][1].register_forward_hook(raising(KeyboardInterrupt))):
        with torch.set_grad_enabled(grads), pytest.raises(KeyboardInterrupt):
            model[1](inputs())
    # Nobody has looked at the stream yet.
    for _ in range(2):
        assert torch.equal(plain[1](inputs()), model[1](inputs()))
    assert at_rest(model)
    assert stream.resident == ()


def test_an_interrupt_that_the_model_itself_catches() -> None:
    class Catching(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - its name
            x = input
            for part in self:
                try:
                    x = part(x)
                except KeyboardInterrupt:  # noqa: PERF203 - one of them is what this is about
                    x = part(x) + 1
            return x

    plain: Any = Catching(*layers(4))
    model = copy.deepcopy(plain)
    stream = by_layers(model)
    for one in (plain, model):
        calls: list[int] = []

        def once(*_: object, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt

        one[1][1].register_forward_hook(once)
    assert_trains_alike(plain, model)
    assert stream.resident == ()
    assert at_rest(model)


def failing(link: Link, when: Callable[[int], bool], how: str) -> Link:
    """A link whose transfers fail, by their numbers: at once, or while they are underway."""
    count = iter(range(1_000))

    def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
        fails = when(next(count))
        if fails and how == "begin":
            raise OopsError("no way")
        arrive = link.begin(hosts, packing)

        def lost() -> torch.Tensor:
            raise OopsError("lost")

        return lost if fails else arrive

    return Link(device=link.device, begin=begin)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("how", ["begin", "arrive"])
def test_a_transfer_that_fails(number: int, how: str) -> None:
    plain, model = layers(4), layers(4)
    stream = by_layers(model, failing(thread_link(), lambda at: at == number, how))
    # Prefetching is repeated when the block is needed. Backward begins with the fourth transfer.
    is_ahead = how == "begin" and number not in (0, 4)
    with nullcontext() if is_ahead else pytest.raises(OopsError):
        model(inputs()).sum().backward()
    assert stream.resident == ()
    assert at_rest(model)
    assert_trains_alike(plain, model)
    assert stream.resident == ()


@pytest.mark.parametrize("error", [OopsError, KeyboardInterrupt])
def test_a_backward_pass_that_fails(error: type[BaseException]) -> None:
    plain, model, stream = pair()
    out = model(inputs())

    def fail(_: torch.Tensor) -> None:
        raise error("here")

    middle: list[Any] = []
    with removed(model[1].register_forward_hook(_into(middle, lambda out: out))):
        out = model(inputs())
    middle[0].register_hook(fail)
    with pytest.raises(error):
        out.sum().backward()
    assert stream.resident == ()
    assert at_rest(model)
    assert_trains_alike(plain, model)


def test_weights_without_values_are_named() -> None:
    model = layers(2)
    model[1].to("meta")
    stream = by_layers(model)
    with pytest.raises(RuntimeError, match=r"block '1' is on the meta.*load_checkpoint_in_model"):
        model(inputs())
    assert stream.resident == ()


# --- copies --------------------------------------------------------------------------------------


def test_a_model_is_not_copied_during_a_pass() -> None:
    _, model, _ = pair()

    def _copying(*_: object) -> None:
        copy.deepcopy(model)

    with removed(model[1][1].register_forward_hook(_copying)):
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match="copied or pickled during a forward"),
        ):
            model(inputs())


def test_a_model_that_was_interrupted_is_copied_at_the_second_try() -> None:
    plain, model, stream = pair()
    with removed(model[1][1].register_forward_hook(raising(KeyboardInterrupt))):
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(inputs())
    with pytest.raises(RuntimeError, match=r"was interrupted.*again"):
        copy.copy(stream)
    assert torch.equal(copy.deepcopy(model)(inputs()), plain(inputs()))


def test_a_stream_of_a_device_that_is_not_there_is_opened_when_it_is_needed() -> None:
    _, _, stream = pair()
    twin = copy.copy(stream)
    twin.place = 99
    assert twin.resident == ()
    with pytest.raises(ValueError, match="no accelerator 99"):
        _ = twin.link
