"""The programs of README and the front page, killed at any step and started again on other ranks."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.testing import run_ranks

ROOT = Path(__file__).parents[2]
MICROBATCHES = 4  # of a step, on all ranks together
# Each page, and the number of its programs.
PAGES = (("README.md", 2), ("docs/pages/index.md", 1))


class KilledError(Exception):
    """The process ends here."""


def programs() -> Iterator[Any]:
    for page, number in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        found = [block for block in blocks if "af.windows" in block or "af.microbatches" in block]
        assert len(found) == number, f"{page} has other programs than this test knows"
        for block in found:
            yield pytest.param(block, id=f"{page}-{'windows' if 'af.windows' in block else 'batches'}")


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def run(program: str, ctx: af.Context, folder: Path, kill_at: int | None = None) -> torch.Tensor:
    """Run a program on a rank, in exact mode; return the weights in the end."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    objects: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": StepLR(optimizer, 2, 0.9),
        "loader": DataLoader(data, batch_size=2, shuffle=True),
    }
    if "init_context" not in program:  # the second level goes on with what the first has prepared
        kinds = ("model", "optimizer", "loader")
        prepared = af.prepare(ctx, *(objects[kind] for kind in kinds))
        objects.update(zip(kinds, prepared, strict=True))
    num_steps = 0

    class Opened:
        def __init__(self, **options: Any) -> None:
            assert options == {"mixed_precision": "bf16", "gradient_accumulation_steps": MICROBATCHES}

        def __enter__(self) -> af.Context:
            return ctx

        def __exit__(self, *raised: object) -> None: ...

    def counted(*arguments: Any, **options: Any) -> Any:
        made = af.make_train_step(*arguments, **options)

        def step(state: Any, window: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == kill_at:
                raise KilledError
            return made(state, window)

        return step

    own = {
        "init_context": Opened,
        "make_train_step": counted,
        "load_latest": lambda ctx, place, *rest: af.load_latest(ctx, folder / place, *rest),
        "save_state": lambda ctx, place, *rest, **more: af.save_state(ctx, folder / place, *rest, **more),
        "save_model": lambda ctx, model, place: af.save_model(ctx, model, folder / place),
    }
    code = (
        program.replace("import accelfn as af\n", "")
        .replace("epochs=8", "epochs=3")
        .replace("range(8)", "range(3)")
    )
    names: dict[str, Any] = {
        **objects,
        "ctx": ctx,
        "nn": nn,
        "loss_fn": loss_fn,
        "af": SimpleNamespace(**{name: getattr(af, name) for name in af.__all__} | own),
    }
    exec(code, names)
    return torch.cat([one.detach().flatten() for one in af.unwrap_model(names["model"]).parameters()])


def on_ranks(program: str, size: int, folder: Path, kill_at: int | None = None) -> torch.Tensor:
    options: Any = {"gradient_accumulation_steps": MICROBATCHES // size, "reduction": "canonical"}
    return run_ranks(lambda ctx: run(program, ctx, folder, kill_at), size, **options)[0]


PROGRAMS = list(programs())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_the_same_weights_on_any_number_of_ranks(program: str, tmp_path: Path) -> None:
    whole = on_ranks(program, 1, tmp_path / "one")
    assert torch.equal(on_ranks(program, 4, tmp_path / "four"), whole)


@pytest.mark.parametrize("program", [one for one in PROGRAMS if "load_latest" in one.values[0]])
@settings(max_examples=5)
@given(
    kill_at=st.integers(1, 9),
    sizes=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
)
def test_a_program_that_is_killed_goes_on_on_other_ranks(
    program: str, kill_at: int, sizes: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    whole = on_ranks(program, 1, folder / "whole")
    with pytest.raises(KilledError):
        on_ranks(program, sizes[0], folder / "killed", kill_at)
    assert torch.equal(on_ranks(program, sizes[1], folder / "killed"), whole)
