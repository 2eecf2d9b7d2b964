from datetime import timedelta
from typing import TypeVar

import torch

_T = TypeVar("_T")

def find_batch_size(data: object) -> int: ...
def send_to_device(tensor: _T, device: str | torch.device) -> _T: ...

class InitProcessGroupKwargs:
    def __init__(self, backend: str | None = "nccl", timeout: timedelta | None = None) -> None: ...
