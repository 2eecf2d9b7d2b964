"""Stand-ins for engines that can't be installed here, which record how they are called."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn


def install(monkeypatch: pytest.MonkeyPatch, **modules: ModuleType) -> None:
    """Put modules into ``sys.modules``; ``__`` in a name stands for a point."""
    for name, module in modules.items():
        name = name.replace("__", ".")
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)


class TransformerEngine:
    """What is used of transformer-engine 2, and the calls of it.

    Attributes:
        recipes: Of each call of ``fp8_autocast``.
        passes: Of each forward pass of a layer: its class, and whether fp8 was on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_old: bool = False) -> None:
        """Install it; an old one knows ``interval``."""
        self.recipes: list[Any] = []
        self.passes: list[tuple[str, bool]] = []
        is_on = [False]
        engine = self

        class Linear(nn.Module):
            def __init__(
                self,
                in_features: int,
                out_features: int,
                bias: bool = True,
                *,
                params_dtype: torch.dtype,
                device: torch.device,
            ) -> None:
                super().__init__()
                empty = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
                self.weight = nn.Parameter(empty)
                self.bias = nn.Parameter(empty[:, 0].clone()) if bias else None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                engine.passes.append(("Linear", is_on[0]))
                return nn.functional.linear(x, self.weight, self.bias)

        class LayerNorm(nn.Module):
            def __init__(
                self, size: int, eps: float = 1e-5, *, params_dtype: torch.dtype, device: torch.device
            ) -> None:
                super().__init__()
                self.eps = eps
                self.weight = nn.Parameter(torch.empty(size, dtype=params_dtype, device=device))
                self.bias = nn.Parameter(torch.empty(size, dtype=params_dtype, device=device))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                engine.passes.append(("LayerNorm", is_on[0]))
                return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

        @contextmanager
        def fp8_autocast(*, enabled: bool = True, fp8_recipe: Any = None) -> Generator[None, None, None]:
            before = is_on[0]
            is_on[0] = enabled
            engine.recipes.append(fp8_recipe)
            try:
                yield
            finally:
                is_on[0] = before

        def delayed_scaling(**options: Any) -> Any:
            if "interval" in options and not is_old:
                raise TypeError("DelayedScaling got an unexpected keyword argument 'interval'")
            return SimpleNamespace(kind="delayed", **options)

        def blocks(*, margin: int, fp8_format: str) -> Any:
            return SimpleNamespace(kind="blocks", margin=margin, fp8_format=fp8_format)

        pytorch, recipe = ModuleType("pytorch"), ModuleType("recipe")
        vars(pytorch).update(Linear=Linear, LayerNorm=LayerNorm, fp8_autocast=fp8_autocast)
        formats = SimpleNamespace(HYBRID="hybrid", E4M3="e4m3", E5M2="e5m2")
        vars(recipe).update(Format=formats, DelayedScaling=delayed_scaling, MXFP8BlockScaling=blocks)
        install(
            monkeypatch,
            transformer_engine=ModuleType("transformer_engine"),
            transformer_engine__pytorch=pytorch,
            transformer_engine__common=ModuleType("common"),
            transformer_engine__common__recipe=recipe,
        )


class Adam8(torch.optim.AdamW):
    """The optimizer that the stand-in of MS-AMP returns."""


class MSAMP:
    """What is used of MS-AMP, and the calls of it.

    Attributes:
        calls: Class of the model, class of the optimizer and level of each call of ``initialize``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Install it."""
        self.calls: list[tuple[str, str, str]] = []
        module = ModuleType("msamp")

        def initialize(
            model: nn.Module, optimizer: torch.optim.Optimizer, opt_level: str
        ) -> tuple[nn.Module, torch.optim.Optimizer]:
            self.calls.append((type(model).__name__, type(optimizer).__name__, opt_level))
            for layer in model.modules():  # it replaces weights
                if isinstance(layer, nn.Linear):
                    layer.weight = nn.Parameter(layer.weight.detach().clone())
            return model, Adam8(model.parameters(), lr=optimizer.defaults["lr"])

        vars(module).update(initialize=initialize)
        install(monkeypatch, msamp=module)
