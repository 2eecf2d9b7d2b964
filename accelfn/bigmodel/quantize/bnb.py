"""Layers of bitsandbytes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from accelfn.bigmodel.quantize.config import BnbQuantizationConfig
from accelfn.bigmodel.quantize.quantizer import Quantizer, has_bias, stand_in
from accelfn.errors import MissingExtraError

__all__ = ("bnb_quantizer", "has_4bit_bnb_layers")

_BLOCK = 64  # weights that share a scale in 4 bits; what bitsandbytes takes by default


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a model has layers in 4 bits of bitsandbytes.

    Ranks: local. Nothing is imported: whoever has such a layer has imported its package.

    >>> has_4bit_bnb_layers(nn.Linear(1, 1))
    False
    """
    kind = getattr(sys.modules.get("bitsandbytes.nn"), "Linear4bit", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def bnb_quantizer(config: BnbQuantizationConfig) -> Quantizer:
    """Return what quantises a layer by bitsandbytes.

    Raises:
        MissingExtraError: It isn't installed.
    """
    bnb = _import()
    return _in_8bit(bnb, config) if config.load_in_8bit else _in_4bit(bnb, config)


def _import() -> Any:
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise MissingExtraError(
            "load_and_quantize_model: BnbQuantizationConfig needs bitsandbytes. Install it: "
            "pip install 'accelfn[bitsandbytes]'"
        ) from error


def _in_8bit(bnb: Any, config: BnbQuantizationConfig) -> Quantizer:
    def make(layer: nn.Linear) -> nn.Linear:
        new = bnb.nn.Linear8bitLt(
            layer.in_features,
            layer.out_features,
            bias=has_bias(layer),
            has_fp16_weights=False,
            threshold=config.llm_int8_threshold,
            device="meta",
        )
        return stand_in(layer, new)

    def put(layer: nn.Linear, weight: torch.Tensor, scales: torch.Tensor) -> None:
        layer.weight = bnb.nn.Int8Params(
            weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=scales
        )

    def fill(layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        # Int8Params quantises only what comes from the CPU, so not by its own way.
        half = weight.detach().to(device, torch.float16).contiguous()
        values, scales, _ = bnb.functional.int8_vectorwise_quant(half)
        put(layer, values, scales)

    def restore(layer: nn.Linear, saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
        put(layer, saved["weight"].to(device), saved["SCB"].to(device))

    def differs(parts: Mapping[str, torch.dtype]) -> str | None:
        if "SCB" in parts and parts.get("weight") == torch.int8:
            return None
        return f"isn't int8 with scales (SCB), but has {', '.join(sorted(parts))}"

    def settle(layer: nn.Linear) -> None:
        layer.register_forward_hook(_Return(), always_call=True)

    return Quantizer(
        objection=_nothing,
        make=make,
        fill=fill,
        travels=True,
        settle=settle,
        saved_parts=("SCB", "weight_format"),
        differs=differs,
        restore=restore,
    )


@dataclass(frozen=True, slots=True)
class _Return:
    """After the forward of an 8-bit layer: what it has taken from its weight goes back there.

    Else the layer would hold the copy that came to the device after it was let go.
    """

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        state, weight = module.state, module.weight
        if state.CB is not None and weight.CB is None and not torch.is_grad_enabled():  # backward needs it
            weight.CB, weight.SCB = state.CB, state.SCB
            state.CB = state.SCB = None


def _nothing(layer: nn.Linear, device: torch.device) -> None:
    """There is nothing against it: any shape on any device can be quantised."""
    del layer, device


def _in_4bit(bnb: Any, config: BnbQuantizationConfig) -> Quantizer:
    computed = cast("torch.dtype", config.bnb_4bit_compute_dtype)
    nested, kind = config.bnb_4bit_use_double_quant, config.bnb_4bit_quant_type

    def make(layer: nn.Linear) -> nn.Linear:
        new = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=has_bias(layer),
            compute_dtype=computed,
            compress_statistics=nested,
            quant_type=kind,
            device="meta",
        )
        # On CPUs with AVX512-BF16 its first forward in evaluation mode would write the weights anew, for a
        # kernel that has no backward, rounds the scales, and refuses sizes that aren't multiples of 32 and
        # 64. After that no gradient would come through the layer any more, and no error tells it.
        new.support_avx512bf16_for_cpu = False
        return stand_in(layer, new)

    def fill(layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        data, state = bnb.functional.quantize_4bit(
            weight.detach().to(device, computed).contiguous(),
            blocksize=_BLOCK,
            compress_statistics=nested,
            quant_type=kind,
        )
        layer.weight = bnb.nn.Params4bit(
            data,
            requires_grad=False,
            quant_state=state,
            blocksize=_BLOCK,
            compress_statistics=nested,
            quant_type=kind,
            bnb_quantized=True,
        )
        cast("Any", layer).quant_state = state

    def restore(layer: nn.Linear, saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
        parts = {name.removeprefix("weight."): value for name, value in saved.items() if name != "weight"}
        weight = bnb.nn.Params4bit.from_prequantized(saved["weight"], parts, device=device)
        layer.weight = weight
        cast("Any", layer).quant_state = weight.quant_state

    def differs(parts: Mapping[str, torch.dtype]) -> str | None:
        if not {"weight", "weight.absmax", f"weight.quant_state.bitsandbytes__{kind}"} <= parts.keys():
            return f"isn't in {kind}, as bnb_4bit_quant_type says, but has {', '.join(sorted(parts))}"
        if (parts["weight.absmax"] == torch.uint8) != nested:
            return f"isn't one of bnb_4bit_use_double_quant={nested}"
        return None

    return Quantizer(
        objection=_nothing,
        make=make,
        fill=fill,
        travels=False,  # the kernels of devices want it packed in ways of their own
        saved_parts=("weight.*",),
        differs=differs,
        restore=restore,
    )
