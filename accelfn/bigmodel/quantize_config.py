"""How a model is quantised: one record for bitsandbytes, one for torchao."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from accelfn.bigmodel.devices import named_dtype
from accelfn.context.config.checks import (
    settle,
    settle_fields,
    unchecked,
    where,
    wrong_type,
)
from accelfn.errors import ConfigurationError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_QUANT_TYPES = ("fp4", "nf4")
_WEIGHTS = ("int8", "int4")
# What the kernels for packed 4-bit integers take.
_GROUPS_OF_INT4 = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class BnbQuantizationConfig:
    """Quantise by bitsandbytes (``pip install 'accelfn[bitsandbytes]'``), in 8 or in 4 bits.

    Attributes:
        load_in_8bit: LLM.int8(): weights in int8 with a scale per row. Default False.
        llm_int8_threshold: In 8 bits, columns of an input with a value above it are computed unquantised.
            Default 6.0.
        load_in_4bit: Weights in blocks of 64 values of 4 bits, with a scale per block. Default False.
        bnb_4bit_quant_type: ``"fp4"``, or ``"nf4"``, which is closer to weights that are spread as by a
            normal distribution. Default ``"fp4"``.
        bnb_4bit_use_double_quant: In 4 bits, quantise the scales too. Default False.
        bnb_4bit_compute_dtype: In 4 bits, dtype of the products: a dtype of torch, or ``"fp32"``, ``"fp16"``,
            ``"bf16"``. Default float16.
        torch_dtype: Of the parameters that aren't quantised. Default: float16 in 8 bits, in 4 bits the dtype
            of the products.
        skip_modules: Modules that aren't quantised, nor what stands in them: names, or parts of names such
            as ``"lm_head"``. None: the last child of the model, and what shares its weights with another;
            of a base model of transformers without shared weights none.
        keep_in_fp32_modules: Modules whose parameters stay in float32, in the same way. Default none.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: torch.dtype | str = torch.float16
    torch_dtype: torch.dtype | str | None = None
    skip_modules: Iterable[str] | None = None
    keep_in_fp32_modules: Iterable[str] | None = None

    def __post_init__(self) -> None:
        """Check the fields, and settle dtypes and names."""
        settle_fields(self)
        if self.load_in_8bit == self.load_in_4bit:
            both = "both are" if self.load_in_8bit else "neither is"
            raise ConfigurationError(
                "BnbQuantizationConfig: exactly one of load_in_8bit and load_in_4bit must be True, and "
                f"{both}. Pass one of them."
            )
        if self.bnb_4bit_quant_type not in _QUANT_TYPES:
            raise ConfigurationError(
                f"BnbQuantizationConfig.bnb_4bit_quant_type must be one of {', '.join(_QUANT_TYPES)}, got "
                f"{self.bnb_4bit_quant_type!r}."
            )
        computed = _dtype(self, "bnb_4bit_compute_dtype")
        kept = None if self.torch_dtype is None else _dtype(self, "torch_dtype")
        default = torch.float16 if self.load_in_8bit else computed
        settle(self, bnb_4bit_compute_dtype=computed, torch_dtype=kept or default)

    @property
    def bits(self) -> Literal[4, 8]:
        """Bits of a quantised weight."""
        return 8 if self.load_in_8bit else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchaoQuantizationConfig:
    """Quantise weights by torchao (``pip install 'accelfn[torchao]'``). Products are computed unquantised.

    Attributes:
        weights: ``"int8"``, or ``"int4"``, packed for the kernels of the device: on accelerators they want
            bfloat16. Default ``"int8"``.
        group_size: How many weights of a row share a scale. None: in int8 a whole row, in int4 128, which
            may also be 32, 64, or on accelerators 256.
        torch_dtype: Of the parameters that aren't quantised, and of the products: a dtype of torch, or
            ``"fp32"``, ``"fp16"``, ``"bf16"``. None: that of each parameter.
        skip_modules: As in :class:`BnbQuantizationConfig`.
        keep_in_fp32_modules: As in :class:`BnbQuantizationConfig`.
    """

    weights: str = "int8"
    group_size: int | None = None
    torch_dtype: torch.dtype | str | None = None
    skip_modules: Iterable[str] | None = None
    keep_in_fp32_modules: Iterable[str] | None = None

    def __post_init__(self) -> None:
        """Check the fields, and settle dtypes and names."""
        if self.weights not in _WEIGHTS:
            raise ConfigurationError(
                f"TorchaoQuantizationConfig.weights must be one of {', '.join(_WEIGHTS)}, got "
                f"{self.weights!r}."
            )
        size = unchecked(self, "group_size")
        if size is not None:
            if not isinstance(size, int) or isinstance(size, bool):
                raise wrong_type(self, "group_size", "an int or None")
            allowed = size in _GROUPS_OF_INT4 if self.weights == "int4" else size >= 1
            if not allowed:
                wanted = f"one of {_GROUPS_OF_INT4}" if self.weights == "int4" else "at least 1"
                raise ConfigurationError(
                    f"TorchaoQuantizationConfig.group_size must be {wanted} for {self.weights}, got {size}."
                )
        if self.torch_dtype is not None:
            settle(self, torch_dtype=_dtype(self, "torch_dtype"))
        settle_fields(self)

    @property
    def bits(self) -> Literal[4, 8]:
        """Bits of a quantised weight."""
        return 8 if self.weights == "int8" else 4


QuantizationConfig: TypeAlias = BnbQuantizationConfig | TorchaoQuantizationConfig


def _dtype(record: object, name: str) -> torch.dtype:
    value = unchecked(record, name)
    found = named_dtype(value) if isinstance(value, str) else value
    if found is not None and not isinstance(found, torch.dtype):
        raise wrong_type(record, name, "a dtype of torch or its name")
    if found not in _DTYPES:
        raise ConfigurationError(
            f"{where(record, name)} must be one of {', '.join(map(str, _DTYPES))} or a name of these, such "
            f"as 'bf16', got {value!r}."
        )
    return found
