import dataclasses
from typing import Any

import pytest
import torch

from accelfn.bigmodel import BnbQuantizationConfig
from accelfn.errors import ConfigurationError


def test_defaults_are_those_of_accelerate() -> None:
    eight, four = BnbQuantizationConfig(load_in_8bit=True), BnbQuantizationConfig(load_in_4bit=True)
    assert (eight.llm_int8_threshold, eight.torch_dtype, eight.bits) == (6.0, torch.float16, 8)
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant, four.bits) == ("fp4", False, 4)
    assert (four.bnb_4bit_compute_dtype, four.torch_dtype) == (torch.float16, torch.float16)
    assert (four.skip_modules, four.keep_in_fp32_modules) == (None, None)


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16", torch.bfloat16])
def test_dtypes_have_names(name: Any) -> None:
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=name)
    assert four.bnb_4bit_compute_dtype == four.torch_dtype == torch.bfloat16
    assert BnbQuantizationConfig(load_in_8bit=True, torch_dtype=name).torch_dtype == torch.bfloat16


def test_names_are_settled_and_records_are_frozen() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["a", "b"], keep_in_fp32_modules="norm")
    assert config.skip_modules == ("a", "b")
    assert config.keep_in_fp32_modules == ("norm",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.load_in_4bit = True  # pyright: ignore[reportAttributeAccessIssue]


EIGHT, FOUR = {"load_in_8bit": True}, {"load_in_4bit": True}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of load_in_8bit and load_in_4bit must be True, but neither is"),
    ({**EIGHT, **FOUR}, "but both are"),
    ({**FOUR, "bnb_4bit_quant_type": "int4"}, "must be one of fp4, nf4, got 'int4'"),
    ({**FOUR, "bnb_4bit_compute_dtype": "fp8"}, "dtype must be one of .* got 'fp8'"),
    ({**EIGHT, "torch_dtype": torch.int8}, "torch_dtype must be one of .*, got torch.int8"),
    ({**EIGHT, "llm_int8_threshold": -1.0}, "threshold must be at least 0, got -1.0"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BnbQuantizationConfig(**fields)


def test_wrong_types_are_type_errors() -> None:
    bad: Any
    for bad in ({"load_in_8bit": 1}, {"load_in_8bit": True, "torch_dtype": 16}):
        with pytest.raises(TypeError):
            BnbQuantizationConfig(**bad)
