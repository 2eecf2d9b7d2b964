"""Checkpoints that DeepSpeed has written: read as data, and continued without it."""

# DeepSpeed leaves everything untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.checkpoint import convert_checkpoint, load_model, load_state, read_accelerate
from accelfn.errors import CheckpointError, DamagedCheckpointError
from accelfn.launch.main import main
from accelfn.testing import run_ranks

# What stage 0 writes in 16 bits, and stage 1 with gradients in float32, are layouts of their own.
CASES = [(stage, dtype) for dtype in ("fp32", "bf16") for stage in range(4)] + [(1, "bf16+fp32")]
RANKS, STEPS, MORE = 2, 2, 3


class Net(nn.Module):
    """A model with two groups of parameters, a frozen layer, a buffer and tied weights."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.middle, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.last.weight = self.middle.weight
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(self.frozen(self.first(rows))))) * self.scale


def build() -> dict[str, Any]:
    model = Net()
    trained = [one for one in model.parameters() if one.requires_grad]
    matrices, vectors = [[one for one in trained if (one.ndim > 1) == many] for many in (True, False)]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def batch(step: int) -> torch.Tensor:
    return torch.randn(4 * RANKS, 3, generator=torch.Generator().manual_seed(step))


class Written(NamedTuple):
    """What DeepSpeed had when it saved, and when it had gone on."""

    saved: dict[str, list[torch.Tensor | None]]
    continued: dict[str, torch.Tensor]


def deepspeed_values(engine: Any) -> dict[str, list[torch.Tensor | None]]:
    """Return the float32 value of each trained parameter, and its moments, as DeepSpeed tells them."""
    utils: Any = importlib.import_module("deepspeed.utils")
    found: dict[str, list[torch.Tensor | None]] = {}
    if engine.zero_optimization_stage() in (1, 2):
        # DeepSpeed 0.19 links moments after the first group's first step, when the others have none.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, one in engine.module.named_parameters():
        if not one.requires_grad:
            continue
        if engine.zero_optimization_stage() > 0:
            moments = [utils.safe_get_full_optimizer_state(one, key) for key in ("exp_avg", "exp_avg_sq")]
            found[name] = [value.clone() for value in (utils.safe_get_full_fp32_param(one), *moments)]
        else:
            state = engine.optimizer.state if isinstance(engine.optimizer, torch.optim.Optimizer) else {}
            own = state.get(one, {})
            value = one.detach().clone() if own else None
            found[name] = [value, *(own[key].clone() if own else None for key in ("exp_avg", "exp_avg_sq"))]
    return found


def write(ctx: Context, stage: int, dtype: str, folder: Path) -> Written:
    deepspeed: Any = importlib.import_module("deepspeed")
    objects = build()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "sub_group_size": 16},  # several flat tensors at stage 3
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype != "fp32"},
        "data_types": {"grad_accum_dtype": "fp32" if "+" in dtype else None},
    }
    engine = deepspeed.initialize(
        model=objects["model"],
        optimizer=objects["optimizer"],
        lr_scheduler=objects["scheduler"],
        config=config,
    )[0]

    def train(steps: range) -> None:
        for step in steps:
            rows = batch(step).chunk(RANKS)[ctx.rank].to(torch.float32 if dtype == "fp32" else torch.bfloat16)
            engine.backward(engine(rows).float().square().mean())
            engine.step()

    train(range(STEPS))
    engine.save_checkpoint(str(folder), tag="pytorch_model", client_state={"epoch": 3})
    saved = deepspeed_values(engine)
    train(range(STEPS, STEPS + MORE))
    continued = {name: values[0] for name, values in deepspeed_values(engine).items()}
    return Written(saved, {name: value for name, value in continued.items() if value is not None})


class Folders(NamedTuple):
    """Folders that DeepSpeed wrote, by stage and dtype, and what it had."""

    root: Path
    written: dict[tuple[int, str], Written]

    def folder(self, stage: int, dtype: str = "fp32") -> Path:
        return self.root / f"{stage}-{dtype}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    pytest.importorskip("deepspeed")
    root = tmp_path_factory.mktemp("deepspeed")

    def on_rank(ctx: Context) -> dict[tuple[int, str], Written]:
        warnings.simplefilter("ignore")  # about DeepSpeed's own calls of torch
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        os.environ["LOCAL_RANK"] = str(ctx.local_rank)
        return {case: write(ctx, *case, root / f"{case[0]}-{case[1]}") for case in CASES}

    return Folders(root, run_ranks(on_rank, RANKS, on="processes", timeout_s=110)[0])


pytestmark = [pytest.mark.slow, pytest.mark.timeout(850), pytest.mark.usefixtures("deepspeed_ops")]


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_values_are_those_that_deepspeed_tells(stage: int, dtype: str, folders: Folders) -> None:
    tree = read_accelerate(folders.folder(stage, dtype))
    assert tree["model"].keys() == Net().state_dict().keys()
    assert all(value.dtype == torch.float32 for value in tree["model"].values())
    plain = Net().state_dict()
    rtol, atol = (0.0, 0.0) if dtype == "fp32" else (4e-3, 1e-4)
    for name in ("scale", "frozen.weight", "frozen.bias"):
        torch.testing.assert_close(tree["model"][name], plain[name], rtol=rtol, atol=atol)
    numbers = iter(range(9))
    order = [name for many in (True, False) for name, one in Net().named_parameters()
             if one.requires_grad and (one.ndim > 1) == many]  # fmt: skip
    for name in order:
        value, *moments = folders.written[stage, dtype].saved[name]
        key = f"#{next(numbers)}" if stage == 0 else f"model/{name}"
        state = tree["optimizer"]["state"][key]
        assert state["step"] >= STEPS  # at stage 0 in 16 bits, DeepSpeed makes a step with zeros
        if value is not None:
            assert torch.equal(tree["model"][name], value)
            for moment, expected in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                assert expected is not None
                assert torch.equal(state[moment], expected)
    torch.testing.assert_close(tree["model"]["last.weight"], tree["model"]["middle.weight"], rtol=0, atol=0)
    assert [len(group["params"]) for group in tree["optimizer"]["groups"]] == [2, 1]


@pytest.mark.parametrize("stage", range(4))
def test_plain_torch_goes_on_as_deepspeed_does(stage: int, folders: Folders, tmp_path: Path) -> None:
    converted = convert_checkpoint(folders.folder(stage), tmp_path / "own", to="accelfn")
    assert "epoch" in " ".join(converted.notes)
    objects = build()
    for one in objects["model"].parameters():
        nn.init.zeros_(one)
    objects = load_state(af.Context(), converted.path, objects)
    model, optimizer, scheduler = (objects[name] for name in ("model", "optimizer", "scheduler"))
    for step in range(STEPS, STEPS + MORE):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for name, expected in folders.written[stage, "fp32"].continued.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=0, atol=1e-6)


LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP2": {"fsdp_plugin": af.FullyShardedDataParallelPlugin(fsdp_version=2)},
    "ZeRO-3": {"deepspeed_plugin": af.DeepSpeedPlugin(zero_stage=3)},
}


@pytest.mark.parametrize(("stage", "layout"), [(1, "FSDP2"), (2, "ZeRO-3"), (3, "DDP")])
def test_two_ranks_go_on_in_any_layout(stage: int, layout: str, folders: Folders, tmp_path: Path) -> None:
    place = convert_checkpoint(folders.folder(stage), tmp_path / "own", to="accelfn").path
    rows = torch.cat([batch(step) for step in range(STEPS, STEPS + MORE)])

    def on_rank(ctx: Context) -> None:
        warnings.simplefilter("ignore")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        objects = build()
        data: Any = list(rows)
        prepared: Any = af.prepare(ctx, *objects.values(), torch.utils.data.DataLoader(data, batch_size=4))
        model, optimizer, scheduler, loader = prepared
        af.load_state(ctx, place, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        scaler = af.init_scaler(ctx)
        for some, micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, model(some).square().mean(), scaler, micro)
            scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=scheduler)
        af.save_model(ctx, model, tmp_path / "weights")

    run_ranks(on_rank, RANKS, on="processes", timeout_s=110, **LAYOUTS[layout])
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    for name, expected in folders.written[stage, "fp32"].continued.items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_are_merged_into_one_file(
    stage: int, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = read_accelerate(folders.folder(stage))["model"]
    assert main(["merge-weights", str(folders.folder(stage)), str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(expected) - set(loaded) == {"last.weight"}  # tied
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    model = Net()
    load_model(model, tmp_path)
    assert torch.equal(model.last.weight, expected["middle.weight"])


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "pytorch_model" / name).unlink()


def copy(name: str, other: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / "pytorch_model" / name, folder / "pytorch_model" / other)


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        path = folder / "pytorch_model" / name
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)

    return rewrite


def optim(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


MODEL = "mp_rank_00_model_states.pt"


class Custom:
    """A class of the user's in client_state."""


@pytest.mark.filterwarnings("ignore")  # importing DeepSpeed's classes, to edit what it wrote
@pytest.mark.parametrize(
    ("stage", "change", "error", "words"),
    [
        (1, remove(optim(1)), CheckpointError, r"rank 1 out of 2 ranks"),
        (1, remove(optim(0)), CheckpointError, r"rank 0 out of 2 ranks"),
        (2, remove(MODEL), CheckpointError, "no file of the model"),
        (3, remove("zero_pp_rank_1_mp_rank_00_model_states.pt"), CheckpointError, "model_states.*rank 1"),
        (1, copy(optim(1), optim(2)), CheckpointError, "of another save"),
        (2, copy(MODEL, f"zero_pp_rank_0_{MODEL}"), CheckpointError, "files of stage 3 and of lower"),
        (1, copy(optim(1), f"bf16_{optim(1)}"), CheckpointError, "both of the same rank"),
        (0, copy(MODEL, "mp_rank_01_model_states.pt"), CheckpointError, "mp_rank_01.*was split by tensor"),
        (0, copy(MODEL, "layer_00-model_states.pt"), CheckpointError, "layer_00.*pipeline"),
        (1, edit(MODEL, lambda state: state.update(mp_world_size=2)), CheckpointError, "was split by tensor"),
        (0, edit(MODEL, lambda state: state.update(mine=Custom())), CheckpointError, "more than data.*Cust"),
        (
            2,
            edit(optim(1), lambda state: state["optimizer_state_dict"].pop("param_slice_mappings")),
            CheckpointError,
            r"DeepSpeed 0\..*param_slice_mappings",
        ),
        (
            3,
            edit(optim(1), lambda state: state["optimizer_state_dict"]["fp32_flat_groups"].pop()),
            DamagedCheckpointError,
            "can't be assembled",
        ),
    ],
)  # fmt: skip
def test_what_is_incomplete_or_of_another_layout_is_refused(
    stage: int, change: Callable[[Path], object], error: type[Exception], words: str,
    folders: Folders, tmp_path: Path,
) -> None:  # fmt: skip
    folder = shutil.copytree(folders.folder(stage), tmp_path / "copy")
    change(folder)
    with pytest.raises(error, match=words):
        read_accelerate(folder)


def test_folders_are_found_by_tag_number_and_latest(folders: Folders, tmp_path: Path) -> None:
    source = folders.folder(1) / "pytorch_model"
    expected = read_accelerate(source)["model"]
    assert expected.keys() == read_accelerate(folders.folder(1))["model"].keys()

    several = tmp_path / "several"
    for tag in ("global_step1", "global_step2"):
        shutil.copytree(source, several / tag)
    with pytest.raises(CheckpointError, match="several checkpoints of DeepSpeed"):
        read_accelerate(several)
    (several / "latest").write_text("global_step1")
    assert read_accelerate(several)["model"].keys() == expected.keys()
    (several / "latest").write_text("global_step3")
    with pytest.raises(CheckpointError, match="names 'global_step3'"):
        read_accelerate(several)

    two = tmp_path / "two"
    shutil.copytree(source, two / "pytorch_model")
    shutil.copytree(folders.folder(3) / "pytorch_model", two / "pytorch_model_1")
    tree = read_accelerate(two)
    assert {"model", "model_1", "optimizer", "optimizer_1"} <= tree.keys()
    assert all(name.startswith("model_1/") for name in tree["optimizer_1"]["state"])
    shutil.rmtree(two / "pytorch_model")
    with pytest.raises(CheckpointError, match="pytorch_model is missing"):
        read_accelerate(two)
