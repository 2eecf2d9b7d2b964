"""Run and train a model with offloaded weights, on a simulated device."""

import copy

import torch
from torch import nn

import accelfn as af
from accelfn.bigmodel import read_offload


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    plain = nn.Sequential(*(Layer(64) for _ in range(8)))
    model = copy.deepcopy(plain)

    # Weights stay in the host's memory; "cpu:0" is a device that is simulated there. Write 0 for a GPU.
    af.cpu_offload(model, execution_device="cpu:0")

    x = torch.randn(4, 64)
    print("same output:", torch.equal(model(x), plain(x)))

    for one in (plain, model):
        one(x).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    same = [a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs]
    print("same gradients, on the stored weights:", all(same))

    for facts in read_offload(model):
        print(f"{facts.num_blocks} blocks, {facts.num_bytes / 1e6:.2f} MB in all")
        most, bound = facts.peak_bytes / 1e6, facts.bound_bytes / 1e6
        print(f"on {facts.place} at a time: {most:.2f} MB, bound {bound:.2f}")


if __name__ == "__main__":
    main()
