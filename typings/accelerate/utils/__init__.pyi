from typing import TypeVar

import torch

_T = TypeVar("_T")

def find_batch_size(data: object) -> int: ...
def send_to_device(tensor: _T, device: str | torch.device) -> _T: ...
