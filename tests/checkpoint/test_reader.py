"""A reader that knows only the page of the format reads what the package writes, and sees flipped bits."""

import tempfile
from collections import deque
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.context import Context
from accelfn.testing import run_ranks
from tests.checkpoint import trees
from tests.checkpoint.reader import Damaged, Foreign, read, verify
from tests.checkpoint.small import flip
from tests.checkpoint.trees import CLASSES, same


def is_for_states(tree: Any) -> bool:
    """Whether a tree has nothing that is registered in a namespace, which save_state doesn't take."""
    children: list[Any] = []
    if isinstance(tree, dict):
        children = list(cast("dict[Any, Any]", tree).values())
    elif isinstance(tree, (list, tuple, deque)):
        children = list(cast("list[Any]", tree))
    return not isinstance(tree, trees.Pair) and all(map(is_for_states, children))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    tree = {"base": base, "again": base, "turned": turned, "same": turned.view_as(turned)}
    found = read(af.save_tree(tmp_path / "at", tree))
    assert found["turned"].stride() == turned.stride()
    found["base"][1, 1] = 77.0
    found["turned"][0, 0] = 5
    assert (found["again"][1, 1], found["same"][0, 0]) == (77.0, 5)


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
    manifest = verify(tmp_path / "at")
    assert [len(manifest["layouts"][manifest["tensors"][name][3]]) for name in ("rows", "columns")] == [2, 2]
    assert torch.equal(tree["rows"], whole)
    assert torch.equal(tree["columns"], whole.to(torch.complex128))


def test_classes_that_nobody_knows_stand_for_themselves(tmp_path: Path) -> None:
    place = af.save_tree(tmp_path / "at", trees.Point(1, trees.Color.RED))
    of = "tests.checkpoint.trees:"
    assert read(place) == Foreign(f"{of}Point", (1, Foreign(f"{of}Color", ("RED",))))


def test_damage_anywhere_is_noticed_and_other_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "own" / "inner").mkdir(parents=True)
    (tmp_path / "own" / "inner" / "file").write_bytes(b"mine")
    tree = {"w": torch.arange(5), "n": [1, "two"]}
    place = af.save_state(Context(), tmp_path / "at", tree, files=tmp_path / "own")
    files = sorted(path for path in place.rglob("*") if path.is_file())
    (place / "more").write_bytes(b"")
    (place / "tensors-00000-0a1b2c3d.safetensors").write_bytes(b"of a save that runs")
    for file in files:
        content = file.read_bytes()
        step = 1 + len(content) // 60
        for at in [*range(0, len(content), step), *range(1, min(99, len(content)), step)]:
            flip(file, at)
            with pytest.raises((Damaged, OSError)):
                verify(place)
            file.write_bytes(content)
        verify(place)
        file.write_bytes(content[:-1])
        with pytest.raises(Damaged):
            verify(place)
        file.unlink()
        with pytest.raises((Damaged, OSError)):
            verify(place)
        file.write_bytes(content)
