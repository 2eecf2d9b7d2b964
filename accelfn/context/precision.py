"""Mixed precision: which dtype a step computes in, and whether the device can."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from accelfn.context.config import (
    AORecipeKwargs,
    AutocastKwargs,
    FP8RecipeKwargs,
    GradScalerKwargs,
    MSAMPRecipeKwargs,
    PrecisionType,
    TERecipeKwargs,
)
from accelfn.context.device import DeviceFacts
from accelfn.errors import ConfigurationError

__all__ = ("Fp8Recipe", "Precision", "check_precision")

Fp8Recipe = FP8RecipeKwargs | TERecipeKwargs | AORecipeKwargs | MSAMPRecipeKwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of one training step.

    Attributes:
        mode: ``"no"`` (the model's own dtypes), ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        autocast: Options of ``torch.autocast``.
        scaler: Options of the loss scaler, used with ``"fp16"``.
        fp8_recipe: How matrix products are cast, used with ``"fp8"``.
    """

    mode: str = "no"
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    fp8_recipe: Fp8Recipe | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown mode, and an fp8 recipe that nothing would use."""
        modes = tuple(item.value for item in PrecisionType)
        mode = self.mode.value if isinstance(self.mode, PrecisionType) else self.mode
        if mode not in modes:
            raise ConfigurationError(f"mixed_precision must be one of {', '.join(modes)}: got {mode!r}.")
        object.__setattr__(self, "mode", mode)
        if self.fp8_recipe is not None and mode != "fp8":
            raise ConfigurationError(
                f"{type(self.fp8_recipe).__name__} has an effect only with mixed_precision='fp8': got "
                f"{mode!r}. Ask for fp8, or leave the recipe out."
            )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype that autocast computes in, or None when it is off."""
        if self.mode == "no" or not self.autocast.enabled:
            return None
        return torch.float16 if self.mode == "fp16" else torch.bfloat16

    @property
    def scales_loss(self) -> bool:
        """Whether small gradients are kept from vanishing by scaling the loss."""
        return self.mode == "fp16" and self.scaler.enabled


def check_precision(precision: Precision, device: DeviceFacts) -> None:
    """Refuse a precision that the device can't compute in.

    Raises:
        ConfigurationError: With the device and what it offers. Nothing falls back to another dtype.
    """
    if precision.mode in ("fp16", "bf16") and precision.mode not in device.precisions:
        offered = ", ".join(("no", *sorted(device.precisions)))
        raise ConfigurationError(
            f"mixed_precision={precision.mode!r} can't be computed on device {device.type!r}, which offers: "
            f"{offered}. Choose one of these."
        )
