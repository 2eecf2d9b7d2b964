"""A trainer class with its own mesh and loop, as torchtitan's: accelfn shards its model and saves its state.

torchrun --nproc_per_node=2 docs/examples/embedding/own_trainer.py
"""

# pyright: basic
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import accelfn as af


class Trainer:
    """Owns a process group, a mesh, a loop and a Stateful protocol, like the trainers of large models."""

    def __init__(self, folder: str, steps: int) -> None:
        dist.init_process_group("gloo")
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        parallelism = af.ParallelismConfig(dp_shard_size=self.mesh.size(), device_mesh=self.mesh)
        self.ctx = af.init_context(cpu=True, parallelism_config=parallelism)
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
        self.model = af.prepare_model(self.ctx, nn.Sequential(*blocks))  # FSDP2 over the trainer's mesh
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.folder, self.steps, self.step = folder, steps, 0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.step + self.mesh.get_local_rank())
        inputs = torch.randn(8, 16, generator=generator)
        return inputs, inputs.flip(1).tanh()

    def train(self) -> None:
        self.load()
        while self.step < self.steps:
            inputs, targets = self.batch()
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.step % 10 == 0:
                self.save()
                mean = af.reduce(self.ctx, loss.detach(), "mean")
                af.print_once(
                    self.ctx, f"step {self.step}: loss {mean:.4f} on {self.ctx.num_processes} ranks"
                )

    def tree(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}

    def save(self) -> None:
        af.save_state(self.ctx, f"{self.folder}/{self.step}", self.tree(), step=self.step)

    def load(self) -> None:
        """Go on from the newest checkpoint, whatever number of ranks wrote it."""
        loaded = af.load_latest(self.ctx, self.folder, self.tree())
        self.step = 0 if loaded is None else loaded["step"]

    def close(self) -> None:
        af.close_context(self.ctx)
        dist.destroy_process_group()


if __name__ == "__main__":
    trainer = Trainer(
        sys.argv[1] if sys.argv[1:] else "runs/own_trainer", int(sys.argv[2]) if sys.argv[2:] else 20
    )
    trainer.train()
    trainer.close()
