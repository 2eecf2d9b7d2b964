"""The process group "xla": each method takes exactly the arguments of torch_xla's, and runs on gloo."""

import os
from collections.abc import Generator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings

from .. import RANK, SIZE, calls

torch_dist: Any = dist
Base: Any = dist.ProcessGroup
Gloo: Any = cast("Any", bindings).ProcessGroupGloo


class ProcessGroupXla(Base):
    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        Base.__init__(self, rank, size)
        options = Gloo._Options()
        options._devices = [Gloo.create_default_device()]
        self.gloo = Gloo(store, rank, size, options)

    def getBackendName(self) -> str:  # noqa: N802 -- torch's name
        return "xla"

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # what stands in for XLA's device

    def allreduce(self, tensors: Any, all_reduce_options: Any) -> Any:
        calls.append(("allreduce",))
        return self.gloo.allreduce(tensors, all_reduce_options)

    def _allgather_base(self, output_tensor: Any, input_tensor: Any, opts: Any) -> Any:
        calls.append(("allgather",))
        return self.gloo._allgather_base(output_tensor, input_tensor, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        calls.append(("broadcast",))
        return self.gloo.broadcast(tensors, opts)


def _rendezvous(url: str, timeout: Any = None, **kwargs: Any) -> Generator[Any, None, None]:
    is_host = RANK == 0
    store = torch_dist.TCPStore("127.0.0.1", int(os.environ["XLA_STAND_IN_PORT"]), SIZE, is_host)
    yield store, RANK, SIZE


if SIZE > 1:  # torch's registry is that of the process
    torch_dist.Backend.register_backend("xla", ProcessGroupXla, devices="xla")
    torch_dist.register_rendezvous_handler("xla", _rendezvous)
