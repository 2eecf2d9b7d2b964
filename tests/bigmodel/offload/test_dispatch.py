"""Models spread over devices, memory and disk compute, train, copy and fail as they do in memory."""

# torch leaves what hooks get untyped.
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import copy
import errno
import gc
import io
import json
import os
import pickle
import sys
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
from safetensors.torch import save_file
from torch import nn

from accelfn.bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model, read_offload, undispatch
from accelfn.bigmodel.offload_folder import offload_state_dict
from accelfn.errors import DamagedCheckpointError
from accelfn.weights.assign import named_modules, refs_of
from accelfn.weights.stored import mapped_from
from tests.bigmodel.offload.trees import (
    WIDTH,
    Namespace,
    Tree,
    assert_same_gradients,
    build,
    doubled,
    gradients,
    inputs,
    is_at_rest,
    kinds,
    num_hooks,
    same,
    streams_of,
    trees,
    values,
)

PLACES = ("cpu", "disk", "cpu:0", "cpu:1")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="limits of processes are of POSIX")


def resident_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of a mapped tensor are in memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(one, 16) for one in first.split("-"))
            inside = start <= tensor.data_ptr() < end
        elif inside and first == "Rss:":
            return int(rest[0]) * 1024
    raise AssertionError("it is mapped nowhere")


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
        assert_same_gradients(plain, model, exact)
        if not exact:
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
    assert_same_gradients(twin, plain, exact=False)
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
    seen: list[int] = []
    model[3].register_forward_hook(lambda *_: seen.append(model[3].weight.data_ptr()))
    dispatch_model(
        model, {"": "cpu", "1": "disk", "3": "disk"}, offload_dir=tmp_path / "new", offload_buffers=True
    )
    mapped = {name for name, ref in refs_of(model) if mapped_from(ref.read()) is not None}
    assert mapped == {"1.scale", "1.shift", "1.mask", "3.weight", "3.bias"}
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("place", ["cpu:0", "disk"])
def test_results_are_the_same_bits(place: str, tmp_path: Path) -> None:
    """Of a single row, a product depends on how the weights are aligned."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        plain = nn.Sequential(nn.Linear(33, 47), nn.Tanh(), nn.Linear(47, 65), nn.Linear(65, 32)).to(dtype)
        model = dispatch_model(copy.deepcopy(plain), {"": place}, "cpu:1", offload_dir=tmp_path)
        for rows in (1, 2, 5):
            x = torch.randn(rows, 33).to(dtype)
            assert torch.equal(model(x), plain(x))


def test_facts_of_the_transfers(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    dispatch_model(model, {"0": "cpu:0", "1": "cpu", "2": "cpu", "3": "cpu"}, "cpu:0")
    with torch.no_grad():
        model(torch.zeros(1, 64))
    (facts,) = read_offload(model)
    size = 64 * 64 * 4
    assert facts == ("cpu:0", 3, 3 * size, 2 * size, 2, 2 * size)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


@pytest.mark.parametrize(
    ("model", "whole", "num_blocks"),
    [
        (nn.Sequential(Pair(), Pair(), nn.Linear(WIDTH, WIDTH)), (), 3),  # layers
        (nn.ModuleDict({"only": Pair(), "last": nn.Linear(WIDTH, WIDTH)}), (), 3),  # no two of a class
        (nn.ModuleDict({"only": Pair(), "last": nn.Linear(WIDTH, WIDTH)}), ("Pair",), 2),
        (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), ("Sequential",), 1),
        (nn.Sequential(Namespace()), (), 2),  # what can't be called is in the block of its parent
        (nn.MultiheadAttention(8, 2), (), 1),  # it reads the weights below
        (nn.TransformerEncoderLayer(8, 2), (), 1),
    ],
    ids=["layers", "leaves", "class", "whole", "namespace", "attention", "encoder"],
)
def test_blocks_are_layers_and_small_modules(
    model: nn.Module, whole: tuple[str, ...], num_blocks: int
) -> None:
    cpu_offload(model, "cpu:0", preload_module_classes=whole)
    assert [facts.num_blocks for facts in read_offload(model)] == [num_blocks]


def test_undispatch_removes_hooks_and_map() -> None:
    model = small()
    model(inputs()).sum().backward()
    before = gradients(model)
    device_map = {"": "cpu", "0": "cpu:0"}
    dispatch_model(model, device_map)
    assert model.hf_device_map == device_map
    assert model.hf_device_map is not device_map
    assert same(gradients(model), before)
    undispatch(model)
    assert not hasattr(model, "hf_device_map")
    assert num_hooks(model) == 0
    assert "_apply" not in vars(model)
    undispatch(model)
    assert num_hooks(cpu_offload(model)) == 0  # weights in memory that are used there need none
    assert read_offload(model) == ()


def test_values_may_come_from_a_state_dict() -> None:
    plain: Any = doubled(small())
    given = {name: ref.read().detach() for name, ref in refs_of(plain)}
    model = dispatch_model(small(), {"": "cpu", "0": "cpu:0"}, state_dict=given)
    assert model[3].weight.data_ptr() == given["3.weight"].data_ptr()
    assert not torch.equal(model[0].weight, plain[0].weight)  # those on a device stay
    with torch.device("meta"):
        bare = small()
    cpu_offload(bare, "cpu:0", state_dict=given)
    assert torch.equal(plain(inputs()), bare(inputs()))
    assert isinstance(bare[0].weight, nn.Parameter)


def test_buffers_of_weights_on_the_host_have_the_values_of_the_state_dict() -> None:
    """They stay on the device, and what is written to them there doesn't reach the caller's values."""
    plain: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    plain(inputs() * 3 + 1)
    given = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model: Any = cpu_offload(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), "cpu:0", state_dict=given
    )
    assert torch.equal(plain.eval()(inputs()), model.eval()(inputs()))
    model.train()(inputs())
    assert same(given, plain.state_dict())


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
        save_file(plain.state_dict(), tmp_path / "x.safetensors")
        whole = {name: {"safetensors_file": str(tmp_path / "x.safetensors")} for name in plain.state_dict()}
        dispatch_model(model, {"": "disk"}, offload_index=whole, offload_buffers=True)
    assert torch.equal(plain(inputs()), model(inputs()))
    assert mapped_from(model[0].weight) is not None
    assert same(values(plain), values(model))


# --- guards --------------------------------------------------------------------------------------


MOVES: list[Callable[[Any], Any]] = [
    lambda model: model.to("meta"),
    lambda model: model.to(torch.device("cpu:0"), torch.float64),
    lambda model: model.cpu(),
    lambda model: model.to_empty(device="cpu"),
]


@pytest.mark.parametrize("move", MOVES)
def test_a_dispatched_model_is_not_moved(move: Callable[[Any], Any], tmp_path: Path) -> None:
    """To no device at all, so that a program behaves the same on every machine."""
    plain, model = small(), small()
    dispatch_model(model, {"": "cpu", "0": "cpu:0", "1": "disk"}, offload_dir=tmp_path)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match=r"Sequential is dispatched to several devices.*undispatch"):
            move(one)
        assert torch.equal(plain(inputs()), one(inputs()))
    undispatch(model)
    assert model.to("meta")[0].weight.is_meta
    assert dispatch_model(small(), {"": "cpu"}).to("meta")[0].weight.is_meta  # in one place


def test_dtypes_may_change_unless_weights_are_on_the_disk(tmp_path: Path) -> None:
    plain, model = small().double(), small()
    dispatch_model(model, {"": "cpu", "0": "cpu:0"}, "cpu:1")
    twin = copy.deepcopy(model)
    model.double()
    assert twin[0].weight.dtype == torch.float32
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


# --- use -----------------------------------------------------------------------------------------


class Translating(nn.Module):
    """An encoder and a decoder that are called by themselves, with an embedding that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.Sequential(self.shared, *(Pair() for _ in range(3)))
        self.decoder = nn.Sequential(self.shared, *(Pair() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.decoder(self.decoder(self.encoder(x)))


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_parts_of_a_model_can_be_called_by_themselves(place: str, tmp_path: Path) -> None:
    plain: Any = Translating()
    model = copy.deepcopy(plain)
    dispatch_model(model, {"": place}, "cpu:0", offload_dir=tmp_path)
    parts: list[Callable[[Any], Any]] = [
        lambda one: one.generate,
        lambda one: one,
        lambda one: one.shared,
        lambda one: one.encoder[1].down,
    ]
    for part in parts:
        assert torch.equal(part(plain)(inputs()), part(model)(inputs()))
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
@pytest.mark.parametrize(("place", "cached"), [("cpu", 0), ("cpu:0", 0), ("cpu", 1 << 20), ("cpu:0", None)])
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


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = small(), small()
    before = pointers(model)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"weights to offload_dir='.*file': it is a file"):
        disk_offload(model, tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=r"can't write weights to offload_dir='.*file/below'"):
        disk_offload(model, tmp_path / "file" / "below")
    refusals = {
        errno.ENOSPC: "No space left on device. Free some space, or pass a folder on another disk",
        errno.EROFS: "Read-only file system. Pass a folder that you may write to",
    }
    places = {"": "disk", "0": "cpu:0"}
    for number, said in refusals.items():

        def refuse(descriptor: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)  # when all but that is written
            with pytest.raises(OSError, match=rf"weights to offload_dir='.*new': {said}") as caught:
                dispatch_model(model, places, offload_dir=tmp_path / "new")
        assert caught.value.errno == number
        assert list((tmp_path / "new").iterdir()) == []
    assert unchanged(model, before)
    dispatch_model(model, places, offload_dir=tmp_path / "new")
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
