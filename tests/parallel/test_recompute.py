"""Recomputed blocks give the same gradients and keep only their inputs."""

# torch leaves backward and manual_seed partly untyped, and transformers much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.context.config import DynamoBackend, TorchDynamoPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel import read_facts
from accelfn.parallel.forward import plan_recompute, refuse_own_recomputation
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.parallel import tensor_models as tm

PLAIN = FullyShardedDataParallelPlugin(fsdp_version=2)
RECOMPUTED = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)


class Step(NamedTuple):
    """What one forward and backward pass came to.

    Attributes:
        gradients: By name, whole.
        names: Of the state dict.
        calls: Of the inner layer of a block, one after the other in training, and one without gradients.
        saved: Bytes that the forward pass kept for the backward.
    """

    gradients: dict[str, torch.Tensor]
    names: list[str]
    calls: tuple[int, int]
    saved: int


def step(ctx: Context, plugin: FullyShardedDataParallelPlugin) -> Step:
    own = ctx.replace(fsdp_plugin=plugin)
    model: Any = tm.GPT(dropout=0.3)
    af.prepare_model(own, model)
    calls: list[None] = []

    def count(*_: Any) -> None:
        calls.append(None)

    if (
        own.strategy.dynamo.backend == DynamoBackend.NO
    ):  # what is compiled as one graph has no such hooks in it
        model.blocks[1].down.register_forward_hook(count)
    ids, _ = tm.make_batch(seed=ctx.coordinate("dp"))
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = local_of(tensor).untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids).float().square().mean()
    af.backward(own, loss, af.init_scaler(own))
    gradients: dict[str, torch.Tensor] = {}
    for name, one in model.named_parameters():
        gradients[name] = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
    in_training = len(calls)
    with torch.no_grad():
        model(ids)
    return Step(
        gradients, list(model.state_dict()), (in_training, len(calls) - in_training), sum(saved.values())
    )


@pytest.mark.parametrize(("shard", "tp", "compiled"), [(1, 1, True), (2, 1, False), (2, 2, False)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at each parameter's
def test_gradients_and_names_are_the_same_with_dropout_and_less_is_kept(
    shard: int, tp: int, compiled: bool
) -> None:
    def both(ctx: Context) -> tuple[Step, ...]:
        found = (step(ctx, PLAIN), step(ctx, RECOMPUTED))
        if not compiled:
            return found
        as_graph = TorchDynamoPlugin(backend="aot_eager", fullgraph=True)
        return (*found, step(ctx.replace(dynamo_plugin=as_graph), RECOMPUTED))

    handler = af.config.TorchTensorParallelConfig(plan=tm.PLAN) if tp > 1 else None
    config = ParallelismConfig(dp_shard_size=shard, tp_size=tp, tp_handler=handler)
    where = "memory" if shard * tp == 1 else "processes"
    ranks = run_ranks(both, shard * tp, where, fsdp_plugin=PLAIN, parallelism_config=config, timeout_s=120)
    for plain, again, *compileds in ranks:
        assert all(torch.equal(one, again.gradients[name]) for name, one in plain.gradients.items())
        assert again.names == plain.names
        assert (plain.calls, again.calls) == ((1, 1), (2, 1))
        assert again.saved < 0.5 * plain.saved
        for one in compileds:
            assert one.names == plain.names
            for name, gradient in plain.gradients.items():
                torch.testing.assert_close(one.gradients[name], gradient)


def test_a_model_of_transformers_computes_without_a_cache_of_keys_and_values() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    plain = transformers.LlamaForCausalLM(config)
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(plain.state_dict())
    ids = torch.arange(12).view(2, 6)
    plain(ids, labels=ids).loss.backward()
    with af.init_context(fsdp_plugin=RECOMPUTED) as ctx:
        model = af.prepare_model(ctx, model)
    assert model.config.use_cache
    model(ids, labels=ids).loss.backward()
    assert all(
        torch.equal(one.grad, other.grad)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    # Its name in transformers before 5.24, and since.
    name = "cache" if "cache" in inspect.signature(plain.forward).parameters else "past_key_values"
    with torch.no_grad():
        filled = model(ids)[name]
    assert filled.get_seq_length() == 6
    with pytest.raises(ConfigurationError, match=f"got {name} with keys and values in it"):
        model(ids, **{name: filled})


class Nested(nn.Module):
    """Units inside of units, and beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.second = nn.Linear(2, 2)


def test_outer_units_are_recomputed_and_a_single_one_is_refused() -> None:
    facts = read_facts(Nested())
    assert plan_recompute(facts, ("second", "first.1", "first", "")) == ("first", "second")
    with pytest.raises(ConfigurationError, match="Nested is a single unit"):
        plan_recompute(facts, ("",))
    own: Any = Nested()
    own.first.gradient_checkpointing = True  # as models of transformers say it
    with pytest.raises(ConfigurationError, match="first has its own gradient_checkpointing on"):
        refuse_own_recomputation(own)


def test_the_plan_says_what_is_recomputed() -> None:
    def planned(ctx: Context) -> list[str | None]:
        plans = [af.plan_model(ctx, tm.GPT()), af.plan_model(ctx.replace(fsdp_plugin=PLAIN), tm.GPT())]
        return [one.rows().get("recomputed") for one in plans]

    expected = ["in the backward: blocks.0, blocks.1", None]
    assert run_ranks(planned, 2, fsdp_plugin=RECOMPUTED) == [expected] * 2
    assert run_ranks(planned, 1, fsdp_plugin=RECOMPUTED) == [expected]
