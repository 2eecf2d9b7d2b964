"""Models under FSDP: their options and units, and what would make ranks drift apart, which is refused."""

# torch leaves backward, fully_shard and its modules partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin
from accelfn.config import GradScalerKwargs
from accelfn.errors import ConfigurationError, DistributedError, MismatchError
from accelfn.parallel import plan_model, register_forward_method
from accelfn.parallel.facts import read_facts
from accelfn.parallel.handle import handle_of
from accelfn.parallel.strategies.fsdp_plan import choose_units, names_of_ignored, names_of_wrapped
from accelfn.testing import run_ranks
from tests.parallel import shard_models as lm

PLUGIN = FullyShardedDataParallelPlugin(fsdp_version=2)
KEEPING = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)
RECOMPUTING = FullyShardedDataParallelPlugin(
    fsdp_version=2, reshard_after_forward=False, activation_checkpointing=True
)


def sharded(fn: Any, plugin: FullyShardedDataParallelPlugin = PLUGIN, size: int = 2, **options: Any) -> Any:
    return run_ranks(fn, size, on="processes", fsdp_plugin=plugin, **options)


def prepared(ctx: Context) -> tuple[Any, Any]:
    model = lm.make()
    return af.prepare(ctx, model, lm.sgd(model.parameters()))


# --- options ---------------------------------------------------------------------------------


PLUGINS = {
    "version 1": FullyShardedDataParallelPlugin(),
    "prefetch": FullyShardedDataParallelPlugin(
        sharding_strategy="SHARD_GRAD_OP", forward_prefetch=True, backward_prefetch="BACKWARD_PRE"
    ),
    "by size": FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=300
    ),
}


def test_options_that_fetch_and_wrap_otherwise_change_no_number() -> None:
    def on_rank(ctx: Context) -> dict[str, dict[str, torch.Tensor]]:
        variants = {name: ctx.replace(fsdp_plugin=plugin) for name, plugin in PLUGINS.items()}
        return {name: lm.train(own, *prepared(own)) for name, own in variants.items()}

    plain = lm.train(Context(), *prepared(Context()))
    for found in sharded(on_rank):
        for name, parameters in found.items():
            assert lm.is_close(parameters, plain), name


class Mixed(nn.Module):
    """A float input, a float buffer and a batch norm between products in lower precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.down = nn.LayerNorm(4), nn.Linear(4, 3)
        self.norm, self.up = nn.BatchNorm1d(3), nn.Linear(3, 4)
        self.register_buffer("scale", torch.full((3,), 1.001))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.up(self.norm(self.down(self.first(x))) * self.scale), "time": time * 1.0}

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(self.down(self.first(x))))


def test_mixed_precision_is_that_of_layouts_without_shards() -> None:
    def on_rank(ctx: Context) -> tuple[list[Any], list[torch.Tensor]]:
        model = Mixed()
        af.prepare_model(ctx, model)
        register_forward_method(model, "score")
        seen: list[Any] = []
        model.up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        x = torch.linspace(-1, 1, 16).view(4, 4)
        found = model(x, torch.tensor([999.0]))
        found["y"].square().mean().backward()
        score = model.score(x).detach()
        seen += [found["time"].item(), model.up.weight.dtype, found["y"].dtype]
        return seen, [found["y"].detach(), score.float(), lm.whole(model, "grad")["up.weight"]]

    seen, plain = on_rank(Context().replace(mixed_precision="bf16"))
    assert seen[0] == torch.bfloat16
    assert seen[2:] == [999.0, torch.float32, torch.float32]
    for seen_in_shards, found in sharded(on_rank, mixed_precision="bf16"):
        assert (seen_in_shards[0], *seen_in_shards[2:]) == (seen[0], *seen[2:])
        torch.testing.assert_close(found, plain, atol=0.02, rtol=0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    assert sharded(lambda ctx: prepared(ctx)[0](lm.ids_of(ctx)).dtype, plugin) == [torch.bfloat16] * 2


# --- what may be in a model -------------------------------------------------------------------------


def test_models_of_one_program_have_plans_of_their_own() -> None:
    def on_rank(ctx: Context) -> tuple[float, list[str], bool]:
        teacher = af.prepare_model(ctx, lm.make(5), evaluation_mode=True)
        second = lm.make(6)
        second = af.prepare_model(ctx, second, plan=plan_model(ctx, second, engine="ddp"))
        student, optimizer = prepared(ctx)
        kinds = [type(next(one.parameters())).__name__ for one in (teacher, second, student)]
        with torch.no_grad():
            wanted = teacher(lm.ids_of(ctx))
        scaler = af.backward(ctx, (student(lm.ids_of(ctx)) - wanted).square().mean(), af.init_scaler(ctx))
        af.optimizer_step(ctx, optimizer, scaler)
        same = af.prepare_model(ctx, student) is student and af.unwrap_model(student) is student
        return (lm.whole(student)["norm.weight"] - 1).abs().max().item(), kinds, same

    for moved, kinds, same in sharded(on_rank):
        assert moved > 0
        assert kinds == ["Parameter", "Parameter", "DTensor"]
        assert same


def test_what_is_written_after_an_evaluation_counts_in_the_next_one() -> None:
    def on_rank(ctx: Context) -> None:
        ids = lm.ids_of(Context())

        def evaluations(one: Any) -> list[torch.Tensor]:
            with torch.no_grad():
                found = [one(ids), one.evaluate(ids)]
            one.requires_grad_(False)
            found.append(one(ids))
            one.requires_grad_(True)
            return [*found, one(ids).detach()]

        for plugin in (PLUGIN, KEEPING):
            model, _ = prepared(ctx.replace(fsdp_plugin=plugin))
            register_forward_method(model, "evaluate")
            expected = lm.make()
            for factor in (1.0, 0.5):
                for one in (*model.parameters(), *expected.parameters()):
                    one.data.mul_(factor)
                torch.testing.assert_close(evaluations(model), evaluations(expected))

    sharded(on_rank)


def test_a_forward_pass_that_is_never_reversed_changes_nothing() -> None:
    def steps(ctx: Context) -> dict[str, torch.Tensor]:
        model, optimizer = prepared(ctx)
        ids, scaler, norms = lm.ids_of(ctx), af.init_scaler(ctx), list[torch.Tensor]()
        for _ in range(2):
            loss = (model(ids) * model(ids.flip(1)).cos()).mean()
            assert all(hasattr(one, "placements") for one in model.parameters()) is (ctx.num_processes > 1)
            scaler = af.backward(ctx, loss, scaler)
            model(ids)
            norms.append(af.clip_grad_norm_(ctx, model.parameters(), 0.1, scaler_state=scaler))
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        return {**lm.whole(model), "norms": torch.stack(norms)}

    def on_rank(ctx: Context) -> list[dict[str, torch.Tensor]]:
        return [steps(ctx.replace(fsdp_plugin=plugin)) for plugin in (PLUGIN, KEEPING, RECOMPUTING)]

    plain = steps(Context())
    assert plain["norms"].min() > 0.1
    assert all(lm.is_close(found, plain) for of_rank in sharded(on_rank) for found in of_rank)


@pytest.mark.parametrize("between", ["forward", "evaluation", "write"])
def test_a_penalty_on_slopes_may_come_before_other_forward_passes(between: str) -> None:
    """As in a critic's loss: what the second derivative needs outlasts them, and each gathers anew."""

    def work(ctx: Context) -> torch.Tensor:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        model, optimizer = af.prepare(ctx, model, lm.sgd(model.parameters()))
        scaler = af.init_scaler(ctx)
        for seed in range(2):
            rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
            x = rows.chunk(ctx.num_processes)[ctx.rank].requires_grad_()

            def penalty(x: torch.Tensor = x) -> torch.Tensor:
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                return slope.square().mean()

            slopes = penalty()
            with torch.no_grad():
                if between == "evaluation":
                    model(x)
                elif between == "write":  # as optimizers do it, which no version counter shows
                    cast("Any", torch)._foreach_mul_([*model.parameters()], 1.5)
            slopes = penalty() if between == "write" else slopes
            scaler = af.backward(ctx, slopes + model(x).square().mean(), scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        return torch.cat([one.flatten() for one in lm.whole(model).values()])

    (alone,) = run_ranks(work, 1)
    wrapping = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1}
    for found in sharded(work, FullyShardedDataParallelPlugin(fsdp_version=2, **cast("Any", wrapping))):
        torch.testing.assert_close(found, alone)


def test_a_method_of_its_own_gathers_where_it_was_registered() -> None:
    def on_rank(ctx: Context) -> None:
        model, _ = prepared(ctx)
        ids = lm.ids_of(Context())
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            model.score(ids)
        with pytest.raises(ConfigurationError, match="has no method 'scores'"):
            register_forward_method(model, "scores")
        register_forward_method(model, "score")
        torch.testing.assert_close(model.score(ids), lm.make().score(ids))

    sharded(on_rank)


# --- what would drift apart is refused --------------------------------------------------------------


def test_a_loss_over_bare_shards_is_refused_by_name() -> None:
    def on_rank(ctx: Context) -> None:
        model, _ = prepared(ctx)
        penalty = model.blocks[1].up.weight.square().sum().full_tensor()
        with pytest.raises(ConfigurationError, match=r"the loss used blocks\.1\.up\.weight, a shard.*decay"):
            af.backward(ctx, penalty, af.init_scaler(ctx))
        for one in (model, model.blocks[1]):
            with pytest.raises(ConfigurationError, match="Copy it before prepare, and prepare both"):
                copy.deepcopy(one)

    sharded(on_rank)


def one_by_one(model: nn.Module) -> None:
    for one in model.parameters():
        one.grad = None


# How to clear the gradients of a model and its optimizer.
CLEAR: dict[str, Callable[[Any, Any], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "one by one": lambda model, optimizer: one_by_one(model),
}


def test_gradients_that_wait_in_an_open_window_are_cleared_and_rescaled_with_those_that_are_shown() -> None:
    def gradients(ctx: Context, way: str, is_late: bool) -> dict[str, torch.Tensor]:
        model, optimizer = prepared(ctx)
        ids, scaler = lm.ids_of(ctx), af.init_scaler(ctx)
        with af.no_sync(ctx, model):
            scaler = af.backward(ctx, 9 * model(ids).square().mean(), scaler)
            loss = model(ids).sin().mean() if is_late else None
            CLEAR[way](model, optimizer)
            scaler = af.backward(ctx, model(ids).sin().mean() if loss is None else loss, scaler)
        af.backward(ctx, model(ids).cos().mean(), scaler)
        return lm.whole(model, "grad")

    def by_the_shim(ctx: Context) -> dict[str, torch.Tensor]:
        accelerator = af.Accelerator(context=ctx)
        model = accelerator.prepare(lm.make())
        accelerator.backward(model(lm.ids_of(ctx)).sin().mean())
        with accelerator.no_sync(model):
            accelerator.backward(9 * model(lm.ids_of(ctx)).square().mean())
        model.zero_grad()
        accelerator.backward(model(lm.ids_of(ctx)).cos().mean())
        return lm.whole(model, "grad")

    def beside_a_step(ctx: Context) -> dict[str, torch.Tensor]:
        scaler = GradScalerKwargs(init_scale=8.0, growth_interval=1)  # the step doubles the scale
        accelerator = af.Accelerator(context=ctx.replace(mixed_precision="fp16", kwargs_handlers=[scaler]))
        pairs = [accelerator.prepare(one, lm.sgd(one.parameters())) for one in (lm.make(), lm.make())]
        (model, _), (other, optimizer) = pairs
        with accelerator.no_sync(model):
            accelerator.backward(model(lm.ids_of(ctx)).sin().mean())
        accelerator.backward(other(lm.ids_of(ctx)).sin().mean())
        optimizer.step()
        accelerator.backward(model(lm.ids_of(ctx)).cos().mean())
        return lm.whole(model, "grad")

    def on_rank(ctx: Context) -> list[dict[str, torch.Tensor]]:
        in_bf16 = ctx.replace(mixed_precision="bf16")  # where FSDP keeps what waits elsewhere
        ways = zip(CLEAR, itertools.cycle((False, True)), strict=False)
        rest = [gradients(in_bf16, "model", False), *(gradients(ctx, *one) for one in ways)]
        return [by_the_shim(ctx), beside_a_step(ctx), *rest]

    shim, rescaled, _, *plain = on_rank(Context())
    for found_by_shim, found_rescaled, in_bf16, *found in sharded(on_rank):
        assert lm.is_close(found_by_shim, shim)
        assert all((found_rescaled[name] - one).abs().max() < 0.1 for name, one in rescaled.items())
        assert all(map(lm.is_close, found, plain))
        assert all((in_bf16[name] - one).abs().max() < 0.01 for name, one in plain[0].items())


def test_a_step_on_gradients_that_were_never_reduced_is_refused() -> None:
    def on_rank(ctx: Context) -> float:
        model, optimizer = prepared(ctx)
        with af.no_sync(ctx, model):
            scaler = af.backward(ctx, model(lm.ids_of(ctx)).square().mean(), af.init_scaler(ctx))
            with pytest.raises(ConfigurationError, match=r"were not averaged over the 2 ranks.*no_sync"):
                af.optimizer_step(ctx, optimizer, scaler)
        with pytest.raises(ConfigurationError, match="were not averaged"):
            af.clip_grad_norm_(ctx, model.parameters(), 1.0, scaler_state=scaler)
        handle = handle_of(model)
        assert handle is not None
        handle.discard()
        with af.no_sync(ctx, model):
            loss = model(lm.ids_of(ctx)).square().mean()
        with af.training.trigger_sync_in_backward(ctx, model):
            scaler = af.backward(ctx, loss, scaler)
        norm = af.clip_grad_norm_(ctx, model.parameters(), 1e9, scaler_state=scaler)
        af.optimizer_step(ctx, optimizer, scaler)
        return norm.item()

    plain = lm.make()
    plain(lm.ids_of(Context())).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    assert sharded(on_rank) == [pytest.approx(expected)] * 2


class Branches(nn.Module):
    """Blocks and heads of which each call uses some."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([lm.Block() for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(lm.WIDTH, 1) for _ in range(3)])

    def forward(self, x: torch.Tensor, blocks: Sequence[int], head: int) -> torch.Tensor:
        for index in blocks:
            x = self.blocks[index](x)
        return self.heads[head](x).square().mean()


def test_parameters_that_only_some_ranks_use_count_as_zero_elsewhere() -> None:
    x = torch.randn(2, 3, lm.WIDTH, generator=torch.Generator().manual_seed(0))

    def train(ctx: Context) -> dict[str, torch.Tensor]:
        model = Branches()
        model, optimizer = af.prepare(ctx, model, torch.optim.AdamW(model.parameters(), lr=0.1))
        scaler = af.init_scaler(ctx)
        for step in range(3):  # head 2 is used in the first step alone, and stays as it is
            ranks = range(2) if ctx.num_processes == 1 else [ctx.rank]
            losses = [model(x[rank], [0, 1] if step else [1], rank if step else 2) for rank in ranks]
            scaler = af.backward(ctx, torch.stack(losses).mean(), scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        return lm.whole(model)

    plain = train(Context())
    assert all(lm.is_close(found, plain) for found in sharded(train))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "skipped"),
    [
        ([[0, 1], [1]], r"all units but blocks\.0"),
        ([[0], [1]], r"all units but blocks\.(0|1)"),
        ([[0, 1], [1, 0]], r"call 10: forward through blocks\.1, blocks\.0, the rest"),
    ],
)
def test_units_that_a_rank_skips_are_named(blocks: list[list[int]], skipped: str) -> None:
    def on_rank(ctx: Context) -> None:
        model = af.prepare_model(ctx, Branches())
        for step in range(3):
            if step < 2:
                model(torch.ones(1, lm.WIDTH), [0, 1], 0).backward()
                continue
            with pytest.raises(MismatchError, match=skipped):
                af.backward(ctx, model(torch.ones(1, lm.WIDTH), blocks[ctx.rank], 0), af.init_scaler(ctx))

    sharded(on_rank)


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
        other = nn.LayerNorm(lm.WIDTH)
        other.weight = nn.Parameter(first.norm.weight.detach())  # as transformers loads it
        with pytest.raises(
            ConfigurationError, match=r"of the LayerNorm is already a shard .DTensor. in a layout of its own"
        ):
            af.prepare_model(ctx, other)

    sharded(on_rank)


def test_an_optimizer_over_no_prepared_model_is_refused() -> None:
    def on_rank(ctx: Context) -> None:
        prepared(ctx)
        stranger = nn.Linear(2, 2)
        optimizer = af.training.prepare_optimizer(ctx, lm.sgd(stranger.parameters()))
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
        model(lm.ids_of(ctx))
        if ctx.rank == 1:
            return "ended"
        with pytest.raises(DistributedError) as caught:
            model(lm.ids_of(ctx))
        return str(caught.value)

    assert "rank 1" in sharded(on_rank)[0]


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
