"""An epoch of transformers' Trainer: accelfn under Accelerate's name, beside Accelerate itself.

The name means one thing in a process, so each side has one of its
own, and they take turns.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any

import torch

from tests.bench.llama import llama
from tests.bench.timing import compare, show_beside

_STEPS, _ROWS, _LENGTH, _VOCABULARY = 150, 4, 16, 64
_SIDES = {"accelfn": ("-m", "accelfn.compat", "-m"), "Accelerate": ("-m",)}


def epoch(folder: str) -> Callable[[], float]:
    """Return a function that trains one epoch by a new Trainer, and returns the seconds of its ``train``."""
    transformers: Any = importlib.import_module("transformers")
    ids = torch.randint(2, _VOCABULARY, (_STEPS * _ROWS, _LENGTH))
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=_ROWS,
        logging_steps=50,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    silence: Any = transformers.PrinterCallback

    def train() -> float:
        model = llama(32, 32, 2, 2, _VOCABULARY, num_key_value_heads=2, max_position_embeddings=_LENGTH)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.remove_callback(silence)
        start = time.perf_counter()
        trainer.train()
        return time.perf_counter() - start

    return train


def work() -> None:
    """Train an epoch for each line of the input, and answer with a line."""
    answers, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        train = epoch(folder)
        for _ in sys.stdin:
            train()
            print("done", file=answers, flush=True)


def turn_of(process: subprocess.Popen[str]) -> Callable[[], object]:
    """Return a function that lets a side train an epoch."""

    def turn() -> None:
        requests: IO[str] | None = process.stdin
        answers: IO[str] | None = process.stdout
        assert requests is not None
        assert answers is not None
        print("go", file=requests, flush=True)
        assert answers.readline() == "done\n", "the process has ended"

    return turn


def main() -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    started = {
        name: subprocess.Popen(
            [sys.executable, *run, "tests.bench.trainer", "work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for name, run in _SIDES.items()
    }
    try:
        times = compare({name: turn_of(process) for name, process in started.items()}, rounds=15, calls=1)
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    show_beside("trainer", {f"an epoch of {_STEPS} steps of transformers' Trainer": times}, 0)


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
