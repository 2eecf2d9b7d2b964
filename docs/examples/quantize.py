"""The same model in 16, 8 and 4 bits, loaded from one checkpoint.

pip install 'accelfn[bitsandbytes]'
python docs/examples/quantize.py
"""

import io
import tempfile

import torch
from torch import nn

import accelfn as af


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(6)))
        self.head = nn.Linear(width, 500)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(ids)))


CONFIGS = {
    "8 bits": af.bigmodel.BnbQuantizationConfig(load_in_8bit=True, torch_dtype="bf16"),
    "nf4": af.bigmodel.BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16"
    ),
}


def megabytes(module: nn.Module) -> float:
    """Measure all of it, scales too, by what a file of it takes."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.tell() / 1e6


def main() -> None:
    af.set_seed(0)
    ids = torch.arange(64).reshape(4, 16)
    with tempfile.TemporaryDirectory() as checkpoint, torch.no_grad():
        whole = Model()
        expected = whole(ids)
        af.save_model(af.Context(), whole, checkpoint)
        print(f"{'float32':7} {megabytes(whole.layers):4.1f} MB of layers")
        for name, config in CONFIGS.items():
            with af.init_empty_weights():
                model = Model()
            af.bigmodel.load_and_quantize_model(model, config, checkpoint)
            found = model(ids.to(model.embed.weight.device)).cpu()
            error = (found.float() - expected).norm() / expected.norm()
            print(f"{name:7} {megabytes(model.layers):4.1f} MB of layers, {error:.0%} off")


if __name__ == "__main__":
    main()
