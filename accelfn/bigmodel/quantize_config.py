"""Quantisation configuration for bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from accelfn.config.checks import (
    settle,
    settle_fields,
    unchecked,
    where,
    wrong_type,
)
from accelfn.errors import ConfigurationError
from accelfn.weights.places import named_dtype

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_QUANT_TYPES = ("fp4", "nf4")


@dataclass(frozen=True, slots=True)
class BnbQuantizationConfig:
    """Quantisation to 8 or 4 bits with bitsandbytes (``pip install 'accelfn[bitsandbytes]'``).

    Attributes:
        load_in_8bit: LLM.int8(): int8 weights with a scale per row. Default False.
        llm_int8_threshold: In 8 bits, input columns with a larger value are computed without quantisation.
            Default 6.0.
        load_in_4bit: 4-bit weights in blocks of 64, with a scale per block. Default False.
        bnb_4bit_quant_type: ``"fp4"``, or ``"nf4"``, which suits normally distributed weights better. Default
            ``"fp4"``.
        bnb_4bit_use_double_quant: In 4 bits, quantise the scales too. Default False.
        bnb_4bit_compute_dtype: In 4 bits, the dtype of matrix products: a torch dtype, ``"fp32"``,
            ``"fp16"`` or ``"bf16"``. Default float16.
        torch_dtype: Dtype of parameters that aren't quantised. Default: float16 in 8 bits, the compute dtype
            in 4 bits.
        skip_modules: Modules that aren't quantised, with all below them: names, or parts of names such as
            ``"lm_head"``. None: the last child of the model, and modules with tied weights; nothing of a
            transformers base model without tied weights.
        keep_in_fp32_modules: Modules whose parameters stay in float32, by names as above. Default none.
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
        """Check the fields, and convert dtypes and names."""
        settle_fields(self)
        if self.load_in_8bit == self.load_in_4bit:
            number = "both are" if self.load_in_8bit else "neither is"
            raise ConfigurationError(
                "BnbQuantizationConfig: exactly one of load_in_8bit and load_in_4bit must be True, but "
                f"{number}."
            )
        if self.bnb_4bit_quant_type not in _QUANT_TYPES:
            raise ConfigurationError(
                f"BnbQuantizationConfig.bnb_4bit_quant_type must be one of {', '.join(_QUANT_TYPES)}, got "
                f"{self.bnb_4bit_quant_type!r}."
            )
        compute_dtype = _dtype(self, "bnb_4bit_compute_dtype")
        torch_dtype = None if self.torch_dtype is None else _dtype(self, "torch_dtype")
        default = torch.float16 if self.load_in_8bit else compute_dtype
        settle(self, bnb_4bit_compute_dtype=compute_dtype, torch_dtype=torch_dtype or default)

    @property
    def bits(self) -> Literal[4, 8]:
        """Bits of a quantised weight."""
        return 8 if self.load_in_8bit else 4


def _dtype(record: object, name: str) -> torch.dtype:
    value = unchecked(record, name)
    dtype = named_dtype(value) if isinstance(value, str) else value
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise wrong_type(record, name, "a torch dtype or its name")
    if dtype not in _DTYPES:
        raise ConfigurationError(
            f"{where(record, name)} must be one of {', '.join(map(str, _DTYPES))} or its name, such as "
            f"'bf16', got {value!r}."
        )
    return dtype
