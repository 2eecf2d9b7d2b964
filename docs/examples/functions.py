"""A small transformer as pure functions: a tree of parameters, keys for random numbers, AdamW as a function.

    accelfn launch --num_processes 2 docs/examples/functions.py
    accelfn launch --num_processes 2 docs/examples/functions.py --zero

It learns to repeat the first half of a random sequence in its second half, and prints the same on 1, 2
and 4 ranks. Each sample has a key of its own, so its dropout doesn't depend on the rank that has it. With
--zero each rank keeps and updates its piece of the optimizer's state alone.
"""

import math
import sys
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import accelfn as af
from accelfn import keys, tree

VOCABULARY, LENGTH, WIDTH, LAYERS, EPOCHS = 12, 16, 32, 2, 6
Params = dict[str, Any]


class Copies(Dataset[dict[str, torch.Tensor]]):
    """512 random sequences whose second half repeats the first."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        half = keys.uniform(keys.fold_in(keys.key("data"), index), (LENGTH // 2,)) * VOCABULARY
        return {"tokens": half.long().repeat(2), "index": torch.tensor(index)}


def init(key: torch.Tensor) -> Params:
    def matrix(*path: int, shape: tuple[int, int]) -> torch.Tensor:
        return keys.normal(keys.fold_in(key, *path), shape) / math.sqrt(shape[0])

    layers = [
        {
            "qkv": matrix(index, 0, shape=(WIDTH, 3 * WIDTH)),
            "out": matrix(index, 1, shape=(WIDTH, WIDTH)),
            "up": matrix(index, 2, shape=(WIDTH, 4 * WIDTH)),
            "down": matrix(index, 3, shape=(4 * WIDTH, WIDTH)),
        }
        for index in range(LAYERS)
    ]
    embedding, position = matrix(100, shape=(VOCABULARY, WIDTH)), matrix(101, shape=(LENGTH, WIDTH))
    return {"embedding": embedding, "position": position, "layers": layers}


def apply(params: Params, tokens: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the logits of one sequence: shape ``(length, vocabulary)``."""
    x = params["embedding"][tokens] + params["position"][: tokens.shape[0]]
    for index, layer in enumerate(params["layers"]):
        q, k, v = (F.layer_norm(x, (WIDTH,)) @ layer["qkv"]).chunk(3, dim=-1)
        scores = q @ k.T / math.sqrt(WIDTH)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(later, -math.inf).softmax(dim=-1) @ v
        x = x + keys.dropout(keys.fold_in(key, index), attention @ layer["out"], 0.05)
        x = x + F.gelu(F.layer_norm(x, (WIDTH,)) @ layer["up"]) @ layer["down"]
    return x @ params["embedding"].T


def loss_fn(params: Params, batch: dict[str, torch.Tensor], key: torch.Tensor) -> af.Loss:
    def of_sample(tokens: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = apply(params, tokens[:-1], keys.fold_in(key, index))[LENGTH // 2 - 1 :]
        labels = tokens[LENGTH // 2 :]
        return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(-1) == labels).sum()

    losses, right = torch.func.vmap(of_sample)(batch["tokens"], batch["index"])
    return af.Loss(losses.sum(), weight=losses.numel() * (LENGTH // 2), aux={"right": right.sum()})


def train(ctx: af.Context, zero: bool = False) -> list[tuple[float, float]]:
    ctx = ctx.replace(dataloader_config=af.DataLoaderConfiguration(data_seed=0))
    loader: Any = af.prepare(ctx, DataLoader(Copies(), batch_size=32 // ctx.num_processes, shuffle=True))
    num_steps = af.num_steps(ctx, loader, EPOCHS)

    def schedule(step: int) -> float:
        return 0.004 * min(1.0, step / 10) * 0.5 * (1 + math.cos(math.pi * step / num_steps))

    root = keys.key(0)
    params = init(keys.fold_in(root, 0))
    average = params
    pieces = af.sharded(ctx, af.shard(ctx, params)) if zero else params
    optimizer = af.functional(torch.optim.AdamW, lr=schedule, betas=(0.9, 0.98))
    state = optimizer.init(pieces)
    gradient = af.value_and_grad(ctx, loss_fn)
    shown: list[tuple[float, float]] = []
    for step, window in enumerate(af.windows(ctx, loader, epochs=EPOCHS)):
        (batch,) = window.batches
        loss, grads = gradient(params, batch, keys.fold_in(root, 1, step))
        grads, _ = af.clip_by_global_norm(grads, 1.0)
        if zero:
            pieces, state = optimizer.update(af.shard(ctx, grads), state, pieces)
            params = af.unshard(ctx, af.pieces(pieces))
        else:
            params, state = optimizer.update(grads, state, params)
        average = af.ema_update(average, params, 0.9)
        if window.is_last:
            shown.append((float(loss.value), float(loss.aux["right"])))
            loss_text = f"loss {shown[-1][0]:.4f}, {shown[-1][1]:.1%} of the tokens right"
            af.print_once(ctx, f"epoch {window.epoch + 1}: {loss_text}")
    norm = tree.global_norm(tree.map(torch.sub, average, params))
    af.print_once(ctx, f"{num_steps} steps, {float(norm):.3f} from the average of the parameters")
    return shown


if __name__ == "__main__":
    with af.init_context() as ctx:
        train(ctx, zero="--zero" in sys.argv)
