"""Checkpoints that were made once load for ever, and the same state gives the same bytes."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.context import Context
from accelfn.testing import run_ranks
from tests.checkpoint.golden.make_golden import CURRENT, Counter, make_run, new_run, new_tree, seeded
from tests.checkpoint.reader import read, verify
from tests.checkpoint.trees import NAMESPACE, Color, same

PLACES = sorted(path.parent for path in CURRENT.parent.glob("v*/*/manifest.json"))


def contents(place: Path) -> dict[str, bytes]:
    """Return the bytes of a checkpoint, without the version of the program, which may differ."""
    found = {path.name: path.read_bytes() for path in sorted(place.iterdir())}
    line, end = found["manifest.json"].split(b"\n", 1)
    assert end == hashlib.sha256(line).hexdigest().encode() + b"\n"
    found["manifest.json"] = re.sub(rb'"created_by":"accelfn [^"]*"', b"", line, count=1)
    return found


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(place.parts[-2:]))
def test_every_byte_is_as_it_was_written(place: Path) -> None:
    report = af.verify_checkpoint(place)
    assert report.num_tensors == len(verify(place)["tensors"])
    assert report.created_by.startswith("accelfn ")


def test_the_tree_loads_to_the_known_values() -> None:
    known, found = new_tree(), af.load_tree(CURRENT / "tree", namespace=NAMESPACE)
    known["object"] = known["object"].state_dict()
    assert same(known, found)
    memory = found["memory"]
    memory["base"][1, 2] = 50.0
    assert memory["row"][2] == memory["turned"][2, 1] == 5.0  # other views are stored by their values
    assert memory["turned"].stride() == (1, 3)
    assert memory["permuted"].stride() == (1, 3)
    assert memory["again"] is memory["twice"]


def test_the_tree_loads_into_another_one() -> None:
    like = {**new_tree(), "object": Counter()}
    loaded = af.load_tree(CURRENT / "tree", like, namespace=NAMESPACE)
    assert loaded["object"] is like["object"]
    assert like["object"].number == 8
    assert loaded["enums"][0] is Color.RED


def test_the_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    place = af.save_tree(tmp_path / "tree", new_tree(), namespace=NAMESPACE)
    assert contents(place) == contents(CURRENT / "tree")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_run_is_loaded_by_any_number_of_ranks(num_ranks: int) -> None:
    def load(ctx: Context) -> tuple[Any, Any]:
        like = new_run(ctx.rank, trained=False)
        return like, af.load_state(ctx, CURRENT / "run", like, random_state=False)

    for rank, (like, loaded) in enumerate(run_ranks(load, num_ranks)):
        known = new_run(rank % 2)
        assert loaded["model"] is like["model"]
        assert same(dict(loaded["model"].state_dict()), dict(known["model"].state_dict()))
        assert loaded["model"][0].weight is loaded["model"][1].weight
        assert same(loaded["optimizer"].state_dict(), known["optimizer"].state_dict())
        assert loaded["loader"] == known["loader"]
        assert same(tuple(loaded["scaler"]), tuple(known["scaler"]))
        assert loaded["counter"].number == 12
        assert same(loaded["own"], known["own"])
        assert (loaded["step"], loaded["name"]) == (12, f"rank {rank % 2}")


def test_the_run_brings_the_random_numbers_back() -> None:
    with seeded():
        known = torch.rand(3)
    like = new_run(0, trained=False)
    with seeded():
        torch.rand(5)
        af.load_state(Context(), CURRENT / "run", like)
        assert torch.equal(torch.rand(3), known)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(CURRENT / "run")


def test_the_reader_that_knows_only_the_page_reads_them() -> None:
    assert [read(CURRENT / "run", rank)["name"] for rank in range(2)] == ["rank 0", "rank 1"]
    tree, random = (read(CURRENT / "run", field=field) for field in ("tree", "random"))
    assert same(tree["model"], dict(new_run(0)["model"].state_dict()))
    assert tree["optimizer"]["groups"][0]["lr"] == 0.25
    assert len(random["python"]["numbers"]) == 625
    assert torch.equal(read(CURRENT / "tree")["memory"]["row"], torch.tensor([3.0, 4.0, 5.0]))
