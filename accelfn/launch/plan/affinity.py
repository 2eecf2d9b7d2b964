"""Which cores each process of a machine gets: near its accelerator, and no core twice."""

from __future__ import annotations

from collections.abc import Sequence

from accelfn.launch.plan.machine import NumaNode

__all__ = ("plan_affinity",)


def plan_affinity(
    nodes: Sequence[NumaNode], local_size: int, device_nodes: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Share the cores of a machine out. Pure.

    A process goes to the memory node of its accelerator; without that, processes are spread over the nodes in
    blocks. The processes of a node share its cores in equal parts; if it has fewer cores than processes, each
    may use all of them.

    Args:
        nodes: Memory nodes with the cores that may be used.
        local_size: Processes on this machine.
        device_nodes: Memory node of each process's accelerator, -1 where that isn't known.

    Returns:
        The cores of each process, in the order of local ranks; empty without nodes.

    >>> nodes = (NumaNode(0, (0, 1, 2, 3)), NumaNode(1, (4, 5, 6, 7)))
    >>> plan_affinity(nodes, 2), plan_affinity(nodes, 4, (1, 1, 0, 0))
    (((0, 1, 2, 3), (4, 5, 6, 7)), ((4, 5), (6, 7), (0, 1), (2, 3)))
    """
    if not nodes or local_size < 1:
        return ()
    known = {node.number: node for node in nodes}
    homes: list[NumaNode] = []
    for rank in range(local_size):
        number = device_nodes[rank] if rank < len(device_nodes) else -1
        homes.append(known.get(number) or nodes[rank * len(nodes) // local_size])
    plan: list[tuple[int, ...]] = []
    for rank, home in enumerate(homes):
        together = [one for one in range(local_size) if homes[one] is home]
        share = len(home.cpus) // len(together)
        place = together.index(rank)
        plan.append(home.cpus[place * share : (place + 1) * share] if share else home.cpus)
    return tuple(plan)
