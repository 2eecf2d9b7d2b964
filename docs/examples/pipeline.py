"""Run a model in two stages, one on each of two processes; none of them ever holds the whole of it.

accelfn launch --num_processes 2 docs/examples/pipeline.py
"""

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
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(6))
        self.head = nn.Linear(width, 500)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * mask[..., None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(rows: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(rows * 5).reshape(rows, 5), "mask": torch.ones(rows, 5)}


def main() -> None:
    with af.init_context() as ctx:
        af.set_seed(0)
        whole = Model()  # only to have a checkpoint, and something to compare with
        af.save_model(ctx, whole, "pipeline-weights")

        with af.init_empty_weights():
            model = Model()
        pipeline = af.bigmodel.prepare_pipeline(ctx, model, batch(8), checkpoint="pipeline-weights")
        af.print_once(ctx, pipeline.plan)

        for rows in (8, 3, 20):
            logits = pipeline(**batch(rows)) if ctx.is_main_process else pipeline()
            if ctx.is_last_process:
                same = torch.allclose(logits, whole(**batch(rows)), atol=1e-5)
                print(f"{rows} rows on rank {ctx.rank}: {'as the whole model' if same else 'different'}")


if __name__ == "__main__":
    main()
