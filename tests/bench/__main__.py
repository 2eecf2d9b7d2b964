"""``python -m tests.bench [PART ...]`` measures, and writes what it found into the pages that show it.

Each part is a module of this package; without a name all run that need no GPU. They print blocks, mostly
tables, each under a comment with its name. The blocks are kept in ``docs/benchmarks.json``, from which the
README and the pages are filled, between such a comment and the next ``<!-- end -->``. Needs
``accelfn[bench]``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "benchmarks.json"
_TWO = ("collectives", "guard", "exact", "data", "sharding", "experts")
_ALONE = (
    "local",
    "checkpoint",
    "campaign",
    "plan",
    "plan_real",
    "load",
    "offload",
    "launch",
    "sequence",
    "trainer",
    "many_ranks",
)
# Worlds that a part is measured in, by their number of processes.
PARTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "training": (1, 2),
        "pipeline": (2, 4),
        **dict.fromkeys(_TWO, (2,)),
        **dict.fromkeys((*_ALONE, "gpu"), (1,)),
    }
)
_BLOCK = re.compile(r"<!-- ([\w-]+) -->\n(.*?)(?=\n\n|\n<!-- |\Z)", re.DOTALL)
_PLACE = re.compile(r"<!-- (?!end )([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str, blocks: Mapping[str, Sequence[str]]) -> str:
    """Return a page with the blocks that it names."""
    return _PLACE.sub(lambda at: "\n".join([f"<!-- {at[1]} -->", *blocks[at[1]], "<!-- end -->"]), page)


def pages() -> list[Path]:
    """Return the files that may name blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]


def read_blocks() -> dict[str, Sequence[str]]:
    """Return all blocks: what was measured, on what, and the table of the README."""
    data: dict[str, Any] = json.loads(DATA.read_text())
    blocks: dict[str, Sequence[str]] = {}
    for part, run in data.items():
        blocks |= run["blocks"]
        blocks[f"{part}-measured-on"] = [f"Measured on {run['machine']}, on {run['date']}."]
    return {**blocks, "figures": _figures(blocks)}


def _figures(blocks: Mapping[str, Sequence[str]]) -> list[str]:
    def median(block: str, row: int, column: int) -> str:
        cell = blocks[block][2 + row].strip("| ").split(" | ")[column]
        return f"{float(cell.split()[0].replace(',', '')):.3g}"

    step, their_step = (median("training-1", 0, column) for column in (2, 4))
    gather, their_gather = (median("collectives", 0, column) for column in (1, 3))
    disk, their_disk = (median("offload-disk", row, 2) for row in (1, 3))
    on_gpu = re.search(r"^\| 118 million .*$", (ROOT / "docs/pages/benchmarks.md").read_text(), re.MULTILINE)
    gpu, their_gpu = re.findall(r": ([\d.]+) \(", on_gpu[0] if on_gpu else "")[::2]
    what = (
        "a training step of a tiny model (hand-written torch is 1)",
        "a training step of 118 million parameters on one H200 (hand-written torch is 1)",
        "`gather` of 50 small tensors on two processes",
        "a forward pass with 1.2 GB of weights on the disk (in memory is 1)",
    )
    run = "| `python -m tests.bench"
    return [
        "| | accelfn | compared with | command |",
        "| --- | --: | --: | --- |",
        f"| {what[0]} | {step} | Accelerate {their_step} {run} training` |",
        f"| {what[1]} | {gpu} | Accelerate {their_gpu} {run}.gpu` |",
        f"| {what[2]} | {gather} ms | Accelerate {their_gather} ms {run} collectives` |",
        f"| {what[3]} | {disk} | Accelerate {their_disk} {run} offload` |",
    ]


def machine() -> str:
    """Describe what is measured on."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "accelerate"))
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {platform.system()}, Python {platform.python_version()}, {', '.join(versions)}"


def run_part(part: str, size: int, environment: Mapping[str, str]) -> str:
    """Run a part in a world of so many processes; show and return what it prints."""
    launch = ("-m", "accelfn", "launch", "--num_processes", str(size), "--cpu") if size > 1 else ()
    command = (sys.executable, *launch, "-m", f"tests.bench.{part}")
    lines: list[str] = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise SystemExit(f"{part} has failed with status {process.returncode}.")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that all parts work")
    given = parser.parse_args()
    environment = {**os.environ, "BENCH_SHARE": "10"} if given.quick else os.environ
    for part in given.parts or [part for part in PARTS if part != "gpu"]:
        output = "".join(run_part(part, size, environment) for size in PARTS[part])
        blocks = {name: text.splitlines() for name, text in _BLOCK.findall(output)}
        data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        data[part] = {"date": today, "machine": machine(), "blocks": blocks}
        DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8"), read_blocks()), encoding="utf-8")


if __name__ == "__main__":
    main()
