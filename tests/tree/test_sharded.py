"""A leaf that is a piece: what it says of itself, what copies it, and that nothing computes with it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import optree
import pytest
import torch

import accelfn as af
from accelfn.errors import NotAvailableError
from accelfn.tree import Sharded, flatten, from_local, local_of, send_to_device


def piece() -> Sharded:
    return Sharded(torch.arange(6.0).view(2, 3), 0, 1, 5)


def test_a_piece_has_the_shape_of_the_whole_and_is_one_leaf() -> None:
    one = piece()
    assert (one.shape, one.dtype, one.numel(), one.start, one.split_dim) == ((5, 3), torch.float32, 15, 1, 0)
    assert not one.requires_grad
    assert torch.equal(local_of(one), one.local)
    assert flatten({"w": one})[0][0] is one
    assert optree.tree_leaves(cast("Any", {"w": one}))[0] is one
    other = from_local(torch.zeros(2, 3), like=one)
    assert isinstance(other, Sharded)
    assert other.place == one.place
    assert piece().place != Sharded(torch.zeros(2, 3), 0, 2, 5).place
    assert "start=1, length=5" in repr(one)
    assert torch.equal(af.pieces([one])[0], one.local)


@pytest.mark.parametrize(
    "make",
    [
        copy.copy,
        copy.deepcopy,
        lambda one: pickle.loads(pickle.dumps(one)),
        torch.clone,
        torch.Tensor.detach,
        lambda one: one.to(torch.float64),
        lambda one: send_to_device(one, "cpu"),
    ],
)
def test_a_copy_is_a_piece_at_the_same_place(make: Callable[[Any], Any]) -> None:
    one, other = piece(), make(piece())
    assert isinstance(other, Sharded)
    assert other.place == one.place
    assert torch.equal(other.local.float(), one.local)


@pytest.mark.parametrize(
    "compute",
    [
        lambda one: one + 1,
        lambda one: 1 + one,
        lambda one: one == one,
        lambda one: one[0],
        lambda one: one.sum(),
        lambda one: one.add_(1),
        lambda one: torch.stack([one, one]),
        lambda one: af.tree.global_norm({"w": one}),
        lambda one: af.slice_tensors(one, slice(1)),
    ],
)
def test_nothing_computes_with_a_piece(compute: Callable[[Any], Any]) -> None:
    with pytest.raises(NotAvailableError, match=r"this rank's piece .* accelfn.pieces\(tree\)"):
        compute(piece())


@pytest.mark.parametrize("send", [af.gather, af.reduce, af.psum, af.shard, af.unshard, af.all_gather])
def test_nothing_sends_a_piece_as_if_it_were_a_whole(send: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"tree\['w'\] is a Sharded.*accelfn.pieces\(tree\)"):
        send(af.Context(), {"w": piece()})
