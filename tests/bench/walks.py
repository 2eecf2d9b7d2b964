"""The functions of accelfn that five public calls run, by file, in the order of first use.

    python -m tests.bench.walks

A first call, which isn't recorded, does the imports.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import accelfn as af
from tests.bench.recording import ROOT, Found, read_recorded, record


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def make_model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(6)))


def record_launch(folder: Path) -> Found:
    """Return the functions that `accelfn launch` runs, and the agent that it becomes."""
    recorded = folder / "recorded"
    recorded.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"from tests.bench.recording import record_process\nrecord_process({str(recorded)!r})\n"
    )
    (folder / "s.py").write_text("print('here')\n")
    command = [sys.executable, "-m", "accelfn", "launch", "-n", "2", "--cpu", str(folder / "s.py")]
    path = os.pathsep.join([str(folder), str(ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    return read_recorded(recorded)


def show(title: str, found: Found) -> None:
    files: dict[str, list[str]] = {}
    for name, function in found:
        plain = function.rpartition("<locals>.")[2]
        if Path(name).is_file() and not plain.startswith("<"):  # comprehensions, and methods made for records
            files.setdefault(str(Path(name).relative_to(ROOT)), []).append(plain)
    print(f"\n{title}: {sum(map(len, files.values()))} functions in {len(files)} files")
    for name, functions in files.items():
        print(f"  {name}: {', '.join(dict.fromkeys(functions))}")


def main() -> None:
    ctx = af.Context()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        af.save_model(ctx, make_model(), folder / "weights")

        def load() -> nn.Module:
            with af.init_empty_weights():
                model = make_model()
            return af.load_checkpoint_and_dispatch(model, folder / "weights", device_map="auto")

        load()
        show("load_checkpoint_and_dispatch", record(load))
        offloaded = af.cpu_offload(make_model(), "cpu:0")
        offloaded(torch.ones(2, 16))
        show("one offloaded forward", record(lambda: offloaded(torch.ones(2, 16))))
        model = make_model()
        tree = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        af.save_state(ctx, folder / "first", tree)
        show("save_state", record(lambda: af.save_state(ctx, folder / "state", tree)))
        af.load_state(ctx, folder / "first", tree)
        show("load_state", record(lambda: af.load_state(ctx, folder / "state", tree)))
        show("accelfn launch -n 2 s.py", record_launch(folder))


if __name__ == "__main__":
    main()
