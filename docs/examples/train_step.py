"""Train on handwritten digits without writing the inside of a step, once over a module and once over a tree.

    accelfn launch --num_processes 2 docs/examples/train_step.py

Both begin with the same weights and see the same batches; scikit-learn's digits come with the package.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af

Batch = list[torch.Tensor]


def load() -> TensorDataset:
    """Give 1,797 images, float32 (64,) in 0..1, with labels 0..9."""
    data, target = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target, dtype=torch.int64)
    )


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> af.Loss:
    """The mean loss, and beside it the share of right answers."""
    right = (outputs.argmax(dim=1) == labels).float().mean()
    return af.Loss(nn.functional.cross_entropy(outputs, labels), aux={"right": right})


def module_loss(model: nn.Module, batch: Batch) -> af.Loss:
    return loss_of(model(batch[0]), batch[1])


def tree_loss(params: dict[str, torch.Tensor], batch: Batch) -> af.Loss:
    hidden = (batch[0] @ params["0.weight"].T + params["0.bias"]).relu()
    return loss_of(hidden @ params["2.weight"].T + params["2.bias"], batch[1])


class Descent:
    """Gradient descent as a pair of functions; torchopt's optimizers fit in the same place."""

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return {name: grad * -0.2 for name, grad in grads.items()}, state


def main() -> None:
    # Each batch of 64 rows is computed in two pieces.
    with af.init_context(gradient_accumulation_steps=2) as ctx:
        af.set_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        params = {name: item.detach().clone() for name, item in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        loader = DataLoader(load(), batch_size=64 // ctx.num_processes, shuffle=True)
        model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)

        step = af.make_train_step(ctx, module_loss, optimizer, model=model, max_norm=1.0)
        state = af.init_train_state(ctx, optimizer)
        pure_step = af.make_train_step(ctx, tree_loss, Descent(), max_norm=1.0)
        pure_state = af.init_train_state(ctx, Descent(), params)
        for epoch in range(5):
            collected: list[af.StepMetrics] = []
            for batch in loader:
                state, metrics = step(state, batch)
                pure_state, pure_metrics = pure_step(pure_state, batch)
                torch.testing.assert_close(pure_metrics, metrics, rtol=1e-3, atol=1e-4)
                collected.append(metrics)
            loss = torch.stack([one.loss for one in collected]).mean()
            right = torch.stack([one.aux["right"] for one in collected]).mean()
            af.print_once(ctx, f"epoch {epoch + 1}: loss {float(loss):.3f}, {float(right):.1%} right")
        af.print_once(ctx, f"{int(state.num_steps)} steps on {ctx.num_processes} processes")


if __name__ == "__main__":
    main()
