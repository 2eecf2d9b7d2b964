"""The frozen record itself: its properties, its variants, its end."""

import copy
import dataclasses
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accelfn as af
from accelfn.context import Context, Owned
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks


def test_the_default_is_one_process_on_the_cpu() -> None:
    ctx = Context()
    assert (ctx.rank, ctx.num_processes, ctx.local_rank, ctx.device) == (0, 1, 0, torch.device("cpu"))
    assert ctx.is_main_process and ctx.is_local_main_process and ctx.is_last_process  # noqa: PT018
    assert (ctx.distributed_type, ctx.mixed_precision) == (af.config.DistributedType.NO, "no")


def test_it_is_frozen_and_equal_by_value() -> None:
    ctx = Context()
    for name in ("tag", "debug", "something"):  # a field, a property, neither
        with pytest.raises((AttributeError, TypeError)):
            setattr(ctx, name, "data")
    assert Context() == ctx
    assert hash(Context()) == hash(ctx)
    assert ctx.replace(debug=True) != ctx
    assert ctx.tagged("data") != ctx


@pytest.mark.parametrize(
    ("rank", "main", "local_main", "last"),
    [(0, True, True, False), (1, False, False, False), (2, False, True, False), (3, False, False, True)],
)
def test_who_is_main(rank: int, main: bool, local_main: bool, last: bool) -> None:
    world = af.context.World(
        rank=rank, size=4, local_rank=rank % 2, local_size=2, node_rank=rank // 2, num_nodes=2
    )
    ctx = Context(world=world)
    assert (ctx.is_main_process, ctx.is_local_main_process, ctx.is_last_process) == (main, local_main, last)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu", af.config.DistributedType.MULTI_CPU),
        ("cuda:1", af.config.DistributedType.MULTI_GPU),
        ("xpu:0", af.config.DistributedType.MULTI_XPU),
        ("hpu:0", af.config.DistributedType.MULTI_HPU),
    ],
)
def test_the_kind_of_world_in_the_words_of_accelerate(device: str, kind: af.config.DistributedType) -> None:
    world = af.context.World(size=2, local_size=2, device=torch.device(device))
    assert Context(world=world).distributed_type == kind


def test_a_variant_changes_what_was_asked_and_nothing_else() -> None:
    ctx = af.init_context(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=4, debug=True)
    assert ctx.replace(mixed_precision="bf16") == dataclasses.replace(
        ctx, precision=af.context.Precision(mode="bf16")
    )
    assert ctx.replace() == ctx.replace(mixed_precision=None) == ctx.replace(cpu=True) == ctx
    autocast = af.config.AutocastKwargs(cache_enabled=False)
    assert ctx.replace(kwargs_handlers=[autocast]).precision.autocast == autocast
    eight = Context(precision=af.context.Precision(mode="fp8", fp8_recipe=af.config.AORecipeKwargs()))
    assert eight.replace(mixed_precision="bf16").precision == af.context.Precision(mode="bf16")
    assert eight.replace(debug=True).precision == eight.precision


def test_variants_are_in_the_same_world_and_other_worlds_are_not() -> None:
    def run(ctx: Context) -> af.context.World:
        for variant in (ctx.replace(debug=True), ctx.tagged("data"), copy.deepcopy(ctx)):
            assert variant.world.identity is ctx.world.identity
            assert variant.world.background is ctx.world.background
        assert ctx.replace() == ctx
        return ctx.world

    first, again = run_ranks(run, 2)[0], run_ranks(run, 2)[0]
    assert first == first
    assert first != again
    assert first.identity is not af.context.World().identity
    assert Context().world.identity is af.context.World().identity is af.init_context(cpu=True).world.identity


def test_a_variant_stays_in_its_world() -> None:
    with pytest.raises(ConfigurationError, match="can't move from 'cpu' to another device: got cpu=False"):
        Context().replace(cpu=False)
    away = Context(world=af.context.World(device=torch.device("cuda:0")))
    with pytest.raises(ConfigurationError, match="can't move from 'cuda' to another device: got cpu=True"):
        away.replace(cpu=True)
    with pytest.raises(ConfigurationError, match="keeps the process group"):
        Context().replace(kwargs_handlers=[af.config.InitProcessGroupKwargs()])


def test_a_variant_owns_nothing_and_a_tag_is_on_it_alone() -> None:
    made = Owned(group=True, previous_device=torch.device("cuda:3"))
    ctx = Context(world=af.context.World(owned=made), guard=af.Guard(mode="off"))
    tagged = ctx.tagged("data")
    assert (ctx.tag, tagged.tag, tagged.tagged("labels").tag) == ("", "data", "labels")
    assert tagged == dataclasses.replace(ctx, tag="data", world=af.context.World())
    assert tagged.collectives.call_log is ctx.collectives.call_log
    assert tagged.replace(mixed_precision="bf16").tag == "data"
    assert tagged.tagged("") == ctx.replace() == ctx  # so that what one has prepared, the other knows
    assert (ctx.replace(debug=True).world.owned, ctx.world.owned) == (Owned(), made)


def test_a_context_is_a_context_manager_that_lets_errors_through() -> None:
    with Context() as ctx:
        assert isinstance(ctx, Context)
    with pytest.raises(KeyError, match="mine"), af.init_context(cpu=True):
        raise KeyError("mine")


def test_closing_a_context_that_made_nothing_does_nothing_any_number_of_times() -> None:
    hook = sys.excepthook
    ctx = af.init_context(cpu=True)
    for _ in range(3):
        af.close_context(ctx)
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    # Nor does one that says it made a group that is gone.
    af.close_context(
        Context(world=af.context.World(owned=Owned(group=True, previous_device=torch.device("cuda:3"))))
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": -1, "size": 2}, r"rank must be in 0\.\.1, got -1"),
        ({"size": 4, "local_rank": 2, "local_size": 2}, r"local_rank must be in 0\.\.1, got 2"),
        ({"size": 4, "local_size": 4, "num_nodes": 2}, "are more than the world size 4"),
    ],
)
def test_an_impossible_place_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        af.context.World(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["precision", "mixed_precision", "device", "lr"])
def test_a_change_of_a_context_is_refused_with_what_to_write(name: str) -> None:
    ctx = af.Context()
    with pytest.raises(dataclasses.FrozenInstanceError, match=rf"{name} can't be set.* ctx\.replace\("):
        setattr(ctx, name, "bf16")
    with pytest.raises(dataclasses.FrozenInstanceError, match=rf"{name} can't be set"):
        delattr(ctx, name)


@pytest.mark.parametrize("where", ["memory", "processes"])
def test_a_pickled_context_knows_its_rank_and_refuses_to_communicate(where: Any) -> None:
    def run(ctx: Context) -> tuple[int, ...]:
        copy = pickle.loads(pickle.dumps(ctx))
        assert copy.mixed_precision == "bf16"
        for operation in (af.gather, af.gather_object, af.reduce, af.broadcast):
            with pytest.raises(NotAvailableError, match="a copy that was pickled"):
                operation(copy, torch.ones(1))
        part = copy.along("dp")
        with pytest.raises(NotAvailableError, match="a copy that was pickled"):
            af.wait_for_everyone(part)
        assert len(af.gather(copy.along("pp"), torch.ones(1))) == 1
        numbers = copy.rank, copy.num_processes, copy.local_rank, copy.coordinate("tp"), part.rank
        assert copy.is_main_process == ctx.is_main_process
        assert numbers == (ctx.rank, 4, ctx.local_rank, ctx.coordinate("tp"), ctx.along("dp").rank)
        return numbers

    mesh = af.ParallelismConfig(dp_replicate_size=2, tp_size=2)
    found = run_ranks(run, 4, where, parallelism_config=mesh, mixed_precision="bf16")
    assert [(rank, tp, dp) for rank, _, _, tp, dp in found] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
