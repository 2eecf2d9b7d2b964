"""What is loaded is what was saved, in every layout, from every start, at every place."""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.load import load_checkpoint_and_dispatch, load_checkpoint_in_model, load_state_dict
from accelfn.checkpoint import load_model
from accelfn.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DamagedCheckpointError,
    Misfit,
    NoCheckpointError,
)
from accelfn.weights import load as loading
from accelfn.weights import read as reading
from accelfn.weights.stored import mapped_from
from tests.bigmodel.load.layouts import LAYOUTS, Layout, ModelT, on_meta, same, save, write

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PLACES = ("cpu", "cpu:0", "cpu:1", "disk")


class Inner(nn.Module):
    """Has a layer, a bare parameter, and buffers that are saved and that aren't."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))
        # Not contiguous: scattered in files of pickles, and in the memory of a model.
        self.turned = nn.Parameter(torch.randn(3, width).t())
        self.register_buffer("count", torch.randint(0, 99, ()))
        self.register_buffer("mask", torch.rand(width) > 0.5)
        self.register_buffer("table", torch.randn(2, width), persistent=False)


class Outer(nn.Module):
    """Blocks, a norm with statistics, an empty tensor, and a head that is tied."""

    def __init__(self, num_blocks: int, width: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList([Inner(width) for _ in range(num_blocks)])
        self.norm = nn.BatchNorm1d(width)
        self.nothing = nn.Parameter(torch.zeros(0, width))
        self.head = nn.Linear(width, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def randomised(model: ModelT) -> ModelT:
    for _, tensor in (*model.named_parameters(), *model.named_buffers()):
        with torch.no_grad():
            tensor.copy_(torch.rand(tensor.shape) * 9 + 1)
    return model


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@given(
    layout=st.sampled_from(LAYOUTS),
    stored=st.sampled_from(FLOATS),
    dtype=st.sampled_from([None, *FLOATS]),
    start=st.sampled_from(["meta", "real", "half"]),
    places=st.none() | st.lists(st.sampled_from(PLACES), min_size=5, max_size=5),
    tied=st.booleans(),
    width=st.integers(1, 9),
    piece=st.sampled_from([16, 64, 1 << 23]),
)
def test_a_checkpoint_is_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    layout: Layout,
    stored: torch.dtype,
    dtype: torch.dtype | None,
    start: str,
    places: list[str] | None,
    tied: bool,
    width: int,
    piece: int,
) -> None:
    folder = tmp_path_factory.mktemp("load")
    saved = randomised(Outer(2, width, tied)).to(stored)
    wanted = values(saved)
    kept = {name: tensor for name, tensor in wanted.items() if not (tied and name == "head.weight")}
    path = save(kept, folder / "ck", layout)
    model = Outer(2, width, tied)
    before = all_tensors(model)
    if start == "meta":
        on_meta(model)
    if start == "half":
        on_meta(model.blocks)
    names: tuple[str, ...] = ("embed", "blocks", "blocks.1", "norm", "")
    device_map: Any = None if places is None else dict(zip(names, places, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", piece)
        patch.setattr(reading, "_STEP_BYTES", piece // 2)
        load_checkpoint_in_model(model, path, device_map, folder / "off", dtype, strict=True)
    for name, tensor in model.state_dict().items():
        floats = wanted[name].is_floating_point()
        assert tensor.device.type == "cpu", name
        assert equal(tensor, wanted[name].to(dtype or torch.float32) if floats else wanted[name]), name
    assert not any(tensor.is_meta for tensor in all_tensors(model).values())
    assert (model.head.weight is model.embed.weight) == tied
    if start == "real":
        after = all_tensors(model)
        assert all(after[name] is one for name, one in before.items() if isinstance(one, nn.Parameter))
    if device_map is not None and device_map["norm"] == "disk":
        assert mapped_from(model.norm.weight) is not None
    # The rest of a model's life: an optimizer, copies, pickles.
    loss: Any = sum(one.sum() for one in model.parameters())
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert all(equal(one, twin.state_dict()[name]) for name, one in model.state_dict().items())
    again = Outer(2, width, tied)
    load_checkpoint_in_model(again, path, dtype=stored)
    assert all(equal(one, wanted[name]) for name, one in again.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_by_name(layout: Layout, tmp_path: Path) -> None:
    tensors = {
        "a.x": torch.randn(3, 4),
        "a.y": torch.tensor(5),
        "b": torch.rand(6).to(torch.float8_e4m3fn),
        "c": torch.tensor([True, False]),
        "d": torch.zeros(0, 3, dtype=torch.bfloat16),
        "e": torch.randn(5, dtype=torch.complex64),
    }
    path = save(tensors, tmp_path, layout)
    for device_map in (None, {"": "disk"}, {"a": "cpu:1", "b": "disk"}):
        found = load_state_dict(path, device_map)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert same(found[name], tensor)
            on_disk = device_map is not None and (device_map.get("") or device_map.get(name)) == "disk"
            assert (mapped_from(found[name]) is not None) == (on_disk and tensor.numel() > 0)


def test_shared_and_noncontiguous_tensors_and_other_values_of_pickled_files(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    torch.save(
        {"whole": base, "same": base, "turned": base.t(), "row": base[1], "note": "x"}, tmp_path / "m.bin"
    )
    found = load_state_dict(tmp_path / "m.bin")
    assert found["note"] == "x"
    assert found["same"] is found["whole"]
    assert torch.equal(found["turned"], base.t())
    assert torch.equal(found["row"], base[1])
    model: Any = nn.Module()
    model.turned = nn.Parameter(torch.empty(4, 3, device="meta"))
    model.row = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.warns(UserWarning, match="the model lacks whole, same, note"):
        load_checkpoint_in_model(model, tmp_path / "m.bin", {"": "disk"}, tmp_path / "off")
    assert torch.equal(model.turned, base.t())
    assert torch.equal(model.row, base[1])
    assert all(mapped_from(one) is not None for one in model.parameters())


# --- places --------------------------------------------------------------------------------------


def test_weights_on_the_disk_are_the_checkpoint_itself(tmp_path: Path) -> None:
    saved = randomised(Outer(2, 4, True))
    kept = {name: one for name, one in values(saved).items() if name != "head.weight"}
    path = save(kept, tmp_path, "folder")
    model = on_meta(Outer(2, 4, True))
    load_checkpoint_in_model(model, path, {"": "disk"})
    for name, tensor in all_tensors(model).items():
        if tensor.numel() and not name.endswith("table"):
            found = mapped_from(tensor)
            assert found is not None, name
            assert found.path.parent == tmp_path
    # Buffers, too, have the values of the checkpoint.
    assert equal(model.get_buffer("norm.running_mean"), saved.get_buffer("norm.running_mean"))


def test_another_dtype_on_the_disk_needs_a_folder_and_is_written_once(tmp_path: Path) -> None:
    path = save({"weight": torch.randn(3, 3), "bias": torch.randn(3)}, tmp_path / "ck", "file")
    model = on_meta(nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match=r"weight: the file has float32, but bfloat16 is req.*\n.*bias.*\nPass off"
    ):
        load_checkpoint_in_model(model, path, {"": "disk"}, dtype="bfloat16")
    assert model.weight.is_meta
    off = tmp_path / "off"
    load_checkpoint_in_model(model, path, {"": "disk"}, off, "torch.bfloat16")
    (file,) = off.iterdir()
    stamp = file.stat().st_mtime_ns
    for dtype, count in ((torch.bfloat16, 1), (torch.float16, 2)):
        other = on_meta(nn.Linear(3, 3))
        load_checkpoint_in_model(other, path, {"": "disk"}, off, dtype)
        assert equal(other.weight.detach(), load_state_dict(path)["weight"].to(dtype))
        assert len(list(off.iterdir())) == count
    assert file.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("change", ["source", "cut", "header", "foreign"])
def test_a_stale_conversion_is_never_taken(change: str, tmp_path: Path) -> None:
    path = save({"weight": torch.randn(3, 3), "bias": torch.randn(3)}, tmp_path / "ck", "file")
    off = tmp_path / "off"
    load_checkpoint_in_model(nn.Linear(3, 3), path, {"": "disk"}, off, "float16")
    (file,) = off.iterdir()
    if change == "source":
        save({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "ck", "file")
        os.utime(path, ns=(1, 1))
    elif change == "cut":
        os.truncate(file, file.stat().st_size - 2)
    elif change == "header":
        file.write_bytes(file.read_bytes().replace(b"accelfn.converted", b"accelfn.convertex"))
    else:
        wrong = {f"{number}:{name}": torch.zeros(3, dtype=torch.float16) for number, name in enumerate("ab")}
        safetensors.torch.save_file(wrong, file, {"accelfn.converted": "{}"})
    model = nn.Linear(3, 3)
    load_checkpoint_in_model(model, path, {"": "disk"}, off, "float16")
    assert equal(model.weight.detach(), load_state_dict(path)["weight"].half())
    assert len(list(off.iterdir())) == (2 if change == "source" else 1)


def test_tied_weights_stay_tied_under_any_map(tmp_path: Path) -> None:
    saved = randomised(Outer(1, 4, True))
    path = save(values(saved), tmp_path, "bin")
    for places, is_mapped in (
        ({"": "cpu", "head": "disk"}, True),
        ({"": "disk", "head": "cpu:0"}, True),
        ({"": "cpu", "head": "cpu:0"}, False),
    ):
        model = on_meta(Outer(1, 4, True))
        load_checkpoint_in_model(model, path, places, tmp_path / "off")
        assert model.head.weight is model.embed.weight
        assert (mapped_from(model.head.weight) is not None) == is_mapped
        assert equal(model.head.weight.detach(), saved.head.weight.detach())


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"device_map": {"": "disk"}}])
def test_replaced_weights_lose_their_gradients_and_graphs(options: dict[str, Any], tmp_path: Path) -> None:
    model: Any = nn.Linear(3, 2)
    save(values(model), tmp_path, "file")
    weight = model.weight
    model(torch.ones(1, 3)).sum().backward()
    out = model(torch.ones(1, 3, requires_grad=True))
    load_checkpoint_in_model(model, tmp_path, **options)
    assert model.weight is weight
    if not options:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        return
    assert model.weight.grad is None
    model(torch.ones(1, 3, dtype=weight.dtype)).sum().backward()
    assert torch.equal(weight.grad, torch.ones(2, 3, dtype=weight.dtype))


def test_a_recurrent_layer_uses_the_weights_that_it_got(tmp_path: Path) -> None:
    saved, model = nn.LSTM(3, 4), on_meta(nn.LSTM(3, 4))
    path = save(values(saved), tmp_path, "file")
    load_checkpoint_in_model(model, path)
    data = torch.randn(2, 1, 3)
    assert torch.equal(model(data)[0], saved(data)[0])


def test_dtypes_by_name(tmp_path: Path) -> None:
    class Marked(nn.Parameter):
        why: str

    layer: Any = nn.Linear(2, 2, device="meta")
    layer.weight = Marked(layer.weight, requires_grad=False)
    layer.weight.why = "mark"
    model = nn.ModuleDict({"norm": nn.LayerNorm(2), "layer": layer, "abnormal": nn.Linear(2, 2)})
    saved = nn.ModuleDict({"norm": nn.LayerNorm(2), "layer": nn.Linear(2, 2), "abnormal": nn.Linear(2, 2)})
    path = save(values(saved), tmp_path, "file")
    load_checkpoint_in_model(
        model, path, dtype="bfloat16", keep_in_fp32_modules=["norm"], special_dtypes={"layer.bias": "float64"}
    )
    found = {name: one.dtype for name, one in model.state_dict().items()}
    assert found.pop("layer.bias") == torch.float64
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {"norm.weight", "norm.bias"}
    assert set(found.values()) == {torch.float32, torch.bfloat16}
    # Class, flags and attributes stay.
    assert (type(layer.weight), layer.weight.requires_grad, layer.weight.why) == (Marked, False, "mark")


# --- names ---------------------------------------------------------------------------------------


def test_strict_lists_all_mismatches_and_changes_nothing(tmp_path: Path) -> None:
    tensors = {"weight": torch.zeros(3, 2), "extra": torch.zeros(1)}
    path = save(tensors, tmp_path, "file")
    model = nn.Linear(2, 2)
    before = values(model)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_checkpoint_in_model(model, path, strict=True)
    assert set(caught.value.rows) == {
        Misfit("weight", "float32 (3, 2)", "float32 (2, 2)"),
        Misfit("bias", "nothing", "float32 (2,)"),
        Misfit("extra", "float32 (1,)", "nothing"),
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        load_checkpoint_in_model(model, path)
    assert caught.value.rows == (Misfit("weight", "float32 (3, 2)", "float32 (2, 2)"),)
    assert all(equal(one, before[name]) for name, one in model.state_dict().items())


def test_names_that_differ_are_warned_of_once(tmp_path: Path) -> None:
    path = save({"weight": torch.ones(2, 2), "extra": torch.zeros(1)}, tmp_path, "file")
    model = nn.Linear(2, 2)
    bias = model.bias.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_checkpoint_in_model(model, path)
    (said,) = caught
    assert "the checkpoint lacks bias (kept unchanged); the model lacks extra (ignored)" in str(said.message)
    assert said.filename == __file__
    assert model.weight.eq(1).all()
    assert torch.equal(model.bias, bias)


def test_tensors_that_would_stay_on_meta_are_an_error(tmp_path: Path) -> None:
    model = Outer(1, 2, False)
    path = save({name: one for name, one in values(model).items() if "scale" not in name}, tmp_path, "file")
    model = model.to("meta")
    with pytest.raises(CheckpointMismatchError, match=r"persistent=False.*include_buffers=False") as caught:
        load_checkpoint_in_model(model, path)
    assert {row.path for row in caught.value.rows} == {"blocks.0.scale", "blocks.0.table"}
    assert model.embed.weight.is_meta


def test_a_non_persistent_buffer_is_loaded_only_if_it_is_on_meta(tmp_path: Path) -> None:
    model = Outer(1, 2, False)
    tensors = {**values(model), "blocks.0.table": torch.full((2, 2), 3.0)}
    path = save(tensors, tmp_path, "file")
    table = model.get_buffer("blocks.0.table").clone()
    with pytest.warns(UserWarning, match=r"the model lacks blocks\.0\.table"):
        load_checkpoint_in_model(model, path)
    assert torch.equal(model.get_buffer("blocks.0.table"), table)
    bare = Outer(1, 2, False).to("meta")
    load_checkpoint_in_model(bare, path, strict=True)
    assert bare.get_buffer("blocks.0.table").eq(3).all()


@pytest.mark.parametrize("strict", [True, False])
def test_names_of_the_model_around_or_inside_get_a_hint(strict: bool, tmp_path: Path) -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outer = nn.ModuleDict({"model": inner, "head": nn.Linear(2, 2)})
    of_inner = save(values(inner), tmp_path / "inner", "file")
    of_outer = save(values(outer), tmp_path / "outer", "file")
    with pytest.raises(
        CheckpointMismatchError, match=r"match with the prefix 'model\.'.*into the module 'model'"
    ):
        load_checkpoint_in_model(on_meta(copy.deepcopy(outer)), of_inner, strict=strict)
    with pytest.raises(CheckpointMismatchError, match=r"without the prefix 'model\.'.*this one as 'model'"):
        load_checkpoint_in_model(on_meta(copy.deepcopy(inner)), of_outer, strict=strict)


@pytest.mark.parametrize("load", [load_checkpoint_in_model, load_model])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "state_dict"])
def test_weights_of_which_no_name_matches_are_refused_with_a_hint(
    prefix: str, load: Any, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    before = values(model)
    found = {f"{prefix}{name}": value for name, value in before.items()}
    is_nested = prefix == "state_dict"
    torch.save({prefix: before, "epoch": 3} if is_nested else found, tmp_path / "pytorch_model.bin")
    words = "'state_dict' is a dict of tensors" if is_nested else f"without the prefix '{prefix}', .*wrapper"
    with pytest.raises((CheckpointMismatchError, DamagedCheckpointError), match=words):
        load(model, tmp_path, strict=False)
    assert torch.equal(model.weight, before["weight"])


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_named(file: str, tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 4976698672\n"
    (tmp_path / file).write_text(text)
    for load in (load_checkpoint_in_model, load_model):
        with pytest.raises(DamagedCheckpointError, match=rf"{file} is a pointer of Git LFS.*git lfs pull"):
            load(nn.Linear(2, 2), tmp_path)


def test_tied_weights_of_two_values_are_refused(tmp_path: Path) -> None:
    tensors = values(Outer(1, 2, True))
    path = save(tensors, tmp_path / "same", "file")
    load_checkpoint_in_model(Outer(1, 2, True), path, strict=True)
    tensors["head.weight"] = tensors["head.weight"] + 1
    path = save(tensors, tmp_path / "other", "file")
    with pytest.raises(CheckpointMismatchError, match="other values than"):
        load_checkpoint_in_model(Outer(1, 2, True), path)


def test_ties_that_the_model_or_the_file_knows_of(tmp_path: Path) -> None:
    saved = Outer(1, 2, True)
    cast("Any", safetensors.torch).save_model(saved, str(tmp_path / "model.safetensors"))
    write(tmp_path / "pytorch_model.bin", {"head.weight": torch.zeros(7, 2)})  # safetensors take precedence
    apart: Any = on_meta(Outer(1, 2, False))
    load_checkpoint_in_model(apart, tmp_path, strict=True)  # the other name is in the file's metadata
    assert torch.equal(apart.head.weight, saved.head.weight)
    assert apart.head.weight.data_ptr() != apart.embed.weight.data_ptr()
    model: Any = on_meta(Outer(1, 2, False))
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}  # as transformers 5 has it
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert model.head.weight is model.embed.weight


def test_counters_that_old_checkpoints_lack_begin_at_zero(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(2)
    saved = values(norm)
    del saved["num_batches_tracked"]
    path = save(saved, tmp_path, "file")
    model = nn.BatchNorm1d(2).to("meta")
    load_checkpoint_in_model(model, path, {"": "disk"}, strict=True)
    assert model.num_batches_tracked is not None
    assert int(model.num_batches_tracked) == 0
    assert mapped_from(model.get_buffer("running_mean")) is not None


def test_old_names_that_a_module_knows(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(2, 3))
    path = save(values(old), tmp_path, "file")
    new = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    load_checkpoint_in_model(on_meta(new), path, strict=True)
    data = torch.randn(1, 2)
    assert torch.allclose(new(data), old(data))


def test_hooks_that_compute_are_refused(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)

    def double(state: dict[str, Any], prefix: str, *_: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    path = save(values(model), tmp_path, "file")
    model._register_load_state_dict_pre_hook(double)
    with pytest.raises(ValueError, match="hook that computes with loaded values"):
        load_checkpoint_in_model(model, path)


def test_extra_state(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen: object = None

        def get_extra_state(self) -> object:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    saved = Counting(2, 2)
    saved.seen = 7
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    model = Counting(2, 2)
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert model.seen == 7
    write(tmp_path / "model.safetensors", values(nn.Linear(2, 2)))
    with pytest.raises(CheckpointMismatchError, match="_extra_state"):
        load_checkpoint_in_model(model, tmp_path, strict=True)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["index", "file"])
def test_a_truncated_file_is_refused(layout: Layout, tmp_path: Path) -> None:
    model = Outer(1, 2, False)
    path = save(values(model), tmp_path, layout)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    bare = on_meta(Outer(1, 2, False))
    for places in (None, {"": "disk"}):
        with pytest.raises(DamagedCheckpointError, match=last.name):
            load_checkpoint_in_model(bare, path, places)
    assert all(one.is_meta for one in bare.parameters())


@pytest.mark.parametrize("change", ["cut", "touched", "replaced"])
def test_a_file_that_changes_before_it_is_read_is_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_and_read(*arguments: Any) -> None:
        if change == "cut":
            os.truncate(path, path.stat().st_size - 1)
        elif change == "touched":
            os.utime(path, ns=(5, 5))
        else:
            os.replace(save({"weight": torch.zeros(9, 9)}, tmp_path / "new", "file"), path)
        true_read(*arguments)

    true_read: Any = loading.read_tensors
    path = save({"weight": torch.ones(9, 9)}, tmp_path, "file")
    monkeypatch.setattr(loading, "read_tensors", change_and_read)
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors was modified"):
        load_checkpoint_in_model(nn.Linear(9, 9, bias=False, device="meta"), path)


def test_a_pickled_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    value = torch.full((64,), 3.25)
    write(tmp_path / "m.bin", {"weight": value})
    data = (tmp_path / "m.bin").read_bytes()
    at = data.index(bytes(value.view(torch.uint8).tolist()))
    (tmp_path / "m.bin").write_bytes(data[: at + 9] + b"\1" + data[at + 10 :])
    with pytest.raises(DamagedCheckpointError, match="doesn't match its checksum"):
        load_state_dict(tmp_path / "m.bin")
    (tmp_path / "m.bin").write_bytes(pickle.dumps({"weight": [1.0]}))
    with pytest.raises(DamagedCheckpointError, match=r"m\.bin"):
        load_state_dict(tmp_path / "m.bin")


def test_the_format_of_old_torch_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"weight": torch.ones(1, 1)}, path, _use_new_zipfile_serialization=False)
    for load in (load_model, load_checkpoint_in_model):
        with pytest.raises(CheckpointError, match=r"m\.bin has the format of torch before 1\.6") as caught:
            load(nn.Linear(1, 1, bias=False), path)
    assert not isinstance(caught.value, DamagedCheckpointError)
    # The remedy in the message works.
    found = re.search(r"Load it with torch\.load, .*with weights_only=(True|False),", str(caught.value))
    assert found is not None
    torch.save(torch.load(path, weights_only=found[1] == "True"), path)
    assert load_state_dict(path)["weight"].eq(1).all()


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.abort, ()

    torch.save({"weight": torch.ones(1), "x": Evil()}, tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path / "m.bin")


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"weight": "../secret.safetensors"}}',
        '{"weight_map": {"weight": "absent.safetensors"}}',
        '{"weight_map": {"weight": 5}}',
        '{"weight_map": ["weight"]}',
        '{"weight_map": {}}',
        "[]",
        "no JSON",
    ],
)
def test_a_damaged_index_is_refused(index: str, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    write(tmp_path / "secret.safetensors", {"weight": torch.ones(1, 1)})
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(index)
    model = nn.Linear(1, 1, device="meta")
    for path in (folder, folder / "model.safetensors.index.json"):
        with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors\.index\.json"):
            load_checkpoint_in_model(model, path)
    assert model.weight.is_meta
    with pytest.raises(NoCheckpointError):
        load_checkpoint_in_model(model, tmp_path / "gone")


@pytest.mark.parametrize("progress", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_a_progress_bar_needs_no_standard_error(
    progress: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(values(nn.Linear(3, 2)), tmp_path, "file")
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw, or in a service
    load_checkpoint_in_model(nn.Linear(3, 2), tmp_path, progress=progress)


def test_several_indexes_of_other_names(tmp_path: Path) -> None:
    save({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path, "other")
    (tmp_path / "second.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"second.* and somebody.*Pass the path of the one to read"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)
    with pytest.raises(NoCheckpointError, match="doesn't exist"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path / "gone")


def test_weights_that_torch_cannot_have_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(1, 1)}, path, {"format": "flax"})
    with pytest.raises(ValueError, match="written for flax"):
        load_state_dict(path)
    head = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(3))
    with pytest.raises(DamagedCheckpointError, match="F6_E2M3, which torch lacks"):
        load_state_dict(path)


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        (torch.bool, torch.uint8, True),
        (torch.int64, torch.int32, False),
        (torch.float32, torch.int64, False),
        (torch.complex64, torch.float32, False),
        (torch.complex64, torch.complex128, True),
    ],
)
def test_dtypes_are_only_cast_within_their_kind(
    stored: torch.dtype, wanted: torch.dtype, fits: bool, tmp_path: Path
) -> None:
    value = torch.ones(3).to(stored)
    path = save({"buffer": value}, tmp_path, "file")
    model = nn.Module()
    model.register_buffer("buffer", torch.zeros(3, dtype=wanted))
    if fits:
        load_checkpoint_in_model(model, path)
        assert equal(model.get_buffer("buffer"), torch.ones(3).to(wanted))
    else:
        with pytest.raises(CheckpointMismatchError):
            load_checkpoint_in_model(model, path)
        assert model.get_buffer("buffer").eq(0).all()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"device_map": {"weight": "cpu"}}, ValueError, "no place for bias"),
        ({"device_map": {"": "cpu", "layers": "cpu"}}, ValueError, "doesn't have: 'layers'"),
        ({"device_map": {"": "cuda:99"}}, ValueError, "cuda:99|no accelerator"),
        ({"device_map": {"": "gpu"}}, ValueError, "unknown place 'gpu'"),
        ({"device_map": "auto"}, TypeError, "load_checkpoint_and_dispatch"),
        ({"dtype": "int8"}, ValueError, "must be a floating dtype"),
        ({"dtype": "float99"}, ValueError, "no dtype 'float99'"),
        ({"dtype": 16}, TypeError, "dtype must be a torch dtype"),
        ({"special_dtypes": {"wieght": "float16"}}, ValueError, "have: 'wieght' .did you mean 'weight'"),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path) -> None:
    path = save(values(nn.Linear(2, 2)), tmp_path, "file")
    model = nn.Linear(2, 2)
    before = values(model)
    with pytest.raises(error, match=said):
        load_checkpoint_in_model(model, path, **options)
    assert all(equal(one, before[name]) for name, one in model.state_dict().items())


def test_lazy_layers_and_other_objects_are_refused(tmp_path: Path) -> None:
    path = save(values(nn.Linear(2, 2)), tmp_path, "file")
    lazy: Any = nn.Module()
    lazy.weight = nn.UninitializedParameter()
    with pytest.raises(ValueError, match="has no shape yet"):
        load_checkpoint_in_model(lazy, path)
    for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
        with pytest.raises(TypeError, match=load.__name__):
            load(cast("Any", {}), path)
