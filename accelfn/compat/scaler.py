"""The loss scaler that programs see: torch's names for the state that accelfn keeps."""

from __future__ import annotations

from typing import Any

import torch

from accelfn.accelerator.scaler_states import Scaling
from accelfn.context import Context


class ScalerView:
    """Shows the loss scale of an Accelerator as a ``torch.amp.GradScaler`` does. It holds nothing itself."""

    def __init__(self, scaling: Scaling, context: Context) -> None:
        """Show the scale that ``scaling`` keeps."""
        self._scaling: Scaling = scaling
        self._context: Context = context

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return True

    def get_scale(self) -> float:
        """Return the scale of the next loss. Waits for the device."""
        return float(self._scaling.settled(self._context).scale)

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale."""
        return outputs * self._scaling.settled(self._context).scale

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as torch's scaler does."""
        state, options = self._scaling.settled(self._context), self._context.precision.scaler
        return {
            "scale": float(state.scale),
            "growth_factor": options.growth_factor,
            "backoff_factor": options.backoff_factor,
            "growth_interval": options.growth_interval,
            "_growth_tracker": int(state.growth_tracker),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a state of torch's scaler, or of this one."""
        state = self._scaling.state
        self._scaling.restore(
            state._replace(
                scale=torch.full_like(state.scale, state_dict["scale"]),
                growth_tracker=torch.full_like(state.growth_tracker, state_dict["_growth_tracker"]),
            )
        )
