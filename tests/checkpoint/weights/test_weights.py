"""The weights of a model are saved as other libraries name and read them, or refused on every rank."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.errors import MismatchError, RemoteRankError, ReplicaDriftError
from accelfn.testing import run_ranks
from tests.checkpoint.campaign import kill_at_its_last_step
from tests.checkpoint.small import names, same_bits
from tests.checkpoint.weights.models import Bag, Extra, Wrapped, sized

ROOT = Path(__file__).parents[3]
INDEX = "model.safetensors.index.json"


# --- files ---------------------------------------------------------------------------------------


# Numbers of bytes, and units in powers of 1000.
LIMITS = st.tuples(
    st.integers(1, 20), st.sampled_from(["{0}B", " {1:f} kb", "{1}KB", "{2:f}MB", "{3:.9f}GB"])
)


@given(st.lists(st.integers(0, 9), max_size=12), LIMITS | st.tuples(st.integers(1, 20), st.none()))
def test_files_are_filled_in_order_up_to_the_limit(sizes: list[int], bound: tuple[int, str | None]) -> None:
    limit, text = bound
    tensors = sized(*sizes)
    expected: list[list[str]] = [[]]
    room = limit
    for name, tensor in tensors.items():
        if tensor.numel() > room and expected[-1]:  # a tensor above the limit has a file of its own
            expected.append([])
            room = limit
        expected[-1].append(name)
        room -= tensor.numel()
    with tempfile.TemporaryDirectory() as folder:
        powers = [limit / 1000**power for power in range(1, 4)]
        given_limit = limit if text is None else text.format(limit, *powers)
        files = af.save_model(Context(), Bag(**tensors), folder, given_limit)
        count = len(expected)
        numbered = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        assert [file.name for file in files] == (["model.safetensors"] if count == 1 else [*numbered, INDEX])
        assert [sorted(load_file(file)) for file in files[:count]] == [sorted(inside) for inside in expected]


@pytest.mark.parametrize("size", ["10GiB", "GB", "", "-1KB", "1 K", "ten", "0KB", 0, -5, "1e3KB"])
def test_other_sizes_are_refused(size: int | str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size must be"):
        af.save_model(Context(), nn.Linear(1, 1), tmp_path / "new", size)
    assert names(tmp_path) == []


DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def test_stock_safetensors_reads_every_dtype(tmp_path: Path) -> None:
    bits = torch.randint(0, 2, (3, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors: dict[str, torch.Tensor] = {}
    for number, dtype in enumerate(DTYPES):
        value = bits.view(dtype) if dtype != torch.bool else bits.bool()
        for form, tensor in enumerate((value, value.transpose(0, 1), value[0, 0, 0], value[:0])):
            tensors[f"t{number}_{form}"] = tensor
    (file,) = af.save_model(Context(), Bag(**tensors), tmp_path)
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())
    # Others can be pickled.
    value = torch.tensor([1 + 2j], dtype=torch.complex128).conj()
    (file,) = af.save_model(Context(), Bag(w=value), tmp_path, safe_serialization=False)
    assert torch.load(file, weights_only=True)["w"].resolve_conj().equal(value.resolve_conj())


def test_the_bytes_of_a_small_file_are_known(tmp_path: Path) -> None:
    (file,) = af.save_model(Context(), Bag(w=torch.tensor([[1.0, 2.0], [3.0, 4.0]])), tmp_path)
    header = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
    header += b" " * (-(8 + len(header)) % 64)
    data = bytes.fromhex("0000803f000000400000404000008040")
    assert file.read_bytes() == len(header).to_bytes(8, "little") + header + data


def test_tensors_are_aligned(tmp_path: Path) -> None:
    """To their element size, and to 64 bytes if possible, so that mapped weights compute the same bits."""
    dtypes = (torch.uint8, torch.float64, torch.int16, torch.bool, torch.float32)
    tensors = {f"t{number}": torch.ones(3, dtype=dtype) for number, dtype in enumerate(dtypes)}
    tensors |= {"a": torch.ones(16), "b": torch.ones(32)}
    (file,) = af.save_model(Context(), Bag(**tensors), tmp_path)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in tensors.items():
        start = 8 + length + header[name]["data_offsets"][0]
        assert start % tensor.dtype.itemsize == 0
        assert tensor.nbytes % 64 or start % 64 == 0


def test_several_files_have_an_index_and_replace_older_files(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"mine")
    kill_at_its_last_step(lambda: af.save_model(Context(), Bag(**sized(1)), tmp_path))
    assert len(names(tmp_path)) == 2
    model = Bag(**sized(4, 4, 4))
    files = af.save_model(Context(), model, tmp_path, max_shard_size=8)
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert json.loads(files[-1].read_text()) == {
        "metadata": {"total_size": 12},
        "weight_map": {"t0": first, "t1": first, "t2": second},
    }
    assert files[-1].read_text().endswith("\n")
    assert names(tmp_path) == sorted((first, second, INDEX, other.name))
    af.save_model(Context(), model, tmp_path)
    assert names(tmp_path) == ["model.safetensors", other.name]


@pytest.mark.parametrize(
    ("options", "name", "end"),
    [
        ({"max_shard_size": 8}, "model", ".safetensors"),
        ({"safe_serialization": False}, "pytorch_model", ".bin"),
        ({"safe_serialization": False, "max_shard_size": 8}, "pytorch_model", ".bin"),
        ({"names": "diffusers"}, "diffusion_pytorch_model", ".safetensors"),
        ({"names": "diffusers", "max_shard_size": 8}, "diffusion_pytorch_model", ".safetensors"),
        ({"names": "diffusers", "safe_serialization": False}, "diffusion_pytorch_model", ".bin"),
    ],
    ids=str,
)
def test_file_names_of_each_format_and_library(
    options: dict[str, Any], name: str, end: str, tmp_path: Path
) -> None:
    expected = [f"{name}{end}"]
    if "max_shard_size" in options:
        expected = [*(f"{name}-0000{number}-of-00002{end}" for number in (1, 2)), f"{name}{end}.index.json"]
    ours = {"model.safetensors", "pytorch_model.bin"}
    theirs = {"diffusion_pytorch_model.safetensors"}
    model = Bag(**sized(4, 4, 4))
    (tmp_path / "old").mkdir()
    for older in ours | theirs:
        (tmp_path / "old" / older).write_bytes(b"older")
    assert [path.name for path in af.save_model(Context(), model, tmp_path / "new", **options)] == expected
    assert names(tmp_path / "new") == sorted(expected)
    af.save_model(Context(), model, tmp_path / "old", **options)
    assert set(names(tmp_path / "old")) == {*expected, *(ours if "names" in options else theirs)}


def test_an_index_of_pickled_files_lists_tied_weights_too(tmp_path: Path) -> None:
    model = nn.ParameterDict({name: torch.full((4,), number) for name, number in (("a", 1.0), ("b", 0.0))})
    model["c"] = model["a"]
    for safe in (True, False):
        *_, index = af.save_model(Context(), model, tmp_path, 16, safe)
        weight_map = json.loads(index.read_text())["weight_map"]
        assert set(weight_map) == ({"a", "b"} if safe else {"a", "b", "c"})
        assert safe or weight_map["c"] == weight_map["a"] != weight_map["b"]


def test_what_is_in_the_way_is_refused_and_links_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for below in ("file", "file/below"):
        with pytest.raises(NotADirectoryError):
            af.save_model(Context(), nn.Linear(1, 1), tmp_path / below)
    assert (tmp_path / "file").read_text() == "text"
    (tmp_path / "model" / "pytorch_model.bin").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"pytorch_model\.bin is a directory"):
        af.save_model(Context(), nn.Linear(1, 1), tmp_path / "model")
    assert names(tmp_path / "model") == ["pytorch_model.bin"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").symlink_to("../file")
    (file,) = af.save_model(Context(), nn.Linear(1, 1), tmp_path / "other")
    assert not file.is_symlink()
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.slow  # an interpreter that imports torch
def test_saving_needs_no_numpy(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, accelfn as af\n"
        "print(len(af.save_model(af.Context(), torch.nn.Linear(2, 2), sys.argv[1])))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.returncode) == ("1\n", 0), result.stderr
    assert set(load_file(tmp_path / "model.safetensors")) == {"weight", "bias"}


# --- on several ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_every_rank_returns_the_files_with_the_models_own_names(on: Any, tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[Path, ...]:
        model = af.prepare(ctx, nn.Linear(2, 1))
        return af.save_model(ctx, model, tmp_path / "new" / "folder", max_shard_size=8)

    first, second = run_ranks(run, 2, on, mixed_precision="bf16")
    assert first == second
    assert [file.exists() for file in first] == [True] * 3
    assert set(load_file(first[0])) == {"weight"}


def bag(**options: Any) -> Callable[[], Bag]:
    return lambda: Bag(w=torch.zeros(2, **options))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: "model", {}, "takes a module, got str"),
        (lambda: Bag(w=torch.zeros(2).to_sparse()), {}, "can't save w: a tensor has the layout torch.sparse"),
        (lambda: Bag(w=Wrapped(torch.zeros(2))), {}, "tensors of class Wrapped consist of others"),
        (bag(dtype=torch.complex128), {}, "can't save w: safetensors lacks torch.complex128"),
        (lambda: nn.Linear(1, 1, device="meta"), {}, "can't save weight, bias: no data"),
        (Extra, {}, "_extra_state: the state dict contains a value that isn't a tensor"),
        (bag(), {"names": "other"}, "names must be 'transformers' or 'diffusers', got 'other'"),
    ],
)
def test_what_one_rank_cannot_save_is_an_error_on_all_and_nothing_is_written(
    make: Callable[[], Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def run(ctx: Context) -> str:
        good, given = ctx.is_main_process, {} if ctx.is_main_process else options
        with pytest.raises((TypeError, ValueError, RemoteRankError), match=message) as caught:
            af.save_model(ctx, bag()() if good else make(), tmp_path / "new", **given)
        return str(caught.value)

    main, other = run_ranks(run, 2)
    assert main.startswith("rank 1 failed in save_model: ")
    assert other in main
    assert names(tmp_path) == []


def drifted(ctx: Context) -> nn.Module:
    """Return a prepared model, of which one weight on rank 1 is the next larger number."""
    model = af.prepare(ctx, nn.Linear(3, 2))
    if ctx.rank == 1:
        weight = next(model.parameters())
        with torch.no_grad():
            weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(9.0))
    return model


@pytest.mark.parametrize(("on", "size"), [("memory", 3), ("processes", 2)])
def test_drifted_replicas_write_nothing(on: Any, size: int, tmp_path: Path) -> None:
    (file,) = af.save_model(Context(), nn.Linear(3, 2), tmp_path / "old")
    before = file.read_bytes()

    def run(ctx: Context) -> list[str]:
        model = drifted(ctx)
        errors: list[str] = []
        for name in ("old", "new"):
            with pytest.raises(ReplicaDriftError, match=r"(?s)model\['weight'\] *differs") as caught:
                af.save_model(ctx, model, tmp_path / name)
            errors.append(str(caught.value))
        return errors

    messages = run_ranks(run, size, on)
    assert messages == [messages[0]] * size
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.rglob("*")] == ["old", file.name]


@pytest.mark.parametrize("guard", [af.Guard(check_replicas_before_saving=False), "off"], ids=["alone", "all"])
def test_drift_is_not_detected_if_the_guard_is_off(guard: af.Guard | str, tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        af.save_model(ctx, drifted(ctx), tmp_path)

    run_ranks(run, 2, guard=guard)
    assert set(load_file(tmp_path / "model.safetensors")) == {"weight", "bias"}


def test_running_statistics_may_differ(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        model = af.prepare(ctx, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        cast("torch.Tensor", cast("nn.BatchNorm1d", model[1]).running_mean).fill_(ctx.rank + 1)
        af.save_model(ctx, model, tmp_path)

    run_ranks(run, 2)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["1.running_mean"], torch.ones(2))


def test_different_models_are_a_mismatch_and_nothing_is_written(tmp_path: Path) -> None:
    def run(ctx: Context) -> str:
        with pytest.raises(MismatchError, match="weight") as caught:
            af.save_model(ctx, nn.Linear(2 + ctx.rank, 1), tmp_path / "new")
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert names(tmp_path) == []


# --- the state dict ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_the_state_dict_of_a_replica_shares_its_memory(size: int) -> None:
    def run(ctx: Context) -> list[str]:
        model = af.prepare(ctx, nn.Linear(2, 1))
        state = af.get_state_dict(ctx, model)
        assert state["weight"].data_ptr() == model.weight.data_ptr()
        assert not any(value.requires_grad for value in state.values())
        return list(state)

    assert run_ranks(run, size) == [["weight", "bias"]] * size
    assert af.get_state_dict(Context(), Extra()) == {"_extra_state": {"steps": 3}}


def test_get_state_dict_of_another_object_raises_on_every_rank() -> None:
    def run(ctx: Context) -> None:
        model: Any = nn.Linear(1, 1) if ctx.rank == 0 else 3
        with pytest.raises((TypeError, RemoteRankError), match="get_state_dict: takes a module, got int"):
            af.get_state_dict(ctx, model)

    run_ranks(run, 2)


def test_a_link_to_a_directory_is_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for size in ("1GB", 40):
        af.save_model(Context(), Bag(**sized(1)), tmp_path / "link", size)
        af.load_model(Bag(**sized(1)), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    path = af.save_state(Context(), tmp_path / "link" / "at", {"step": 1})
    assert af.load_latest(Context(), tmp_path / "link", {"step": 0}) == {"step": 1}
    assert path.parent.name == "link"
