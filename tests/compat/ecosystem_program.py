"""Train tiny models by the libraries around Accelerate, and write what came out.

Run under Accelerate by ``python``, and under accelfn by ``python -m accelfn.compat``.
"""

# torch leaves these partly untyped.
# pyright: reportUnknownMemberType=false

import argparse
import importlib
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.compat import local_glue
from tests.compat.trainer_program import VOCABULARY, Runs, llama, peft_mode


def load(name: str) -> Any:
    """Return a module that has no types which strict checking accepts, or isn't in every environment."""
    return importlib.import_module(name)


accelerate, transformers = load("accelerate"), load("transformers")
Loader: Any = DataLoader  # of lists, which torch reads and its types refuse
Result = dict[str, Any]
WORDS = [f"w{number}" for number in range(VOCABULARY - 4)]
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 5,
}


def tokenizer() -> Any:
    tokenizers = load("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", "<unk>", "<mask>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )


def sentence(seed: int) -> str:
    return " ".join(WORDS[(seed * step + step) % len(WORDS)] for step in range(1, 4 + seed % 3))


def report(runner: Any, **more: Any) -> Result:
    model = runner.accelerator.unwrap_model(runner.model)
    losses = [log["loss"] for log in runner.state.log_history if "loss" in log]
    return {"losses": losses, "weights": size_of(model), "steps": runner.state.global_step, **more}


def size_of(model: nn.Module) -> float:
    return sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())


def sft(folder: pathlib.Path, peft_config: Any = None) -> Result:
    trl = load("trl")
    rows = [{"prompt": sentence(seed), "completion": f" {sentence(seed + 7)}"} for seed in range(13)]
    runner = trl.SFTTrainer(
        model=llama(),
        args=trl.SFTConfig(output_dir=str(folder), max_length=12, gradient_accumulation_steps=2, **OPTIONS),
        train_dataset=load("datasets").Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    runner.train()
    return report(runner)


def sft_with_lora(folder: pathlib.Path) -> Result:
    lora = load("peft").LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return sft(folder, lora)


def dpo(folder: pathlib.Path) -> Result:
    trl = load("trl")
    rows = [
        {"prompt": sentence(seed), "chosen": f" {sentence(seed + 3)}", "rejected": f" {sentence(seed + 5)}"}
        for seed in range(13)
    ]
    runner = trl.DPOTrainer(
        model=llama(),
        ref_model=llama(),
        args=trl.DPOConfig(output_dir=str(folder), max_length=12, **OPTIONS),
        train_dataset=load("datasets").Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    runner.train()
    return report(runner)


def diffusion(folder: pathlib.Path) -> Result:
    """Train as diffusers' script for unconditional images does."""
    diffusers, utils = load("diffusers"), load("accelerate.utils")
    average: Any = load("diffusers.training_utils").EMAModel
    logger = load("accelerate.logging").get_logger(__name__, log_level="INFO")
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision="no",
        log_with="tensorboard",
        project_config=utils.ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs")),
        kwargs_handlers=[utils.InitProcessGroupKwargs(timeout=timedelta(seconds=600))],
        cpu=True,
    )
    utils.set_seed(3)
    model = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    ema = average(
        model.parameters(),
        decay=0.9,
        use_ema_warmup=True,
        model_cls=diffusers.UNet2DModel,
        model_config=model.config,
    )

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            ema.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for one in models:
                one.save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load_hook(models: list[Any], input_dir: str) -> None:
        ema.load_state_dict(
            average.from_pretrained(f"{input_dir}/unet_ema", diffusers.UNet2DModel).state_dict()
        )
        for _ in range(len(models)):
            one = models.pop()
            loaded = diffusers.UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            one.register_to_config(**loaded.config)
            one.load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=20, beta_schedule="linear")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    images = torch.randn(22, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    loader = Loader([{"input": image} for image in images], batch_size=2, shuffle=True)
    get_scheduler: Any = load("diffusers.optimization").get_scheduler
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=20)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    if accelerator.is_main_process:
        accelerator.init_trackers("diffusion", config={"learning_rate": 0.01})
    logger.info("***** Running training *****")
    losses: list[float] = []
    rates: list[float] = []

    def train_epochs(number: int) -> None:
        for _ in range(number):
            model.train()
            for batch in loader:
                clean = batch["input"]
                noise = torch.randn(clean.shape, device=clean.device)
                timesteps = torch.randint(0, 20, (clean.shape[0],), device=clean.device).long()
                noisy = noise_scheduler.add_noise(clean, noise, timesteps)
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(noisy, timesteps).sample.float(), noise.float())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    ema.step(model.parameters())
                logs = {"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]}
                accelerator.log(logs, step=len(losses))
                losses.append(logs["loss"])
                rates.append(logs["lr"])
            accelerator.wait_for_everyone()

    train_epochs(1)
    accelerator.save_state(str(folder / "checkpoint-1"))
    train_epochs(1)
    first = size_of(accelerator.unwrap_model(model))
    accelerator.load_state(str(folder / "checkpoint-1"))
    train_epochs(1)
    again = size_of(accelerator.unwrap_model(model))
    unet = accelerator.unwrap_model(model)
    ema.store(unet.parameters())
    ema.copy_to(unet.parameters())
    if accelerator.is_main_process:
        unet.save_pretrained(folder / "trained")
    accelerator.wait_for_everyone()
    averaged = size_of(diffusers.UNet2DModel.from_pretrained(folder / "trained"))
    ema.restore(unet.parameters())
    accelerator.end_training()
    events = [*(folder / "logs").rglob("events*")]
    assert events
    return {
        "losses": losses,
        "rates": rates,
        "weights": [first, again, averaged],
        "steps": ema.optimization_step,
    }


def sentences_model(folder: pathlib.Path) -> Any:
    sentence_transformers = load("sentence_transformers")
    modules = load("sentence_transformers.sentence_transformer.modules")
    words = modules.Transformer(str(folder), max_seq_length=16)
    pooling = modules.Pooling(words.get_embedding_dimension())
    return sentence_transformers.SentenceTransformer(modules=[words, pooling], device="cpu")


def sentences(folder: pathlib.Path) -> Result:
    sentence_transformers = load("sentence_transformers")
    losses = load("sentence_transformers.sentence_transformer.losses")
    pairs = [local_glue.sentence_pair(index) for index in range(15)]
    model = sentences_model(folder.parent / "bert")
    arguments: Any = sentence_transformers.SentenceTransformerTrainingArguments
    runner = sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=arguments(output_dir=str(folder), **OPTIONS),
        train_dataset=load("datasets").Dataset.from_list(
            [{"anchor": pair["sentence1"], "positive": pair["sentence2"]} for pair in pairs]
        ),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    runner.train()
    embeddings = model.encode(["word1 word2"], convert_to_numpy=True)
    return report(runner, embeddings=float(abs(embeddings).sum()))


def sentences_fit(folder: pathlib.Path) -> Result:
    """Train by the older ``fit``, which takes loaders."""
    example: Any = load("sentence_transformers").InputExample
    losses = load("sentence_transformers.sentence_transformer.losses")
    pairs = [local_glue.sentence_pair(index) for index in range(15)]
    model = sentences_model(folder.parent / "bert")
    examples = [
        example(texts=[str(pair["sentence1"]), str(pair["sentence2"])], label=float(pair["label"]))
        for pair in pairs
    ]
    model.fit(
        train_objectives=[(Loader(examples, batch_size=2, shuffle=True), losses.CosineSimilarityLoss(model))],
        epochs=1,
        warmup_steps=1,
        optimizer_params={"lr": 0.01},
        show_progress_bar=False,
        output_path=None,
        checkpoint_path=str(folder),
    )
    return {"losses": [], "weights": size_of(model), "steps": 1}


MODES: dict[str, Callable[[pathlib.Path], Result]] = {
    "peft": lambda folder: peft_mode(Runs(folder, "peft")),
    "sft": sft,
    "sft with lora": sft_with_lora,
    "dpo": dpo,
    "sentences": sentences,
    "sentences by fit": sentences_fit,
    "diffusion": diffusion,  # last: it leaves the world
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--modes", default=",".join(MODES))
    options = parser.parse_args()
    results: dict[str, Any] = {}
    results["processes"] = accelerate.PartialState(cpu=True).num_processes
    for mode in options.modes.split(","):
        folder = options.folder / mode.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        transformers.set_seed(0)
        try:
            results[mode] = MODES[mode](folder)
        except Exception as error:  # noqa: BLE001 -- reported, and the other modes run
            traceback.print_exc()
            results[mode] = {"error": f"{type(error).__name__}: {error}"}
    results["files"] = sorted({str(one.__file__) for _, one in accelerate_modules()})
    rank = os.environ.get("RANK", "0")
    (options.folder / f"results-{rank}.json").write_text(json.dumps(results))


def accelerate_modules() -> list[tuple[str, Any]]:
    return [(name, one) for name, one in [*sys.modules.items()] if name.partition(".")[0] == "accelerate"]


if __name__ == "__main__":
    main()
