from collections.abc import Callable
from typing import Any

from torch import nn

from .. import calls


class SpmdFullyShardedDataParallel(nn.Module):
    def __init__(self, module: nn.Module, mesh: Any, shard_output: Callable[..., Any] | None = None) -> None:
        assert "fsdp" in mesh.axis_names
        super().__init__()
        self._orig_module = module
        calls.append(("fsdp", type(module).__name__))
