"""A reader that knows only the page of the format reads what the package writes, and sees flipped bits."""

import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.context import Context
from accelfn.testing import run_ranks
from tests.checkpoint import trees
from tests.checkpoint.reader import Damaged, Foreign, read, verify
from tests.checkpoint.trees import NAMESPACE, same


def make_pair(metadata: Any, children: list[Any]) -> trees.Pair:
    left, right = children
    return trees.Pair(left, right, metadata)


CLASSES: dict[str, Callable[..., Any]] = {
    "tests.checkpoint.trees:Point": trees.Point,
    "tests.checkpoint.trees:Pair": make_pair,
    "tests.checkpoint.trees:Color": trees.Color.__members__.__getitem__,
    "tests.checkpoint.trees:Number": trees.Number.__members__.__getitem__,
    "tests.checkpoint.trees:Word": trees.Word.__members__.__getitem__,
}


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(trees.trees())
def test_a_tree_is_what_load_tree_gives(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = af.save_tree(Path(folder) / "at", tree, namespace=NAMESPACE)
        verify(place)
        assert same(af.load_tree(place, namespace=NAMESPACE), read(place, classes=CLASSES))


def is_for_states(tree: Any) -> bool:
    """Whether a tree has nothing that is registered in a namespace, which save_state doesn't take."""
    children: list[Any] = []
    if isinstance(tree, dict):
        children = list(cast("dict[Any, Any]", tree).values())
    elif isinstance(tree, (list, tuple, deque)):
        children = list(cast("list[Any]", tree))
    return not isinstance(tree, trees.Pair) and all(map(is_for_states, children))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(trees.trees().filter(is_for_states), min_size=2, max_size=2))
def test_each_rank_has_its_own(ranks: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "at"
        # What a rank has may stand at the same places as another's, or be of another form.
        own = [{"tree": tree, "both": torch.arange(3), "step": rank} for rank, tree in enumerate(ranks)]
        run_ranks(lambda ctx: af.save_state(ctx, place, own[ctx.rank]), 2)
        found = [read(place, rank, CLASSES) for rank in range(3)]
        assert same(own, found[:2])
        assert same(own[0], found[2])
        assert same(own[0], af.load_tree(place))


def test_the_same_tensor_comes_back_as_one(tmp_path: Path) -> None:
    base, turned = torch.arange(12.0).reshape(3, 4), torch.arange(6).reshape(2, 3).t()
    tree = {"base": base, "row": base[1], "again": base, "turned": turned, "same": turned.view_as(turned)}
    read_back = read(af.save_tree(tmp_path / "at", tree))
    for name, tensor in tree.items():
        assert torch.equal(read_back[name], tensor), name
        assert read_back[name].stride() == tensor.stride(), name
    read_back["base"][1, 1] = 77.0
    assert read_back["again"][1, 1] == 77.0
    assert read_back["row"][1] == 5.0
    read_back["turned"][0, 0] = 5
    assert read_back["same"][0, 0] == 5


@pytest.mark.parametrize("tree", [{}, None, [1, "two"], 3.5])
def test_a_tree_without_tensors(tmp_path: Path, tree: Any) -> None:
    place = af.save_tree(tmp_path / "at", tree)
    assert [path.name for path in place.iterdir()] == ["manifest.json"]
    assert same(af.load_tree(place), read(place))


def test_the_states_of_objects_and_of_generators(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    place = af.save_state(Context(), tmp_path / "at", {"model": model, "optimizer": optimizer}, step=3)
    tree = read(place)
    assert same(tree["model"], dict(model.state_dict()))
    momentum = tree["optimizer"]["state"]["model/weight"]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[model.weight]["momentum_buffer"])
    assert tree["optimizer"]["groups"][0]["params"] == ["model/weight", "model/bias"]
    assert verify(place)["step"] == 3
    assert torch.equal(read(place, field="random")["torch"], torch.get_rng_state())
    assert len(read(place, field="random")["python"]["numbers"]) == 625


def test_tensors_in_pieces(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)

    def save(ctx: Context) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        tree = {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole.to(torch.complex128), mesh, [Shard(1)]),
        }
        af.save_state(ctx, tmp_path / "at", tree)

    run_ranks(save, 2, on="processes")
    tree = read(tmp_path / "at")
    assert len(verify(tmp_path / "at")["tensors"]["rows"][2]) == 2
    assert torch.equal(tree["rows"], whole)
    assert torch.equal(tree["columns"], whole.to(torch.complex128))


def test_classes_that_nobody_knows_stand_for_themselves(tmp_path: Path) -> None:
    place = af.save_tree(tmp_path / "at", trees.Point(1, trees.Color.RED))
    of = "tests.checkpoint.trees:"
    assert read(place) == Foreign(f"{of}Point", (1, Foreign(f"{of}Color", ("RED",))))


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "own" / "inner").mkdir(parents=True)
    (tmp_path / "own" / "inner" / "file").write_bytes(b"mine")
    tree = {"w": torch.arange(5), "n": [1, "two"]}
    place = af.save_state(Context(), tmp_path / "at", tree, files=tmp_path / "own")
    for file in sorted(path for path in place.rglob("*") if path.is_file()):
        content = file.read_bytes()
        step = 1 + len(content) // 300
        for at in [*range(0, len(content), step), *range(1, min(99, len(content)), step)]:
            file.write_bytes(bytes([*content[:at], content[at] ^ (1 << at % 8), *content[at + 1 :]]))
            with pytest.raises((Damaged, OSError)):
                verify(place)
        file.write_bytes(content)
    verify(place)


def test_files_that_are_missing_or_cut_off_are_noticed_and_others_ignored(tmp_path: Path) -> None:
    place = af.save_tree(tmp_path / "at", {"w": torch.arange(5)})
    (place / "more").write_bytes(b"")
    (place / "tensors-00000-0a1b2c3d.safetensors").write_bytes(b"of a save that runs")
    verify(place)
    file = place / "tensors-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(Damaged, match="length"):
        verify(place)
    file.unlink()
    with pytest.raises(Damaged, match="files"):
        verify(place)
