"""Train tiny models by the libraries around Accelerate, and write what came out."""

# torch leaves these partly untyped.
# pyright: reportUnknownMemberType=false

import importlib
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.compat import local_glue
from tests.compat.trainer_program import DEFAULTS, VOCABULARY, llama


def load(name: str) -> Any:
    """Return a module that has no types which strict checking accepts, or isn't in every environment."""
    return importlib.import_module(name)


accelerate, transformers = load("accelerate"), load("transformers")
Loader: Any = DataLoader  # of lists, which torch reads and its types refuse
Result = dict[str, Any]
WORDS = [f"w{number}" for number in range(VOCABULARY - 4)]
OPTIONS: dict[str, Any] = {**DEFAULTS, "max_steps": 4, "bf16": False}


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


def sft(folder: pathlib.Path) -> Result:
    trl = load("trl")
    rows = [{"prompt": sentence(seed), "completion": f" {sentence(seed + 7)}"} for seed in range(13)]
    options = {**OPTIONS, "save_strategy": "steps", "save_steps": 4}
    lora = load("peft").LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    runner = trl.SFTTrainer(
        model=llama(),
        args=trl.SFTConfig(output_dir=str(folder), max_length=12, gradient_accumulation_steps=2, **options),
        train_dataset=load("datasets").Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora,
    )
    runner.train()
    return report(runner, saved=(folder / "checkpoint-4" / "adapter_model.safetensors").is_file())


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
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_config=utils.ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs")),
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
    average: Any = load("diffusers.training_utils").EMAModel
    ema = average(model.parameters(), model_cls=diffusers.UNet2DModel, model_config=model.config)

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            ema.save_pretrained(f"{output_dir}/unet_ema")
            models[0].save_pretrained(f"{output_dir}/unet")
            weights.pop()

    def load_hook(models: list[Any], input_dir: str) -> None:
        ema.load_state_dict(
            average.from_pretrained(f"{input_dir}/unet_ema", diffusers.UNet2DModel).state_dict()
        )
        loaded = diffusers.UNet2DModel.from_pretrained(input_dir, subfolder="unet")
        models.pop().load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    images = torch.randn(22, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    loader = Loader([{"input": image} for image in images], batch_size=2, shuffle=True)
    get_scheduler: Any = load("diffusers.optimization").get_scheduler
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=20)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    accelerator.init_trackers("diffusion", config={"learning_rate": 0.01})
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=20)
    logged: list[tuple[float, float]] = []

    def train_epoch() -> float:
        for batch in loader:
            clean = batch["input"]
            noise, timesteps = torch.randn(clean.shape), torch.randint(0, 20, clean.shape[:1])
            with accelerator.accumulate(model):
                said = model(noise_scheduler.add_noise(clean, noise, timesteps), timesteps).sample
                loss = nn.functional.mse_loss(said, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
            logged.append((loss.item(), lr_scheduler.get_last_lr()[0]))
            accelerator.log({"loss": loss.item()}, step=len(logged))
        accelerator.wait_for_everyone()
        return size_of(accelerator.unwrap_model(model))

    train_epoch()
    if accelerator.is_main_process:
        accelerator.save_state(str(folder / "checkpoint"))
    accelerator.wait_for_everyone()
    first = train_epoch()
    accelerator.load_state(str(folder / "checkpoint"))
    again = train_epoch()
    ema.copy_to(model.parameters())
    averaged = size_of(accelerator.unwrap_model(model))
    accelerator.end_training()
    assert [*(folder / "logs").rglob("events*")]
    return {"losses": logged, "weights": [first, again, averaged], "steps": ema.optimization_step}


def sentences(folder: pathlib.Path) -> Result:
    sentence_transformers = load("sentence_transformers")
    losses = load("sentence_transformers.sentence_transformer.losses")
    pairs = [local_glue.sentence_pair(index) for index in range(15)]
    modules = load("sentence_transformers.sentence_transformer.modules")
    words = modules.Transformer(str(folder.parent / "bert"), max_seq_length=16)
    pooling = modules.Pooling(words.get_embedding_dimension())
    model = sentence_transformers.SentenceTransformer(modules=[words, pooling], device="cpu")
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


MODES: dict[str, Callable[[pathlib.Path], Result]] = {
    "sft": sft,
    "dpo": dpo,
    "sentences": sentences,
    "diffusion": diffusion,  # last: it leaves the world
}


def main() -> None:
    (parent,) = sys.argv[1:]
    results: dict[str, Any] = {}
    results["processes"] = accelerate.PartialState(cpu=True).num_processes
    for mode, train in MODES.items():
        folder = pathlib.Path(parent, mode)
        folder.mkdir(exist_ok=True)
        transformers.set_seed(0)
        try:
            results[mode] = train(folder)
        except Exception as error:  # noqa: BLE001 -- reported, and the other modes run
            traceback.print_exc()
            results[mode] = {"error": f"{type(error).__name__}: {error}"}
    results["file"] = str(accelerate.__file__)
    if int(os.environ.get("RANK", "0")) == 0:
        pathlib.Path(parent, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
