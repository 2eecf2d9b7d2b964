"""Weights are saved from every layout as complete tensors, and loaded into any layout."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn.checkpoint import convert_checkpoint
from accelfn.context import Context
from accelfn.errors import ReplicaDriftError
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.parallel.layouts import LAYOUTS, SAVED
from tests.parallel.tensor_models import GPT

State = dict[str, torch.Tensor]


def prepared(ctx: Context, seed: int) -> Any:
    model: nn.Module = GPT(seed=seed)
    return af.prepare(ctx, model)


def whole(ctx: Context, model: nn.Module) -> State:
    """Return the complete tensors of a model. Ranks: every rank."""
    state = af.unwrap_model(model).state_dict()
    own = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in state.items()
    }
    stages = af.gather_object(ctx.along("pp"), [own])
    return {name: value for stage in stages for name, value in stage.items()}


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", SAVED)
def test_weights_are_saved_from_and_loaded_into_every_layout(name: str, tmp_path: Path) -> None:
    expected = dict(GPT().state_dict())

    def work(ctx: Context) -> tuple[bool, bool]:
        model = prepared(ctx, 0)
        warned: list[Any] = []
        handler: Any = logging.Handler()
        handler.handle = warned.append
        logging.getLogger("torch.distributed.tensor._redistribute").addHandler(handler)
        state = af.get_state_dict(ctx, model)
        assert warned == []
        files = af.save_model(ctx, model, tmp_path / "functions", max_shard_size=4000)
        assert len(files) > 3
        assert all(path.is_file() for path in files)
        fresh = prepared(ctx, 1)
        assert af.load_model(fresh, tmp_path / "functions") == ((), ())
        assert equal(whole(ctx, fresh), expected)
        other = prepared(ctx, 2)
        af.load_checkpoint_in_model(other, tmp_path / "functions")
        assert equal(whole(ctx, other), expected)

        accelerator = af.Accelerator(context=ctx)
        ours: Any = accelerator.prepare(GPT())
        theirs = accelerator.get_state_dict(ours)
        accelerator.save_model(ours, tmp_path / "shim")
        return equal(state, expected), equal(theirs, expected)

    sizes = LAYOUTS[name]
    ranks = run_ranks(work, sizes.size, "processes", timeout_s=120.0, parallelism_config=sizes.config())
    is_spread = sizes.shard * sizes.tp * sizes.pp > 1  # then only the main rank has the state dict
    for rank, results in enumerate(ranks):
        assert results == ((True, True) if rank == 0 or not is_spread else (False, False))
    index = json.loads((tmp_path / "functions" / "model.safetensors.index.json").read_text())
    stored = {
        key: value
        for file in sorted(set(index["weight_map"].values()))
        for key, value in load_file(tmp_path / "functions" / file).items()
    }
    once = {key: value for key, value in expected.items() if key != "head.weight"}
    assert equal(stored, once)
    assert equal(load_file(tmp_path / "shim" / "model.safetensors"), once)


def small_llama(seed: int) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
    ).eval()


def small_mixtral(seed: int) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    ).eval()


@pytest.mark.parametrize(("name", "new"), [("pp2", small_llama), ("ep2", small_mixtral)])
def test_models_of_transformers_load_and_save_in_layouts(
    name: str, new: Callable[[int], Any], tmp_path: Path
) -> None:
    theirs = new(0)
    theirs.save_pretrained(tmp_path / "theirs")  # ties by the first name, experts separately
    af.save_model(Context(), theirs, tmp_path / "plain")
    af.save_state(Context(), tmp_path / "state", {"model": theirs})
    expected = dict(theirs.state_dict())

    def work(ctx: Context) -> None:
        ours = new(1)
        af.load_model(ours, tmp_path / "plain")
        ours = af.prepare(ctx, ours)  # loaded before it was prepared
        assert equal(whole(ctx, ours), expected)
        model: nn.Module = af.prepare(ctx, new(1))
        load: Any
        for load in (
            lambda: af.load_model(model, tmp_path / "plain"),
            lambda: af.load_checkpoint_in_model(model, tmp_path / "theirs", strict=True),
            lambda: af.load_state(ctx, tmp_path / "state", {"model": model}, random_state=False),
        ):
            for parameter in model.parameters():
                local_of(parameter).data.zero_()
            load()
            assert equal(whole(ctx, model), expected)
        af.save_model(ctx, model, tmp_path / "ours")
        af.save_state(ctx, tmp_path / "ours-state", {"model": model})

    layout = LAYOUTS[name]
    run_ranks(work, layout.size, "processes", timeout_s=120.0, parallelism_config=layout.config())
    convert_checkpoint(tmp_path / "ours-state", tmp_path / "converted", to="safetensors")
    ids = torch.arange(6).unsqueeze(0)
    for folder in ("ours", "converted"):
        (file,) = (tmp_path / folder).iterdir()
        assert file.read_bytes() == (tmp_path / "plain" / file.name).read_bytes()
        theirs.config.save_pretrained(tmp_path / folder)
        read: Any = cast("Any", type(theirs)).from_pretrained(tmp_path / folder)
        assert torch.equal(read(ids).logits, theirs(ids).logits)


DRIFTED = [
    ("hsdp2x2", "blocks.0.up.weight", "blocks.0.up.weight"),
    ("tp2", "norm.weight", "norm.weight"),
    ("pp2", "head.weight", "embed.weight"),  # which the stages share
]


@pytest.mark.parametrize(("name", "leaf", "reported"), DRIFTED)
def test_drifted_copies_are_refused(name: str, leaf: str, reported: str, tmp_path: Path) -> None:
    def work(ctx: Context) -> str:
        model = prepared(ctx, 0)
        if ctx.rank == ctx.num_processes - 1:
            local_of(af.unwrap_model(model).get_parameter(leaf)).data.add_(1e-3)
        with pytest.raises(ReplicaDriftError) as caught:
            af.save_model(ctx, model, tmp_path)
        assert [(row.rank, row.path) for row in caught.value.rows] == [
            (ctx.num_processes - 1, f"model[{reported!r}]")
        ]
        return str(caught.value)

    layout = LAYOUTS[name]
    results = run_ranks(work, layout.size, "processes", timeout_s=120.0, parallelism_config=layout.config())
    assert results == [results[0]] * layout.size
    assert not [*tmp_path.iterdir()]
