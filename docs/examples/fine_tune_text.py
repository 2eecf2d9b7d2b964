"""Train a small BERT-like or GPT-like model of transformers on the docstrings of the standard library.

    accelfn launch --num_processes 2 docs/examples/fine_tune_text.py --model gpt --curve gpt.csv
    python docs/examples/fine_tune_text.py --model gpt --curve gpt-plain.csv --plain

The second line is the same training in plain torch, on one process: each of its steps has the texts that all
processes of the first have together. Nothing is downloaded: models begin with random weights, and a token is
one of the most frequent words. With `from_pretrained` and a real tokenizer the loop stays the same.
"""

# pyright: basic
# transformers leaves much of its models untyped, and an example stays free of ignores.

import argparse
import ast
import random
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    get_linear_schedule_with_warmup,
)

from accelfn import Accelerator, MicroBatch, set_seed

PAD, MASK, UNKNOWN = 0, 1, 2
VOCABULARY = 500  # words, and the three above
IGNORED = -100  # the label of a token that isn't to be predicted
LENGTH = 24  # words of a text at most
ROWS = 48  # texts of an optimizer step, whatever the number of processes
ACCUMULATION = 2  # batches of an optimizer step
HELD_OUT = 100


def read_texts() -> list[list[str]]:
    """Give the docstrings of the standard library as words and signs, shuffled, the same each time."""
    found = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = re.findall(r"\w+|[^\w\s]", (ast.get_docstring(node) or "").lower())
                if len(words) >= 4:
                    found.add(tuple(words[:LENGTH]))
    texts = [list(words) for words in sorted(found)]
    random.Random(0).shuffle(texts)  # here and not by the loader, so that plain torch reads the same order
    return texts


def to_tokens(texts: list[list[str]]) -> list[list[int]]:
    """Number the most frequent words; all others are one token."""
    counts = Counter(word for text in texts for word in text)
    known = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - 3]
    numbers = {word: number for number, word in enumerate(known, 3)}
    return [[numbers.get(word, UNKNOWN) for word in text] for text in texts]


def make_samples(kind: str, texts: list[list[int]]) -> list[dict[str, list[int]]]:
    """Give tokens and labels: the next token for gpt, and a hidden one here and there for bert."""
    samples = []
    chance = random.Random(1)
    for tokens in texts:
        if kind == "gpt":
            samples.append({"input_ids": tokens, "labels": [*tokens[1:], IGNORED]})
            continue
        hidden = [chance.random() < 0.15 for _ in tokens]
        masked = [MASK if hide else token for token, hide in zip(tokens, hidden, strict=True)]
        labels = [token if hide else IGNORED for token, hide in zip(tokens, hidden, strict=True)]
        samples.append({"input_ids": masked, "labels": labels})
    return samples


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Make a batch: int64 (rows, tokens of the longest text), with a mask that tells tokens from padding."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([sample[name] + [value] * (longest - len(sample[name])) for sample in samples])

    tokens, labels = padded("input_ids", PAD), padded("labels", IGNORED)
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": labels}


def make_model(kind: str, width: int) -> nn.Module:
    """Build a model of two layers; without dropout, which would differ between processes."""
    if kind == "gpt":
        config = GPT2Config(
            vocab_size=VOCABULARY,
            bos_token_id=PAD,
            eos_token_id=PAD,
            n_positions=LENGTH,
            n_embd=width,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return GPT2LMHeadModel(config)
    config = BertConfig(
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def losses_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Give each text's loss, summed over its labels, and how many labels it has."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    each = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return each.view_as(labels).sum(dim=1), (labels != IGNORED).sum(dim=1)


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    # With Adam's own epsilon of 1e-8 a gradient that is nothing but rounding becomes a whole step: then even
    # one process drifts from itself when it adds up its batches in another order.
    return torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-6)


def ignore_padding(batch: dict[str, torch.Tensor], micro: MicroBatch | None) -> None:
    """Take the labels of texts that only fill up the last batches of all processes, and were read before."""
    if micro is not None and micro.own_valid is not None:
        batch["labels"][micro.own_valid :] = IGNORED


def train(arguments: argparse.Namespace, learned: Any, held_out: Any) -> tuple[list[float], float]:
    """Train on any number of processes; give the loss of each step, and that of the held-out texts."""
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    batch_size, rest = divmod(ROWS, ACCUMULATION * accelerator.num_processes)
    if rest:
        raise ValueError(f"{ROWS} texts a step can't be dealt out to {accelerator.num_processes} processes.")
    set_seed(0)
    model = make_model(arguments.model, arguments.width)
    optimizer = make_optimizer(model, arguments.rate)
    steps = arguments.epochs * -(-len(learned) // ROWS)
    model, optimizer, loader, held_out_loader, scheduler = accelerator.prepare(
        model,
        optimizer,
        DataLoader(learned, batch_size=batch_size, collate_fn=collate),
        DataLoader(held_out, batch_size=batch_size, collate_fn=collate),
        get_linear_schedule_with_warmup(optimizer, steps // 10, steps),
    )

    curve = []
    for _ in range(arguments.epochs):
        window = torch.zeros(2, device=accelerator.device)
        for batch in loader:
            ignore_padding(batch, accelerator.micro)
            with accelerator.accumulate(model):
                losses, labels = losses_of(model, batch)
                # The sum, and its weight: texts have different numbers of labels, so a mean of means would be
                # another loss on each number of processes.
                accelerator.backward(losses.sum(), weight=labels.sum())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            window += torch.stack([losses.detach().sum(), labels.sum()])
            if accelerator.sync_gradients:
                loss, weight = accelerator.reduce(window)
                curve.append(float(loss / weight))
                window.zero_()

    model.eval()
    total = torch.zeros(2, device=accelerator.device)
    with torch.no_grad():
        for batch in held_out_loader:
            losses, labels = accelerator.gather_for_metrics(losses_of(model, batch))
            total += torch.stack([losses.sum(), labels.sum()])
    accelerator.close()
    return curve if accelerator.is_main_process else [], float(total[0] / total[1])


def train_plain(arguments: argparse.Namespace, learned: Any, held_out: Any) -> tuple[list[float], float]:
    """Do the same in plain torch, on one process."""
    torch.manual_seed(0)
    model = make_model(arguments.model, arguments.width)
    optimizer = make_optimizer(model, arguments.rate)
    loader = DataLoader(learned, batch_size=ROWS, collate_fn=collate)
    steps = arguments.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)

    curve = []
    for _ in range(arguments.epochs):
        for batch in loader:
            losses, labels = losses_of(model, batch)
            loss = losses.sum() / labels.sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            curve.append(loss.item())

    model.eval()
    with torch.no_grad():
        found = [losses_of(model, batch) for batch in DataLoader(held_out, ROWS, collate_fn=collate)]
    return curve, float(sum(one.sum() for one, _ in found) / sum(one.sum() for _, one in found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("bert", "gpt"), default="gpt")
    parser.add_argument("--plain", action="store_true", help="train in plain torch, on one process")
    parser.add_argument("--curve", type=Path, help="CSV file for the loss of each optimizer step")
    parser.add_argument("--texts", type=int, default=2500, help="docstrings to learn from")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="learning rate at its highest")
    arguments = parser.parse_args()

    texts = to_tokens(read_texts())
    samples = make_samples(arguments.model, texts[: HELD_OUT + arguments.texts])
    run = train_plain if arguments.plain else train
    curve, held_out = run(arguments, samples[HELD_OUT:], samples[:HELD_OUT])
    if not curve:  # another process tells
        return
    print(f"loss of {len(curve)} steps: {curve[0]:.4f} to {curve[-1]:.4f}, held-out texts: {held_out:.4f}")
    if arguments.curve:
        lines = [f"{step},{loss!r}" for step, loss in enumerate(curve)]
        arguments.curve.write_text("\n".join(["step,loss", *lines, ""]))


if __name__ == "__main__":
    main()
