"""States that are cut over ranks: any cut and any world takes up what any other has saved, bit for bit."""

import json
import math
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import accelfn as af
from accelfn.checkpoint.manifest import MANIFEST, Manifest, Piece, StoredTensor, parse_manifest
from accelfn.checkpoint.plan import find_overlaps, join_overlaps, join_parts
from accelfn.context import Context
from accelfn.errors import CheckpointMismatchError, DamagedCheckpointError, Misfit, RemoteRankError
from accelfn.testing import run_ranks
from tests.checkpoint.layouts import OPTIMIZERS, Layout, laid_out, mesh_of, step, whole

Tensors = dict[str, torch.Tensor]


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Name what is not the same to the last bit."""
    names = one.keys() | other.keys()
    return sorted(name for name in names if not _same(one.get(name), other.get(name)))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def manifest_of(path: Path) -> Manifest:
    return parse_manifest((path / MANIFEST).read_bytes())


# --- any layout to any layout --------------------------------------------------------------------

# World sizes 4, 3, 2 and 1; neither tells of the other which of them an error would hide in.
JOURNEY = (
    Layout("fsdp", (4,)),
    Layout("tp_fsdp", (2, 2)),
    Layout("ddp", (2,)),
    Layout("fsdp", (3,)),
    Layout("ddp", (1,)),
    Layout("hsdp", (2, 2)),
    Layout("tp", (2,)),
    Layout("fsdp", (2,)),
    Layout("fsdp", (1,)),
)


# Nine worlds; each takes up what the one before has saved, makes steps and saves again.
def test_every_layout_takes_up_what_another_has_saved(tmp_path: Path) -> None:
    last: dict[str, Tensors] = {}
    for number, layout in enumerate(JOURNEY):

        def run(
            ctx: Context, number: int = number, layout: Layout = layout
        ) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
            came: dict[str, Tensors] = {}
            left: dict[str, Tensors] = {}
            for name, make in OPTIMIZERS.items():
                model = laid_out(ctx, layout, seed=number)
                optimizer = make(model.parameters())
                tree = {"model": model, "optimizer": optimizer}
                if number:
                    af.load_state(ctx, tmp_path / f"{name}-{number - 1}", tree)
                came[name] = whole(model, optimizer)
                step(model, optimizer, 2)
                af.save_state(ctx, tmp_path / f"{name}-{number}", tree)
                left[name] = whole(model, optimizer)
                scratch = model.get_buffer("module.scratch" if hasattr(model, "module") else "scratch")
                assert not scratch.any()
                inner = af.unwrap_model(model)
                assert inner.get_parameter("head.weight") is inner.get_parameter("embed.weight")
            return came, left

        results = run_ranks(run, layout.size, "processes")
        for rank, (came, left) in enumerate(results):
            for name in OPTIMIZERS:
                where = f"{name} on rank {rank} of {layout}"
                assert not number or not differing(came[name], last[name]), where
                assert not differing(left[name], results[0][1][name]), where
        last = results[0][1]
        for name in OPTIMIZERS:
            check_pieces(tmp_path / f"{name}-{number}", last[name])


def check_pieces(path: Path, expected: Tensors) -> None:
    """See that every element is stored once, whatever number of ranks holds it, and can be read anywhere."""
    manifest = manifest_of(path)
    for name, one in manifest.tensors.items():
        assert sum(math.prod(piece.shape) for piece in one.pieces) == math.prod(one.shape), name
        assert len({(piece.offset, piece.shape) for piece in one.pieces}) == len(one.pieces), name
    entries = [(piece.file, piece.key) for one in manifest.tensors.values() for piece in one.pieces]
    assert len(set(entries)) == len(entries)
    assert not {"model/head.weight", "model/embed.weight"} <= manifest.tensors.keys()  # they are tied
    af.verify_checkpoint(path)
    loaded = af.load_tree(path)
    found = {f"model/{name}": value for name, value in loaded["model"].items()}
    for name, values in loaded["optimizer"]["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer/{name.removeprefix('model/')}/{key}"] = value
    assert not differing(found, expected)


# --- pieces and boxes, without any world ---------------------------------------------------------


class Grid(NamedTuple):
    """A tensor's shape, and where each dimension is cut."""

    cuts: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(cut[-1] for cut in self.cuts)

    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        ranges = [list(pairwise(cut)) for cut in self.cuts]
        return [
            (tuple(start for start, _ in one), tuple(end - start for start, end in one))
            for one in product(*ranges)
        ]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> Grid:
    inner = [draw(st.lists(st.integers(0, size), max_size=3)) for size in shape]
    return Grid(tuple((0, *sorted(cut), size) for cut, size in zip(inner, shape, strict=True)))


class Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Cut:
    """Says which part of a tensor is wanted, as a DTensor does."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(self.chunk.offsets), torch.Size(self.chunk.sizes))]


def sliced(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


DTYPES = ("float32", "bfloat16", "bool", "complex128", "float8_e4m3fn", "uint16")


@given(st.data(), st.lists(st.integers(0, 6), max_size=3).map(tuple), st.sampled_from(DTYPES))
def test_any_box_is_put_together_from_any_pieces(
    data: st.DataObject, shape: tuple[int, ...], dtype: str
) -> None:
    kind = cast("torch.dtype", getattr(torch, dtype))
    plain = torch.randint(0, 2, (*shape, kind.itemsize), dtype=torch.uint8)
    whole = plain.view(kind).reshape(shape)
    grid = data.draw(grids(shape))
    assert grid.shape == shape
    # A save leaves out what has no elements, unless the tensor has none.
    boxes = [box for box in grid.boxes() if all(box[1]) or not whole.numel()]
    pieces = tuple(Piece("tensors-00000.safetensors", str(one), *one, ()) for one in dict.fromkeys(boxes))
    data.draw(st.permutations(pieces))
    stored = StoredTensor(dtype, shape, pieces)
    content = {piece.key: sliced(whole, piece.offset, piece.shape) for piece in pieces}

    def read(target: Any) -> torch.Tensor:
        found = find_overlaps(stored, target)
        parts = [
            (
                content[one.piece.key]
                if one.offset is None
                else sliced(content[one.piece.key], one.offset, one.shape or ())
            )
            .contiguous()
            .clone()
            for one in found
        ]
        if target is None:
            return join_overlaps(stored, None, found, parts)
        for one in found:  # nothing is read in vain
            assert all((one.piece.shape if one.shape is None else one.shape) or (1,)) or not whole.numel()
        return join_parts(dtype, target.chunk.sizes, found, parts)

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    assert torch.equal(bits(read(None)), bits(whole))
    corners = [
        tuple(sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in shape
    ]
    offset = tuple(start for start, _ in corners)
    sizes = tuple(end - start for start, end in corners)
    result = read(Cut(Chunk(offset, sizes)))
    assert (result.dtype, tuple(result.shape)) == (kind, sizes)
    assert torch.equal(bits(result), bits(sliced(whole, offset, sizes)))


# --- what is special about cut states ------------------------------------------------------------


def small(layout: Layout) -> nn.Module:
    return fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), mesh=mesh_of(layout))  # pyright: ignore[reportReturnType]


def test_parameters_keep_their_names_after_an_evaluation(tmp_path: Path) -> None:
    def run(ctx: Context) -> list[str]:
        def evaluated(num: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = small(Layout("fsdp", (2,)))
            optimizer = torch.optim.AdamW(
                reversed(list(model.parameters())) if num == 0 else model.parameters()
            )
            step(model, optimizer, num)
            with torch.no_grad():
                model(torch.ones(2, 5))  # leaves gathered parameters behind
            return model, optimizer

        model, optimizer = evaluated(2)
        af.save_state(ctx, tmp_path / "at", {"model": model, "optimizer": optimizer})
        fresh, other = evaluated(0)
        af.load_state(ctx, tmp_path / "at", {"model": fresh, "optimizer": other})
        return differing(whole(model, optimizer), whole(fresh, other))

    assert run_ranks(run, 2, "processes") == [[], []]


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.row = nn.Parameter(torch.ones(1))


def test_the_number_of_steps_is_cut_with_no_parameter(tmp_path: Path) -> None:
    def run(ctx: Context) -> dict[str, str]:
        def new() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = distribute_module(Numbers(), mesh_of(Layout("tp", (2,))))
            return model, torch.optim.AdamW(model.parameters(), foreach=False)

        model, optimizer = new()
        step(model, optimizer, 2)
        af.save_state(ctx, tmp_path / "at", {"model": model, "optimizer": optimizer})
        fresh, other = new()
        af.load_state(ctx, tmp_path / "at", {"model": fresh, "optimizer": other})
        assert not differing(whole(model, optimizer), whole(fresh, other))
        state = cast("dict[str, Any]", other.state[fresh.get_parameter("scale")])
        return {key: type(value).__name__ for key, value in state.items()}

    expected = {"step": "Tensor", "exp_avg": "DTensor", "exp_avg_sq": "DTensor"}
    assert run_ranks(run, 2, "processes") == [expected] * 2


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[Misfit, ...]:
        layout = Layout("fsdp", (2,))
        model = small(layout)
        af.save_state(ctx, tmp_path / "at", {"model": model, "average": torch.ones(3)})
        with torch.device("meta"):
            fresh = small(layout)
            like = {"model": fresh, "average": torch.zeros(3)}
        with pytest.raises(CheckpointMismatchError, match="to_empty") as caught:
            af.load_state(ctx, tmp_path / "at", like)
        fresh.to_empty(device="cpu")
        loaded: Any = af.load_state(ctx, tmp_path / "at", like)
        optimizer = torch.optim.SGD(model.parameters())
        assert not differing(whole(model, optimizer), whole(fresh, optimizer))
        assert torch.equal(loaded["average"], torch.ones(3))
        return caught.value.rows

    for rows in run_ranks(run, 2, "processes"):
        assert [row.path for row in rows] == [
            f"model/{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")
        ]
        assert rows[0].stored == "float32 [7, 5]"


def test_cut_tensors_of_the_tree_itself_in_the_background(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        mesh = mesh_of(Layout("fsdp", (3,)))
        full = torch.arange(35.0).reshape(7, 5)

        def cut(tensor: torch.Tensor, *placements: Any) -> DTensor:
            return distribute_tensor(tensor.clone(), mesh, placements)

        tree: dict[str, Any] = {
            "rows": cut(full, Shard(0)),
            "columns": nn.Parameter(cut(full, Shard(1))),
            "whole": full.clone(),
            "copied": cut(full, Replicate()),
            "empty": cut(torch.zeros(0, 3), Shard(0)),
            "number": cut(torch.tensor(4), Replicate()),
        }
        handle = af.save_state(ctx, tmp_path / "at", tree, True)
        with torch.no_grad():
            for name in ("rows", "columns", "whole", "copied"):
                tree[name].zero_()
        handle.result()
        zeros = torch.zeros(7, 5)
        like: dict[str, Any] = {
            "rows": nn.Parameter(cut(zeros, Shard(1))),
            "columns": zeros.clone(),
            "whole": cut(zeros, Shard(1)),
            "copied": cut(zeros, Shard(0)),
            "empty": torch.zeros(0, 3),
            "number": torch.tensor(0),
        }
        loaded = af.load_state(ctx, tmp_path / "at", like)
        assert loaded["rows"] is like["rows"]
        for name, value in loaded.items():
            assert isinstance(value, DTensor) == isinstance(like[name], DTensor)
            expected = {"empty": torch.zeros(0, 3), "number": torch.tensor(4)}.get(name, full)
            assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected), name

    run_ranks(run, 3, "processes")


def test_ranks_of_a_pipeline_have_different_modules(tmp_path: Path) -> None:
    def run(ctx: Context) -> list[str]:
        mesh = mesh_of(Layout("stages", (2, 2)))

        def new(seed: int) -> tuple[dict[str, Any], nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
            model = nn.Linear(5, 3 + ctx.rank // 2)
            fully_shard(model, mesh=mesh["tensor"])  # the two ranks of a stage
            optimizer = torch.optim.AdamW(model.parameters())
            return {"model": {f"stage{ctx.rank // 2}": model}, "optimizer": optimizer}, model, optimizer

        tree, model, optimizer = new(0)
        step(model, optimizer, 2)
        af.save_state(ctx, tmp_path / "at", tree)
        like, fresh, other = new(1)
        af.load_state(ctx, tmp_path / "at", like)
        return differing(whole(model, optimizer), whole(fresh, other))

    assert run_ranks(run, 4, "processes") == [[]] * 4
    tensors = manifest_of(tmp_path / "at").tensors
    assert len(tensors["model/stage0/weight"].pieces) == 2
    assert len(tensors["model/stage1/weight"].pieces) == 2


# --- damage --------------------------------------------------------------------------------------


def test_damage_anywhere_is_an_error_everywhere_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "at"

    def run(ctx: Context) -> int:
        layout = Layout("hsdp", (2, 2))
        model = laid_out(ctx, layout, seed=0)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        step(model, optimizer)
        af.save_state(ctx, path, {"model": model, "optimizer": optimizer})
        fresh = laid_out(ctx, layout, seed=1)
        other = OPTIMIZERS["adamw"](fresh.parameters())
        before = whole(fresh, other)

        def refused(kinds: Any) -> Exception:
            with pytest.raises(kinds) as caught:
                af.load_state(ctx, path, {"model": fresh, "optimizer": other})
            assert not differing(whole(fresh, other), before)
            return caught.value

        def on_main(act: Callable[[], object]) -> None:
            af.wait_for_everyone(ctx)
            if ctx.is_main_process:
                act()
            af.wait_for_everyone(ctx)

        cases = 0
        contents = {file: file.read_bytes() for file in sorted(path.glob("*.safetensors"))}
        for file, content in contents.items():
            start = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:start])
            ends = [one["data_offsets"][1] for key, one in header.items() if key != "__metadata__"]
            for end in ends:
                damaged = bytearray(content)
                damaged[start + end - 1] ^= 1
                on_main(partial(file.write_bytes, damaged))
                assert file.name in str(refused((DamagedCheckpointError, RemoteRankError)))
            on_main(file.unlink)
            assert file.name in str(refused(DamagedCheckpointError))
            on_main(partial(file.write_bytes, content))
            cases += len(ends)
        af.load_state(ctx, path, {"model": fresh, "optimizer": other})
        assert not differing(whole(fresh, other), whole(model, optimizer))
        return cases

    cases = run_ranks(run, 4, "processes", timeout_s=60)
    assert len(os.listdir(path)) == 5  # every rank has written some
    assert cases[0] > 40
