from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.bigmodel import (
    BnbQuantizationConfig,
    compute_module_sizes,
    has_4bit_bnb_layers,
)
from accelfn.bigmodel import quantize as loading
from accelfn.errors import CheckpointMismatchError, ConfigurationError, MissingExtraError, ReplicaDriftError
from accelfn.testing import run_ranks
from tests.bigmodel.quantize.models import CONFIGS, IDS, QUANTIZED, Net, made

pytestmark = pytest.mark.slow
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
# How far off a result may be, of the result's own length.
ERRORS = {8: 0.01, 4: 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("net")
    af.save_model(Context(), made(), place, max_shard_size="40KB")
    return place


def empty() -> Net:
    with af.init_empty_weights():
        return Net().eval()


def result(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)


def length(vector: torch.Tensor) -> float:
    return vector.square().sum().sqrt().item()


@EACH
def test_a_quantised_model_computes_nearly_the_same_in_less_memory(
    config: BnbQuantizationConfig, folder: Path
) -> None:
    plain = made()
    now = made()
    assert af.bigmodel.load_and_quantize_model(now, config) is now
    found = cast("Any", now)
    assert (found.is_loaded_in_8bit, found.is_loaded_in_4bit) == (config.bits == 8, config.bits == 4)
    assert has_4bit_bnb_layers(now) == (config.bits == 4)
    expected = result(plain)
    assert 0 < length(result(now).float() - expected) < ERRORS[config.bits] * length(expected)
    for name in QUANTIZED:
        before = cast("nn.Linear", plain.get_submodule(name)).weight
        layer = cast("nn.Linear", now.get_submodule(name))
        size = compute_module_sizes(layer)["weight"]
        assert size <= before.numel() * (1.3 if config.bits == 8 else 0.8)
        assert not layer.weight.requires_grad
    assert type(now.head) is nn.Linear
    # Loaded from a checkpoint it is the same, bit for bit, and so are copies, made before it ran and after.
    loaded = af.bigmodel.load_and_quantize_model(empty(), config, folder)
    for one in (copy.deepcopy(loaded), loaded, copy.deepcopy(now), pickle.loads(pickle.dumps(now))):
        assert torch.equal(result(one), result(now))
    assert not any(one.is_meta for one in (*loaded.parameters(), *loaded.buffers()))


@EACH
def test_quantised_layers_pass_gradients_on(config: BnbQuantizationConfig) -> None:
    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    model = af.bigmodel.load_and_quantize_model(made(), config)
    model.requires_grad_(False)
    layer = cast("Any", model.blocks[0]).up
    result(model)  # in evaluation mode before: kernels for that may not stay
    model.train()
    x = torch.randn(5, 64, dtype=model.embed.weight.dtype, requires_grad=True)
    layer(x).float().sum().backward()
    assert x.grad is not None
    exact = cast("Any", made().blocks[0]).up.weight.sum(0)
    assert length(x.grad[0].float() - exact) < 2 * ERRORS[config.bits] * length(exact)


@EACH
def test_state_dicts_are_stable_and_saved_models_are_loaded_directly(
    config: BnbQuantizationConfig, tmp_path: Path
) -> None:
    model = af.bigmodel.load_and_quantize_model(made(), config)
    before = copy.deepcopy(model.state_dict())
    expected = result(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    af.save_model(Context(), model, tmp_path)
    other = af.bigmodel.load_and_quantize_model(empty(), config, tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size < 0.8 * compute_module_sizes(made())[""]
    assert torch.equal(result(other), expected)


def test_other_quantisations_are_refused(tmp_path: Path) -> None:
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    af.save_model(Context(), af.bigmodel.load_and_quantize_model(made(), four), tmp_path)
    fp4 = BnbQuantizationConfig(load_in_4bit=True)
    twice = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    for config, message in ((fp4, "isn't fp4"), (twice, "wasn't saved with bnb_4bit_use_double_quant=True")):
        model = empty()
        with pytest.raises(CheckpointMismatchError, match=message):
            af.bigmodel.load_and_quantize_model(model, config, tmp_path)
        assert model.head.weight.is_meta
    with pytest.raises(CheckpointMismatchError, match="doesn't fit the model"):
        af.bigmodel.load_and_quantize_model(empty(), BnbQuantizationConfig(load_in_8bit=True), tmp_path)


@EACH
def test_one_layer_at_a_time_is_in_memory(
    config: BnbQuantizationConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[weakref.ref[torch.Tensor]] = []
    most: list[int] = []
    real = loading.read_tensors

    def watched(readings: Any, *rest: Any) -> None:
        read.extend(weakref.ref(one.target) for one in readings)
        most.append(sum(one() is not None for one in read))
        real(readings, *rest)

    monkeypatch.setattr(loading, "read_tensors", watched)
    af.bigmodel.load_and_quantize_model(empty(), config, folder)
    assert most == [1] * len(QUANTIZED)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(self.embed(ids))))


@pytest.mark.parametrize("skip_modules", [None, []], ids=["default", "none"])
def test_tied_weights(skip_modules: list[str] | None, tmp_path: Path) -> None:
    torch.random.manual_seed(1)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    plain = Tied()
    af.save_model(Context(), plain, tmp_path)
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32", skip_modules=skip_modules)
    with af.init_empty_weights():
        model = Tied()
    af.bigmodel.load_and_quantize_model(model, config, tmp_path)
    in_place = af.bigmodel.load_and_quantize_model(copy.deepcopy(plain), config)
    for now in (model, in_place):
        assert (now.head.weight is now.embed.weight) == (skip_modules is None)
        assert torch.equal(now.embed.weight, plain.embed.weight)
        assert now.body.weight.dtype == torch.int8
        assert (now.head.weight.dtype == torch.int8) == (skip_modules is not None)
    assert torch.equal(model(IDS), in_place(IDS))


# --- places --------------------------------------------------------------------------------------


def kinds(model: nn.Module) -> list[str]:
    return [type(cast("nn.Linear", model.get_submodule(name)).weight).__name__ for name in QUANTIZED]


@EACH
def test_simulated_devices_and_the_host(config: BnbQuantizationConfig, folder: Path) -> None:
    places = {"": "cpu:0", "blocks.1": "cpu"}
    model = af.bigmodel.load_and_quantize_model(empty(), config, folder, device_map=places)
    assert cast("Any", model).hf_device_map == places
    # Layers of 4 bits can't travel, and stay as they are where they would have to.
    skipped = {} if config.bits == 8 else {"skip_modules": ("blocks.1", "head")}
    expected = af.bigmodel.load_and_quantize_model(empty(), dataclasses.replace(config, **skipped), folder)
    assert kinds(model) == kinds(expected)
    for _ in range(2):
        assert torch.equal(result(model), result(expected))
    x = model(IDS).float()
    x.sum().backward()
    model.zero_grad()
    assert torch.equal(result(model), result(expected))


def test_weights_on_the_disk_are_used_in_place(folder: Path) -> None:
    places = {"": "cpu", "blocks.1": "disk"}
    eight = CONFIGS["int8"]
    model = af.bigmodel.load_and_quantize_model(empty(), eight, folder, device_map=places)
    assert kinds(model) == ["Int8Params", "Int8Params", "Parameter", "Parameter"]
    skipping = dataclasses.replace(eight, skip_modules=["blocks.1", "head"])
    expected = af.bigmodel.load_and_quantize_model(empty(), skipping, folder)
    assert torch.equal(result(model), result(expected))
    with pytest.raises(ValueError, match=r"on the disk that are in memory\. Pass offload_folder"):
        af.bigmodel.load_and_quantize_model(made(), eight, device_map=places)


def test_inferred_maps_count_quantised_sizes(folder: Path) -> None:
    # Each block has 24 576 weights: 98 KB in float32, and 25 KB in int8.
    budgets = {"cpu:0": 110_000, "cpu": 10_000_000}
    plain = af.infer_auto_device_map(empty(), budgets, no_split_module_classes=["Block"])
    assert "cpu" in plain.values()
    eight = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    model = af.bigmodel.load_and_quantize_model(
        empty(), eight, folder, "sequential", no_split_module_classes=["Block"], max_memory=budgets
    )
    assert cast("Any", model).hf_device_map == {"": "cpu:0"}
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32")
    with pytest.raises(ValueError, match=r"4-bit layers can't be offloaded.* on cpu\. Pass"):
        af.bigmodel.load_and_quantize_model(
            empty(), four, folder, "sequential", max_memory={"cpu:0": 30_000, "cpu": 10_000_000}
        )
    # Without an accelerator the host is where it runs.
    alone = af.bigmodel.load_and_quantize_model(empty(), four, folder, "auto", max_memory={"cpu": 10_000_000})
    assert cast("Any", alone).hf_device_map == {"": "cpu"}
    assert has_4bit_bnb_layers(alone)


# --- bad input -----------------------------------------------------------------------------------


def test_bad_input_is_refused_before_anything_is_changed(folder: Path, tmp_path: Path) -> None:
    eight = BnbQuantizationConfig(load_in_8bit=True)
    model = empty()
    with pytest.raises(ValueError, match=r"embed\.weight, .* have no values\. Pass weights_location"):
        af.bigmodel.load_and_quantize_model(model, eight)
    with pytest.raises(TypeError, match=r"must be a BnbQuantizationConfig, got str"):
        af.bigmodel.load_and_quantize_model(model, cast("Any", "int8"))
    with pytest.raises(ValueError, match="skip_modules has lm_head, but the model has no such module"):
        af.bigmodel.load_and_quantize_model(
            made(), BnbQuantizationConfig(load_in_8bit=True, skip_modules=["lm_head"])
        )
    with pytest.raises(ValueError, match=r"nowhere"):
        af.bigmodel.load_and_quantize_model(model, eight, folder, device_map={"nowhere": "cpu"})
    af.save_model(Context(), nn.Linear(2, 2), tmp_path)
    with pytest.raises(CheckpointMismatchError):
        af.bigmodel.load_and_quantize_model(model, eight, tmp_path)
    assert all(one.is_meta for one in model.parameters())
    assert kinds(model) == ["Parameter"] * 4
    quantized = af.bigmodel.load_and_quantize_model(made(), eight)
    with pytest.raises(ValueError, match="the model is quantised already"):
        af.bigmodel.load_and_quantize_model(quantized, eight)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("bitsandbytes"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelfn\[bitsandbytes\]'"):
        af.bigmodel.load_and_quantize_model(made(), CONFIGS["nf4"])
    monkeypatch.delitem(sys.modules, "bitsandbytes.nn", raising=False)
    assert not has_4bit_bnb_layers(made())


# --- prepared ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_adapters_of_a_quantised_model_train_on_ranks(name: str) -> None:
    def run(ctx: Context) -> torch.Tensor:
        model = af.bigmodel.load_and_quantize_model(made(), CONFIGS[name])
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        prepared, optimizer = af.prepare(ctx, model, optimizer)
        out = prepared(IDS + ctx.rank)
        scaler = af.init_scaler(ctx)
        scaler = af.backward(ctx, out.float().square().mean(), scaler)
        af.optimizer_step(ctx, optimizer, scaler)
        return model.head.bias.detach()

    # Not on processes: the kernels of these packages have threads of their own, which a fork leaves behind.
    first, second = run_ranks(run, 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, made().head.bias)


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_ranks_with_different_weights_are_refused(name: str) -> None:
    """Quantised weights aren't broadcast, so they must be equal."""

    def run(ctx: Context) -> None:
        model = made()
        with torch.no_grad():
            cast("Any", model.blocks[1]).down.weight[3, 5] += 0.5 * ctx.rank
        af.bigmodel.load_and_quantize_model(model, CONFIGS[name])
        with pytest.raises(ReplicaDriftError, match=r"blocks\.1\.down\.weight"):
            af.prepare_model(ctx, model)

    run_ranks(run, 2)


def test_a_quantised_model_is_not_moved() -> None:
    model = af.bigmodel.load_and_quantize_model(made(), CONFIGS["nf4"])
    assert af.prepare_model(Context(), model) is model
    other = af.bigmodel.load_and_quantize_model(made(), CONFIGS["int8"])
    cast("Any", other).hf_device_map = {"": 0}  # as if it had been loaded on an accelerator
    with pytest.raises(ConfigurationError, match="puts weights on 0, while this rank trains on cpu"):
        af.prepare_model(Context(), other)


def test_a_model_that_torchao_quantised_is_dispatched_and_named_by_save_model(tmp_path: Path) -> None:
    quantization: Any = importlib.import_module("torchao.quantization")
    model = made()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    expected = result(model)
    af.dispatch_model(model, {"": "cpu:0", "blocks.1": "cpu"})
    assert torch.equal(result(model), expected)
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight, .* of class Int\w+Tensor"):
        af.save_model(Context(), model, tmp_path)  # files that can't hold them
