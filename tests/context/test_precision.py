import dataclasses

import pytest
import torch

from accelfn.context import Precision
from accelfn.context.config import AORecipeKwargs, AutocastKwargs, GradScalerKwargs, PrecisionType
from accelfn.errors import ConfigurationError


@pytest.mark.parametrize(
    ("mode", "dtype", "scales"),
    [("no", None, False), ("fp16", torch.float16, True), ("bf16", torch.bfloat16, False)],
)
def test_each_mode_has_its_dtype_and_only_fp16_scales(
    mode: str, dtype: torch.dtype | None, scales: bool
) -> None:
    precision = Precision(mode=mode)
    assert (precision.compute_dtype, precision.scales_loss) == (dtype, scales)


def test_switches_turn_autocast_and_scaling_off() -> None:
    assert Precision(mode="bf16", autocast=AutocastKwargs(enabled=False)).compute_dtype is None
    assert not Precision(mode="fp16", scaler=GradScalerKwargs(enabled=False)).scales_loss


@pytest.mark.parametrize("item", list(PrecisionType))
def test_a_mode_may_be_an_enum_and_is_kept_as_plain_text(item: PrecisionType) -> None:
    precision = Precision(mode=item)
    assert type(precision.mode) is str
    assert precision == Precision(mode=item.value)


@pytest.mark.parametrize("mode", ["fp32", "BF16", "", None, 16])
def test_an_unknown_mode_is_refused(mode: str) -> None:
    with pytest.raises(ConfigurationError, match=r"mixed_precision must be one of no, fp8, fp16, bf16: got"):
        Precision(mode=mode)


def test_an_fp8_recipe_without_fp8_is_refused() -> None:
    recipe = AORecipeKwargs()
    assert Precision(mode="fp8", fp8_recipe=recipe).fp8_recipe == recipe
    with pytest.raises(
        ConfigurationError, match="AORecipeKwargs has an effect only with mixed_precision='fp8'"
    ):
        Precision(mode="bf16", fp8_recipe=recipe)


def test_it_is_frozen_and_hashable() -> None:
    precision = Precision(mode="bf16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        precision.mode = "no"  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(precision) == hash(Precision(mode=PrecisionType.BF16))
