import dataclasses
from typing import Any

import pytest
import torch

from accelfn.bigmodel import BnbQuantizationConfig, TorchaoQuantizationConfig
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
    for made in (
        BnbQuantizationConfig(load_in_8bit=True, torch_dtype=name),
        TorchaoQuantizationConfig(torch_dtype=name),
    ):
        assert made.torch_dtype == torch.bfloat16


def test_names_are_settled_and_records_are_frozen() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["a", "b"], keep_in_fp32_modules="norm")
    assert config.skip_modules == ("a", "b")
    assert config.keep_in_fp32_modules == ("norm",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.load_in_4bit = True  # pyright: ignore[reportAttributeAccessIssue]
    assert TorchaoQuantizationConfig().bits == 8
    assert TorchaoQuantizationConfig(weights="int4").bits == 4


EIGHT, FOUR = {"load_in_8bit": True}, {"load_in_4bit": True}
BAD: list[tuple[type[Any], dict[str, Any], str]] = [
    (BnbQuantizationConfig, {}, "exactly one of load_in_8bit and load_in_4bit must be True, but neither is"),
    (BnbQuantizationConfig, {**EIGHT, **FOUR}, "but both are"),
    (BnbQuantizationConfig, {**FOUR, "bnb_4bit_quant_type": "int4"}, "must be one of fp4, nf4, got 'int4'"),
    (BnbQuantizationConfig, {**FOUR, "bnb_4bit_compute_dtype": "fp8"}, "dtype must be one of .* got 'fp8'"),
    (
        BnbQuantizationConfig,
        {**EIGHT, "torch_dtype": torch.int8},
        "torch_dtype must be one of .*, got torch.int8",
    ),
    (BnbQuantizationConfig, {**EIGHT, "llm_int8_threshold": -1.0}, "threshold must be at least 0, got -1.0"),
    (TorchaoQuantizationConfig, {"weights": "int2"}, "weights must be one of int8, int4, got 'int2'"),
    (TorchaoQuantizationConfig, {"weights": "int4", "group_size": 48}, "one of .* for int4, got 48"),
    (TorchaoQuantizationConfig, {"group_size": 0}, "group_size must be at least 1 for int8, got 0"),
    (TorchaoQuantizationConfig, {"torch_dtype": "fp7"}, "torch_dtype must be one of .*, got 'fp7'"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), BAD)
def test_bad_fields_are_refused(kind: type[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kind(**fields)


def test_wrong_types_are_type_errors() -> None:
    bad: Any
    for bad in ({"load_in_8bit": 1}, {"load_in_8bit": True, "torch_dtype": 16}):
        with pytest.raises(TypeError):
            BnbQuantizationConfig(**bad)
    bad = {"group_size": 32.0}
    with pytest.raises(TypeError, match="group_size must be an int or None"):
        TorchaoQuantizationConfig(**bad)
