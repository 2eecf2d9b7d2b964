"""Train tiny models by transformers' Trainer, in the modes that are named, and write what came out.

Run under Accelerate by ``python``, and under accelfn by ``python -m accelfn.compat``.
"""

# torch leaves these partly untyped.
# pyright: reportUnknownMemberType=false

import argparse
import importlib
import json
import os
import pathlib
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

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

    def __init__(self, number: int, seed: int = 0, classes: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, VOCABULARY, (number, LENGTH), generator=generator)
        self.labels = self.ids.masked_fill(torch.rand(number, LENGTH, generator=generator) < 0.3, -100)
        if classes:
            self.labels = torch.randint(0, classes, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, number: int) -> None:
        self.tokens = Tokens(number)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.tokens[index] for index in range(len(self.tokens)))


def llama(dropout: float = 0.0) -> Any:
    _seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    _seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


class SmallMemory(transformers.LlamaForCausalLM):
    """Runs out of memory with more than 2 sentences in a batch."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if self.training and len(input_ids) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 byte (a test's).")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)  # pyright: ignore[reportUnknownVariableType]


class Runs:
    """Makes and runs Trainers of one mode, in a folder of its own."""

    def __init__(self, folder: pathlib.Path, mode: str) -> None:
        self.folder, self.mode = folder / mode, mode

    def arguments(self, kind: Any = transformers.TrainingArguments, **options: Any) -> Any:
        defaults: dict[str, Any] = {
            "output_dir": str(self.folder),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 3,
            "max_steps": 5,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "seed": 5,
        }
        return kind(**{**defaults, **options})

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
            args=self.arguments(kind, **options),
            train_dataset=data if data is not None else Tokens(11),
            eval_dataset=eval_dataset,
        )
        runner.train(resume_from_checkpoint=resume)
        return self.report(runner)

    def report(self, runner: Any, **more: Any) -> Result:
        logs = runner.state.log_history
        losses = [log[name] for log in logs for name in ("loss", "eval_loss") if name in log]
        model = runner.accelerator.unwrap_model(runner.model, keep_torch_compile=False)
        weights = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
        return {"losses": losses, "weights": weights, "steps": runner.state.global_step, **more}


Mode = Callable[[Runs], Result]


def evaluate(runs: Runs) -> Result:
    transformers.set_seed(3)
    runner = transformers.Trainer(model=llama(), args=runs.arguments(), eval_dataset=Tokens(10, 1))
    output = runner.predict(Tokens(10, 1))
    metrics = runner.evaluate()
    return {
        "losses": [metrics["eval_loss"], output.metrics["test_loss"]],
        "weights": float(abs(output.predictions.astype("float64")).sum()),
        "steps": len(output.predictions),
    }


def resume(runs: Runs, **options: Any) -> Result:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, **options}
    runs.train(llama(0.1), Tokens(19), **saves)
    checkpoint = runs.folder / "checkpoint-2"
    kept = runs.folder.with_name(f"{runs.mode}-kept") / "checkpoint-2"
    if int(os.environ.get("RANK", "0")) == 0:
        shutil.copytree(checkpoint, kept, dirs_exist_ok=True)
    accelerate.PartialState().wait_for_everyone()
    return runs.train(llama(0.1), Tokens(19), resume=str(checkpoint), **saves)


def best_model(runs: Runs) -> Result:
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    return runs.train(
        llama(), eval_dataset=Tokens(7, 1), load_best_model_at_end=True, save_total_limit=1, **options
    )


def datasets_mode(runs: Runs) -> Result:
    table_of: Any = importlib.import_module("datasets").Dataset.from_dict

    tokens: Any = Tokens(11)
    table = table_of({"input_ids": tokens.ids.tolist(), "labels": tokens.labels.tolist()})
    return runs.train(llama(), table.with_format("torch"))


def tensorboard(runs: Runs) -> Result:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(runs.folder / "runs")
    result = runs.train(llama(), report_to="tensorboard")
    events = [*runs.folder.glob("runs/**/events*")]
    return {**result, "events": bool(events) or int(os.environ.get("RANK", "0")) > 0}


def peft_mode(runs: Runs) -> Result:
    peft: Any = importlib.import_module("peft")

    _seed(1)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    result = runs.train(peft.get_peft_model(llama(), config), save_strategy="steps", save_steps=5)
    return {**result, "saved": (runs.folder / "checkpoint-5" / "adapter_model.safetensors").is_file()}


def seq2seq(runs: Runs) -> Result:
    _seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return runs.train(
        transformers.T5ForConditionalGeneration(config),
        eval_dataset=Tokens(7, 1),
        trainer=transformers.Seq2SeqTrainer,
        kind=transformers.Seq2SeqTrainingArguments,
        eval_strategy="steps",
        eval_steps=3,
        predict_with_generate=True,
        generation_max_length=4,
    )


SEQUENTIAL: dict[str, Any] = {"train_sampling_strategy": "sequential"}
MODES: dict[str, Mode] = {
    "training": lambda runs: runs.train(llama(), **SEQUENTIAL),
    "shuffled": lambda runs: runs.train(llama()),
    "dropout": lambda runs: runs.train(llama(0.3)),
    "accumulation": lambda runs: runs.train(llama(), Tokens(21), gradient_accumulation_steps=2),
    "bert accumulation": lambda runs: runs.train(
        bert(), Tokens(21, classes=3), gradient_accumulation_steps=3
    ),
    "bf16": lambda runs: runs.train(llama(), bf16=True),
    "evaluate": evaluate,
    "train with evaluation": lambda runs: runs.train(
        llama(), eval_dataset=Tokens(10, 1), eval_strategy="steps", eval_steps=2
    ),
    "resume": resume,
    "resume sequential": lambda runs: resume(runs, **SEQUENTIAL),
    "best model": best_model,
    "automatic batch size": lambda runs: runs.train(
        SmallMemory(llama().config), auto_find_batch_size=True, per_device_train_batch_size=4
    ),
    "iterable": lambda runs: runs.train(llama(), Stream(12)),
    "datasets": datasets_mode,
    "tensorboard": tensorboard,
    "compile": lambda runs: runs.train(llama(), torch_compile=True, torch_compile_backend="aot_eager"),
    "gradient checkpointing": lambda runs: runs.train(llama(), gradient_checkpointing=True),
    "peft": peft_mode,
    "seq2seq": seq2seq,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument(
        "--resume", type=pathlib.Path, help="folder of another run, whose checkpoints to resume"
    )
    options = parser.parse_args()
    bases = [kind.__module__ for kind in accelerate.Accelerator.__mro__]
    results: dict[str, Any] = {"accelerate": str(accelerate.__file__), "bases": bases}
    for mode in options.modes.split(","):
        _seed(0)
        try:
            results[mode] = MODES[mode](Runs(options.folder, mode))
        except Exception as error:  # noqa: BLE001 -- reported, and the other modes run
            traceback.print_exc()
            results[mode] = {"error": f"{type(error).__name__}: {error}"}
        if options.resume is not None and mode.startswith("resume"):
            checkpoint = options.resume / f"{mode}-kept" / "checkpoint-2"
            more: dict[str, Any] = SEQUENTIAL if "sequential" in mode else {}
            saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, **more}
            results[f"{mode} of the other"] = Runs(options.folder, f"{mode}-other").train(
                llama(0.1), Tokens(19), resume=str(checkpoint), **saves
            )
    if int(os.environ.get("RANK", "0")) == 0:
        (options.folder / "results.json").write_text(json.dumps(results))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
