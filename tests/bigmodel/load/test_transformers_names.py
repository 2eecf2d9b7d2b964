"""Models of transformers whose checkpoints have other tensors than they."""

# transformers leaves much untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.bigmodel.load import load_checkpoint_in_model, load_state_dict
from accelfn.bigmodel.weight_files import mapped_from
from accelfn.context import Context
from accelfn.errors import CheckpointMismatchError
from accelfn.testing import run_ranks
from tests.bigmodel.load.layouts import on_meta, write

transformers: Any = pytest.importorskip("transformers")


def experts() -> Any:
    """More than ten experts, whose numbers aren't in the order of letters."""
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=11,
    )
    return transformers.MixtralForCausalLM(config).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.random.manual_seed(5)
    folder = tmp_path_factory.mktemp("mixtral")
    model = experts()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.rand(one.shape))
    model.save_pretrained(folder, max_shard_size="3KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return model, folder


def same(one: Any, other: Any, dtype: torch.dtype | None = None) -> bool:
    there = other.state_dict()
    return all(torch.equal(value, there[name].to(dtype)) for name, value in one.state_dict().items())


@pytest.mark.parametrize("start", ["meta", "real"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_parts_are_put_together(
    saved: tuple[Any, Path], start: str, place: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    plain, folder = saved
    model = on_meta(experts()) if start == "meta" else experts()
    load_checkpoint_in_model(model, folder, {"": place}, tmp_path, dtype, strict=True)
    assert same(model, plain, dtype)
    merged = model.model.layers[1].mlp.experts.down_proj
    assert (mapped_from(merged) is not None) == (place == "disk")


def test_assembled_tensors_on_the_disk_need_a_folder(saved: tuple[Any, Path]) -> None:
    with pytest.raises(ValueError, match=r"experts\.down_proj: transformers assembles it"):
        load_checkpoint_in_model(on_meta(experts()), saved[1], {"": "disk"})


def test_it_is_written_again_when_a_part_changes(saved: tuple[Any, Path], tmp_path: Path) -> None:
    def names() -> set[str]:
        load_checkpoint_in_model(on_meta(experts()), saved[1], {"": "disk"}, tmp_path)
        return {path.name for path in tmp_path.iterdir()}

    once = names()
    assert once
    assert names() == once
    index = json.loads((saved[1] / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted({file for name, file in index.items() if ".layers.1." in name and "experts" in name})
    assert len(files) > 1  # the parts of one tensor are in several
    os.utime(saved[1] / files[-1], ns=(5, 5))
    assert names() > once


def test_missing_tensors_are_named(saved: tuple[Any, Path]) -> None:
    other = on_meta(experts())
    other.extra = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointMismatchError, match=r"extra\.weight"):
        load_checkpoint_in_model(other, saved[1])


def test_parts_that_do_not_go_together(saved: tuple[Any, Path], tmp_path: Path) -> None:
    tensors = load_state_dict(saved[1])
    name = next(name for name in tensors if "experts.3.w1" in name)
    write(tmp_path / "model.safetensors", {**tensors, name: torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"gate_up_proj can't be assembled from .* and 21 more"):
        load_checkpoint_in_model(on_meta(experts()), tmp_path)
    write(tmp_path / "model.safetensors", {one: value for one, value in tensors.items() if one != name})
    with pytest.raises(ValueError, match=r"gate_up_proj"):
        load_checkpoint_in_model(on_meta(experts()), tmp_path)


def test_it_is_put_together_on_one_rank_for_all(saved: tuple[Any, Path]) -> None:
    plain, folder = saved

    def load(ctx: Context) -> bool:
        model = on_meta(experts())
        place = folder if ctx.is_main_process else folder / "gone"
        load_checkpoint_in_model(model, place, strict=True, broadcast_from_rank0=True)
        return same(model, plain)

    assert run_ranks(load, 2, on="processes") == [True, True]


def test_ties_and_output(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=50,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    plain = transformers.T5ForConditionalGeneration(config).eval()
    plain.save_pretrained(tmp_path)
    bare = on_meta(transformers.T5ForConditionalGeneration(config).eval())
    device_map = {"": "cpu", "encoder": "cpu:0", "decoder": "disk", "lm_head": "cpu:1"}
    model = af.load_checkpoint_and_dispatch(bare, tmp_path, device_map, strict=True)
    tokens = torch.arange(3, 17).view(2, 7)
    found = [one.generate(tokens, max_new_tokens=5) for one in (plain, model)]
    assert torch.equal(*found)
