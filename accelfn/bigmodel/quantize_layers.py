"""Quantised layers of bitsandbytes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from accelfn.bigmodel.quantize_config import BnbQuantizationConfig
from accelfn.errors import MissingExtraError


class Quantizer:
    """Quantises layers to some bits.

    Attributes:
        can_offload: Whether a quantised weight can be stored in host memory and used on an accelerator.
        saved_parts: Names of the tensors of a quantised layer in a state dict, beside its weight and bias; a
            name that ends in ``"*"`` is a prefix.
    """

    can_offload: bool
    saved_parts: tuple[str, ...]

    def __init__(self, bitsandbytes: Any, config: BnbQuantizationConfig) -> None:
        self._bnb = bitsandbytes
        self._config = config

    def make(self, layer: nn.Linear) -> nn.Linear:
        """Return the quantised layer that replaces ``layer``, on the meta device."""
        raise NotImplementedError

    def fill(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        """Quantise a weight of shape ``(out_features, in_features)`` into a layer from :meth:`make`."""
        raise NotImplementedError

    def prepare_offload(self, layer: nn.Linear) -> None:
        """Prepare a layer whose weight is offloaded."""

    def mismatch(self, parts: Mapping[str, torch.dtype]) -> str | None:
        """Return how a saved layer differs from those of :meth:`make`; None if it doesn't.

        Args:
            parts: Dtypes by name, of ``"weight"`` and its parts.
        """
        raise NotImplementedError

    def restore(self, layer: nn.Linear, saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Load the tensors of a saved layer into a layer from :meth:`make`, on a device."""
        raise NotImplementedError

    def is_part(self, name: str) -> bool:
        """Check whether a quantised layer has a tensor of that name in a state dict."""
        return any(
            name.startswith(part[:-1]) if part.endswith("*") else name == part for part in self.saved_parts
        )


def _empty(kind: Any, layer: nn.Linear, **options: Any) -> nn.Linear:
    """Return a layer of a class with the bias, training mode and hooks of another, and without a weight."""
    has_bias = cast("object", layer.bias) is not None
    new = kind(layer.in_features, layer.out_features, bias=has_bias, device="meta", **options)
    new.bias = layer.bias
    new.training = layer.training
    for name, value in vars(layer).items():
        if name.endswith("_hooks") or "_hooks_" in name:
            setattr(new, name, value)
    return new


_BLOCK = 64  # weights that share a scale in 4 bits; bitsandbytes' default


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Check whether a model has 4-bit layers of bitsandbytes.

    Ranks: local. Doesn't import bitsandbytes, which a model with such layers has imported.

    >>> has_4bit_bnb_layers(nn.Linear(1, 1))
    False
    """
    kind = getattr(sys.modules.get("bitsandbytes.nn"), "Linear4bit", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def make_quantizer(config: BnbQuantizationConfig) -> Quantizer:
    """Return the quantizer of a configuration.

    Raises:
        MissingExtraError: bitsandbytes isn't installed.
    """
    try:
        bitsandbytes: Any = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise MissingExtraError(
            f"load_and_quantize_model: {type(config).__name__} needs bitsandbytes. Install it: "
            "pip install 'accelfn[bitsandbytes]'"
        ) from error
    return (_Bnb8bit if config.load_in_8bit else _Bnb4bit)(bitsandbytes, config)


class _Bnb8bit(Quantizer):
    can_offload = True
    saved_parts = ("SCB", "weight_format")

    def make(self, layer: nn.Linear) -> nn.Linear:
        threshold = self._config.llm_int8_threshold
        return _empty(self._bnb.nn.Linear8bitLt, layer, has_fp16_weights=False, threshold=threshold)

    def fill(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        # Int8Params itself only quantises when it is moved from the CPU.
        half = weight.detach().to(device, torch.float16).contiguous()
        values, scales, _ = self._bnb.functional.int8_vectorwise_quant(half)
        self._put(layer, values, scales)

    def restore(self, layer: nn.Linear, saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._put(layer, saved["weight"].to(device), saved["SCB"].to(device))

    def mismatch(self, parts: Mapping[str, torch.dtype]) -> str | None:
        if "SCB" in parts and parts.get("weight") == torch.int8:
            return None
        return f"isn't int8 with scales (SCB), but has {', '.join(sorted(parts))}"

    def prepare_offload(self, layer: nn.Linear) -> None:
        layer.register_forward_hook(_ReturnState(), always_call=True)

    def _put(self, layer: nn.Linear, weight: torch.Tensor, scales: torch.Tensor) -> None:
        layer.weight = self._bnb.nn.Int8Params(
            weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=scales
        )


@dataclass(frozen=True, slots=True)
class _ReturnState:
    """After the forward of an 8-bit layer: move its state back to its weight.

    Otherwise the layer would keep the copy on the device alive.
    """

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        state, weight = module.state, module.weight
        if state.CB is not None and weight.CB is None and not torch.is_grad_enabled():  # backward needs it
            weight.CB, weight.SCB = state.CB, state.SCB
            state.CB = state.SCB = None


class _Bnb4bit(Quantizer):
    can_offload = False  # since the packing depends on the device
    saved_parts = ("weight.*",)

    @property
    def _options(self) -> dict[str, Any]:
        config = self._config
        return {
            "compress_statistics": config.bnb_4bit_use_double_quant,
            "quant_type": config.bnb_4bit_quant_type,
        }

    def make(self, layer: nn.Linear) -> nn.Linear:
        compute_dtype = self._config.bnb_4bit_compute_dtype
        new: Any = _empty(self._bnb.nn.Linear4bit, layer, compute_dtype=compute_dtype, **self._options)
        # On CPUs with AVX512-BF16 the first forward in evaluation mode would repack the weights, for a kernel
        # that rounds the scales, only supports multiples of 32 and 64, and has no backward: gradients would
        # be dropped without an error.
        new.support_avx512bf16_for_cpu = False
        return new

    def fill(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        options = {"blocksize": _BLOCK, **self._options}
        compute_dtype = cast("torch.dtype", self._config.bnb_4bit_compute_dtype)
        data, state = self._bnb.functional.quantize_4bit(
            weight.detach().to(device, compute_dtype).contiguous(), **options
        )
        layer.weight = self._bnb.nn.Params4bit(
            data, requires_grad=False, quant_state=state, bnb_quantized=True, **options
        )
        cast("Any", layer).quant_state = state

    def restore(self, layer: nn.Linear, saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
        parts = {name.removeprefix("weight."): value for name, value in saved.items() if name != "weight"}
        weight = self._bnb.nn.Params4bit.from_prequantized(saved["weight"], parts, device=device)
        layer.weight = weight
        cast("Any", layer).quant_state = weight.quant_state

    def mismatch(self, parts: Mapping[str, torch.dtype]) -> str | None:
        kind, nested = self._config.bnb_4bit_quant_type, self._config.bnb_4bit_use_double_quant
        if not {"weight", "weight.absmax", f"weight.quant_state.bitsandbytes__{kind}"} <= parts.keys():
            return f"isn't {kind} (bnb_4bit_quant_type), but has {', '.join(sorted(parts))}"
        if (parts["weight.absmax"] == torch.uint8) != nested:
            return f"wasn't saved with bnb_4bit_use_double_quant={nested}"
        return None
