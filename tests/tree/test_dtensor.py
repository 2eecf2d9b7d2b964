"""DTensors are told from other tensors, and their module isn't loaded for that."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import subprocess
import sys

import torch

from accelfn import Context
from accelfn.testing import run_ranks
from accelfn.tree import is_dtensor, local_of


def test_a_plain_tensor_is_all_here_and_a_dtensor_is_not() -> None:
    plain = torch.ones(2, requires_grad=True)
    assert not is_dtensor(plain)
    assert not is_dtensor(None)
    assert local_of(plain) is plain

    def run(ctx: Context) -> list[float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (ctx.num_processes,))
        spread = torch.nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
        assert is_dtensor(spread)
        local = local_of(spread)
        assert not is_dtensor(local)
        assert not local.requires_grad
        writes = local_of(spread)._version
        local.mul_(2)  # the very part
        assert local_of(spread)._version == writes + 1
        return local_of(spread).tolist()

    assert run_ranks(run, 2, on="processes") == [[0, 2], [4, 6]]


def test_to_ask_does_not_load_the_module() -> None:
    code = (
        "import sys, torch; from accelfn.tree import is_dtensor, local_of; "
        "assert not is_dtensor(local_of(torch.ones(2))); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
