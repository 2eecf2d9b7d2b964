"""Models spread over devices, memory and disk compute, train, copy and fail as they do in memory."""

from __future__ import annotations

import copy
import errno
import gc
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.assign import named_modules, refs_of
from accelfn.bigmodel.block_stream import BlockPrefetcher
from accelfn.bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model, read_offload, undispatch
from accelfn.bigmodel.offload_folder import offload_state_dict
from accelfn.bigmodel.weight_files import mapped_from
from accelfn.errors import DamagedCheckpointError
from tests.bigmodel.offload.test_links import resident_bytes
from tests.bigmodel.offload.trees import (
    WIDTH,
    Tree,
    build,
    gradients,
    inputs,
    kinds,
    same,
    trees,
    values,
)

PLACES = ("cpu", "disk", "cpu:0", "cpu:1")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="limits of processes are of POSIX")


def streams_of(model: nn.Module) -> list[BlockPrefetcher]:
    return list(getattr(vars(model).get("_accelfn_dispatched"), "prefetchers", []))


def num_hooks(model: nn.Module) -> int:
    return sum(
        len(vars(module)["_forward_hooks"]) + len(vars(module)["_forward_pre_hooks"])
        for module in model.modules()
    )


def is_at_rest(model: nn.Module) -> bool:
    return all(stream.resident == () for stream in streams_of(model))


def within_bounds(model: nn.Module) -> bool:
    return all(facts.peak_bytes <= facts.bound_bytes for facts in read_offload(model))


@st.composite
def maps(draw: st.DrawFn, model: nn.Module) -> dict[str, str]:
    """A place for the whole model, and others for some of its modules."""
    names = [name for name, _ in named_modules(model) if name]
    some = draw(st.lists(st.sampled_from(names), unique=True, max_size=5)) if names else []
    return {name: draw(st.sampled_from(PLACES)) for name in ["", *some]}


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: Any = model(x)
    if out.requires_grad:
        (out * out).sum().backward()
    return out.detach()


@given(
    tree=trees(),
    data=st.data(),
    main=st.sampled_from([None, "cpu", "cpu:0"]),
    offload_buffers=st.booleans(),
    num_ahead=st.integers(0, 3),
    is_training=st.booleans(),
)
def test_every_placement_equals_the_plain_model(
    tree: Tree,
    data: st.DataObject,
    main: str | None,
    offload_buffers: bool,
    num_ahead: int,
    is_training: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    plain, model = build(tree), build(tree)
    device_map = data.draw(maps(model))
    folder = tmp_path_factory.mktemp("offload")
    parameters = list(model.parameters())
    found = dispatch_model(
        model,
        device_map,
        main,
        offload_dir=folder,
        offload_buffers=offload_buffers,
        num_ahead=num_ahead,
        cache_bytes=data.draw(st.sampled_from([None, 0, 100])),
    )
    assert found is model
    if not {"tied", "shared"} & set(kinds(tree)):  # what is in several places becomes copies
        assert all(left is right for left, right in zip(parameters, model.parameters(), strict=True))
    assert same(values(plain), values(model))
    for one in (plain, model):
        one.train(is_training)
    exact = not {"tied", "shared", "twice", "direct"} & set(kinds(tree))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            expected, out = plain(inputs()), model(inputs())
        assert torch.equal(expected, out)
        assert same(values(plain), values(model))
        assert is_at_rest(model)
    optimizers: list[Any] = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (plain, model)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, out = (step(one, inputs(number)) for one in (plain, model))
        assert torch.equal(expected, out)
        if exact:
            assert same(gradients(plain), gradients(model))
        else:  # a weight's gradient is a sum of several, in another order
            for left, right in zip(gradients(plain).values(), gradients(model).values(), strict=True):
                torch.testing.assert_close(left, right)
            for left, right in zip(plain.parameters(), model.parameters(), strict=True):
                right.grad = None if left.grad is None else left.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert same(values(plain), values(model))
        assert is_at_rest(model)
    assert within_bounds(model)


@given(tree=trees(), data=st.data(), how=st.sampled_from(["deepcopy", "pickle", "save"]))
def test_copies_are_models_of_their_own(
    tree: Tree, data: st.DataObject, how: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain, model = build(tree), build(tree)
    dispatch_model(model, data.draw(maps(model)), "cpu:0", offload_dir=tmp_path_factory.mktemp("offload"))
    if how == "deepcopy" or "parametrized" in kinds(tree):  # which torch doesn't pickle
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert same(values(twin), values(plain))
    before = values(model)
    assert torch.equal(step(twin, inputs()), step(plain, inputs()))
    for left, right in zip(gradients(twin).values(), gradients(plain).values(), strict=True):
        torch.testing.assert_close(left, right)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert same(values(model), before)
    assert len(streams_of(twin)) == len(streams_of(model))
    assert is_at_rest(twin)
    undispatch(twin)
    assert num_hooks(twin) == 0
    assert (num_hooks(model) > 0) == bool(streams_of(model))


# --- storage ----------------------------------------------------------------------------


def small() -> Any:
    return build(Tree("sequential", (Tree("linear"), Tree("bare"), Tree("norm"), Tree("linear"))))


def pointers(model: nn.Module) -> dict[str, int]:
    return {name: ref.read().data_ptr() for name, ref in refs_of(model)}


def test_weights_on_the_disk_are_mapped_and_their_file_is_unlinked(tmp_path: Path) -> None:
    model = small()
    dispatch_model(
        model, {"": "cpu", "1": "disk", "3": "disk"}, offload_dir=tmp_path / "new", offload_buffers=True
    )
    mapped = {name for name, ref in refs_of(model) if mapped_from(ref.read()) is not None}
    assert mapped == {"1.scale", "1.shift", "1.mask", "3.weight", "3.bias"}
    assert list((tmp_path / "new").iterdir()) == []


def test_on_the_cpu_weights_in_memory_need_no_hooks() -> None:
    model = small()
    assert cpu_offload(model) is model
    assert num_hooks(model) == 0
    assert read_offload(model) == ()


def test_weights_on_the_disk_are_used_in_place(tmp_path: Path) -> None:
    model = small()
    disk_offload(model, tmp_path)
    before = pointers(model)
    seen: list[dict[str, int]] = []

    def look(*_: object) -> None:
        seen.append(pointers(model))

    model[3].register_forward_hook(look)
    model(inputs())
    assert seen == [before]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("place", ["cpu", "cpu:0", "disk"])
def test_results_are_the_same_bits(place: str, rows: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a single row, a product depends on how the weights are aligned."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    plain = nn.Sequential(nn.Linear(33, 47), nn.Tanh(), nn.Linear(47, 65), nn.Linear(65, 32)).to(dtype)
    model = dispatch_model(copy.deepcopy(plain), {"": place}, offload_dir=tmp_path)
    x = torch.randn(rows, 33).to(dtype)
    assert torch.equal(model(x), plain(x))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model: Any = build(Tree("tied", (Tree("linear"),)))
    dispatch_model(model, {"": "cpu:0", "0": "disk", "3": "cpu"}, offload_dir=tmp_path)
    assert model[0].weight is model[3].weight


def test_facts_of_the_transfers(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    dispatch_model(model, {"0": "cpu:0", "1": "cpu", "2": "cpu", "3": "cpu"}, "cpu:0")
    with torch.no_grad():
        model(torch.zeros(1, 64))
    (facts,) = read_offload(model)
    size = 64 * 64 * 4
    assert facts == ("cpu:0", 3, 3 * size, 2 * size, 2, 2 * size)


def test_undispatch_removes_hooks_and_map() -> None:
    model = small()
    device_map = {"": "cpu", "0": "cpu:0"}
    dispatch_model(model, device_map)
    assert model.hf_device_map == device_map
    assert model.hf_device_map is not device_map
    undispatch(model)
    assert not hasattr(model, "hf_device_map")
    assert num_hooks(model) == 0
    assert "_apply" not in vars(model)
    undispatch(model)


def test_a_state_dict_provides_values_of_weights_on_the_host() -> None:
    plain, model = small(), small()
    with torch.no_grad():
        for one in plain.parameters():
            one.add_(1)
    given = plain.state_dict()
    dispatch_model(model, {"": "cpu", "0": "cpu:0"}, state_dict=given)
    assert model[3].weight.data_ptr() == given["3.weight"].data_ptr()
    assert not torch.equal(model[0].weight, plain[0].weight)


def test_a_model_without_values_gets_them_from_a_state_dict() -> None:
    plain = small()
    with torch.device("meta"):
        model = small()
    given = {name: ref.read().detach() for name, ref in refs_of(plain)}
    cpu_offload(model, "cpu:0", state_dict=given)
    assert torch.equal(plain(inputs()), model(inputs()))
    assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.parametrize("how", ["disk_offload", "offload_dir", "both", "offload_index"])
def test_a_model_without_values_gets_them_from_a_folder_of_accelerate(how: str, tmp_path: Path) -> None:
    plain: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    offload_state_dict(tmp_path, plain.state_dict())
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    if how == "disk_offload":
        disk_offload(model, tmp_path)
    elif how == "offload_dir":
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, offload_buffers=True)
    elif how == "both":
        entries = json.loads((tmp_path / "index.json").read_text())
        (tmp_path / "index.json").unlink()
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, offload_index=entries, offload_buffers=True)
    else:
        index = {"0.weight": {"safetensors_file": str(tmp_path / "x.safetensors")}}
        from safetensors.torch import save_file

        save_file(plain.state_dict(), tmp_path / "x.safetensors")
        whole = {name: {**index["0.weight"]} for name in plain.state_dict()}
        dispatch_model(model, {"": "disk"}, offload_index=whole, offload_buffers=True)
    assert torch.equal(plain(inputs()), model(inputs()))
    assert mapped_from(model[0].weight) is not None
    assert same(values(plain), values(model))


def test_gradients_are_moved_with_their_weights(tmp_path: Path) -> None:
    model = small()
    model(inputs()).sum().backward()
    before = gradients(model)
    disk_offload(model, tmp_path, "cpu:0")
    assert same(gradients(model), before)


def test_a_buffer_that_is_not_saved_needs_no_place() -> None:
    plain: Any = build(Tree("bare"))
    model: Any = build(Tree("bare"))
    dispatch_model(model, {"scale": "cpu", "shift": "cpu:0"}, "cpu:0")
    assert torch.equal(plain(inputs()), model(inputs()))


# --- guards --------------------------------------------------------------------------------------


MOVES: list[Callable[[Any], Any]] = [
    lambda model: model.to("meta"),
    lambda model: model.to("cpu"),
    lambda model: model.to(torch.device("cpu:0"), torch.float64),
    lambda model: model.cpu(),
    lambda model: model.to_empty(device="cpu"),
]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_dispatched_model_is_not_moved(move: Callable[[Any], Any], place: str, tmp_path: Path) -> None:
    """To no device at all, so that a program behaves the same on every machine."""
    plain, model = small(), small()
    dispatch_model(model, {"": place, "0": "cpu:0"}, offload_dir=tmp_path)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match=r"Sequential is dispatched to several devices.*undispatch"):
            move(one)
        assert torch.equal(plain(inputs()), one(inputs()))
    undispatch(model)
    assert model.to("meta")[0].weight.is_meta


def test_a_model_that_is_in_one_place_is_moved() -> None:
    model = small()
    dispatch_model(model, {"": "cpu"})
    assert model.to("meta")[0].weight.is_meta


def test_dtypes_may_change_unless_weights_are_on_the_disk(tmp_path: Path) -> None:
    plain, model = small().double(), small()
    dispatch_model(model, {"": "cpu", "0": "cpu:0"}, "cpu:1")
    model.double()
    assert torch.equal(plain(inputs().double()), model(inputs().double()))
    disk_offload(model, tmp_path)
    for change in (model.half, model.float, lambda: model.to(torch.bfloat16)):
        with pytest.raises(RuntimeError, match=r"weights on the disk, .*would have to be read"):
            change()
    assert model[0].weight.dtype == torch.float64
    assert model.double() is model
    assert model.to(torch.float64) is model
    assert model.share_memory() is model
    assert torch.equal(plain(inputs().double()), model(inputs().double()))


def test_a_copy_guards_itself_and_not_its_original() -> None:
    model = small()
    dispatch_model(model, {"": "cpu", "0": "cpu:0"}, "cpu:1")
    twin = copy.deepcopy(model)
    twin.double()
    assert twin[0].weight.dtype == torch.float64
    assert model[0].weight.dtype == torch.float32


# --- use -----------------------------------------------------------------------------------------


class Translating(nn.Module):
    """An encoder and a decoder that are called by themselves, with an embedding that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.Sequential(
            self.shared, *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        )
        self.decoder = nn.Sequential(
            self.shared, *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.encoder(x)))

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            state = self.encoder(x)
            for _ in range(3):
                state = self.head(self.decoder(state))
        return state


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_parts_of_a_model_can_be_called_by_themselves(place: str, tmp_path: Path) -> None:
    plain: Any = Translating()
    model = copy.deepcopy(plain)
    dispatch_model(model, {"": place}, "cpu:0", offload_dir=tmp_path)
    for _ in range(2):
        assert torch.equal(plain.generate(inputs()), model.generate(inputs()))
        assert torch.equal(plain(inputs()), model(inputs()))
        assert is_at_rest(model)
    assert torch.equal(plain.shared(inputs()), model.shared(inputs()))
    assert torch.equal(plain.encoder[1][0](inputs()), model.encoder[1][0](inputs()))
    assert is_at_rest(model)
    assert within_bounds(model)


def test_the_state_dict_has_the_values_and_takes_others(tmp_path: Path) -> None:
    plain, model = small(), small()
    dispatch_model(model, {"": "disk", "1": "cpu", "2": "cpu:0"}, "cpu:1", offload_dir=tmp_path)
    state = model.state_dict()
    assert same(state, plain.state_dict())
    assert not any(one.is_meta for one in state.values())
    other = {name: one + 1 for name, one in state.items()}
    model.load_state_dict(other)
    assert same(model.state_dict(), other)
    model.load_state_dict(plain.state_dict(), assign=True)
    assert torch.equal(plain(inputs()), model(inputs()))


def test_writes_to_weights_on_the_disk_are_kept(tmp_path: Path) -> None:
    plain: Any = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    model = copy.deepcopy(plain)
    disk_offload(model, tmp_path, cache_bytes=0)
    x = torch.randn(2, 512)
    for one in (plain, model):
        optimizer: Any = torch.optim.SGD(one.parameters(), lr=1e-4)
        for _ in range(3):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(plain(x), model(x))
    assert same(values(plain), values(model))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are only let go on Linux")
@pytest.mark.parametrize("place", ["cpu", "cpu:0"])
@pytest.mark.parametrize("cached", [None, 0, 1 << 20])
def test_cache_bytes_of_the_disk_stay_in_memory(place: str, cached: int | None, tmp_path: Path) -> None:
    model: Any = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3))).requires_grad_(False)
    disk_offload(model, tmp_path, place, cache_bytes=cached)
    for _ in range(3):
        model(torch.randn(2, 512))
    whole = 3 << 20
    expected = whole if cached is None else cached
    assert abs(resident_bytes(model[0].weight) - expected) < 100_000


def test_a_deleted_model_frees_its_memory_and_its_threads(tmp_path: Path) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("accelfn-")}

    before = threads()
    model: Any = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    dispatch_model(model, {"": "cpu", "1": "disk"}, "cpu:0", offload_dir=tmp_path)
    model(torch.zeros(1, 300)).sum().backward()
    started = threads() - before
    assert started
    weight = weakref.ref(model[0].weight.untyped_storage())
    model = None
    gc.collect()
    assert weight() is None
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


@posix_only
def test_a_forked_process_runs_the_model_itself() -> None:
    model: Any = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    cpu_offload(model, "cpu:0")
    x = torch.zeros(1, 300)
    with torch.no_grad():
        model(x)  # starts the thread
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                expected = nn.Sequential(*copy.deepcopy(model))(x)
                code = 0 if torch.equal(model(x), expected) else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- bad input -----------------------------------------------------------------------------------


def unchanged(model: nn.Module, before: dict[str, int]) -> bool:
    return pointers(model) == before and num_hooks(model) == 0 and not hasattr(model, "hf_device_map")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": {"": "gpu"}}, "device_map\\[''\\]: unknown place 'gpu'"),
        ({"device_map": {"": 99}}, "no accelerator 99"),
        ({"device_map": {"": "cpu"}, "main_device": 99}, "main_device: this machine has no accelerator 99"),
        ({"device_map": {"": "cpu"}, "main_device": "disk"}, "main_device: the disk can't compute"),
        ({"device_map": {"0": "cpu"}}, "no place for 1.scale"),
        ({"device_map": {"": "cpu", "9": "cpu"}}, "that the model doesn't have: '9'"),
        ({"device_map": {"": "disk"}}, "Pass offload_dir"),
        ({"device_map": {"": "cpu"}, "num_ahead": -1}, "num_ahead must be at least 0, got -1"),
        ({"device_map": {"": "cpu"}, "cache_bytes": -1}, "cache_bytes must be at least 0, got -1"),
        (
            {"device_map": {"": "cpu"}, "state_dict": {"0.weight": torch.zeros(2)}},
            "'0.weight' is torch.float32 of shape \\(4, 4\\) in the model, but .*\\(2,\\)",
        ),
        (
            {"device_map": {"": "cpu"}, "state_dict": {"0.bias": torch.zeros(4, dtype=torch.int64)}},
            "'0.bias' is torch.float32 of .* in the model, but .* torch.int64",
        ),
    ],
)
def test_invalid_arguments_are_refused_and_nothing_is_changed(options: dict[str, Any], message: str) -> None:
    model = small()
    before = pointers(model)
    with pytest.raises(ValueError, match=message):
        dispatch_model(model, **options)
    assert unchanged(model, before)


def onto_disk(model: nn.Module, folder: Path) -> None:
    disk_offload(model, folder)


def partly_onto_disk(model: nn.Module, folder: Path) -> None:
    dispatch_model(model, {"": "disk", "0": "cpu:0"}, offload_dir=folder)


@pytest.mark.parametrize("offload", [onto_disk, partly_onto_disk])
def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_changed(
    offload: Callable[[nn.Module, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = small(), small()
    before = pointers(model)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"weights to offload_dir='.*file': it is a file"):
        offload(model, tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=r"can't write weights to offload_dir='.*file/below'"):
        offload(model, tmp_path / "file" / "below")
    refusals = {
        errno.ENOSPC: "No space left on device. Free some space, or pass a folder on another disk",
        errno.EROFS: "Read-only file system. Pass a folder that you may write to",
    }
    for number, said in refusals.items():

        def refuse(descriptor: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)  # when all but that is written
            with pytest.raises(OSError, match=rf"weights to offload_dir='.*new': {said}") as caught:
                offload(model, tmp_path / "new")
        assert caught.value.errno == number
        assert list((tmp_path / "new").iterdir()) == []
    assert unchanged(model, before)
    offload(model, tmp_path / "new")
    assert torch.equal(plain(inputs()), model(inputs()))


def test_weights_without_values_are_named() -> None:
    model = small()
    model[3].to("meta")
    for place in ("cpu", "cpu:0"):
        with pytest.raises(
            ValueError, match=r"'3.weight', '3.bias' are on the meta.*load_checkpoint_and_dispatch"
        ):
            dispatch_model(model, {"": place}, "cpu:0")
    assert num_hooks(model) == 0


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(WIDTH, WIDTH)
    offload_state_dict(tmp_path, {"weight": torch.zeros(WIDTH, WIDTH)})
    with pytest.raises(ValueError, match="'bias' are on the meta device"):
        disk_offload(model, tmp_path)
    offload_state_dict(tmp_path, {"bias": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'bias' is .*\(4,\) in the model, but .*\(1,\)"):
        disk_offload(model, tmp_path)
    (tmp_path / "weight.dat").write_bytes(b"short")
    with pytest.raises(DamagedCheckpointError, match=r"weight\.dat has 5 bytes"):
        disk_offload(model, tmp_path)
    assert model.weight.is_meta


def test_tensors_that_are_not_plain_bytes_cannot_be_on_the_disk(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"'weight' can't be on the disk.*complex128"):
        disk_offload(model, tmp_path)
    sparse = nn.Module()
    sparse.register_buffer("some", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"'some' can't be on the disk.*sparse"):
        disk_offload(sparse, tmp_path, offload_buffers=True)


@posix_only
def test_a_full_disk_leaves_no_files(tmp_path: Path) -> None:
    program = """
        import resource, signal, sys, torch
        from torch import nn
        from accelfn.bigmodel import disk_offload
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        before = [parameter.data_ptr() for parameter in model.parameters()]
        try:
            disk_offload(model, sys.argv[1])
        except OSError as error:
            assert before == [parameter.data_ptr() for parameter in model.parameters()]
            print(error.filename or error)
    """
    ran = subprocess.run(
        (sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "full")),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert "full" in ran.stdout
    assert list((tmp_path / "full").iterdir()) == []
