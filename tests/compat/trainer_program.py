"""Train tiny models by transformers' Trainer, in the modes that are named, and write what came out."""

# torch leaves these partly untyped.
# pyright: reportUnknownMemberType=false

import importlib
import json
import os
import pathlib
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

# They have no types that strict checking accepts.
accelerate: Any = importlib.import_module("accelerate")
transformers: Any = importlib.import_module("transformers")

VOCABULARY, LENGTH = 32, 6
Result = dict[str, Any]
_seed: Any = vars(torch)["manual_seed"]


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sentences; a label of -100 here and there, so that batches weigh differently."""

    def __init__(self, number: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, VOCABULARY, (number, LENGTH), generator=generator)
        self.labels = self.ids.masked_fill(torch.rand(number, LENGTH, generator=generator) < 0.3, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, number: int) -> None:
        self.tokens = Tokens(number)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.tokens[index] for index in range(len(self.tokens)))


def llama(dropout: float = 0.0, kind: Any = transformers.LlamaForCausalLM) -> Any:
    _seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return kind(transformers.LlamaConfig(**sizes, **heads, **tokens, attention_dropout=dropout))


class OwnMean(transformers.LlamaForCausalLM):
    """Leaves it to Accelerate to divide the loss of a window."""

    accepts_loss_kwargs = False


class SmallMemory(transformers.LlamaForCausalLM):
    """Runs out of memory with more than 2 sentences in a batch."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if self.training and len(input_ids) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 byte (a test's).")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)  # pyright: ignore[reportUnknownVariableType]


SIZES = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 3,
    "max_steps": 5,
    "logging_steps": 1,
}
PLAIN = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "dataloader_pin_memory": False}
DEFAULTS: dict[str, Any] = {**SIZES, **PLAIN, "learning_rate": 0.01, "seed": 5, "disable_tqdm": True}


class Runs:
    """Makes and runs Trainers of one mode, in a folder of its own."""

    def __init__(self, folder: pathlib.Path, mode: str) -> None:
        self.folder, self.mode = folder / mode, mode

    def train(
        self,
        model: Any,
        data: Any = None,
        *,
        eval_dataset: Any = None,
        resume: str | None = None,
        trainer: Any = transformers.Trainer,
        kind: Any = transformers.TrainingArguments,
        **options: Any,
    ) -> Result:
        transformers.set_seed(3)
        runner = trainer(
            model=model,
            args=kind(output_dir=str(self.folder), **{**DEFAULTS, **options}),
            train_dataset=data if data is not None else Tokens(11),
            eval_dataset=eval_dataset,
        )
        runner.train(resume_from_checkpoint=resume)
        logs = runner.state.log_history
        losses = [log[name] for log in logs for name in ("loss", "eval_loss") if name in log]
        model = runner.accelerator.unwrap_model(runner.model, keep_torch_compile=False)
        weights = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
        return {"losses": losses, "weights": weights, "steps": runner.state.global_step}


Mode = Callable[[Runs], Result]


SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


def resume(runs: Runs) -> Result:
    runs.train(llama(0.1), Tokens(19), **SAVES)
    checkpoint, kept = runs.folder / "checkpoint-2", runs.folder.with_name("kept")
    if int(os.environ.get("RANK", "0")) == 0:
        shutil.copytree(checkpoint, kept / "checkpoint-2", dirs_exist_ok=True)
    accelerate.PartialState().wait_for_everyone()
    return runs.train(llama(0.1), Tokens(19), resume=str(checkpoint), **SAVES)


def seq2seq(runs: Runs) -> Result:
    _seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return runs.train(
        transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens)),
        eval_dataset=Tokens(7, 1),
        trainer=transformers.Seq2SeqTrainer,
        kind=transformers.Seq2SeqTrainingArguments,
        eval_strategy="steps",
        eval_steps=3,
        predict_with_generate=True,
        generation_max_length=4,
    )


MODES: dict[str, Mode] = {
    "shuffled": lambda runs: runs.train(llama(0.3)),
    "accumulation": lambda runs: runs.train(llama(), Tokens(21), gradient_accumulation_steps=2),
    "divided accumulation": lambda runs: runs.train(
        llama(kind=OwnMean), Tokens(21), gradient_accumulation_steps=3
    ),
    "bf16": lambda runs: runs.train(llama(), bf16=True),
    "train with evaluation": lambda runs: runs.train(
        llama(), eval_dataset=Tokens(10, 1), eval_strategy="steps", eval_steps=2
    ),
    "resume": resume,
    "automatic batch size": lambda runs: runs.train(
        llama(kind=SmallMemory), auto_find_batch_size=True, per_device_train_batch_size=4
    ),
    "iterable": lambda runs: runs.train(llama(), Stream(12)),
    "compile": lambda runs: runs.train(llama(), torch_compile=True, torch_compile_backend="aot_eager"),
    "seq2seq": seq2seq,
}


def main() -> None:
    folder, modes, other = sys.argv[1:]
    bases = [kind.__module__ for kind in accelerate.Accelerator.__mro__]
    results: dict[str, Any] = {"accelerate": str(accelerate.__file__), "bases": bases}
    for mode in modes.split(","):
        _seed(0)
        try:
            results[mode] = MODES[mode](Runs(pathlib.Path(folder), mode))
        except Exception as error:  # noqa: BLE001 -- reported, and the other modes run
            traceback.print_exc()
            results[mode] = {"error": f"{type(error).__name__}: {error}"}
    if other:  # another run, of which the checkpoint is resumed
        checkpoint = str(pathlib.Path(other, "kept", "checkpoint-2"))
        runs = Runs(pathlib.Path(folder), "resume of the other")
        results[runs.mode] = runs.train(llama(0.1), Tokens(19), resume=checkpoint, **SAVES)
    if int(os.environ.get("RANK", "0")) == 0:
        pathlib.Path(folder, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
