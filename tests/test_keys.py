"""Random numbers of a key: known words, the same anywhere, independent, mapped and compiled."""

# torch leaves tolist, backward and compile partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn import keys
from accelfn.testing import run_ranks

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("seed", "counter", "words"),
    [
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((FULL << 32) + FULL, (FULL,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x299F31D0 << 32) + 0xA4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_words_are_those_of_the_reference(seed: int, counter: tuple[int, ...], words: str) -> None:
    """Of Random123's known answers for philox4x32-10."""
    found = vars(keys)["_philox_of"](keys.key(seed), tuple(map(torch.tensor, counter)))
    assert " ".join(f"{int(word):08x}" for word in found) == words


@given(st.integers(0, 2**64 - 1), st.integers(1, 200), st.integers(0, 200))
def test_a_longer_shape_begins_with_the_numbers_of_a_shorter_one(seed: int, number: int, more: int) -> None:
    key = keys.key(seed)
    for draw in (keys.uniform, lambda key, shape: keys.bernoulli(key, 0.3, shape)):
        assert torch.equal(draw(key, (number + more,))[:number], draw(key, (number,)))
    assert sorted(keys.permutation(key, number).tolist()) == list(range(number))
    for dtype in (torch.float32, torch.float64):
        found = keys.uniform(key, (number,), dtype=dtype)
        assert found.dtype == dtype
        assert bool(((found >= 0) & (found < 1)).all())


def test_texts_are_numbers_of_a_seed() -> None:
    first, second = keys.key("shuffle").tolist()
    assert keys.seed_of("shuffle") == first + (second << 32)
    assert keys.seed_of(0, "shuffle", 1) == keys.seed_of(0, first + (second << 32), 1)


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=3))
def test_numbers_are_folded_in_one_after_the_other(numbers: list[int]) -> None:
    key = keys.key(3)
    folded = key
    for number in numbers:
        folded = keys.fold_in(folded, number)
    assert torch.equal(keys.fold_in(key, *numbers), folded)
    first, second = folded.tolist()
    assert keys.seed_of(3, *numbers) == first + (second << 32)
    assert not torch.equal(folded, key)


def test_keys_differ_and_their_numbers_are_independent() -> None:
    many = keys.fold_in(keys.key("a run"), torch.arange(1000))
    assert len({tuple(one) for one in many.tolist()}) == 1000
    first, second = keys.split(keys.key(1))
    left, right = (keys.normal(one, (20_000,)) for one in (first, second))
    assert abs(float((left * right).mean())) < 5 / math.sqrt(20_000)
    for found, mean, std in (
        (left, 0.0, 1.0),
        (keys.uniform(first, (20_000,)), 0.5, math.sqrt(1 / 12)),
        (keys.bernoulli(first, 0.25, (20_000,)).float(), 0.25, math.sqrt(0.1875)),
    ):
        assert abs(float(found.mean()) - mean) < 5 * std / math.sqrt(20_000)
        assert abs(float(found.std()) - std) < 0.02


def test_dropout_keeps_the_mean_and_its_gradient() -> None:
    x = torch.ones(10_000, requires_grad=True)
    found = keys.dropout(keys.key(0), x, 0.2)
    assert set(found.tolist()) == {0.0, 1.25}
    assert abs(float(found.detach().mean()) - 1) < 0.03
    found.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, found)
    assert torch.equal(keys.dropout(keys.key(0), x, 1.0), torch.zeros(10_000))
    with pytest.raises(ValueError, match="p must be from 0 to 1, got 2"):
        keys.dropout(keys.key(0), x, 2)


def test_they_are_mapped_and_compiled() -> None:
    many = keys.fold_in(keys.key(0), torch.arange(3))
    mapped = torch.func.vmap(lambda key: keys.uniform(key, (4,)))(many)
    each = torch.stack([keys.uniform(key, (4,)) for key in many])
    assert torch.equal(mapped, each)
    compiled: Any = torch.compile(keys.uniform, backend="eager")
    assert torch.equal(compiled(many[0], (4,)), each[0])


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_samples_get_the_same_numbers_on_any_rank(on: Any) -> None:
    def draw(ctx: af.Context) -> torch.Tensor:
        step = keys.fold_in(keys.key(0), 7)
        samples = af.split_between_processes(ctx, list(range(8)))
        return torch.stack([keys.normal(keys.fold_in(step, sample), (3,)) for sample in samples])

    (whole,) = run_ranks(draw, 1)
    assert torch.equal(torch.cat(run_ranks(draw, 4, on)), whole)


def test_split_and_fold_in_give_different_keys() -> None:
    key = keys.key(0)
    found = [*keys.split(key, 3), *(keys.fold_in(key, number) for number in range(3)), key]
    assert len({tuple(one.tolist()) for one in found}) == 7


def test_what_is_no_seed_number_or_probability_is_refused() -> None:
    key: Any = keys.key(0)
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: keys.key(2**70), ValueError, "a seed has 64 bits"),
        (lambda: keys.key(-(2**63) - 1), ValueError, "a seed has 64 bits"),
        (lambda: vars(keys)["key"](1.5), TypeError, r"an int or a text, got 1\.5"),
        (lambda: keys.seed_of(0, 2**64), ValueError, "a seed has 64 bits"),
        (lambda: keys.fold_in(key, vars(math)["pi"]), TypeError, "numbers are integers, got 3"),
        (lambda: keys.bernoulli(key, 2.0), ValueError, r"from 0 to 1, got 2\.0"),
        (lambda: vars(keys)["uniform"](5, ()), TypeError, "a key is a tensor"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(keys.key(-1), keys.key(2**64 - 1))


def test_what_is_no_key_is_refused() -> None:
    for wrong in (torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.tensor(1)):
        with pytest.raises(TypeError, match=r"a key is an int64 tensor of shape \(2,\)"):
            keys.uniform(wrong)
