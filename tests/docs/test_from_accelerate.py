"""The page for people who know Accelerate: both sides of its loop train the same model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelfn import set_seed

PAGE = (Path(__file__).parents[2] / "docs" / "pages" / "guide" / "from-accelerate.md").read_text()


def side(sign: str) -> str:
    """Return one side of the diff."""
    found = re.search(r"^```diff\n.*?^@@.*?@@\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    return "".join(line[1:] for line in found[1].splitlines(keepends=True) if line[0] in (sign, " "))


def test_the_loop_before_and_after_trains_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second row of the page's table: only the imports change.
    before = re.sub(r"from accelerate(\.utils)?", "from accelfn", side("-"))
    weights: list[Any] = []
    for name, program in (("before", before), ("after", side("+"))):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        set_seed(1)
        model: Any = nn.Linear(3, 2)
        data = TensorDataset(torch.randn(30, 3), torch.randint(0, 2, (30,)))
        names: dict[str, Any] = {
            "torch": torch,
            "model": model,
            "loss_fn": nn.functional.cross_entropy,
            "loader": DataLoader(data, batch_size=2),
            "held_out": DataLoader(TensorDataset(*data[:9]), batch_size=4),
        }
        schedule = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"
        start, line, rest = program.partition("lr=1e-3)\n")
        exec(start + line + schedule + rest, names)
        weights.append([parameter.tolist() for parameter in model.parameters()])
        assert sorted(path.name for path in Path("checkpoints").iterdir()) == ["0", "1", "2"]
    assert weights[0] == weights[1]
