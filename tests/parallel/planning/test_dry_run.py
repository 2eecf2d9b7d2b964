"""What a dry run of a batch finds is what real runs keep and receive."""

# torch leaves backward and manual_seed partly untyped, and transformers much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typing_extensions import Self

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel import plan_traffic, read_facts
from accelfn.testing import run_ranks
from tests.parallel.expert_models import SparseGPT
from tests.parallel.layouts import LAYOUTS
from tests.parallel.tensor_models import GPT, LENGTH, PLAN, SEQUENCE, VOCABULARY
from tests.parallel.traffic import Traffic, held

ROWS = 8


def llama() -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 4))


def of_text() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (ROWS, 24))
    return {"input_ids": ids, "labels": ids}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: torch.ones(64, 8)),
    "gpt": (GPT, lambda: (torch.zeros(ROWS, LENGTH, dtype=torch.long),)),
    "llama": (llama, of_text),
}


class Saved:
    """A block in which the storages are found that autograd keeps."""

    class _Token:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def __init__(self) -> None:
        self._tokens: list[weakref.ref[Any]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda token: token.tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        token = self._Token(tensor)
        self._tokens.append(weakref.ref(token))
        return token

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*cast("Any", error))

    def beside(self, own: list[torch.Tensor]) -> int:
        """Return the bytes that autograd keeps, except storages of ``own``."""
        alive = [token.tensor for one in self._tokens if (token := one()) is not None]
        return held([*alive, *own]) - held(own)


def call(model: nn.Module, batch: Any) -> Any:
    return (
        model(**batch)
        if isinstance(batch, dict)
        else model(*batch)
        if isinstance(batch, tuple)
        else model(batch)
    )


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one == "llama" else ()) for one in MODELS]
)
def test_activations_are_what_autograd_keeps(name: str, precision: str) -> None:
    make, make_batch = MODELS[name]
    ctx = af.plan_context(1, mixed_precision=precision)
    model, batch = make(), make_batch()
    model.eval()  # which the plan is not for
    before = {key: one.clone() for key, one in model.state_dict().items()}
    random = torch.get_rng_state()
    budget = af.plan_memory(ctx, model, batch=batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training
    after = model.state_dict()
    assert all(torch.equal(after[key], one) for key, one in before.items())
    model.train()
    with Saved() as saved, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        result = call(model, batch)
    real = saved.beside([*model.parameters(), *model.buffers()])
    assert budget.activations == pytest.approx(real, rel=0.01)
    del result


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    ids, labels, positions = batch
    return F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten(), reduction="sum")


def make_ids() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    return ids, ids, torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()


CASES = {
    "tp2-sequence": ("tp2", SEQUENCE, "no"),
    "tp2xcp2": ("tp2xcp2", PLAN, "no"),
    "sp2": ("sp2", PLAN, "no"),
    "tp2xfsdp2": ("tp2xfsdp2", PLAN, "bf16"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name == "sp2" else pytest.mark.slow) for name in CASES]
)
def test_ranks_keep_and_receive_what_was_planned(case: str) -> None:
    name, plan, precision = CASES[case]
    layout = LAYOUTS[name]
    config = layout.config(plan)

    def work(ctx: Context) -> tuple[int, dict[str, int], dict[str, int]]:
        batch = af.shard_sequence(ctx, make_ids(), 1)
        model = af.prepare_model(ctx, GPT())
        loss_of(model, batch).backward()  # the first one has things to settle
        units = [cast("Any", one) for one in model.modules() if hasattr(one, "_get_fsdp_state")]
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        with Traffic() as traffic:
            with Saved() as saved:
                loss = loss_of(model, batch)
            own = [one for group in groups for each in group.fsdp_params for one in each.all_gather_outputs]
            kept = saved.beside([*model.parameters(), *own])
            loss.backward()
        return kept, dict(traffic.received), dict(traffic.calls)

    ctx = af.plan_context(layout.size, parallelism_config=config, mixed_precision=precision)
    batch = af.shard_sequence(ctx, make_ids(), 1)
    budget = af.plan_memory(ctx, GPT(), batch=batch, loss_fn=loss_of)
    ranks = run_ranks(work, layout.size, on="processes", parallelism_config=config, mixed_precision=precision)
    assert budget.activations == pytest.approx(max(kept for kept, _, _ in ranks), rel=0.001)
    traffic = plan_traffic(ctx, GPT(), batch=batch, loss_fn=loss_of)
    assert traffic.moved == budget.moved
    of_activations = [one for one in traffic.exchanges if one.what == "activations"]
    for _, received, calls in ranks:
        found = Counter({call: size for call, size in received.items() if call in OF_ACTIVATIONS})
        # Of these the counter sees the whole, half of which a rank of two has itself. A ring sends wholes.
        found["reduce_scatter_tensor"] //= 2
        assert sum(one.received for one in of_activations) == found.total()
        if "cp" not in name:  # whose loop torch doesn't show as collectives of one kind
            assert sum(one.calls for one in of_activations) == sum(
                calls.get(one, 0) for one in OF_ACTIVATIONS
            )


# FSDP's and DDP's have other names.
OF_ACTIVATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b"])
def test_stages_keep_the_microbatches_that_are_underway(schedule: str) -> None:
    stages = af.config.PipelineParallelConfig(schedule=schedule, num_microbatches=4)
    config = af.ParallelismConfig(pp_size=2, pp_handler=stages)

    def work(ctx: Context) -> tuple[af.parallel.Budget, int]:
        model, batch = GPT(num_blocks=12), make_ids()
        plan = af.plan_model(ctx, model)
        budget = af.plan_memory(ctx, model, plan=plan, batch=batch, loss_fn=loss_of)
        prepared = af.prepare_model(ctx, model, plan=plan)
        scaler = af.init_scaler(ctx)
        most = [0]

        def look(*args: object) -> None:
            most[0] = max(most[0], saved.beside([*prepared.parameters()]))

        def looking(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = loss_of(model, batch)
            look()
            return loss

        for block in cast("Any", prepared).blocks:
            block.register_forward_hook(look)
        for found, micro in af.microbatches(ctx, [batch]):
            with Saved() as saved, af.accumulate(ctx, micro, prepared):
                af.forward_backward(ctx, prepared, looking, found, scaler, micro)
        return budget, most[0]

    ranks = run_ranks(work, 2, on="processes", parallelism_config=config)
    for budget, most in ranks:  # what a stage has sent is kept by torch, and not by autograd
        assert budget.activations == pytest.approx(most, rel=0.03)
    whole = af.plan_memory(
        af.plan_context(2, parallelism_config=config), GPT(num_blocks=12), batch=make_ids(), loss_fn=loss_of
    )
    assert whole in [budget for budget, _ in ranks]
    # Of each of 4 microbatches of 2 rows, forward and back, at each boundary that this rank is at.
    boundary = 2 * LENGTH * 16 * 4
    tied = 2 * VOCABULARY * 16 * 4 // 2
    per_rank = {"interleaved1f1b": 3}.get(schedule, 1)
    assert [budget.moved["pp"] for budget, _ in ranks] == [per_rank * 4 * boundary + tied] * 2


def test_recomputed_blocks_keep_their_inputs() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    ctx = af.plan_context(1, fsdp_plugin=plugin)
    model, batch = GPT(num_blocks=4), make_ids()
    budget = af.plan_memory(ctx, model, batch=batch, loss_fn=loss_of)
    plain = af.plan_memory(af.plan_context(1), model, batch=batch, loss_fn=loss_of)
    x = torch.zeros(ROWS, LENGTH, 16)
    with Saved() as saved:
        output = cast("Any", model).blocks[0](x)
    block = saved.beside([*model.parameters(), x])
    del output
    assert budget.recomputed == block
    with af.init_context(cpu=True, fsdp_plugin=plugin) as alone:
        prepared = af.prepare_model(alone, GPT(num_blocks=4))
        with Saved() as saved:
            loss = loss_of(prepared, batch)
        assert budget.activations == saved.beside([*prepared.parameters()])
        del loss
    assert plain.activations == pytest.approx(cast("int", budget.activations) + 4 * block, rel=0.03)
    assert "recomputed" in str(budget)
    assert budget.total == budget.held + cast("int", budget.activations) + block + budget.temporary
    assert budget.temporary == x.nbytes * 4  # what is between the two layers of a block


class Deciding(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def test_what_depends_on_values_is_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ConfigurationError, match=r"the computation of Deciding or loss_fn depends on values"):
        af.plan_memory(Context(), Deciding(3, 3), batch=x)
    with pytest.raises(ConfigurationError, match="facts have no forward"):
        af.plan_memory(Context(), read_facts(Deciding(3, 3)), batch=x)
    config = af.ParallelismConfig(dp_shard_size=2, ep_size=2)
    ctx = af.plan_context(2, parallelism_config=config)
    with pytest.raises(ConfigurationError, match="Leave batch out where ep_size is above 1"):
        af.plan_memory(ctx, SparseGPT(), batch=x)
