import pathlib
import subprocess
import sys

import pytest
import torch

from accelfn.comm import reduce
from accelfn.context import Context
from accelfn.errors import MissingRankError
from accelfn.testing import Fault
from accelfn.testing.plugin import Ranks, ranks

__all__ = ("ranks",)  # pytest looks for fixtures among the names of the module


def backend(ctx: Context) -> tuple[str | None, bool]:
    return ctx.world.backend, ctx.world.group is not None


def test_without_a_parameter_ranks_are_in_memory(ranks: Ranks) -> None:
    assert ranks(backend, 2) == [("memory", False)] * 2


@pytest.mark.parametrize(
    ("ranks", "expected"), [("memory", ("memory", False)), ("processes", ("gloo", True))], indirect=["ranks"]
)
def test_a_parameter_names_the_kind_of_world(ranks: Ranks, expected: tuple[str, bool]) -> None:
    assert ranks(backend, 2) == [expected] * 2
    assert ranks(lambda ctx: int(reduce(ctx, torch.tensor(1))), 2) == [2, 2]


def test_everything_else_is_that_of_run_ranks(ranks: Ranks) -> None:
    def nodes(ctx: Context) -> tuple[int, str]:
        return ctx.world.node_rank, ctx.mixed_precision

    assert ranks(nodes, 2, num_nodes=2, mixed_precision="bf16") == [(0, "bf16"), (1, "bf16")]
    with pytest.raises(MissingRankError):
        ranks(lambda ctx: reduce(ctx, torch.tensor(1)), 2, timeout_s=10, faults=[Fault(kind="die", rank=0)])


USERS = """
import pytest
import accelfn as af
from accelfn.testing import scheduling_point
from accelfn.testing.plugin import ranks

def come(ctx, came):
    scheduling_point(ctx, 'come')
    came.append(ctx.rank)
    af.wait_for_everyone(ctx)

def test_seed(ranks):
    came = []
    ranks(lambda ctx: come(ctx, came), 4)
    assert came != [0, 1, 2, 3]

@pytest.mark.parametrize("ranks", ["mars"], indirect=True)
def test_kind(ranks): pass
"""


@pytest.mark.slow
def test_an_option_gives_worlds_in_memory_the_schedule_of_a_seed_and_another_kind_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "test_user.py").write_text(USERS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "accelfn.testing.plugin"]
    command += ["--ranks-seed", "0", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "1 passed, 1 error" in done.stdout
    assert "ranks: a world is one of memory, processes; got 'mars'." in done.stdout
