"""Gradients arrive on the weights at rest, and weights are saved as where they lie."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from accelfn.bigmodel.offload.gradients import (
    Refetched,
    Saved,
    after_backward,
    connect,
    is_in_backward,
    is_innermost,
    refetching,
)


def test_gradients_arrive_where_they_are_wanted() -> None:
    hosts = [torch.nn.Parameter(torch.ones(2)), torch.ones(2), torch.nn.Parameter(torch.ones(2))]
    copies = [torch.full((2,), 2.0), torch.full((2,), 3.0), torch.zeros(2)]
    connected: Any = connect(copies, hosts)
    assert connected[1] is copies[1]
    assert all(torch.equal(left, right) for left, right in zip(connected, copies, strict=True))
    (connected[0] * connected[1]).sum().backward()
    assert torch.equal(cast("Any", hosts[0].grad), torch.full((2,), 3.0))
    assert hosts[2].grad is None  # it wasn't used


def test_without_any_that_is_trained_the_copies_are_given_as_they_are() -> None:
    copies = (torch.zeros(1), torch.ones(1))
    assert connect(copies, (torch.zeros(1), torch.ones(1))) == copies


def test_connected_tensors_keep_strides_that_could_be_others() -> None:
    copy = torch.zeros(3, 1, 3, 3).to(memory_format=torch.channels_last)
    strange = torch.empty(0).set_(copy.untyped_storage(), 0, (3, 1, 3, 3), (9, 1, 3, 1))
    (connected,) = connect([strange], [torch.nn.Parameter(torch.zeros(3, 1, 3, 3))])
    assert connected.stride() == (9, 1, 3, 1)


def test_a_connected_tensor_counts_changes_with_its_copy() -> None:
    copy = torch.zeros(2)
    (connected,) = connect([copy], [torch.nn.Parameter(torch.zeros(2))])
    before = copy._version
    with torch.no_grad():
        connected.add_(1)
    assert copy._version > before


MEMORY = torch.arange(32, dtype=torch.float32)


def fetched(found: Saved | None) -> tuple[Any, list[Refetched]]:
    asked: list[Refetched] = []

    def find(address: int, start: int) -> Saved | None:
        return found if address == MEMORY.untyped_storage().data_ptr() else None

    def fetch(part: Refetched) -> torch.Tensor:
        asked.append(part)
        return part.within(MEMORY)

    return refetching(find, fetch), asked


@pytest.mark.parametrize(
    "part",
    [
        MEMORY[8:16],
        MEMORY.view(4, 8).T,
        MEMORY[:16].view(torch.complex64).conj(),
        MEMORY[:16].view(torch.complex64).conj().imag,
        MEMORY.view(torch.int32)[::3],
    ],
)
def test_parts_of_a_weight_are_given_anew_as_they_were(part: torch.Tensor) -> None:
    hooks, asked = fetched(Saved(3, 1, 7, ()))
    kept = hooks.pack_hook(part)
    assert isinstance(kept, Refetched)
    assert (kept.block, kept.weight, kept.version) == (3, 1, 7)
    again = hooks.unpack_hook(kept)
    assert torch.equal(again, part)
    assert (again.stride(), again.is_conj(), again.is_neg()) == (part.stride(), part.is_conj(), part.is_neg())
    assert asked == [kept]


def test_what_forward_has_written_is_copied() -> None:
    hooks, asked = fetched(Saved(0, 0, None, ()))
    kept = hooks.pack_hook(MEMORY[:4])
    assert torch.equal(hooks.unpack_hook(kept), MEMORY[:4])
    assert kept.untyped_storage().data_ptr() != MEMORY.untyped_storage().data_ptr()
    assert asked == []


def test_other_tensors_go_to_the_hooks_around() -> None:
    seen: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> str:
        seen.append(tensor)
        return "kept"

    other = torch.zeros(2)
    with torch.autograd.graph.saved_tensors_hooks(
        keep, lambda kept: torch.ones(3) if kept == "kept" else other
    ):
        hooks, _ = fetched(Saved(0, 0, 0, ()))
        kept = hooks.pack_hook(other)
        part = hooks.pack_hook(MEMORY[:4])
    assert seen == [other]
    assert torch.equal(hooks.unpack_hook(kept), torch.ones(3))
    assert torch.equal(hooks.unpack_hook(part), MEMORY[:4])
    alone, _ = fetched(None)
    assert alone.unpack_hook(alone.pack_hook(other)) is other


def test_the_innermost_hooks_are_told_from_others() -> None:
    first, _ = fetched(None)
    assert not is_innermost(first)
    with first:
        assert is_innermost(first)
        with torch.autograd.graph.save_on_cpu():
            assert not is_innermost(first)
        assert is_innermost(first)


def backward_that(work: Any) -> None:
    x = torch.ones(1, requires_grad=True)
    y: Any = x * 2
    y.register_hook(work)
    y.sum().backward()


@pytest.mark.parametrize("fails", [False, True])
def test_work_is_done_once_after_backward_also_if_it_fails(fails: bool) -> None:
    done: list[str] = []

    def work(gradient: torch.Tensor) -> None:
        assert is_in_backward()
        assert after_backward(lambda: done.append("after"))
        assert done == []
        if fails:
            raise KeyError("here")

    if fails:
        with pytest.raises(KeyError):
            backward_that(work)
    else:
        backward_that(work)
    assert done == ["after"]


def test_outside_of_backward_there_is_no_end_to_wait_for() -> None:
    done: list[str] = []
    assert not is_in_backward()
    assert not after_backward(lambda: done.append("now"))
