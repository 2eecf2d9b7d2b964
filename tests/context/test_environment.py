"""From launchers' variables to a plan: what each launcher really sets, and what must be refused."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context.environment import EnvironmentPlan, detect_environment, first_host
from accelfn.errors import EnvironmentPlanError

Env = dict[str, str]


def torchrun(rank: int, size: int, local: int, local_size: int, node: int, nodes: int) -> Env:
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_size}
    env = {**places, "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes, "MASTER_PORT": 29400}
    return {name: str(number) for name, number in env.items()} | {
        "MASTER_ADDR": "node0",
        "TORCHELASTIC_RUN_ID": "none",
    }


def slurm(rank: int, size: int, local: int, local_size: int, node: int, nodes: int, spread: str) -> Env:
    places = {"NTASKS": size, "PROCID": rank, "LOCALID": local, "NODEID": node, "JOB_ID": 1234}
    step = {"STEP_ID": 0, "STEP_NUM_TASKS": size, "STEP_NUM_NODES": nodes, "STEP_TASKS_PER_NODE": spread}
    hosts = {"STEP_NODELIST": "gpu[07-12]", "JOB_NODELIST": "gpu[01-12]"}
    return {f"SLURM_{name}": str(value) for name, value in {**places, **step, **hosts}.items()}


Family = Callable[[int, int, int, int], Env]


def family(rank: str, size: str, local: str, local_size: str) -> Family:
    def launch(*numbers: int) -> Env:
        return dict(zip((rank, size, local, local_size), map(str, numbers), strict=True))

    return launch


openmpi = family(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
mvapich = family(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
hydra = family("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # MPICH and Intel MPI
pals = family("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")  # Cray's mpiexec

MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "12345"}
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345"}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4"}


def plan(
    launcher: str,
    rank_size: tuple[int, int],
    local: tuple[int, int],
    node: tuple[int, int],
    master: tuple[str | None, int | None],
    *,
    known: bool = True,
) -> EnvironmentPlan:
    names = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")
    places = dict(zip(names, (*rank_size, *local, *node), strict=True))
    address: dict[str, Any] = {"master_addr": master[0], "master_port": master[1], "nodes_known": known}
    return EnvironmentPlan(launcher=launcher, **places, **address)


# Name: variables, and the plan.
LAUNCHES: Mapping[str, tuple[Env, EnvironmentPlan]] = {
    "nothing": ({}, EnvironmentPlan()),
    "not distributed, as old launchers say it": ({"LOCAL_RANK": "-1"}, EnvironmentPlan()),
    "not distributed, with a size": ({"LOCAL_RANK": "-1", "RANK": "0", "WORLD_SIZE": "1"}, EnvironmentPlan()),
    "torchrun, second of three nodes": (
        torchrun(5, 12, 1, 4, 1, 3),
        plan("torchrun", (5, 12), (1, 4), (1, 3), ("node0", 29400)),
    ),
    "torchrun, the small one of two uneven nodes": (
        torchrun(4, 5, 0, 1, 1, 2),
        plan("torchrun", (4, 5), (0, 1), (1, 2), ("node0", 29400)),
    ),
    "torchrun inside mpirun": (
        {**openmpi(0, 2, 0, 1), **torchrun(3, 4, 1, 2, 1, 2)},
        plan("torchrun", (3, 4), (1, 2), (1, 2), ("node0", 29400)),
    ),
    "Kubernetes: one process a pod": (
        {"RANK": "2", "WORLD_SIZE": "4", **MASTER},
        plan("env", (2, 4), (0, 1), (2, 4), ("node0", 12345), known=False),
    ),
    "by hand on loopback": (
        {"RANK": "2", "WORLD_SIZE": "4", **LOOPBACK},
        plan("env", (2, 4), (2, 4), (0, 1), ("127.0.0.1", 12345)),
    ),
    "by hand without an address": (
        {"RANK": "2", "WORLD_SIZE": "4"},
        plan("env", (2, 4), (2, 4), (0, 1), ("127.0.0.1", 29500)),
    ),
    "by hand, all there but the node": (
        {**BY_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MASTER},
        plan("env", (3, 4), (1, 2), (1, 2), ("node0", 12345), known=False),
    ),
    "a platform that numbers nodes": (
        {**BY_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1", **MASTER},
        plan("env", (3, 4), (1, 2), (1, 2), ("node0", 12345)),
    ),
    "a platform that leaves out how many are on the node": (
        {**BY_HAND, "LOCAL_RANK": "1", "NODE_RANK": "1", **MASTER},
        plan("env", (3, 4), (1, 2), (1, 2), ("node0", 12345), known=False),
    ),
    "Open MPI's mpirun in a SLURM allocation: srun started the daemons": (
        {**openmpi(1, 2, 1, 2), **slurm(0, 2, 0, 1, 0, 2, "1(x2)")},
        plan("openmpi", (1, 2), (1, 2), (0, 1), ("127.0.0.1", 29500)),
    ),
    "MVAPICH": (
        {**mvapich(1, 2, 1, 2), "MASTER_PORT": "7"},
        plan("mvapich", (1, 2), (1, 2), (0, 1), ("127.0.0.1", 7)),
    ),
    "Cray PALS, two nodes": (
        {**pals(3, 4, 1, 2), **MASTER},
        plan("mpich", (3, 4), (1, 2), (1, 2), ("node0", 12345), known=False),
    ),
    "MPI on loopback that doesn't say the place": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", **LOOPBACK},
        plan("mpich", (1, 2), (1, 2), (0, 1), ("127.0.0.1", 12345)),
    ),
    "SLURM, third of three uneven nodes": (
        slurm(4, 5, 0, 1, 2, 3, "2(x2),1"),
        plan("slurm", (4, 5), (0, 1), (2, 3), ("gpu07", 28638)),
    ),
    "SLURM with an address": (
        {**slurm(3, 4, 1, 2, 1, 2, "2(x2)"), **MASTER},
        plan("slurm", (3, 4), (1, 2), (1, 2), ("node0", 12345)),
    ),
    "sbatch without srun": (
        {name: text for name, text in slurm(0, 8, 0, 8, 0, 1, "8").items() if "STEP" not in name},
        EnvironmentPlan(),
    ),
    "srun -n 1": (slurm(0, 1, 0, 1, 0, 1, "1"), EnvironmentPlan()),
    "srun --mpi=pmi2": (
        {**slurm(3, 4, 1, 2, 1, 2, "2(x2)"), "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "7"},
        plan("slurm", (3, 4), (1, 2), (1, 2), ("gpu07", 28638)),
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_each_launcher_is_understood(name: str) -> None:
    env, expected = LAUNCHES[name]
    assert detect_environment(env) == expected


# Name: variables, and what the message must say.
REFUSED: Mapping[str, tuple[Env, str]] = {
    "size without rank": ({"WORLD_SIZE": "2"}, "sets WORLD_SIZE but not RANK"),
    "negative rank": ({"RANK": "-1", "WORLD_SIZE": "2"}, r"rank must be in 0\.\.1, got -1"),
    "empty world": ({"RANK": "0", "WORLD_SIZE": "0"}, "a rank needs at least one process, got 0"),
    "not a number": ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be an integer, got 'one'"),
    "port outside the range": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"},
        r"MASTER_PORT must be in 1\.\.65535, got 65536",
    ),
    "local rank outside the node": (
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", **MASTER},
        r"local_rank must be in 0\.\.1, got 2",
    ),
    "an empty node": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0", **MASTER},
        "a local_rank needs at least one process, got 0",
    ),
    "node outside the nodes": ({**torchrun(0, 4, 0, 2, 2, 2)}, r"node_rank must be in 0\.\.1, got 2"),
    "a full node beside others": (torchrun(0, 4, 0, 4, 0, 2), "are more than the world size 4"),
    "alone, and not": ({"LOCAL_RANK": "-1", "RANK": "0", "WORLD_SIZE": "4"}, "LOCAL_RANK=-1 means"),
    "several nodes by hand without an address": (
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        "Export MASTER_ADDR",
    ),
    "half of Open MPI's pair": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=None"),
    "Open MPI on several nodes without an address": (openmpi(0, 4, 0, 2), "Export MASTER_ADDR"),
    "MPI that doesn't say the place": (
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        "MPI_LOCALRANKID and MPI_LOCALNRANKS, .* are not set",
    ),
    "SLURM's rank outside its step": (slurm(4, 4, 0, 2, 1, 2, "2(x2)"), r"rank must be in 0\.\.3, got 4"),
    "SLURM's node outside the list": (slurm(3, 4, 0, 1, 2, 3, "2(x2)"), "SLURM_NODEID=2 is out of range"),
    "SLURM's spread in another form": (slurm(0, 4, 0, 2, 0, 2, "2x2"), "'2x2' has an unknown format"),
    "SLURM on several nodes without hosts": (
        slurm(0, 4, 0, 2, 0, 2, "2(x2)") | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""},
        "MASTER_ADDR is not set",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused(name: str) -> None:
    env, message = REFUSED[name]
    with pytest.raises(EnvironmentPlanError, match=message):
        detect_environment(env)


def test_slurm_steps_of_one_job_get_different_ports() -> None:
    step = slurm(0, 2, 0, 2, 0, 1, "2")
    ports = {detect_environment({**step, "SLURM_STEP_ID": str(number)}).master_port for number in range(5)}
    assert len(ports) == 5


def test_slurm_without_a_spread_takes_equal_nodes() -> None:
    env = slurm(3, 4, 1, 2, 1, 2, "")
    found = detect_environment(env)
    assert (found.local_size, found.local_rank) == (2, 1)
    del env["SLURM_LOCALID"]
    assert detect_environment(env).local_rank == 1


HOSTS = {"n1,n2": "n1", "n[01,03-05],m2": "n01", "n7,m[1-2]": "n7", "r[1-2]c[3,5]": "r1c3", " n1 ": "n1"}


def test_first_host_of_a_list() -> None:
    assert {hosts: first_host(hosts) for hosts in HOSTS} == HOSTS
    assert first_host("gpu-[01-03].cluster.org") == "gpu-01.cluster.org"


@pytest.mark.parametrize("hosts", ["", ",", "]"])
def test_an_unknown_list_of_hosts_is_refused(hosts: str) -> None:
    with pytest.raises(EnvironmentPlanError, match="unknown format"):
        first_host(hosts)


# --- laws ----------------------------------------------------------------------------------------

Layout = list[int]  # processes on each node
Launch = Callable[[Layout, int, int, int], Env]


def by_torchrun(layout: Layout, node: int, local: int, rank: int) -> Env:
    return torchrun(rank, sum(layout), local, layout[node], node, len(layout))


def by_slurm(layout: Layout, node: int, local: int, rank: int) -> Env:
    spread = ",".join(str(count) for count in layout)
    return slurm(rank, sum(layout), local, layout[node], node, len(layout), spread)


def by_mpi(family: Family) -> Launch:
    def launch(layout: Layout, node: int, local: int, rank: int) -> Env:
        return {**family(rank, sum(layout), local, layout[node]), **MASTER}

    return launch


def in_blocks(layout: Layout) -> list[tuple[int, int]]:
    """Give (node, local rank) by rank: one node is filled after the other."""
    return [(node, local) for node, count in enumerate(layout) for local in range(count)]


def in_turn(layout: Layout) -> list[tuple[int, int]]:
    """Give (node, local rank) by rank: one process a node, then from the first node again."""
    return [
        (node, local) for local in range(max(layout)) for node, count in enumerate(layout) if local < count
    ]


def has_several(layout: Layout) -> bool:
    return sum(layout) > 1


uneven = st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(has_several)
layouts = uneven | st.lists(st.just(2), min_size=1, max_size=5)


@pytest.mark.parametrize("launch", [by_torchrun, by_slurm])
@pytest.mark.parametrize("deal", [in_blocks, in_turn])
@given(layout=uneven)
def test_launchers_that_number_nodes_give_the_layout_exactly(
    launch: Launch, deal: Callable[[Layout], list[tuple[int, int]]], layout: Layout
) -> None:
    if launch is by_torchrun:
        deal = in_blocks  # its agents never deal in turn
    for rank, (node, local) in enumerate(deal(layout)):
        found = detect_environment(launch(layout, node, local, rank))
        assert (found.rank, found.size, found.nodes_known) == (rank, sum(layout), True)
        assert (found.local_rank, found.local_size) == (local, layout[node])
        assert (found.node_rank, found.num_nodes) == (node, len(layout))


@pytest.mark.parametrize("family", [openmpi, mvapich, hydra, pals])
@pytest.mark.parametrize("deal", [in_blocks, in_turn])
@given(layout=layouts)
def test_mpi_on_any_layout_gives_the_rank_and_says_that_its_node_is_a_guess(
    family: Family, deal: Callable[[Layout], list[tuple[int, int]]], layout: Layout
) -> None:
    for rank, (node, local) in enumerate(deal(layout)):
        found = detect_environment(by_mpi(family)(layout, node, local, rank))
        assert (found.rank, found.size) == (rank, sum(layout))
        assert (found.local_rank, found.local_size) == (local, layout[node])
        assert found.nodes_known == (len(layout) == 1)
        if deal is in_blocks and len(set(layout)) == 1:  # the usual layout, which is guessed
            assert (found.node_rank, found.num_nodes) == (node, len(layout))


NAMES = (
    *torchrun(0, 1, 0, 1, 0, 1),
    *slurm(0, 1, 0, 1, 0, 1, "1"),
    *openmpi(0, 1, 0, 1),
    *hydra(0, 1, 0, 1),
    *pals(0, 1, 0, 1),
    "NODE_RANK",
)
values = st.sampled_from(("", "-1", "0", "1", "2", "3", "4", "x", "2(x2)", "127.0.0.1"))


@given(env=st.dictionaries(st.sampled_from(NAMES), values, max_size=10))
def test_any_variables_give_a_plan_or_a_refusal_and_stay_as_they_are(env: Env) -> None:
    before = dict(env)

    def outcome() -> EnvironmentPlan | str:
        try:
            return detect_environment(env)
        except EnvironmentPlanError as error:
            return str(error)

    found = outcome()
    assert outcome() == found
    if isinstance(found, EnvironmentPlan):
        assert 0 <= found.rank < found.size
        assert 0 <= found.local_rank < found.local_size
        assert found.local_size + found.num_nodes - 1 <= found.size
    assert env == before


@given(rank=st.integers(0, 3), size=st.integers(2, 4))
def test_a_world_that_was_asked_for_is_never_silently_one_process(rank: int, size: int) -> None:
    for drop in ("RANK", "WORLD_SIZE"):
        env = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        del env[drop]
        with pytest.raises(EnvironmentPlanError):
            detect_environment(env)
