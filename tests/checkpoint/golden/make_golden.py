"""Make the golden checkpoints: ``python -m tests.checkpoint.golden.make_golden``.

Those of a version of the format that was released are never made again: they show that old checkpoints still
load, and that nobody changes the bytes unawares. A new version gets a directory of its own beside them.
"""

import contextlib
import math
import pathlib
import random
import shutil
import sys
from collections import Counter as Counts
from collections import OrderedDict, defaultdict, deque
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch import nn

import accelfn as af
from accelfn.context import Context
from accelfn.testing import run_ranks
from tests.checkpoint.trees import NAMESPACE, Color, Pair, Point

CURRENT = pathlib.Path(__file__).parent / "v1"


class Counter:
    """Speaks for itself."""

    def __init__(self, number: int = 0) -> None:
        """Begin to count."""
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        """Return the number."""
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a number."""
        self.number = state["number"]


class Steps(torch.optim.Optimizer):
    """Has no options but a rate, so that its state is the same with every torch."""

    def __init__(self, params: Any) -> None:
        """Take parameters."""
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add one to the state of each parameter."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].get("momentum", torch.zeros_like(parameter))
                self.state[parameter]["momentum"] = momentum + 1


def new_tree() -> Any:
    """Make a tree with everything in it."""
    base = torch.arange(6.0).reshape(2, 3)
    twice = torch.tensor([1.5], dtype=torch.bfloat16)
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
    ints = (torch.int64, torch.int32, torch.int16, torch.int8, torch.bool)
    unsigned = (torch.uint64, torch.uint32, torch.uint16, torch.uint8)
    small = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    raw = torch.tensor([0x01, 0x7F], dtype=torch.uint8)
    tree: dict[str, Any] = {
        "dtypes": {
            str(dtype): torch.tensor([1, 0]).to(dtype) for dtype in (*floats, *ints, *unsigned, *small)
        },
        "bytes": {
            str(dtype): raw.view(dtype)
            for dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bits8)
        },
        "complex32": torch.tensor([0x3C004000], dtype=torch.int32).view(torch.complex32),
        "shapes": [torch.tensor(3.0), torch.zeros(0, 2), torch.arange(24).reshape(2, 3, 4)],
        "memory": {
            "base": base,
            "row": base[1],
            "turned": base.t(),
            "again": twice,
            "twice": twice,
            "permuted": torch.arange(6).reshape(2, 3).t(),
        },
        "parameter": nn.Parameter(torch.tensor([0.25])),
        "leaf": torch.tensor([2.0], requires_grad=True),
        "generator": torch.Generator().manual_seed(7),
        "numpy": {
            "array": np.arange(4, dtype=np.float32),
            "columns": np.asfortranarray(np.array([[1, 2], [3, 4]])),
            "scalar": np.float32(0.5),
        },
        "literals": [None, True, 3, -0.0, 1e300, "text é \U0001f600", 1 << 1000],
        "numbers": [math.inf, -math.inf, 1 - 2j, complex(math.inf, 0)],
        "bytes of Python": [b"\x00\xff", bytearray(b"b")],
        "path": pathlib.Path("a/b"),
        "torch": [torch.float32, torch.device("cuda", 1), torch.Size((2, 3))],
        "enums": [Color.RED],
        "sequences": [(1, (2,)), deque([1, 2], 3), deque([torch.tensor(1)]), Point(torch.ones(1), 2)],
        "node": Pair(torch.tensor([4]), [5], "label"),
        "dicts": [
            {1: "one", "1": torch.tensor(1), (2, Color.RED): None},
            {"$": "no kind", "a/b~c": torch.tensor(2)},
            OrderedDict(b=1, a=2),
            defaultdict(list, a=[1]),
            Counts({2: 3}),
        ],
        "sets": [{3, 1, (2, "two")}, frozenset({"a"})],
        "object": Counter(8),
    }
    return tree


@contextlib.contextmanager
def seeded() -> Generator[None, None, None]:
    """Bring the random number generators of the process to known states, and back afterwards."""
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()
    random.seed(1)
    torch.manual_seed(2)  # pyright: ignore[reportUnknownMemberType]
    np.random.seed(3)
    yield
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    np.random.set_state(before[2])


def new_run(rank: int, *, trained: bool = True) -> dict[str, Any]:
    """Make what a rank of a run holds, as it was saved or as it was before the first step."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 0.5 if trained else 0.0)
    model[1].weight = model[0].weight  # tied
    optimizer = Steps(model.parameters())
    if trained:
        optimizer.step()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.25
    epoch, consumed = (2, 6) if trained else (0, 0)
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": af.data.LoaderState(epoch=epoch, consumed=consumed, length=10, seed=11, order="shuffled"),
        "scaler": af.init_scaler(Context().replace(mixed_precision="fp16")),
        "counter": Counter(12 if trained else 0),
        "own": torch.tensor([rank + 1.0 if trained else 0.0]),
        "step": 12 if trained else 0,
        "name": f"rank {rank}" if trained else "",
    }


def make_run(place: pathlib.Path) -> None:
    """Save the run of two ranks."""
    runs = [new_run(rank) for rank in range(2)]  # before, as new models draw random numbers
    with seeded():
        run_ranks(lambda ctx: af.save_state(ctx, place, runs[ctx.rank], step=12, metric=0.5), 2)


def main() -> None:
    """Make all of this version."""
    if CURRENT.exists() and "--again" not in sys.argv:
        raise SystemExit(f"{CURRENT} is there. Before its version is released, --again makes it anew.")
    shutil.rmtree(CURRENT, ignore_errors=True)  # a checkpoint that replaces another one says so
    af.save_tree(CURRENT / "tree", new_tree(), namespace=NAMESPACE)
    make_run(CURRENT / "run")


if __name__ == "__main__":
    # Under its own name, which stands in the files with the classes.
    from tests.checkpoint.golden import make_golden

    make_golden.main()
