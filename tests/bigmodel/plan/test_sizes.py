from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from accelfn.bigmodel import (
    CustomDtype,
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_max_layer_size,
    get_module_leaves,
    get_non_persistent_buffers,
)
from tests.bigmodel.plan.trees import M3


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, 4),
        ("torch.bfloat16", 2),
        (torch.complex64, 8),
        (torch.bool, 1),  # what it takes; Accelerate counts an eighth
        (CustomDtype.FP8, 1),
        (CustomDtype.INT4, 0.5),
        ("int4", 0.5),
        (CustomDtype.INT2, 0.25),
    ],
)
def test_bytes_of_an_element(dtype: Any, expected: float) -> None:
    assert dtype_byte_size(dtype) == expected
    if isinstance(dtype, torch.dtype):
        assert torch.empty(1, dtype=dtype).nbytes == expected


@pytest.mark.parametrize("dtype", ["float17", "weight", 16, None])
def test_unknown_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be a torch dtype or its name"):
        dtype_byte_size(dtype)


def test_the_documented_sizes() -> None:
    sizes = compute_module_sizes(M3())
    assert {name: sizes[name] for name in ("", "linear1", "batchnorm", "linear2")} == {
        "": 236,
        "linear1": 64,
        "batchnorm": 72,
        "linear2": 100,
    }
    assert sizes["batchnorm.num_batches_tracked"] == 8
    half = compute_module_sizes(M3(), dtype="float16")
    assert [half[name] for name in ("linear1", "batchnorm", "linear2", "")] == [32, 40, 50, 122]
    # No dtype makes anything larger, but a special one does.
    assert sizes == compute_module_sizes(M3(), dtype=torch.float64)
    assert sizes["absent"] == 0
    special = compute_module_sizes(
        M3(), torch.float16, {"linear1.weight": torch.float64, "linear2.bias": "int4"}
    )
    assert special["linear1"] == 96 + 8
    assert special["linear2.bias"] == 3  # two and a half
    assert calculate_maximum_sizes(M3()) == (236, (100, ["linear2"]))
    assert compute_module_total_buffer_size(M3()) == 40
    assert compute_module_total_buffer_size(M3(), dtype=torch.float16) == 24
    assert compute_module_total_buffer_size(nn.Linear(2, 2)) == 0


def test_names_and_layers() -> None:
    model = nn.Sequential(M3(), nn.Linear(10, 5))
    cast("Any", model[0]).register_buffer("table", torch.zeros(3), persistent=False)
    sizes = compute_module_sizes(model)
    tensors = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    assert sorted(get_module_leaves(sizes)) == sorted(tensors)
    assert get_max_layer_size([*model.named_children()], sizes, []) == (220, ["1"])
    assert get_max_layer_size([*model.named_children()], sizes, ["M3"]) == (248, ["0"])
    assert get_non_persistent_buffers(model) == set()
    assert get_non_persistent_buffers(model, recurse=True) == {"table"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"0.table"}


def test_only_floating_tensors_are_cast() -> None:
    model: Any = nn.Module()
    model.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
    model.register_buffer("waves", torch.zeros(3, dtype=torch.complex64))
    model.register_buffer("numbers", torch.zeros(3))
    sizes = compute_module_sizes(model, dtype=torch.float16)
    assert (sizes["counts"], sizes["waves"], sizes["numbers"]) == (24, 24, 6)


def test_no_split_modules_are_layers() -> None:
    model: Any = nn.Sequential(M3(), nn.Linear(10, 5))
    model._no_split_modules = ["M3"]
    assert calculate_maximum_sizes(model) == (456, (236, ["0"]))
    model._no_split_modules = None
    assert calculate_maximum_sizes(model) == (456, (220, ["1"]))
