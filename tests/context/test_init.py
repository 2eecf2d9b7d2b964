"""Starting a context in real processes: joining, adopting, refusing; and what is left afterwards."""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import accelfn
from accelfn.comm import reduce
from accelfn.config import AutocastKwargs, Guard, InitProcessGroupKwargs
from accelfn.context import (
    CallLog,
    Collectives,
    Context,
    MessageBoard,
    World,
    close_context,
    init_context,
    process_group,
)
from accelfn.context import init as module
from accelfn.errors import ConfigurationError, DistributedError
from accelfn.testing import run_ranks

ROOT = Path(accelfn.__file__).parents[1]


def numbers(tensor: torch.Tensor) -> list[Any]:
    return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def new_group(ranks: list[int]) -> Any:
    return dist.new_group(ranks)  # pyright: ignore[reportUnknownMemberType]


def standing(ctx: Context) -> list[Any]:
    """Say where a context stands, and that it can talk."""
    world = ctx.world
    gathered = numbers(ctx.collectives.all_gather(torch.tensor([ctx.rank])))
    return [
        [world.rank, world.size],
        [world.local_rank, world.local_size],
        [world.node_rank, world.num_nodes],
        str(world.device),
        gathered,
    ]


# --- alone ---------------------------------------------------------------------------------------


def test_alone_nothing_is_started() -> None:
    before, hook = dict(os.environ), sys.excepthook
    with init_context(cpu=True) as ctx:
        assert (ctx.world, ctx.collectives) == (World(), Collectives())
        assert not dist.is_initialized()
    assert (dict(os.environ), sys.excepthook) == (before, hook)


def test_alone_a_missing_backend_is_refused_and_a_timeout_is_harmless() -> None:
    init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])
    with pytest.raises(ConfigurationError, match="unknown backend 'banana'"):
        init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="banana")])
    with pytest.raises(ConfigurationError, match=r"needs a registered group"):
        init_context(cpu=True, group=dist.ProcessGroup(HashStore(), 0, 1))


# --- adopting ------------------------------------------------------------------------------------


def test_an_initialised_group_is_adopted_and_stays() -> None:
    def adopt(outer: Context) -> list[Any]:
        with init_context(cpu=True, mixed_precision="bf16") as ctx:
            place = standing(ctx)
            adopted = ctx.world.group is dist.group.WORLD
            owns = ctx.world.owned.group
        alive = dist.is_initialized() and numbers(outer.collectives.all_gather(torch.tensor([1]))) == [1, 1]
        return [place, adopted, owns, alive, ctx.world.backend]

    for rank, found in enumerate(run_ranks(adopt, 2, on="processes")):
        place = [[rank, 2], [rank, 2], [0, 1], "cpu", [0, 1]]
        assert found == [place, True, False, True, "gloo"]


def test_adopting_a_subgroup_counts_its_ranks_and_refuses_others() -> None:
    def adopt(outer: Context) -> Any:
        group = new_group([1, 2])
        if outer.rank == 0:
            with pytest.raises(ConfigurationError, match="a rank that isn't in the group"):
                init_context(cpu=True, group=group)
            return None
        with init_context(cpu=True, group=group) as ctx:
            return [standing(ctx), dist.get_process_group_ranks(group)]

    places = [[[[rank, 2], [rank, 2], [0, 1], "cpu", [0, 1]], [1, 2]] for rank in (0, 1)]
    assert run_ranks(adopt, 3, "processes") == [None, *places]


def test_ranks_of_a_group_find_each_others_nodes() -> None:
    def adopt(outer: Context) -> list[Any]:
        # Ranks dealt to two machines in turn, as mpirun --map-by node does.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_host", lambda: f"machine {outer.rank % 2}".encode())
            world = init_context(cpu=True).world
        return [world.local_rank, world.local_size, world.node_rank, world.num_nodes]

    assert run_ranks(adopt, 3, on="processes") == [[0, 2, 0, 2], [0, 1, 1, 2], [1, 2, 0, 2]]


def test_an_adopted_group_gets_one_beside_it_which_closing_destroys() -> None:
    def adopt(outer: Context) -> list[Any]:
        def together() -> list[Any]:
            # torch numbers groups: one that only some ranks counted would part them here.
            buffer = torch.tensor([1.0])
            dist.all_reduce(buffer, group=new_group([0, 1, 2]))  # pyright: ignore[reportUnknownMemberType]
            return numbers(buffer)

        def carries_none(group: dist.ProcessGroup) -> bool:
            return group.size() == 0

        group = new_group([2, 1])
        if outer.rank == 0:
            return together()  # not part of the group: isn't needed to make one beside it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_group, "carries_cpu_tensors", carries_none)
            ctx = init_context(cpu=True, group=group)
        assert ctx.world.group_owner is not None
        side = weakref.ref(cast("dist.ProcessGroup", ctx.world.group_owner.group))
        rows = ctx.collectives.all_gather_bytes(torch.tensor([outer.rank], dtype=torch.uint8))
        said = [int(row[0]) for row in rows]
        said += numbers(ctx.collectives.all_gather(torch.tensor([outer.rank])))
        variant = ctx.replace(debug=True)
        close_context(variant)
        still = side() is not None
        close_context(ctx)
        close_context(ctx)
        return [said, still, side() is None, dist.get_world_size(group), *together()]

    results = run_ranks(adopt, 3, on="processes", timeout_s=10.0)
    inside = [[1, 2, 1, 2], True, True, 2, 3.0]
    assert results == [[3.0], inside, inside]


def test_a_backend_that_the_adopted_group_does_not_have_is_refused() -> None:
    def adopt(outer: Context) -> None:
        del outer
        init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="GLOO")])
        with pytest.raises(ConfigurationError, match=r"'mpi'\) has no effect: .* initialised with 'gloo'"):
            init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="mpi")])

    run_ranks(adopt, 2, "processes")


def test_contexts_one_after_another_and_side_by_side_share_the_group() -> None:
    def train(outer: Context) -> list[Any]:
        sums: list[float] = []
        for number in range(8):
            with init_context(cpu=True) as ctx:
                sums.append(float(reduce(ctx, torch.tensor(float(number + outer.rank)))))
        first = init_context(cpu=True, mixed_precision="fp16")
        second = init_context(cpu=True, gradient_accumulation_steps=4)
        close_context(first)
        steps = [one.gradient_accumulation_steps for one in (second, outer)]
        return [sums, standing(second)[-1], first.mixed_precision, second.mixed_precision, steps]

    expected = [[3.0 * number + 3 for number in range(8)], [0, 1, 2], "fp16", "no", [4, 1]]
    assert run_ranks(train, 3, "processes", timeout_s=10.0) == [expected] * 3


def test_a_rank_that_adopts_alone_says_so() -> None:
    def adopt(outer: Context) -> str:
        if outer.rank:
            return ""
        with pytest.raises(DistributedError) as caught:
            init_context(cpu=True, guard=Guard(timeout=timedelta(seconds=0.5)))
        return str(caught.value)

    said, _ = run_ranks(adopt, 2, on="processes", timeout_s=10.0)
    assert said.startswith("rank 0 could not connect to the other 1 ranks of the adopted group: ")
    assert said.endswith("Every rank of the group must call init_context, equally often.")


# --- launched ------------------------------------------------------------------------------------

KNOWN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "SLURM_", "ACCEL", "TORCHELASTIC")


@contextmanager
def launched(**variables: str) -> Generator[dict[str, str], None, None]:
    """Be a process that a launcher has started with these variables, and no rank of the test's world."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(KNOWN)]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield dict(os.environ)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def mpi_variables(rank: int, size: int, port: str) -> dict[str, str]:
    places = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    mpi = {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in places.items()}
    return {**mpi, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def kubernetes_variables(rank: int, size: int, port: str) -> dict[str, str]:
    # A remote address by its name: every "pod" takes itself for alone on its node until they have talked.
    address = "localhost.localdomain" if _resolves("localhost.localdomain") else "127.0.0.1"
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": port}


def slurm_variables(rank: int, size: int, port: str) -> dict[str, str]:
    places = {"PROCID": rank, "LOCALID": rank, "NODEID": 0, "STEP_NUM_TASKS": size, "STEP_NUM_NODES": 1}
    job = {"JOB_ID": 77, "STEP_ID": 1, "STEP_TASKS_PER_NODE": size, "STEP_NODELIST": "here"}
    return {f"SLURM_{name}": str(value) for name, value in {**places, **job}.items()} | {"MASTER_PORT": port}


def torchrun_variables(rank: int, size: int, port: str) -> dict[str, str]:
    places = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    node = {name: str(number) for name, number in places.items()}
    return {**kubernetes_variables(rank, size, port), **node, "TORCHELASTIC_RUN_ID": "none"}


def _resolves(name: str) -> bool:
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return False


@pytest.mark.parametrize(
    ("variables", "size"),
    [(mpi_variables, 2), (kubernetes_variables, 2), (slurm_variables, 2), (torchrun_variables, 1)],
)
def test_launchers_join_one_world_by_their_variables_and_an_error_closes_it(
    variables: Callable[[int, int, str], dict[str, str]], size: int
) -> None:
    port = free_port()

    def join(outer: Context) -> list[Any]:
        found: list[Any] = []
        with launched(**variables(outer.rank, size, port)) as before:
            hook = sys.excepthook
            with contextlib.suppress(KeyError), init_context(cpu=True) as ctx:
                found += [standing(ctx), ctx.world.owned.group]
                raise KeyError("mine")
            return [*found, dist.is_initialized(), dict(os.environ) == before and sys.excepthook is hook]

    ranks = list(range(size))
    assert run_ranks(join, size, "processes", timeout_s=60) == [
        [[[rank, size], [rank, size], [0, 1], "cpu", ranks], True, False, True] for rank in ranks
    ]


PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
import accelfn as af
before, hook = dict(os.environ), sys.excepthook

def gathered(ctx):
    return ctx.collectives.all_gather(torch.tensor([ctx.rank])).tolist()

with af.init_context(cpu=True) as ctx:
    found = [[ctx.rank, ctx.world.backend, ctx.world.owned.group, str(ctx.distributed_type), gathered(ctx)]]
    with ctx.replace(mixed_precision="bf16") as variant:
        found += [variant.world.group is ctx.world.group, variant.world.owned.group]
    second = af.init_context(cpu=True, gradient_accumulation_steps=2)
    af.close_context(second)
    found += [second.world.owned.group, dist.is_initialized(), gathered(ctx)]
found += [dist.is_initialized(), dict(os.environ) == before, sys.excepthook is hook]
for _ in range(2):  # torchrun's store still knows the last world
    with af.init_context(cpu=True) as again:
        found.append(gathered(again))
# Closed again while somebody else's group is there: that one stays.
dist.init_process_group("gloo")
af.close_context(ctx)
found.append(dist.is_initialized())
dist.destroy_process_group()
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(found, file)
# torch sometimes aborts when the host of a store exits ("terminate called without an active exception").
os._exit(0)
"""


@pytest.mark.slow
def test_torchrun_is_joined_owned_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with launched() as environment:
        subprocess.run(
            [*command, str(tmp_path / "program.py"), str(tmp_path)],
            env={
                **environment,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                "OMP_NUM_THREADS": "1",
            },
            check=True,
            timeout=90,
        )
    for rank in (0, 1):
        assert json.loads((tmp_path / str(rank)).read_text(encoding="utf-8")) == [
            *([rank, "gloo", True, "MULTI_CPU", [0, 1]], True, False),
            *(False, True, [0, 1]),
            *(False, True, True),
            *([0, 1], [0, 1], True),
        ]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "said"), [(1, r" \(openmpi, backend gloo"), (0, "")])
def test_a_world_that_cannot_be_reached_or_whose_ranks_do_not_come_is_an_error(rank: int, said: str) -> None:
    hook = sys.excepthook
    short = InitProcessGroupKwargs(timeout=timedelta(seconds=2))
    with launched(**mpi_variables(rank, 2, free_port())):
        with pytest.raises(DistributedError, match=f"rank {rank} could not join its world of 2{said}"):
            init_context(cpu=True, kwargs_handlers=[short, AutocastKwargs()])
    assert not dist.is_initialized()
    assert sys.excepthook is hook


@pytest.mark.parametrize("interactive", [False, True])
def test_an_error_that_an_interactive_session_has_survived_is_no_failure(
    interactive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = dict[str, str]()
    board = MessageBoard(post_once=notes.setdefault)
    with_hooks = module._with_exit_hooks  # pyright: ignore[reportPrivateUsage]
    world = with_hooks(World(size=2), Collectives(board=board, call_log=CallLog()), Guard())
    at_exit = world.owned.at_exit
    assert at_exit is not None
    atexit.unregister(at_exit)
    monkeypatch.setattr(sys, "last_exc", KeyError("cell 3"), raising=False)
    if interactive:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    at_exit()
    assert [*notes] == (["end"] if interactive else ["failure"])
