"""Tensors mapped from files: equal, writable, cheap to copy, and never robbed of a write."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.weight_files import (
    STORED_DTYPES,
    Stored,
    drop_pages,
    map_stored,
    mapped_from,
    read_in,
    stored_in,
)
from accelfn.checkpoint.disk import REAL_DISK
from accelfn.checkpoint.files import new_entry, write_tensors
from accelfn.context import Context
from accelfn.errors import DamagedCheckpointError
from accelfn.testing import run_ranks

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are only looked at on Linux")
DTYPES = tuple(STORED_DTYPES.values())
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    high = 2 if dtype == torch.bool else 256
    flat = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    write_tensors(
        REAL_DISK, str(path), [new_entry(name, one) for name, one in tensors.items()], {"format": "pt"}
    )
    return path


def bits(tensor: torch.Tensor) -> bytes:
    plain: Any = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return bytes(plain.tolist())


def load(path: Path) -> dict[str, torch.Tensor]:
    stored = stored_in(path)
    return dict(zip(stored, map_stored([*stored.values()]), strict=True))


def filled(path: Path, num_pages: int = 8) -> torch.Tensor:
    """Map a tensor of ones that spans several pages and a part of one."""
    write(path, {"w": torch.ones(num_pages * PAGE // 4 + 100)})
    return load(path)["w"]


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
kinds = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=6)


@given(kinds=kinds, seed=st.integers(0, 1000))
def test_mapped_tensors_equal_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, tuple[int, ...]]], seed: int
) -> None:
    tensors = {f"t{at}": random_tensor(dtype, shape, seed + at) for at, (dtype, shape) in enumerate(kinds)}
    path = write(tmp_path_factory.mktemp("m") / "m.safetensors", tensors)
    before = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = load(path)
    assert mapped.keys() == tensors.keys()
    for name, tensor in tensors.items():
        one = mapped[name]
        assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
        assert bits(one) == bits(tensor)
        assert one.is_contiguous()
        assert one.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
        assert (mapped_from(one) is not None) == bool(tensor.numel())
        one.view(-1).view(torch.uint8).fill_(1)
    assert path.read_bytes() == before


def test_the_mapping_record_follows_the_memory(tmp_path: Path) -> None:
    one = filled(tmp_path / "m.safetensors")
    parameter = nn.Parameter(one)
    assert mapped_from(parameter) is not None
    assert mapped_from(parameter.data) is not None
    assert mapped_from(parameter[1:]) is None
    assert mapped_from(torch.zeros(3)) is None
    assert mapped_from(torch.empty(3, device="meta")) is None
    assert mapped_from(copy.deepcopy(parameter)) is None
    parameter.data = parameter.data.double()
    assert mapped_from(parameter) is None
    one.share_memory_()
    assert mapped_from(one) is None
    assert drop_pages([one, parameter, torch.zeros(3)]) == 0


def test_pickles_and_copies_take_the_bytes_of_one_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"big": torch.zeros(100_000), "small": torch.arange(3.0)})
    small = nn.Parameter(load(path)["small"])
    data = pickle.dumps(small)
    assert len(data) < 2000
    assert torch.equal(pickle.loads(data), small)
    assert b"accelfn" not in data
    saved = io.BytesIO()
    torch.save({"small": small}, saved)
    assert len(saved.getvalue()) < 4000
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=True)["small"], small)
    twin = copy.deepcopy(small)
    with torch.no_grad():
        twin.add_(1)
    assert torch.equal(small, torch.arange(3.0))


def test_a_file_may_go_while_its_tensors_live(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"w": torch.arange(1000.0)})
    one = load(path)["w"]
    write(tmp_path / "other.safetensors", {"w": torch.zeros(1000)})
    os.replace(tmp_path / "other.safetensors", path)
    assert torch.equal(one, torch.arange(1000.0))


# --- files that aren't what they were ------------------------------------------------------------


def test_a_truncated_file_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"w": torch.zeros(10_000)})
    stored = stored_in(path)["w"]
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(DamagedCheckpointError, match=rf"has {size - 1} bytes, but its tensors need {size}"):
        stored.map()


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "w.dat"
    path.write_bytes(bytes(2) + bits(torch.arange(4.0)) + bytes(6))
    odd, even = Stored("odd", path, torch.float32, (4,), 2), Stored("even", path, torch.complex64, (1,), 12)
    assert (odd.is_mappable, even.is_mappable) == (False, True)
    found, other = map_stored([odd, even])
    assert torch.equal(found, torch.arange(4.0))
    assert mapped_from(found) is None
    assert mapped_from(other) is not None


# --- pages ---------------------------------------------------------------------------------------


@on_linux
def test_clean_pages_are_dropped_and_read_again(tmp_path: Path) -> None:
    one = filled(tmp_path / "m.safetensors")
    read_in([one])
    assert float(one.sum()) == one.numel()
    assert drop_pages([one]) >= 7 * PAGE
    assert float(one.sum()) == one.numel()


def by_item(tensor: torch.Tensor, at: int) -> None:
    tensor.detach()[at] = 5.0


def by_data(tensor: torch.Tensor, at: int) -> None:
    tensor.data[at] = 5.0


def by_view(tensor: torch.Tensor, at: int) -> None:
    tensor.detach()[at : at + 1].add_(4.0)


def by_optimizer(tensor: torch.Tensor, at: int) -> None:
    """Add to one element through a parameter that shares the memory."""
    parameter = nn.Parameter(tensor)
    optimizer: Any = torch.optim.SGD([parameter], lr=4.0)
    loss: Any = -parameter[at]
    loss.backward()
    optimizer.step()


Write = Callable[[torch.Tensor, int], None]
places = st.integers(0, 8 * PAGE // 4 + 99)
steps = st.tuples(st.sampled_from([by_item, by_data, by_view, by_optimizer]), places, st.booleans())


@on_linux
@given(writes=st.lists(steps, max_size=4))
def test_no_write_is_lost(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[Write, int, bool]]
) -> None:
    one = filled(tmp_path_factory.mktemp("m") / "m.safetensors")
    wanted = torch.ones_like(one)
    for write_at, at, and_drop in writes:
        write_at(one, at)
        write_at(wanted, at)
        if and_drop:
            drop_pages([one])
        assert torch.equal(one, wanted)
    drop_pages([one])
    assert torch.equal(one, wanted)


def of_files() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))


@on_linux
def test_the_resident_set_falls(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", {"w": torch.ones(16 << 20)})

    def measure(ctx: Context) -> tuple[int, int]:
        if ctx.rank:
            return 1 << 26, 0
        one = load(tmp_path / "m.safetensors")["w"]
        at_rest = of_files()
        assert one.sum() == 16 << 20
        used = of_files()
        drop_pages([one])
        return used - at_rest, of_files() - at_rest

    # In a separate process, since other tests touch pages here.
    used, dropped = run_ranks(measure, 2, on="processes")[0]
    assert used > 60_000_000
    assert dropped < 6_000_000


@on_linux
def test_files_larger_than_memory_are_mapped(tmp_path: Path) -> None:
    with open(tmp_path / "large.dat", "wb") as file:
        file.truncate(1 << 40)  # a hole of 1 TB, more than any machine that runs this has
    one = Stored("w", tmp_path / "large.dat", torch.uint8, (1 << 40,), 0).map()
    one[1 << 39] = 7
    assert int(one[1 << 39]) == 7
    assert int(one[-1]) == 0
