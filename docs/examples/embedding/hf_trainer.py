"""A Trainer of transformers whose checkpoints are accelfn's: whole or absent, verified, and without pickles.

torchrun --nproc_per_node=2 docs/examples/embedding/hf_trainer.py
"""

# pyright: basic
import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import accelfn as af


class StateTrainer(Trainer):
    """Saves and loads model, optimizer, schedule and random numbers in one tree, on all ranks together."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ctx = af.init_context(cpu=self.args.use_cpu)  # in the process group of TrainingArguments

    def tree(self) -> dict[str, Any]:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # without Accelerate's wrapper
        return {"model": self.model, "optimizer": optimizer, "scheduler": self.lr_scheduler}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        af.save_state(self.ctx, f"{output_dir}/state", self.tree(), step=self.state.global_step)

    def _save_rng_state(self, output_dir: str) -> None: ...  # part of the state

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            af.load_state(self.ctx, f"{checkpoint}/state", self.tree(), random_state=False)

    def _load_rng_state(self, checkpoint: str | None) -> None:  # called before each epoch's first batch
        if checkpoint is not None:
            af.load_state(self.ctx, f"{checkpoint}/state", {}, partial=True)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(16) * (index + 1)) % 31
        return {"input_ids": row, "labels": row}


def main(folder: str, resume_from: str | None = None) -> None:
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        folder,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="epoch",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = StateTrainer(model, arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=resume_from)
    total = sum(parameter.double().sum() for parameter in model.parameters())
    af.print_once(trainer.ctx, f"{trainer.state.global_step} steps, sum of weights {total:.10f}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["runs/hf_trainer"])
