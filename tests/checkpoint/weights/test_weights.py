import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.checkpoint.weights_index import WeightsPlan, parse_size, plan_weights
from accelfn.errors import MismatchError, RemoteRankError, ReplicaDriftError
from accelfn.testing import run_ranks
from tests.checkpoint.campaign import kill_at_its_last_step

ROOT = Path(__file__).parents[3]


class Bag(nn.Module):
    """Holds the given tensors as buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def sized(*sizes: int) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}


def names(plan: WeightsPlan) -> list[str]:
    return ["".join(name[1:] for name in inside) for _, inside in plan.files]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((4, 4, 4), 12, ["012"]),
        ((4, 4, 4), 11, ["01", "2"]),
        ((4, 9, 1, 4), 5, ["0", "1", "23"]),
        ((9, 9), 5, ["0", "1"]),
        ((9, 1), 5, ["0", "1"]),
        ((), 5, [""]),
    ],
)
def test_files_are_filled_in_order(sizes: tuple[int, ...], limit: int, expected: list[str]) -> None:
    plan = plan_weights(sized(*sizes), limit)
    assert names(plan) == expected
    assert plan.total_bytes == sum(sizes)
    if len(expected) == 1:
        assert plan.files[0][0] == "model.safetensors"
    else:
        count = len(expected)
        assert [file for file, _ in plan.files] == [
            f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
        ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 20))
def test_a_file_is_within_the_limit_or_holds_one_tensor(sizes: list[int], limit: int) -> None:
    tensors = sized(*sizes)
    plan = plan_weights(tensors, limit)
    assert sorted(name for _, inside in plan.files for name in inside) == sorted(tensors)
    for _, inside in plan.files:
        filled = [tensors[name].numel() for name in inside]
        assert sum(filled) <= limit or sum(size > 0 for size in filled) == 1


def test_identical_data_is_stored_once_and_overlapping_data_separately() -> None:
    base = torch.arange(6.0)
    plan = plan_weights({"a": base, "part": base[:3], "b": base.view(6), "two": base.view(2, 3)}, 10**6)
    assert plan.tied == (("b", "a"),)
    assert plan.files == (("model.safetensors", ("a", "part", "two")),)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *((1, 1), (10**18 + 1, 10**18 + 1), ("5B", 5), ("1KB", 1000), ("2 mb", 2_000_000)),
        *(("1.5GB", 1_500_000_000), ("1tb", 10**12), (" 10GB ", 10**10), ("1.005KB", 1005)),
    ],
)
def test_sizes_are_in_powers_of_1000(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["10GiB", "GB", "", "-1KB", "1 K", "ten", "0KB", 0, -5, "1e3KB"])
def test_malformed_sizes_are_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="max_shard_size must be"):
        parse_size(text)


DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stock_safetensors_reads_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.randint(0, 2, (3, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    value = bits.view(dtype) if dtype != torch.bool else bits.bool()
    model = Bag(plain=value, strided=value.transpose(0, 1), scalar=value[0, 0, 0], empty=value[:0])
    (file,) = af.save_model(Context(), model, tmp_path)
    loaded = load_file(file)
    assert set(loaded) == {"plain", "strided", "scalar", "empty"}
    for name, tensor in model.state_dict().items():
        assert loaded[name].dtype == dtype
        assert loaded[name].shape == tensor.shape
        assert (
            loaded[name]
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(tensor.contiguous().view(-1).view(torch.uint8))
        )


def test_the_bytes_of_a_small_file_are_known(tmp_path: Path) -> None:
    (file,) = af.save_model(Context(), Bag(w=torch.tensor([[1.0, 2.0], [3.0, 4.0]])), tmp_path)
    header = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
    header += b" " * (-(8 + len(header)) % 64)
    data = bytes.fromhex("0000803f000000400000404000008040")
    assert file.read_bytes() == len(header).to_bytes(8, "little") + header + data


def test_ties_are_recorded(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    (file,) = af.save_model(Context(), model, tmp_path)
    with safe_open(file, "pt") as opened:
        assert list(opened.keys()) == ["a.weight"]
        assert opened.metadata() == {"format": "pt", "b.weight": "a.weight"}


def test_several_files_have_an_index_and_replace_older_files(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"mine")
    kill_at_its_last_step(lambda: af.save_model(Context(), Bag(**sized(1)), tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    model = Bag(**sized(4, 4, 4))
    files = af.save_model(Context(), model, tmp_path, max_shard_size=8)
    index = tmp_path / "model.safetensors.index.json"
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert files == (tmp_path / first, tmp_path / second, index)
    assert json.loads(index.read_text()) == {
        "metadata": {"total_size": 12},
        "weight_map": {"t0": first, "t1": first, "t2": second},
    }
    assert index.read_text().endswith("\n")
    assert {file.name for file in tmp_path.iterdir()} == {first, second, index.name, other.name}
    af.save_model(Context(), model, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors", other.name}


def test_a_failed_save_keeps_the_old_file_and_raises_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = af.save_model(Context(), Bag(w=torch.zeros(2)), tmp_path)
    before = file.read_bytes()

    def fails(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)

    def run(ctx: Context) -> str:
        with pytest.raises((OSError, RemoteRankError)) as caught:
            af.save_model(ctx, Bag(w=torch.ones(2)), tmp_path, max_shard_size="1KB")
        return f"{type(caught.value).__name__}: {caught.value}"

    main, other = run_ranks(run, 2)
    assert main.startswith("OSError: [Errno 28]")
    assert other.startswith("RemoteRankError: rank 0 failed in save_model: OSError: [Errno 28]")
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("below", ["file", "file/below"])
def test_a_file_in_place_of_the_directory_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(NotADirectoryError):
        af.save_model(Context(), Bag(w=torch.ones(1)), tmp_path / below)
    assert (tmp_path / "file").read_text() == "text"


def test_meta_tensors_and_extra_states_are_refused(tmp_path: Path) -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

    with pytest.raises(ValueError, match=r"^save_model: can't save weight, bias: no data"):
        af.save_model(Context(), nn.Linear(1, 1, device="meta"), tmp_path)
    with pytest.raises(ValueError, match="_extra_state: the state dict contains a value that isn't a tensor"):
        af.save_model(Context(), Extra(), tmp_path)
    with pytest.raises(ValueError, match="max_shard_size"):
        af.save_model(Context(), nn.Linear(1, 1), tmp_path, "10GiB")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_every_rank_returns_the_files_with_the_models_own_names(on: Any, tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[Path, ...]:
        model = af.prepare(ctx, nn.Linear(2, 1))
        return af.save_model(ctx, model, tmp_path / "new" / "folder", max_shard_size=8)

    first, second = run_ranks(run, 2, on, mixed_precision="bf16")
    assert first == second
    assert [file.exists() for file in first] == [True] * 3
    assert set(load_file(first[0])) == {"weight"}


def drifted(ctx: Context) -> nn.Module:
    """Return a prepared model, of which one weight on rank 1 is the next larger number."""
    model = af.prepare(ctx, nn.Linear(3, 2))
    if ctx.rank == 1:
        weight = next(model.parameters())
        with torch.no_grad():
            weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(9.0))
    return model


@pytest.mark.parametrize(("on", "size"), [("memory", 2), ("memory", 3), ("processes", 2)])
def test_drifted_replicas_write_nothing(on: Any, size: int, tmp_path: Path) -> None:
    (file,) = af.save_model(Context(), nn.Linear(3, 2), tmp_path / "old")
    before = file.read_bytes()

    def run(ctx: Context) -> list[str]:
        model = drifted(ctx)
        errors: list[str] = []
        for name in ("old", "new"):
            with pytest.raises(ReplicaDriftError) as caught:
                af.save_model(ctx, model, tmp_path / name)
            errors.append(str(caught.value))
        return errors

    messages = run_ranks(run, size, on)
    assert messages == [messages[0]] * size
    for text in messages[0]:
        assert "model['weight']" in text
        assert "1 of 6" in text
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
        with pytest.raises(MismatchError) as caught:
            af.save_model(ctx, nn.Linear(2 + ctx.rank, 1), tmp_path / "new")
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert "weight" in first
    assert list(tmp_path.iterdir()) == []


def test_an_argument_that_is_not_a_model_raises_on_every_rank(tmp_path: Path) -> None:
    def run(ctx: Context) -> str:
        model: Any = nn.Linear(1, 1) if ctx.rank == 0 else "model"
        with pytest.raises((TypeError, RemoteRankError)) as caught:
            af.save_model(ctx, model, tmp_path / "new")
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second = run_ranks(run, 2)
    assert second == "TypeError: save_model: takes a module, got str."
    assert first.startswith("RemoteRankError: rank 1 failed in save_model: TypeError")
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"max_shard_size": 8}, ("model-0000{}-of-00002.safetensors", "model.safetensors.index.json")),
        ({"safe_serialization": False}, ("pytorch_model.bin",)),
        (
            {"safe_serialization": False, "max_shard_size": 8},
            ("pytorch_model-0000{}-of-00002.bin", "pytorch_model.bin.index.json"),
        ),
        ({"names": "diffusers"}, ("diffusion_pytorch_model.safetensors",)),
        (
            {"names": "diffusers", "max_shard_size": 8},
            (
                "diffusion_pytorch_model-0000{}-of-00002.safetensors",
                "diffusion_pytorch_model.safetensors.index.json",
            ),
        ),
        ({"names": "diffusers", "safe_serialization": False}, ("diffusion_pytorch_model.bin",)),
    ],
    ids=str,
)
def test_file_names_of_each_format_and_library(
    options: dict[str, Any], files: tuple[str, ...], tmp_path: Path
) -> None:
    expected = (files[0].format(1), files[0].format(2), files[1]) if len(files) > 1 else files
    model = Bag(**sized(4, 4, 4))
    for other in ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin"):
        (tmp_path / "old").mkdir(exist_ok=True)
        (tmp_path / "old" / other).write_bytes(b"older")
    assert [path.name for path in af.save_model(Context(), model, tmp_path / "new", **options)] == list(
        expected
    )
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(expected)
    af.save_model(Context(), model, tmp_path / "old", **options)
    kept = (
        {"model.safetensors", "pytorch_model.bin"}
        if "names" in options
        else {"diffusion_pytorch_model.safetensors"}
    )
    assert {path.name for path in (tmp_path / "old").iterdir()} == {*expected, *kept}


def test_an_index_of_pickled_files_lists_tied_weights_too(tmp_path: Path) -> None:
    shared = nn.Parameter(torch.ones(4))
    model = nn.Module()
    for name, value in (("a", shared), ("b", nn.Parameter(torch.zeros(4))), ("c", shared)):
        model.register_parameter(name, value)
    for safe in (True, False):
        *_, index = af.save_model(Context(), model, tmp_path, 16, safe)
        weight_map = json.loads(index.read_text())["weight_map"]
        assert set(weight_map) == ({"a", "b"} if safe else {"a", "b", "c"})
        assert safe or weight_map["c"] == weight_map["a"] != weight_map["b"]


class Wrapped(torch.Tensor):
    """A tensor that consists of others, like those of quantised models."""

    part: torch.Tensor

    @staticmethod
    def __new__(cls: type["Wrapped"], part: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        tensor = make(cls, part.shape, dtype=part.dtype)
        tensor.part = part
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].part)
        raise NotImplementedError(function)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2).to_sparse(), "can't save w: a tensor has the layout torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.complex128), "can't save w: safetensors lacks torch.complex128"),
        (torch.zeros(2, device="meta"), "can't save w: no data"),
        (Wrapped(torch.zeros(2)), "can't save w: tensors of class Wrapped consist of others"),
    ],
    ids=["sparse", "dtype", "meta", "wrapped"],
)
def test_weights_that_cannot_be_stored_are_refused_by_name(
    value: torch.Tensor, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^save_model: {message}"):
        af.save_model(Context(), Bag(w=value), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_dtypes_that_safetensors_lacks_can_be_pickled(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j], dtype=torch.complex128).conj()
    (file,) = af.save_model(Context(), Bag(w=value), tmp_path, safe_serialization=False)
    assert torch.load(file, weights_only=True)["w"].resolve_conj().equal(value.resolve_conj())


def test_an_unknown_naming_is_refused_on_every_rank(tmp_path: Path) -> None:
    def run(ctx: Context) -> str:
        names: Any = "other" if ctx.rank == 1 else "diffusers"
        with pytest.raises((ValueError, RemoteRankError)) as caught:
            af.save_model(ctx, Bag(w=torch.ones(1)), tmp_path, names=names)
        return str(caught.value)

    main, other = run_ranks(run, 2)
    assert other == "names must be 'transformers' or 'diffusers', got 'other'."
    assert main.startswith("rank 1 failed in save_model: ValueError: names must be")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_the_name_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").mkdir()
    with pytest.raises(IsADirectoryError, match=r"pytorch_model\.bin is a directory"):
        af.save_model(Context(), nn.Linear(1, 1), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_links_are_replaced_instead_of_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"of a cache")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to("../blob")
    (file,) = af.save_model(Context(), nn.Linear(1, 1), tmp_path / "model")
    assert not file.is_symlink()
    assert (tmp_path / "blob").read_bytes() == b"of a cache"


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
    assert all(value.eq(1).all() for value in load_file(file).values())


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


def test_extra_states_stay_in_the_state_dict() -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

    assert af.get_state_dict(Context(), Extra()) == {"_extra_state": {"steps": 3}}


def test_get_state_dict_of_another_object_raises_on_every_rank() -> None:
    def run(ctx: Context) -> str:
        model: Any = nn.Linear(1, 1) if ctx.rank == 0 else 3
        with pytest.raises((TypeError, RemoteRankError)) as caught:
            af.get_state_dict(ctx, model)
        return str(caught.value)

    main, other = run_ranks(run, 2)
    assert other == "get_state_dict: takes a module, got int."
    assert main.startswith("rank 1 failed in get_state_dict: TypeError")
