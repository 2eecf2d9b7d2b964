import os
from collections.abc import Mapping

import torch

def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes: ...
def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None: ...
def load(data: bytes) -> dict[str, torch.Tensor]: ...
def load_file(
    filename: str | os.PathLike[str], device: str | int | torch.device = "cpu"
) -> dict[str, torch.Tensor]: ...
