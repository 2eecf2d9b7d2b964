"""A model that doesn't fit into what it may use, three ways: loaded, offloaded, and estimated before.

    python docs/examples/big_model.py

The device is a simulated one, ``"cpu:0"``, so that it runs anywhere; with a GPU, write 0 instead.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import accelfn as af
from accelfn.bigmodel import draw_estimate, estimate_memory


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 128, num_blocks: int = 12, tokens: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight  # one weight, with two names

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def main() -> None:
    af.set_seed(0)
    ids = torch.arange(12).reshape(2, 6)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        checkpoint = Path(folder) / "checkpoint"
        model = Model()
        af.save_model(af.Context(), model, checkpoint, max_shard_size="2MB")
        expected = model(ids)

        # 1. Before anything is loaded: how much would it take?
        with af.init_empty_weights():
            empty = Model()
        print(draw_estimate(estimate_memory(empty, ["float32", "bfloat16"]), "the model"))

        # 2. Load it from its checkpoint, straight to where there is room.
        loaded = af.load_checkpoint_and_dispatch(
            empty,
            checkpoint,
            device_map="auto",
            max_memory={"cpu:0": "3MB", "cpu": "2MB", "disk": "1GB"},
            no_split_module_classes=["Block"],
            offload_folder=Path(folder) / "offload",
        )
        print("places:", sorted({str(place) for place in vars(loaded)["hf_device_map"].values()}))
        print("loaded:", "equal" if torch.equal(loaded(ids), expected) else "different")

        # 3. Or keep a model that is there already on the host or the disk, and run it on a device.
        af.cpu_offload(model, "cpu:0")
        print("on the host:", "equal" if torch.equal(model(ids), expected) else "different")
        other = Model()
        other.load_state_dict(model.state_dict())
        af.disk_offload(other, Path(folder) / "weights", "cpu:0")
        print("on the disk:", "equal" if torch.equal(other(ids), expected) else "different")


if __name__ == "__main__":
    main()
