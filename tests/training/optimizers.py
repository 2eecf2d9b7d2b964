"""Optimizers that are pairs of functions, as small as they can be."""

from typing import Any, NamedTuple

import optree
import torch


class Sgd(NamedTuple):
    """Plain gradient descent."""

    lr: float

    def init(self, params: Any) -> Any:
        return ()

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def step(grad: torch.Tensor) -> torch.Tensor:
            return grad * -self.lr

        return optree.tree_map(step, grads), state


class AdamState(NamedTuple):
    mean: Any
    square: Any
    num_updates: Any


class Adam(NamedTuple):
    """Adam as torch has it; ``number`` makes the first count, and so says what counts."""

    lr: float
    number: Any = torch.tensor

    def init(self, params: Any) -> AdamState:
        return AdamState(
            optree.tree_map(torch.zeros_like, params),
            optree.tree_map(torch.zeros_like, params),
            self.number(0.0),
        )

    def update(self, grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        number = state.num_updates + 1

        def mean_of(mean: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return 0.9 * mean + 0.1 * grad

        def square_of(square: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return 0.999 * square + 0.001 * grad * grad

        def step(mean: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
            root = (square / (1 - 0.999**number)).sqrt() + 1e-8
            return -self.lr * (mean / (1 - 0.9**number)) / root

        mean = optree.tree_map(mean_of, state.mean, grads)
        square = optree.tree_map(square_of, state.square, grads)
        return optree.tree_map(step, mean, square), AdamState(mean, square, number)
