"""Weights of torchao."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from accelfn.bigmodel.quantize.config import TorchaoQuantizationConfig
from accelfn.bigmodel.quantize.quantizer import Quantizer, has_bias, stand_in
from accelfn.errors import MissingExtraError

__all__ = ("Int4Linear", "torchao_quantizer")

_GROUP_OF_INT4 = 128
_ROWS_OF_INT4 = 16  # of which the CPU's kernel takes multiples
_LARGEST_GROUP_ON_CPU = 128


class Int4Linear(nn.Linear):
    """A linear layer whose weight is of packed 4-bit integers, through which gradients come.

    The kernels for such weights have no backward. Here it is the product with the weight as they see it,
    which is unpacked for that moment. The weight itself gets no gradient.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- as in nn.Linear
        """Multiply in the dtype that the weight was quantised from, and give back that of ``input``."""
        values = input.to(self.weight.dtype)
        if values.requires_grad and torch.is_grad_enabled():
            result = cast("torch.Tensor", cast("Any", _Product).apply(values, self.weight))
        else:
            result = F.linear(values, self.weight)
        result = result.to(input.dtype)
        return result + self.bias.to(input.dtype) if has_bias(self) else result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return F.linear(values, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight: torch.Tensor = ctx.weight
        (grad,) = grads
        units = torch.eye(weight.shape[1], dtype=weight.dtype, device=grad.device)
        return grad @ F.linear(units, weight).mT, None


def torchao_quantizer(config: TorchaoQuantizationConfig) -> Quantizer:
    """Return what quantises a layer by torchao.

    Raises:
        MissingExtraError: It isn't installed.
    """
    api = _import("torchao.quantization")
    return _in_int8(api, config) if config.weights == "int8" else _in_int4(api, config)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"load_and_quantize_model: TorchaoQuantizationConfig needs torchao ({name}). Install it: "
            "pip install 'accelfn[torchao]'"
        ) from error


def _in_int8(api: Any, config: TorchaoQuantizationConfig) -> Quantizer:
    size = config.group_size
    granularity = api.PerRow() if size is None else api.PerGroup(size)
    # Otherwise it changes options of torch.compile for the whole process.
    method = api.Int8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)

    def objection(layer: nn.Linear, device: torch.device) -> str | None:
        del device
        if size is not None and layer.in_features % size:
            return f"its {layer.in_features} inputs are no multiple of group_size={size}"
        return None

    def make(layer: nn.Linear) -> nn.Linear:
        return stand_in(layer, _empty(nn.Linear, layer))

    def choose(device: torch.device) -> Any:
        del device
        return method

    return Quantizer(objection=objection, make=make, fill=_filler(api, config, choose), travels=True)


def _in_int4(api: Any, config: TorchaoQuantizationConfig) -> Quantizer:
    size = config.group_size or _GROUP_OF_INT4

    def method(device: torch.device) -> Any:
        if device.type == "cpu":
            packed = _import("torchao.prototype.quantization.int4")
            return packed.PrototypeInt4WeightOnlyConfig(group_size=size, set_inductor_config=False)
        return api.Int4WeightOnlyConfig(
            group_size=size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )

    def objection(layer: nn.Linear, device: torch.device) -> str | None:
        if layer.in_features % size:
            return f"its {layer.in_features} inputs are no multiple of group_size={size}"
        if device.type != "cpu":
            kept = config.torch_dtype or layer.weight.dtype
            return None if kept == torch.bfloat16 else f"on {device.type} it must be in bfloat16, not {kept}"
        if size > _LARGEST_GROUP_ON_CPU:
            return f"on the CPU group_size must be at most {_LARGEST_GROUP_ON_CPU}"
        if layer.out_features % _ROWS_OF_INT4:
            return f"its {layer.out_features} outputs are no multiple of {_ROWS_OF_INT4}"
        return None

    def make(layer: nn.Linear) -> nn.Linear:
        return stand_in(layer, _empty(Int4Linear, layer))

    return Quantizer(objection=objection, make=make, fill=_filler(api, config, method), travels=False)


def _empty(kind: type[nn.Linear], layer: nn.Linear) -> nn.Linear:
    return kind(
        layer.in_features,
        layer.out_features,
        bias=has_bias(layer),
        device="meta",
        dtype=layer.weight.dtype,
    )


def _filler(
    api: Any, config: TorchaoQuantizationConfig, method: Callable[[torch.device], Any]
) -> Callable[[nn.Linear, torch.Tensor, torch.device], None]:
    def fill(layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        dtype = cast("torch.dtype | None", config.torch_dtype) or weight.dtype
        whole = weight.detach().to(device, dtype)
        layer.weight = nn.Parameter(whole, requires_grad=False)
        api.quantize_(layer, method(device))
        # A method that torchao sets for printing, and that can't be pickled.
        vars(layer).pop("extra_repr", None)

    return fill
