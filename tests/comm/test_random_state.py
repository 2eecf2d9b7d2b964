import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm import set_seed, synchronize_rng_states
from accelfn.context import Context
from accelfn.errors import ConfigurationError, MismatchError
from accelfn.testing import run_ranks
from accelfn.testing.strategies import worlds
from accelfn.tree import listify


def draws() -> list[Any]:
    return [random.random(), listify(torch.rand(2))]


def test_a_seed_decides_what_is_drawn() -> None:
    set_seed(7)
    first = draws()
    set_seed(7)
    assert draws() == first
    set_seed(8)
    assert draws() != first


def test_ranks_can_have_seeds_of_their_own_and_be_synchronised() -> None:
    def work(ctx: Context) -> list[Any]:
        set_seed(7, ctx=ctx, device_specific=True)
        drawn = draws()
        synchronize_rng_states(ctx, ["torch"])
        return [drawn, listify(torch.rand(3))]

    (first, shared), (second, there) = run_ranks(work, 2, "processes")
    assert first != second
    assert shared == there
    set_seed(8)
    assert draws() == second


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed must be in 0..2\\*\\*32 - 1, got {seed}"):
        set_seed(seed)


@pytest.mark.parametrize("given", [(Context(), 7), (Context(),), (7, True)])
def test_arguments_at_each_others_places_are_named(given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"set_seed: the seed comes first, then the context: got "):
        set_seed(*given)


@given(worlds(), st.integers(0, 2**31), st.booleans())
def test_generators_continue_from_rank_0(size: int, seed: int, debug: bool) -> None:
    def work(ctx: Context) -> Any:
        generator = torch.Generator()
        generator.manual_seed(seed + ctx.rank)
        before = generator.get_state()
        synchronize_rng_states(ctx, ["generator"], generator)
        if ctx.rank == 0:
            assert torch.equal(generator.get_state(), before)
        return listify(torch.rand(3, generator=generator))

    results = run_ranks(work, size, debug=debug)
    assert results == [results[0]] * size


@pytest.mark.parametrize("size", [1, 2])
def test_bad_types_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match='the type "generator" needs generator='):
        run_ranks(lambda ctx: synchronize_rng_states(ctx, ["generator"]), size)
    with pytest.raises(ConfigurationError, match="got 'dice'"):
        run_ranks(lambda ctx: synchronize_rng_states(ctx, ["dice"]), size)


def test_ranks_must_name_the_same_types() -> None:
    def work(ctx: Context) -> Any:
        generator = torch.Generator()
        synchronize_rng_states(ctx, ["generator"] * (1 + ctx.rank), generator)

    with pytest.raises(MismatchError, match=r"\n  1 .*  generator,generator  generator\n"):
        run_ranks(work, 2)
