"""Recomputed blocks give the same gradients and keep only their inputs."""

# torch leaves backward and manual_seed partly untyped, and transformers much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel import read_facts
from accelfn.parallel.strategies.recompute import plan_recompute, refuse_own_recomputation
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.parallel import tensor_models as tm

PLAIN = FullyShardedDataParallelPlugin(fsdp_version=2)
RECOMPUTED = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
OFFLOADED = replace(RECOMPUTED, activation_checkpointing_offload=True)


class Step(NamedTuple):
    """What one forward and backward pass came to.

    Attributes:
        gradients: By name, whole.
        names: Of the state dict.
        calls: Of the inner layer of a block.
        saved: Bytes that the forward pass kept for the backward.
    """

    gradients: dict[str, torch.Tensor]
    names: list[str]
    calls: int
    saved: int


def step(ctx: Context, plugin: FullyShardedDataParallelPlugin) -> Step:
    model: Any = tm.GPT(dropout=0.3)
    af.prepare_model(ctx.replace(fsdp_plugin=plugin), model)
    calls: list[None] = []

    def count(*_: Any) -> None:
        calls.append(None)

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
    af.backward(ctx, loss, af.init_scaler(ctx))
    gradients = {name: one.grad.full_tensor() for name, one in model.named_parameters()}
    return Step(gradients, list(model.state_dict()), len(calls), sum(saved.values()))


def test_gradients_and_names_are_the_same_with_dropout_and_less_is_kept() -> None:
    config = ParallelismConfig(dp_shard_size=2)
    plugins = (PLAIN, RECOMPUTED, OFFLOADED)
    for plain, again, offloaded in run_ranks(
        lambda ctx: [step(ctx, plugin) for plugin in plugins], 2, "processes", parallelism_config=config
    ):
        # The hooks that offload take the inputs of blocks before those that count here.
        assert offloaded.saved < again.saved
        assert all(torch.equal(one, offloaded.gradients[name]) for name, one in plain.gradients.items())
        assert offloaded.calls == 2
        assert all(torch.equal(one, again.gradients[name]) for name, one in plain.gradients.items())
        assert again.names == plain.names
        assert (plain.calls, again.calls) == (1, 2)
        assert again.saved < 0.5 * plain.saved


@pytest.mark.slow
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
    with af.init_context(fsdp_plugin=RECOMPUTED) as ctx:  # as a critic beside a model
        with pytest.raises(ConfigurationError, match="for this model alone with a context of its own"):
            af.prepare_model(ctx, nn.Linear(2, 1))
        without = replace(RECOMPUTED, activation_checkpointing=False)
        af.prepare_model(ctx.replace(fsdp_plugin=without), nn.Linear(2, 1))
    own: Any = Nested()
    own.first.gradient_checkpointing = True  # as models of transformers say it
    with pytest.raises(ConfigurationError, match="first has its own gradient_checkpointing on"):
        refuse_own_recomputation(own)


def test_offloading_needs_recomputation_and_no_compiler() -> None:
    for version, checkpointing in ((2, False), (1, True)):
        with pytest.raises(ConfigurationError, match=r"activation_checkpointing=True and fsdp_version=2"):
            FullyShardedDataParallelPlugin(
                fsdp_version=version,
                activation_checkpointing=checkpointing,
                activation_checkpointing_offload=True,
            )
    compiled = af.config.TorchDynamoPlugin(backend="eager")
    with af.init_context(fsdp_plugin=OFFLOADED, dynamo_plugin=compiled) as ctx:
        with pytest.raises(ConfigurationError, match=r"compiles into one. Leave one out"):
            af.prepare_model(ctx, tm.GPT())
