"""Models as users have them: with caches, outputs that are records, ties, and parts that are joined."""

# transformers leaves much untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.bigmodel import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    check_tied_parameters_in_config,
    cpu_offload_with_hook,
    estimate_memory,
    find_tied_parameters,
    load_state_dict,
    read_source,
)
from accelfn.errors import CheckpointMismatchError
from accelfn.testing import run_ranks
from accelfn.weights.stored import mapped_from
from tests.bigmodel.load.layouts import on_meta, write
from tests.bigmodel.offload.trees import assert_same_gradients
from tests.bigmodel.real import TINY, create, tiny

pytestmark = pytest.mark.slow

TOKENS = torch.arange(3, 13).reshape(1, 10)


def same(one: Any, other: Any, dtype: torch.dtype | None = None) -> bool:
    there = other.state_dict()
    return all(torch.equal(value, there[name].to(dtype)) for name, value in one.state_dict().items())


# --- hooks ---------------------------------------------------------------------------------------


def each_module(model: nn.Module) -> None:
    attach_align_device_hook(model, "cpu:0", offload=True)


def blocks(model: nn.Module) -> None:
    names = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
    attach_align_device_hook_on_blocks(
        model,
        {name: "cpu:1" if name == "lm_head" else "cpu:0" for name in names},
        {name: name in ("model.layers", "lm_head") for name in names},
    )


def whole(model: nn.Module) -> None:
    cpu_offload_with_hook(model, "cpu:0")


@pytest.mark.parametrize("attach", [each_module, blocks, whole])
def test_tokens_are_those_without_hooks(attach: Callable[[nn.Module], None]) -> None:
    plain = tiny("llama")
    model = copy.deepcopy(plain)
    attach(model)
    found = [one.generate(TOKENS, max_new_tokens=6, do_sample=False) for one in (model, plain)]
    assert torch.equal(*found)


def dispatched(model: nn.Module) -> None:
    af.dispatch_model(model, {"": "cpu", "encoder": "cpu:0", "lm_head": "cpu:1"})


@pytest.mark.parametrize("attach", [each_module, dispatched])
def test_tied_weights_train_as_in_the_plain_model(attach: Callable[[nn.Module], None]) -> None:
    plain = tiny("t5")
    model = copy.deepcopy(plain)
    attach(model)
    losses = [one(input_ids=TOKENS, labels=TOKENS).loss for one in (model, plain)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    assert model.shared.weight is model.lm_head.weight
    assert_same_gradients(model, plain)


# --- empty models, their sizes and ties ----------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_empty_models_have_the_buffers_and_ties_of_others(name: str) -> None:
    plain = tiny(name)
    with af.init_empty_weights():
        empty = tiny(name)
    assert all(tensor.is_meta for tensor in empty.parameters())
    assert find_tied_parameters(empty) == find_tied_parameters(plain)
    assert bool(find_tied_parameters(plain)) is check_tied_parameters_in_config(plain) is (name == "t5")
    values = dict(plain.named_buffers())
    assert all(torch.equal(buffer, values[key]) for key, buffer in empty.named_buffers())


def test_the_estimate_of_bert_is_that_of_accelerate() -> None:
    with af.init_empty_weights(include_buffers=True):
        model = create("BertModel", {"vocab_size": 28996})
    rows = {row.dtype: row for row in estimate_memory(model).dtypes}
    single = rows["float32"]
    assert single.training is not None
    # As Accelerate prints it: in powers of 1024.
    sizes = [single.largest_layer, single.total, single.training.peak]
    assert [f"{size / 2**20:.2f}" for size in sizes] == ["86.47", "413.18", "1652.69"]
    assert single.largest_names == ("embeddings",)
    for name, parts in (("float16", 2), ("bfloat16", 2), ("int8", 4), ("int4", 8)):
        # Accelerate divides the few kilobytes of position indices too.
        assert rows[name].total == pytest.approx(single.total / parts, rel=2e-4)


def test_a_configuration_names_the_model(tmp_path: Path) -> None:
    config = {**TINY["llama"][1], "model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    shape = read_source(tmp_path)
    model = create("LlamaForCausalLM", config).bfloat16()
    parameters = {leaf.name: leaf.num_bytes for leaf in shape.root.leaves() if leaf.kind == "parameter"}
    named = model.named_parameters(remove_duplicate=False)
    assert parameters == {name: value.nbytes for name, value in named}
    assert shape.ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert shape.no_split_classes == ("LlamaDecoderLayer",)
    # Without the name of a model it is that without a head.
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_source(tmp_path).root.children[0].name == "embed_tokens"
    for unknown in ("{}", '{"model_type": "of nobody"}', "no JSON"):
        (tmp_path / "config.json").write_text(unknown)
        with pytest.raises(ValueError, match=r"config\.json doesn.t describe a model"):
            read_source(tmp_path)


# --- checkpoints whose tensors are joined --------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.random.manual_seed(5)
    folder = tmp_path_factory.mktemp("mixtral")
    model = tiny("mixtral")
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.rand(one.shape))
    model.save_pretrained(folder, max_shard_size="3KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return model, folder


@pytest.mark.parametrize(
    ("start", "place", "dtype"),
    [("meta", "cpu", None), ("real", "cpu", torch.bfloat16), ("meta", "disk", torch.bfloat16)],
)
def test_parts_are_put_together(
    saved: tuple[Any, Path], start: str, place: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    plain, folder = saved
    model = on_meta(tiny("mixtral")) if start == "meta" else tiny("mixtral")
    af.bigmodel.load_checkpoint_in_model(model, folder, {"": place}, tmp_path, dtype, strict=True)
    assert same(model, plain, dtype)
    merged = model.model.layers[1].mlp.experts.down_proj
    assert (mapped_from(merged) is not None) == (place == "disk")


def test_they_are_written_again_when_a_part_changes(saved: tuple[Any, Path], tmp_path: Path) -> None:
    def names() -> set[str]:
        af.bigmodel.load_checkpoint_in_model(on_meta(tiny("mixtral")), saved[1], {"": "disk"}, tmp_path)
        return {path.name for path in tmp_path.iterdir()}

    with pytest.raises(ValueError, match=r"experts\.down_proj: transformers assembles it"):
        af.bigmodel.load_checkpoint_in_model(on_meta(tiny("mixtral")), saved[1], {"": "disk"})
    once = names()
    assert once
    assert names() == once
    index = json.loads((saved[1] / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted({file for name, file in index.items() if ".layers.1." in name and "experts" in name})
    assert len(files) > 1  # the parts of one tensor are in several
    os.utime(saved[1] / files[-1], ns=(5, 5))
    assert names() > once


def test_parts_that_do_not_go_together(saved: tuple[Any, Path], tmp_path: Path) -> None:
    other = on_meta(tiny("mixtral"))
    other.extra = nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointMismatchError, match=r"extra\.weight"):
        af.bigmodel.load_checkpoint_in_model(other, saved[1])
    tensors = load_state_dict(saved[1])
    name = next(name for name in tensors if "experts.3.w1" in name)
    write(tmp_path / "model.safetensors", {**tensors, name: torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"gate_up_proj can't be assembled from .* and 21 more"):
        af.bigmodel.load_checkpoint_in_model(on_meta(tiny("mixtral")), tmp_path)
    write(tmp_path / "model.safetensors", {one: value for one, value in tensors.items() if one != name})
    with pytest.raises(ValueError, match=r"gate_up_proj"):
        af.bigmodel.load_checkpoint_in_model(on_meta(tiny("mixtral")), tmp_path)


def test_they_are_put_together_on_one_rank_for_all(saved: tuple[Any, Path]) -> None:
    plain, folder = saved

    def load(ctx: Context) -> bool:
        model = on_meta(tiny("mixtral"))
        place = folder if ctx.is_main_process else folder / "gone"
        af.bigmodel.load_checkpoint_in_model(model, place, strict=True, broadcast_from_rank0=True)
        return same(model, plain)

    assert run_ranks(load, 2, on="processes") == [True, True]


def test_a_dispatched_model_with_ties_generates_what_the_plain_one_does(tmp_path: Path) -> None:
    plain = tiny("t5")
    plain.save_pretrained(tmp_path)
    device_map = {"": "cpu", "encoder": "cpu:0", "decoder": "disk", "lm_head": "cpu:1"}
    model = af.load_checkpoint_and_dispatch(on_meta(tiny("t5")), tmp_path, device_map, strict=True)
    assert torch.equal(*(one.generate(TOKENS.view(2, 5), max_new_tokens=5) for one in (plain, model)))


# --- pipelines -----------------------------------------------------------------------------------

IDS = torch.arange(5 * 7).reshape(5, 7)


@pytest.mark.parametrize(("name", "size"), [("llama", 4), ("t5", 2), ("bart", 3)])
def test_models_run_in_stages(name: str, size: int, tmp_path: Path) -> None:
    inputs = {"input_ids": IDS, "attention_mask": (IDS > 2).long()}
    if name != "llama":
        inputs["decoder_input_ids"] = IDS[:, :4] + 1
    plain = tiny(name)
    with torch.no_grad():
        expected = plain(**inputs, use_cache=False)
    af.save_model(Context(), plain, tmp_path)

    def run(ctx: Context) -> None:
        with af.init_empty_weights():
            empty = tiny(name)
        pipeline = af.bigmodel.prepare_pipeline(ctx, empty, inputs, checkpoint=tmp_path, gather_output=True)
        out: Any = pipeline(**inputs)
        assert type(out).__name__ == type(expected).__name__
        assert out.keys() == expected.keys()
        torch.testing.assert_close(out.logits, expected.logits)
        if name != "llama":
            found = out.encoder_last_hidden_state
            torch.testing.assert_close(found, expected.encoder_last_hidden_state)
        assert len(list(pipeline.parameters())) < len(list(plain.parameters()))

    # Before ranks are forked, which would import it each.
    importlib.import_module("torch.distributed.pipelining")
    run_ranks(run, size, "processes", timeout_s=60)
