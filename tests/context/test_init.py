"""Starting a context in real processes: joining, adopting, refusing; and what is left afterwards."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import accelfn
from accelfn.comm import reduce
from accelfn.context import (
    Collectives,
    Context,
    World,
    close_context,
    init_context,
    process_group,
)
from accelfn.context import init as module
from accelfn.context.config import AutocastKwargs, Guard, InitProcessGroupKwargs
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
    before = dict(os.environ)
    hook = sys.excepthook
    with init_context(cpu=True) as ctx:
        assert ctx.world == World()
        assert ctx.collectives == Collectives()
        assert not dist.is_initialized()
    assert dict(os.environ) == before
    assert sys.excepthook is hook


def test_alone_a_missing_backend_is_refused_and_a_timeout_is_harmless() -> None:
    init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])
    with pytest.raises(ConfigurationError, match="unknown backend 'banana'"):
        init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="banana")])


def test_a_group_needs_an_initialised_torch_distributed() -> None:
    group = dist.ProcessGroup(HashStore(), 0, 1)
    with pytest.raises(ConfigurationError, match=r"needs a registered group"):
        init_context(cpu=True, group=group)


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
            try:
                init_context(cpu=True, group=group)
            except ConfigurationError as error:
                return str(error)
            return "adopted"
        with init_context(cpu=True, group=group) as ctx:
            place = standing(ctx)
        return [place, len(dist.get_process_group_ranks(group))]

    refused, first, second = run_ranks(adopt, 3, on="processes")
    assert "a rank that isn't in the group" in refused
    assert first == [[[0, 2], [0, 2], [0, 1], "cpu", [0, 1]], 2]
    assert second == [[[1, 2], [1, 2], [0, 1], "cpu", [0, 1]], 2]


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
        side = weakref.ref(cast("dist.ProcessGroup", vars(ctx.world.group_owner)["_group"]))
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
    def adopt(outer: Context) -> str:
        del outer
        init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="GLOO")])
        try:
            init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="mpi")])
        except ConfigurationError as error:
            return str(error)
        return "adopted"

    for message in run_ranks(adopt, 2, on="processes"):
        assert "backend='mpi') has no effect: torch.distributed is already initialised with 'gloo'" in message


def test_contexts_one_after_another_adopt_the_same_group() -> None:
    def train(outer: Context) -> list[float]:
        sums: list[float] = []
        for number in range(8):
            with init_context(cpu=True) as ctx:
                sums.append(float(reduce(ctx, torch.tensor(float(number + outer.rank)))))
        return sums

    assert run_ranks(train, 3, on="processes", timeout_s=10.0) == [[3.0 * n + 3 for n in range(8)]] * 3


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


def test_contexts_side_by_side_share_the_group() -> None:
    def two(outer: Context) -> list[Any]:
        first = init_context(cpu=True, mixed_precision="fp16")
        second = init_context(cpu=True, gradient_accumulation_steps=4)
        close_context(first)
        return [
            standing(second)[-1],
            first.mixed_precision,
            second.mixed_precision,
            second.gradient_accumulation_steps,
            outer.gradient_accumulation_steps,
        ]

    assert run_ranks(two, 2, on="processes") == [[[0, 1], "fp16", "no", 4, 1]] * 2


# --- launched ------------------------------------------------------------------------------------


def script(folder: Path, body: str) -> Path:
    """Write a program that ends with ``report(...)``: one file of JSON per rank, beside it."""
    path = folder / "program.py"
    head = f"""\
    import json, os, sys
    sys.path.insert(0, {str(ROOT)!r})
    import torch, torch.distributed as dist
    import accelfn as af
    before, hook = dict(os.environ), sys.excepthook

    def standing(ctx):
        world = ctx.world
        gathered = ctx.collectives.all_gather(torch.tensor([ctx.rank])).tolist()
        return [[world.rank, world.size], [world.local_rank, world.local_size],
                [world.node_rank, world.num_nodes], str(world.device), gathered]

    def report(name, value):
        with open(os.path.join({str(folder)!r}, f"{{name}}.json"), "w") as file:
            json.dump(value, file)
    """
    # torch sometimes aborts when the host of a store exits ("terminate called without an active exception").
    tail = "\nsys.stdout.flush()\nos._exit(0)\n"
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body) + tail, encoding="utf-8")
    return path


def reports(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def plain_environment() -> dict[str, str]:
    known = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "SLURM_", "ACCEL", "TORCHELASTIC")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(known)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run_all(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], *, timeout_s: float = 90
) -> list[str]:
    """Run processes side by side and return what each wrote to stderr; none outlives this."""
    running = [
        subprocess.Popen(
            command,
            env={**plain_environment(), **env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, env in commands
    ]
    try:
        errors = [process.communicate(timeout=timeout_s)[1] for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
    for process, error in zip(running, errors, strict=True):
        assert process.returncode == 0, error
    return errors


def run_torchrun(program: Path, nproc: int = 2) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    run_all([([*launcher, str(program)], {})])


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def test_torchrun_is_joined_owned_and_left_as_it_was(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        found = []
        with af.init_context(cpu=True) as ctx:
            found += [standing(ctx), ctx.world.backend, ctx.world.owned.group, str(ctx.distributed_type)]
            variant = ctx.replace(mixed_precision="bf16")
            with variant:
                shares = variant.world.group is ctx.world.group and not variant.world.owned.group
            found += [shares, dist.is_initialized()]
            second = af.init_context(cpu=True, gradient_accumulation_steps=2)
            af.close_context(second)
            found += [second.world.owned.group, dist.is_initialized(), standing(ctx)[-1]]
        found += [dist.is_initialized(), dict(os.environ) == before, sys.excepthook is hook]
        for _ in range(2):  # torchrun's store still knows the last world
            with af.init_context(cpu=True) as again:
                found.append(standing(again)[-1])
        # Closed again while somebody else's group is there: that one stays.
        dist.init_process_group("gloo")
        af.close_context(ctx)
        found.append(dist.is_initialized())
        dist.destroy_process_group()
        report(os.environ["RANK"], found)
        """,
    )
    run_torchrun(program)
    found = reports(tmp_path)
    assert list(found) == ["0", "1"]
    for rank, lines in enumerate(found.values()):
        place = [[rank, 2], [rank, 2], [0, 1], "cpu", [0, 1]]
        assert lines[:4] == [place, "gloo", True, "MULTI_CPU"]
        assert lines[4:6] == [True, True]
        assert lines[6:9] == [False, True, [0, 1]]
        assert lines[9:12] == [False, True, True]
        assert lines[12:] == [[0, 1], [0, 1], True]


def test_torchrun_with_one_process_has_a_group_that_an_error_closes_too(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        found = []
        try:
            with af.init_context(cpu=True) as ctx:
                found += [standing(ctx), dist.is_initialized(), str(ctx.distributed_type)]
                raise KeyError("mine")
        except KeyError:
            found += [dist.is_initialized(), dict(os.environ) == before, sys.excepthook is hook]
        report("alone", found)
        """,
    )
    run_torchrun(program, nproc=1)
    place = [[0, 1], [0, 1], [0, 1], "cpu", [0]]
    assert reports(tmp_path) == {"alone": [place, True, "NO", False, True, True]}


def mpi_variables(rank: int, size: int, port: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def kubernetes_variables(rank: int, size: int, port: str) -> dict[str, str]:
    # A remote address by its name: every "pod" takes itself for alone on its node until they have talked.
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost.localdomain" if _resolves("localhost.localdomain") else "127.0.0.1",
        "MASTER_PORT": port,
    }


def slurm_variables(rank: int, size: int, port: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "here",
        "MASTER_PORT": port,
    }


def _resolves(name: str) -> bool:
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return False


@pytest.mark.parametrize("variables", [mpi_variables, kubernetes_variables, slurm_variables])
def test_other_launchers_join_one_world_by_their_variables(tmp_path: Path, variables: Any) -> None:
    program = script(
        tmp_path,
        """
        with af.init_context(cpu=True) as ctx:
            found = [standing(ctx), ctx.world.owned.group]
        report(str(ctx.rank), [*found, dist.is_initialized(), dict(os.environ) == before])
        """,
    )
    port = free_port()
    run_all([([sys.executable, str(program)], variables(rank, 2, port)) for rank in range(2)])
    assert reports(tmp_path) == {
        str(rank): [[[rank, 2], [rank, 2], [0, 1], "cpu", [0, 1]], True, False, True] for rank in range(2)
    }


def test_a_world_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in mpi_variables(1, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    hook = sys.excepthook
    short = InitProcessGroupKwargs(timeout=timedelta(seconds=2))
    with pytest.raises(
        DistributedError, match=r"rank 1 could not join its world of 2 \(openmpi, backend gloo"
    ):
        init_context(cpu=True, kwargs_handlers=[short, AutocastKwargs()])
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_a_world_whose_other_ranks_do_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in mpi_variables(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    short = InitProcessGroupKwargs(timeout=timedelta(seconds=2))
    with pytest.raises(DistributedError, match="rank 0 could not join its world of 2"):
        init_context(cpu=True, kwargs_handlers=[short])
    assert not dist.is_initialized()
