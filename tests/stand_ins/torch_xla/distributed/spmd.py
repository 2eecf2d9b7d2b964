from typing import Any

import torch

from .. import calls

_mesh: list[Any] = []


class Mesh:
    def __init__(
        self, device_ids: list[int], mesh_shape: tuple[int, ...], axis_names: tuple[str, ...]
    ) -> None:
        assert len(device_ids) == mesh_shape[0] * mesh_shape[1]
        self.mesh_shape, self.axis_names = mesh_shape, axis_names


def set_global_mesh(mesh: Mesh) -> None:
    _mesh[:] = [mesh]


def get_global_mesh() -> Mesh:
    return _mesh[0]


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: tuple[str | None, ...]) -> None:
    assert len(partition_spec) == t.dim()
    calls.append(("mark_sharding", tuple(t.shape), partition_spec))
