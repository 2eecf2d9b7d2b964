"""Programs in worlds of ranks, and the verdict about each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelfn.testing.programs import (
    Draft,
    Grammar,
    Program,
    check_programs,
    feature,
    finding_of,
    script,
    shrink,
    training_programs,
)

ROWS = 16


def build_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make_rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(3, generator=draw), torch.randn(1, generator=draw)) for _ in range(ROWS)]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


FAULTS = {
    "hangs": "import time\n    time.sleep(3600)",
    "computes": "while True:\n        pass",
    "dies": "import os\n    print('its last words', flush=True)\n    os._exit(7)",
    "aborts": "import os\n    def deep(left):\n        deep(left - 1) if left else os.abort()\n    deep(40)",
    "raises": "raise RuntimeError('something else')",
    "differs": "model.weight_of_one_rank = [*model.parameters()][0].data.add_(1.0)",
    "is_refused": "af.prepare(ctx)",
    "logs_more": "log('loss', torch.zeros(()))",
}


@feature("fault", ("", *FAULTS), is_neutral=True)
def fault(program: Program, draft: Draft) -> None:
    """What rank 1, or every rank, does before the loop."""
    if program["fault"]:
        ranks = "True" if program["fault"] == "computes" else "ctx.rank == 1"
        draft.add("built", f"if {ranks}:\n    {FAULTS[program['fault']]}")


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    return training_programs(build_model, make_rows, loss_of, features=[fault])


@pytest.mark.parametrize(
    "text",
    [
        "dp=3 world=memory api=shim optimizer=adamw rows=15",
        "dp=2 world=memory exact accumulation=2 optimizer=momentum",
        "dp=2 api=train_step precision=bf16",
        "dp=2 save=middle resume=one optimizer=momentum",
        "shard=2 api=forward_backward ema=before",
    ],
)
def test_a_model_of_the_users_own_trains_as_one_process(grammar: Grammar, text: str) -> None:
    (verdict,) = check_programs([grammar.program(text)])
    assert verdict.kind == "equal", verdict.what


@pytest.mark.parametrize(
    ("kind", "what", "names"),
    [
        ("error", "raises", "RuntimeError: something else"),
        ("crash", "dies", "  | its last words"),
        ("crash", "aborts", "  | Fatal Python error: Aborted"),
        ("different", "differs", "loss off by"),
        ("different", "logs_more", "times loss"),
        ("refused", "is_refused", "prepare: got nothing to prepare"),
    ],
)
@pytest.mark.parametrize("world", ["processes", "memory"])
def test_a_fault_has_its_verdict(grammar: Grammar, kind: str, what: str, names: str, world: str) -> None:
    (verdict,) = check_programs([grammar.program(dp=2, fault=what, world=world)])
    assert (verdict.kind, names in verdict.what) == (kind, True), verdict


@pytest.mark.slow
@pytest.mark.parametrize("world", ["processes", "memory"])
def test_a_program_that_hangs_ends_by_its_limit(grammar: Grammar, world: str) -> None:
    program = grammar.program(dp=2, fault="hangs", world=world)
    (verdict,) = check_programs([program], timeout_s=1.0)
    assert verdict.kind == "hang"


@pytest.mark.slow
@pytest.mark.timeout(80)
@pytest.mark.parametrize("text", ["", "dp=2", "dp=2 world=memory"])
def test_a_program_that_never_waits_ends_as_soon_among_many(grammar: Grammar, text: str) -> None:
    plain = grammar.program(text)
    values = ("momentum", "adamw", "groups", "two"), ("norm", "value"), (1, 3)
    names = ("optimizer", "clip", "batch")
    others = [
        plain.but(**{name: one}) for name, several in zip(names, values, strict=True) for one in several
    ]
    first, *rest = check_programs([plain.but(fault="computes"), *others], timeout_s=1.0)
    assert (first.kind, 'File "<program>", line' in first.what) == ("hang", True), first
    assert {one.kind for one in rest} == {"equal"}


def test_programs_after_one_that_fails_run_in_another_world(grammar: Grammar) -> None:
    programs = [grammar.program(dp=2, world="memory", fault=fault) for fault in ("", "raises", "differs", "")]
    programs[3] = programs[3].but(clip="norm")
    kinds = [verdict.kind for verdict in check_programs(programs)]
    assert kinds == ["equal", "error", "different", "equal"]


@pytest.mark.slow
def test_a_failure_shrinks_to_what_it_takes(grammar: Grammar) -> None:
    program = grammar.program("dp=3 world=memory accumulation=3 fault=differs clip=norm schedule")
    (verdict,) = check_programs([program])
    small, own = shrink(program, verdict)
    assert str(small) in ("dp=2 fault=differs", "dp=2 world=memory fault=differs")
    assert own.kind == "different"
    assert ("fault", "differs") in finding_of(small)


def test_a_diverging_reference_makes_a_program_invalid() -> None:
    steep = training_programs(build_model, make_rows, steep_loss)
    (verdict,) = check_programs([steep.program()])
    assert verdict.kind == "invalid"
    assert "diverges" in verdict.what


def steep_loss(model: Any, batch: Any) -> torch.Tensor:
    return 1e4 * loss_of(model, batch)


_OF_MAIN = """
import torch
from torch import nn
from accelfn.testing.programs import script, training_programs

SIZE = 4

class Local(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(SIZE, 1)

    def forward(self, x):
        return doubled(self.inner(x))

def doubled(x):
    return 2 * x

def build_model():
    torch.manual_seed(0)
    return Local()

def make_rows():
    return [*torch.arange(16.0 * SIZE).view(16, SIZE)]

def loss_of(model, batch):
    return 1e-4 * model(batch).square().mean()

print(script(training_programs(build_model, make_rows, loss_of).program("dp=2 world=memory")))
"""


@pytest.mark.slow
def test_a_script_has_what_functions_of_the_main_module_use(tmp_path: Path) -> None:
    texts = [_OF_MAIN]
    for name in ("grammar.py", "program.py"):
        (tmp_path / name).write_text(texts[-1])
        command = [sys.executable, "-W", "ignore", str(tmp_path / name)]
        texts.append(subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout)
    assert "inner.weight" in texts[-1]


def test_a_script_of_a_function_without_a_text_of_its_own_is_refused() -> None:
    built = training_programs(lambda: build_model(), make_rows, loss_of)
    with pytest.raises(ValueError, match=r"script: build_model is .*<lambda>, which no text"):
        script(built.program("dp=2"))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp=2 world=memory accumulation=2", "dp=2 save=middle resume=shard2"])
def test_a_script_prints_what_one_process_and_the_layout_come_to(tmp_path: Path, text: str) -> None:
    from tests.programs.grammar import GRAMMAR  # whose functions have a source that stands alone

    file = tmp_path / "program.py"
    file.write_text(script(GRAMMAR.program(text)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file)], capture_output=True, text=True, timeout=100, check=True
    )
    first, second, *none = re.split(r"^# .*\n", done.stdout, flags=re.MULTILINE)[1:]
    alone, found = (dict(line.split(" ", 1) for line in part.splitlines()) for part in (first, second))
    assert (alone.keys(), none) == (found.keys(), [])
    assert {"seen", "norm", "model.head.weight"} <= alone.keys()
    for name, numbers in alone.items():
        seen = [float(one) for one in found[name].split()]
        assert seen == pytest.approx([float(one) for one in numbers.split()], rel=1e-3, abs=1e-4), name
