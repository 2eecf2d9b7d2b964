"""A Trainer under the alias, plain, sharded in each way and resumed; writes the losses as JSON."""

# torch leaves these partly untyped.
# pyright: reportUnknownMemberType=false

import importlib
import json
import pathlib
import sys
from typing import Any

import torch

# They have no types that strict checking accepts.
accelerate: Any = importlib.import_module("accelerate")
transformers: Any = importlib.import_module("transformers")


def trainer(folder: pathlib.Path, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config: Any = transformers.LlamaConfig(**sizes, vocab_size=64, tie_word_embeddings=False)
    ids = [torch.randint(0, 64, (16,)) for _ in range(64)]
    common: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 8 if "parallelism_config" in options else 4,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "steps",
        "save_steps": 3,
        "save_only_model": "deepspeed" in folder.name,
        "logging_steps": 1,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
    }
    arguments = transformers.TrainingArguments(str(folder), **{**common, **options})
    data: Any = [{"input_ids": row, "labels": row.masked_fill(row > 48, -100)} for row in ids]
    return transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=data)


def losses(of: Any) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    decay = {"lr_scheduler_type": "linear", "warmup_steps": 2}  # DeepSpeed's has at least two
    windows = {"gradient_accumulation_steps": 2, "max_steps": 4, **decay}
    if sys.argv[2:]:  # DeepSpeed is chosen by the launcher's file
        run = trainer(folder / "launched deepspeed", **windows)
        run.train()
        if run.args.process_index == 0:
            is_used = run.is_deepspeed_enabled and type(run.deepspeed).__name__
            (folder / "launched.json").write_text(json.dumps([is_used, losses(run)]))
        return
    fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    zero = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", **batch}
    rates = {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    rates_of_adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    # DeepSpeed's own takes minutes to compile.
    adam = {"type": "AdamW", "params": {**rates_of_adam, "torch_adam": True}}
    planned = {"type": "WarmupDecayLR", "params": {**rates, "warmup_type": "linear"}}
    overlapped = {"zero_optimization": {"stage": 1, "overlap_comm": True, "_comment": "fast"}}
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "fsdp": {"fsdp": True, "fsdp_config": fsdp},
        "cp": {"parallelism_config": accelerate.ParallelismConfig(cp_size=2)},
        "deepspeed": {"deepspeed": zero},
        "deepspeed, stage 1": {"deepspeed": {"_comment": "as people write it", **batch, **overlapped}},
        "windows": windows,
        "deepspeed, auto": {"deepspeed": {**zero, "optimizer": adam, "scheduler": planned}, **windows},
    }
    for name, options in ways.items():
        run = trainer(folder / name, **options)
        run.train()
        found[name] = losses(run)
        found[f"{name} parameters"] = sorted({type(one).__name__ for one in run.model_wrapped.parameters()})
    resumed = trainer(folder / "fsdp", fsdp=True, fsdp_config=fsdp)
    resumed.train(resume_from_checkpoint=str(folder / "fsdp" / "checkpoint-3"))
    found["resumed"] = losses(resumed)
    if resumed.args.process_index == 0:
        (folder / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
