"""Models under FSDP train as one process does; anything that would make ranks drift apart is refused."""

# torch leaves backward, fully_shard and its modules partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.data import plan_microbatch
from accelfn.errors import ConfigurationError, DistributedError, MismatchError, NotAvailableError
from accelfn.parallel import plan_model, register_forward_method
from accelfn.parallel.facts import read_facts
from accelfn.parallel.handle import handle_of
from accelfn.parallel.shard import choose_units, names_of_ignored, names_of_wrapped
from accelfn.testing import run_ranks
from tests.parallel import shard_models as lm

PLUGIN = FullyShardedDataParallelPlugin(fsdp_version=2)
HSDP = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
TOLERANCE = 1e-6


def sharded(fn: Any, plugin: FullyShardedDataParallelPlugin = PLUGIN, size: int = 2, **options: Any) -> Any:
    return run_ranks(fn, size, on="processes", fsdp_plugin=plugin, **options)


def prepared(ctx: Context, make_optimizer: lm.MakeOptimizer = lm.sgd) -> tuple[Any, Any]:
    model = lm.make()
    return af.prepare(ctx, model, make_optimizer(model.parameters()))


def rows(ctx: Context) -> lm.BATCH:
    (batch,) = lm.windows(1, 1)[0]
    return {name: one.chunk(ctx.num_processes)[ctx.rank] for name, one in batch.items()}


# --- as one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "config"), [(2, None), (4, HSDP)], ids=["shards", "replicas of shards"])
def test_shards_train_as_one_process(ranks: int, config: ParallelismConfig | None) -> None:
    cases = [
        (size, make, weighted) for size in (1, 3) for make, weighted in ((lm.adamw, True), (lm.sgd, False))
    ]

    def on_rank(ctx: Context) -> list[lm.Trained]:
        return [lm.train(ctx, *prepared(ctx, make), size, weighted) for size, make, weighted in cases]

    plain = [lm.train_plain(make, size, weighted) for size, make, weighted in cases]
    for found in sharded(on_rank, size=ranks, parallelism_config=config):
        for trained, expected, case in zip(found, plain, cases, strict=True):
            assert trained.distance(expected) < TOLERANCE, case


PLUGINS = {
    "version 1": FullyShardedDataParallelPlugin(),
    "prefetch": FullyShardedDataParallelPlugin(
        sharding_strategy="SHARD_GRAD_OP", forward_prefetch=True, backward_prefetch="BACKWARD_PRE"
    ),
    "no reshard": FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False),
    "one unit": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP"),
    "by size": FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=300
    ),
    "offload, recomputed": FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_offload=True, activation_checkpointing=True
    ),
}


def test_no_option_changes_the_numbers() -> None:
    def on_rank(ctx: Context) -> dict[str, lm.Trained]:
        variants = {name: ctx.replace(fsdp_plugin=plugin) for name, plugin in PLUGINS.items()}
        return {name: lm.train(own, *prepared(own), 2, True) for name, own in variants.items()}

    plain = lm.train_plain(lm.sgd, 2, True)
    for found in sharded(on_rank):
        for name, trained in found.items():
            assert trained.distance(plain) < TOLERANCE, name


def test_gradients_that_are_reduced_in_each_batch_are_the_same() -> None:
    def on_rank(ctx: Context) -> tuple[lm.Trained, bool]:
        model, optimizer = prepared(ctx)
        with af.accumulate(ctx, plan_microbatch(0, 0, 2, 2), model):
            model(rows(ctx)["ids"]).sum().backward()
        holds_shards = all(one.grad is not None for one in model.parameters())
        optimizer.zero_grad()
        return lm.train(ctx, model, optimizer, 3, True), holds_shards

    accumulation = af.GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    found = sharded(on_rank, gradient_accumulation_plugin=accumulation)
    plain = lm.train_plain(lm.sgd, 3, True)
    assert all(holds_shards and one.distance(plain) < TOLERANCE for one, holds_shards in found)


def test_ranks_begin_with_the_weights_of_rank_0_and_keep_half_of_them() -> None:
    def on_rank(ctx: Context) -> tuple[dict[str, torch.Tensor], int]:
        model = af.prepare_model(ctx, lm.make(seed=ctx.rank))
        return lm.whole(model), sum(cast("Any", one).to_local().numel() for one in model.parameters())

    found = sharded(on_rank)
    expected = dict(lm.make().named_parameters())
    assert all(torch.equal(value, expected[name]) for values, _ in found for name, value in values.items())
    total = sum(one.numel() for one in expected.values())
    assert sum(number for _, number in found) == total


def test_mixed_precision_is_a_policy_and_not_autocast() -> None:
    def on_rank(ctx: Context) -> tuple[Any, ...]:
        model, _ = prepared(ctx)
        seen: list[torch.dtype] = []

        def look(module: Any, args: Any, output: Any) -> None:
            del args
            seen.extend([output.dtype, module.up.weight.dtype])

        model.blocks[0].register_forward_hook(look)
        output = model(rows(ctx)["ids"])
        output.sum().backward()
        kept = next(model.parameters())
        return output.dtype, kept.dtype, kept.grad.dtype, seen[0], "forward" in vars(model)

    whole, low = torch.float32, torch.bfloat16
    assert sharded(on_rank, mixed_precision="bf16")[0] == (whole, whole, whole, low, False)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    assert sharded(on_rank, plugin)[0] == (low, whole, whole, low, False)


def test_float16_steps_are_skipped_by_all_ranks_where_one_shard_overflows() -> None:
    def on_rank(ctx: Context) -> tuple[float, bool, bool]:
        model, optimizer = prepared(ctx)
        scaler = af.init_scaler(ctx)
        before = lm.whole(model)
        loss = model(rows(ctx)["ids"]).square().mean()
        scaler = af.backward(ctx, loss, scaler)
        if ctx.rank == 1:
            model.norm.weight.grad.to_local().fill_(float("inf"))
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        is_same = all(torch.equal(one, before[name]) for name, one in lm.whole(model).items())
        return scaler.scale.item(), is_same, af.step_was_skipped(ctx, scaler)

    # The scale is what the device's precision would have; on the CPU only the policy computes in float16.
    assert sharded(on_rank, mixed_precision="fp16") == [(32768.0, True, True)] * 2


# --- what may be in a model -------------------------------------------------------------------------


def test_frozen_parameters_are_sharded_too_and_stay_as_they_are() -> None:
    def on_rank(ctx: Context) -> bool:
        model = lm.make()
        model.blocks[0].requires_grad_(False)
        model.norm.weight.requires_grad_(False)
        before = {name: one.clone() for name, one in model.named_parameters() if not one.requires_grad}
        model, optimizer = af.prepare(ctx, model, lm.sgd([p for p in model.parameters() if p.requires_grad]))
        lm.train(ctx, model, optimizer, 2, True)
        after = lm.whole(model)
        moved = [
            name
            for name in after
            if name not in before and torch.equal(after[name], lm.whole(lm.make())[name])
        ]
        return not moved and all(torch.equal(after[name], one) for name, one in before.items())

    assert all(sharded(on_rank))


def test_models_of_one_program_have_plans_of_their_own() -> None:
    def on_rank(ctx: Context) -> tuple[float, list[str], bool]:
        teacher = af.prepare_model(ctx, lm.make(5), evaluation_mode=True)
        second = lm.make(6)
        second = af.prepare_model(ctx, second, plan=plan_model(ctx, second, engine="ddp"))
        student, optimizer = prepared(ctx)
        kinds = [type(next(one.parameters())).__name__ for one in (teacher, second, student)]
        with torch.no_grad():
            wanted = teacher(rows(ctx)["ids"])
        scaler = af.backward(ctx, (student(rows(ctx)["ids"]) - wanted).square().mean(), af.init_scaler(ctx))
        af.optimizer_step(ctx, optimizer, scaler)
        same = af.prepare_model(ctx, student) is student and af.unwrap_model(student) is student
        return (lm.whole(student)["norm.weight"] - 1).abs().max().item(), kinds, same

    for moved, kinds, same in sharded(on_rank):
        assert moved > 0
        assert kinds == ["Parameter", "Parameter", "DTensor"]
        assert same


def test_an_evaluation_reads_the_whole_model_and_training_goes_on() -> None:
    def on_rank(ctx: Context) -> float:
        model, optimizer = prepared(ctx)
        ids = lm.windows(1, 1)[0][0]["ids"]
        with torch.no_grad():
            difference = (model(ids) - lm.make()(ids)).abs().max().item()
        found = lm.train(ctx, model, optimizer, 1, True)
        return max(difference, found.distance(lm.train_plain(lm.sgd, 1, True)))

    assert max(sharded(on_rank)) < TOLERANCE


@pytest.mark.parametrize("reshards", [True, False])
def test_what_is_written_after_an_evaluation_counts_in_the_next_one(reshards: bool) -> None:
    def on_rank(ctx: Context) -> None:
        model, _ = prepared(ctx)
        ids = lm.windows(1, 1)[0][0]["ids"]
        register_forward_method(model, "evaluate")

        def evaluations() -> list[torch.Tensor]:
            with torch.no_grad():
                found = [model(ids), model.evaluate(ids)]
            model.requires_grad_(False)
            found.append(model(ids))
            model.requires_grad_(True)
            return found

        before = evaluations()
        assert all(hasattr(one, "placements") for one in model.parameters())
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(0.5)
        for found, old in zip(evaluations(), before, strict=True):
            assert not torch.allclose(found, old)
        expected = lm.make()
        with torch.no_grad():
            for one in expected.parameters():
                one.mul_(0.5)
        for found in evaluations()[::2]:
            assert torch.allclose(found, expected(ids), atol=1e-6)

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=reshards)
    sharded(on_rank, plugin)


def test_a_method_of_its_own_gathers_where_it_was_registered() -> None:
    def on_rank(ctx: Context) -> tuple[float, float]:
        model, _ = prepared(ctx)
        plain = lm.make()
        ids = lm.windows(1, 1)[0][0]["ids"]
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            model.score(ids)
        with pytest.raises(ConfigurationError, match="has no method 'scores'"):
            register_forward_method(model, "scores")
        register_forward_method(model, "score")
        loss, expected = model.score(ids), plain.score(ids)
        loss.backward()
        expected.backward()
        grad = model.embed.weight.grad.full_tensor()
        return abs((loss - expected).item()), (grad - plain.embed.weight.grad).abs().max().item()

    assert max(number for both in sharded(on_rank) for number in both) < TOLERANCE


# --- what would drift apart is refused --------------------------------------------------------------


def test_a_loss_over_bare_shards_is_refused_by_name() -> None:
    def on_rank(ctx: Context) -> None:
        model, _ = prepared(ctx)
        penalty = model.blocks[1].up.weight.square().sum().full_tensor()
        with pytest.raises(ConfigurationError, match=r"the loss used blocks\.1\.up\.weight, a shard"):
            af.backward(ctx, penalty, af.init_scaler(ctx))

    sharded(on_rank)


def test_a_step_on_gradients_that_were_never_reduced_is_refused() -> None:
    def on_rank(ctx: Context) -> tuple[bool, float]:
        model, optimizer = prepared(ctx)
        with af.no_sync(ctx, model):
            scaler = af.backward(ctx, model(rows(ctx)["ids"]).square().mean(), af.init_scaler(ctx))
            has_none = all(one.grad is None for one in model.parameters())
            with pytest.raises(ConfigurationError, match=r"were not averaged over the 2 ranks.*no_sync"):
                af.optimizer_step(ctx, optimizer, scaler)
        with pytest.raises(ConfigurationError, match="were not averaged"):
            af.clip_grad_norm_(ctx, model.parameters(), 1.0, scaler_state=scaler)
        handle = handle_of(model)
        assert handle is not None
        handle.discard()
        with af.no_sync(ctx, model):
            loss = model(rows(ctx)["ids"]).square().mean()
        with af.trigger_sync_in_backward(ctx, model):
            scaler = af.backward(ctx, loss, scaler)
        norm = af.clip_grad_norm_(ctx, model.parameters(), 1e9, scaler_state=scaler)
        af.optimizer_step(ctx, optimizer, scaler)
        return has_none, norm.item()

    plain = lm.make()
    plain(lm.windows(1, 1)[0][0]["ids"]).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    assert sharded(on_rank) == [(True, pytest.approx(expected))] * 2


def test_a_module_is_sharded_once() -> None:
    def on_rank(ctx: Context) -> None:
        model = lm.make()
        fully_shard(model.blocks[1])
        with pytest.raises(ConfigurationError, match=r"its module blocks\.1 is already sharded by FSDP"):
            af.prepare_model(ctx, model)
        first = lm.make()
        af.prepare_model(ctx, first)
        with pytest.raises(ConfigurationError, match=r"1\.weight of the Sequential is already a shard"):
            af.prepare_model(ctx, nn.Sequential(nn.ReLU(), first.norm))

    sharded(on_rank)


def test_an_optimizer_over_no_prepared_model_is_refused() -> None:
    def on_rank(ctx: Context) -> None:
        prepared(ctx)
        stranger = nn.Linear(2, 2)
        optimizer = af.prepare_optimizer(ctx, lm.sgd(stranger.parameters()))
        with pytest.raises(ConfigurationError, match="no parameter of the SGD is in a prepared model"):
            af.optimizer_step(ctx, optimizer, af.init_scaler(ctx))

    sharded(on_rank)


def test_a_rank_with_another_plan_is_named() -> None:
    def on_rank(ctx: Context) -> None:
        wrap = "NO_WRAP" if ctx.rank else None
        own = ctx.replace(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=wrap))
        af.prepare_model(own, lm.make())

    with pytest.raises(MismatchError, match=r"blocks\.0, blocks\.1, the rest of the model"):
        sharded(on_rank)


def test_a_rank_that_is_lost_is_named_in_the_forward_pass() -> None:
    def on_rank(ctx: Context) -> str:
        model, _ = prepared(ctx)
        model(rows(ctx)["ids"])
        if ctx.rank == 1:
            return "ended"
        with pytest.raises(DistributedError) as caught:
            model(rows(ctx)["ids"])
        return str(caught.value)

    assert "rank 1" in sharded(on_rank)[0]


def test_exact_mode_and_threads_have_no_shards() -> None:
    def in_order(ctx: Context) -> None:
        with pytest.raises(ConfigurationError, match='reduction="canonical" needs the full model'):
            plan_model(ctx, lm.make(), engine="shard")

    run_ranks(in_order, 2, reduction="canonical")

    def on_thread(ctx: Context) -> None:
        with pytest.raises(NotAvailableError, match='on="processes"'):
            af.prepare_model(ctx, lm.make())

    run_ranks(on_thread, 2, fsdp_plugin=PLUGIN)


# --- units ------------------------------------------------------------------------------------------


def plugin_of(**fields: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, **fields)


def test_units_are_blocks_classes_sizes_or_what_a_policy_says() -> None:
    model = lm.make(is_tied=False)
    facts = read_facts(model)
    blocks = ("blocks.1", "blocks.0", "")
    assert choose_units(plugin_of(), facts) == blocks
    assert choose_units(plugin_of(auto_wrap_policy="NO_WRAP"), facts) == ("",)
    assert choose_units(plugin_of(transformer_cls_names_to_wrap=["Block"]), facts) == blocks
    by_size = plugin_of(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=190)
    # up has 216 parameters, down 200; what is left of a block is its norm
    assert set(choose_units(by_size, facts)) == {
        *(f"blocks.{index}.{leaf}" for index in (0, 1) for leaf in ("up", "down")),
        *("embed", "head", ""),
    }
    # a tied parameter is gathered with one unit, and a size asks for none by name
    assert not {"embed", "head"} & set(choose_units(by_size, read_facts(lm.make())))
    assert names_of_wrapped(lambda module: isinstance(module, lm.Block), model) == ("blocks.0", "blocks.1")
    torchs = functools.partial(size_based_auto_wrap_policy, min_num_params=400)
    assert names_of_wrapped(torchs, model) == ("blocks.0", "blocks.1")


def test_what_does_not_fit_the_model_is_refused_before_anything_is_changed() -> None:
    model = lm.make()
    facts = read_facts(model)
    with pytest.raises(ConfigurationError, match="Did you mean 'Block'"):
        choose_units(plugin_of(transformer_cls_names_to_wrap=["Blok"]), facts)
    with pytest.raises(ConfigurationError, match=r"embed\.weight and head\.weight are one tied parameter"):
        choose_units(plugin_of(), facts, ["embed"])
    with pytest.raises(ConfigurationError, match=r"has blocks\.1\..*, which is trained"):
        names_of_ignored(r"blocks\.1", model, facts)
    with pytest.raises(ConfigurationError, match="matches no module"):
        names_of_ignored("layers", model, facts)
    with pytest.raises(ConfigurationError, match="has a Linear that is not in the Model"):
        names_of_ignored([nn.Linear(1, 1)], model, facts)


def test_ignored_modules_stay_whole() -> None:
    def on_rank(ctx: Context) -> tuple[bool, bool]:
        model = lm.make()
        model.blocks[0].requires_grad_(False)
        af.prepare_model(ctx, model)
        blocks = cast("Any", model.blocks)
        return isinstance(blocks[0], FSDPModule), hasattr(blocks[0].up.weight, "placements")

    plugin = plugin_of(ignored_modules=r"blocks\.0", auto_wrap_policy="NO_WRAP")
    assert sharded(on_rank, plugin) == [(False, False)] * 2


# --- checkpoints ------------------------------------------------------------------------------------


def test_shards_are_saved_and_loaded_into_one_process_and_back_bit_by_bit(tmp_path: Path) -> None:
    def states(model: Any, optimizer: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        moments = [
            value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
            for one in optimizer.param_groups[0]["params"]
            for value in optimizer.state[one].values()
        ]
        return lm.whole(model), moments

    def save(ctx: Context) -> Any:
        model, optimizer = prepared(ctx, lm.adamw)
        lm.train(ctx, model, optimizer, 2, True)
        af.save_state(ctx, tmp_path / "sharded", {"model": model, "optimizer": optimizer})
        return states(model, optimizer)

    def load(ctx: Context) -> Any:
        model = lm.make(seed=9)
        model, optimizer = af.prepare(ctx, model, lm.adamw(model.parameters()))
        af.load_state(ctx, tmp_path / "alone", {"model": model, "optimizer": optimizer})
        return states(model, optimizer)

    def is_equal(one: Any, other: Any) -> bool:
        return all(torch.equal(one[0][name], other[0][name]) for name in one[0]) and all(
            torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True)
        )

    saved, _ = sharded(save, plugin_of(state_dict_type="FULL_STATE_DICT"))
    made = af.checkpoint.convert_checkpoint(tmp_path / "sharded", tmp_path / "weights", to="safetensors")
    assert [path.name for path in made.path.iterdir()] == ["model.safetensors"]
    model = lm.make(seed=9)
    af.load_model(model, made.path)
    assert all(torch.equal(one, saved[0][name]) for name, one in model.named_parameters())
    alone = Context()
    model = lm.make(seed=9)
    model, optimizer = af.prepare(alone, model, lm.adamw(model.parameters()))
    af.load_state(alone, tmp_path / "sharded", {"model": model, "optimizer": optimizer})
    assert is_equal(states(model, optimizer), saved)
    af.save_state(alone, tmp_path / "alone", {"model": model, "optimizer": optimizer})
    assert all(is_equal(one, saved) for one in sharded(load))
