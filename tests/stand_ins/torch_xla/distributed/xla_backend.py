"""The process group "xla": each method takes exactly the arguments of torch_xla's, and runs on gloo."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo


class ProcessGroupXla(ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_default_device()]
        self.gloo = ProcessGroupGloo(store, rank, size, options)

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
        torch_xla.calls.append(("allreduce",))
        return self.gloo.allreduce(tensors, all_reduce_options)

    def _allgather_base(self, output_tensor: Any, input_tensor: Any, opts: Any) -> Any:
        torch_xla.calls.append(("allgather",))
        return self.gloo._allgather_base(output_tensor, input_tensor, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        torch_xla.calls.append(("broadcast",))
        return self.gloo.broadcast(tensors, opts)

    def alltoall_base(self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any) -> Any:
        assert not output_splits
        assert not input_splits
        return self.gloo.alltoall_base(output, input, output_splits, input_splits, opts)


def _rendezvous(url: str, timeout: Any = None, **kwargs: Any) -> Any:
    is_host = torch_xla.RANK == 0
    store = dist.TCPStore("127.0.0.1", int(os.environ["XLA_STAND_IN_PORT"]), torch_xla.SIZE, is_host)
    yield store, torch_xla.RANK, torch_xla.SIZE


if torch_xla.SIZE > 1:  # torch's registry is that of the process
    dist.Backend.register_backend("xla", ProcessGroupXla, devices="xla")
    dist.register_rendezvous_handler("xla", _rendezvous)
