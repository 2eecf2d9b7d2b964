"""What only a GPU can show. Skipped without one; all of it runs on one GPU of CUDA."""

# torch leaves backward, its optimizers and torch.cuda partly untyped; optional packages have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Context
from tests.parallel.fp8_models import batches, loss_of, make, train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torchao asks for autocast's dtype by torch's old name.
    pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning"),
]

# The distance of 30 losses from those in float32 on the CPU.
DISTANCES = {"no": 1e-3, "bf16": 0.05, "fp16": 0.05, "fp8": 0.1}


def curve(ctx: Context, steps: int = 30, fused: bool = False) -> list[float]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    model, optimizer = af.prepare(ctx, model, optimizer)
    return train(ctx, model, optimizer, [ids.to(ctx.device) for ids in batches(steps)])


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("mode", list(DISTANCES))
def test_training_follows_the_cpu(mode: str, fused: bool) -> None:
    if mode == "fp8":
        pytest.importorskip("torchao")
    expected = curve(Context(), fused=False)
    with af.init_context(mixed_precision=mode) as ctx:
        assert ctx.device.type == "cuda"
        found = curve(ctx, fused=fused)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < DISTANCES[mode]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("mode", ["no", "bf16", "fp8"])
def test_compiled_training_follows_the_cpu(mode: str) -> None:
    if mode == "fp8":
        pytest.importorskip("torchao")
    expected = curve(Context())
    with af.init_context(mixed_precision=mode, dynamo_backend="inductor") as ctx:
        found = curve(ctx)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < DISTANCES[mode]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
def test_a_step_never_waits_for_the_device(mode: str) -> None:
    with af.init_context(mixed_precision=mode, gradient_accumulation_steps=2) as ctx:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        # In float16 a scheduler has to learn on the host whether the step was skipped.
        scheduler = None
        if mode != "fp16":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        data: Any = batches(8)
        loader = DataLoader[Any](data, batch_size=None, pin_memory=True)
        model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
        scaler = af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                loss = loss_of(model, batch)
                if micro.index >= 2:  # the first window makes the optimizer's state
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    scaler = af.backward(ctx, loss, scaler, micro)
                    if micro.sync:
                        scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0, scheduler=scheduler)
                finally:
                    torch.cuda.set_sync_debug_mode("default")


def test_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    def state(ctx: Context) -> dict[str, Any]:
        model = nn.Sequential(make(), nn.Dropout(0.1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = af.prepare(ctx, model, optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": af.init_scaler(ctx)}

    def go_on(ctx: Context, tree: dict[str, Any], data: list[torch.Tensor]) -> None:
        for ids in data:
            loss = loss_of(tree["model"], ids.to(ctx.device))
            scaler = af.backward(ctx, loss, tree["scaler"])
            tree["scaler"] = af.optimizer_step(ctx, tree["optimizer"], scaler, max_norm=1.0)

    with af.init_context(mixed_precision="fp16") as ctx:
        af.set_seed(3)
        first = state(ctx)
        go_on(ctx, first, batches(3))
        pending = af.save_state(ctx, tmp_path / "state", first, asynchronous=True)
        go_on(ctx, first, batches(3, seed=2))  # while the copy is written
        pending.result()
        second = af.load_state(ctx, tmp_path / "state", state(ctx))
        go_on(ctx, second, batches(3, seed=2))
    for name, value in first["model"].state_dict().items():
        assert torch.equal(value, second["model"].state_dict()[name]), name


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("bitsandbytes.optim", "AdamW8bit"),
        ("bitsandbytes.optim", "PagedAdamW8bit"),
        ("bitsandbytes.optim", "Lion8bit"),
        ("torchao.optim", "AdamW8bit"),
        ("torchao.optim", "AdamW4bit"),
        ("torchao.optim", "AdamWFp8"),
        ("schedulefree", "AdamWScheduleFree"),
    ],
)
def test_other_optimizers_train_and_resume(package: str, name: str, tmp_path: Path) -> None:
    make_optimizer = getattr(pytest.importorskip(package), name)

    def state(ctx: Context) -> dict[str, Any]:
        model = make()
        optimizer = make_optimizer(model.parameters(), lr=2e-3)
        model, optimizer = af.prepare(ctx, model, optimizer)
        return {"model": model, "optimizer": optimizer}

    with af.init_context(mixed_precision="bf16") as ctx:
        data = [ids.to(ctx.device) for ids in batches(20)]
        first = state(ctx)
        losses = train(ctx, first["model"], first["optimizer"], data)
        assert losses[-1] < losses[0] - 0.2
        af.save_state(ctx, tmp_path / "state", first)
        second = af.load_state(ctx, tmp_path / "state", state(ctx))
        going_on = train(ctx, first["model"], first["optimizer"], data)
        assert train(ctx, second["model"], second["optimizer"], data) == going_on


@pytest.mark.parametrize(
    "options",
    [{"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}],
    ids=["int8", "nf4"],
)
def test_bitsandbytes_layers_compute_nearly_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    af.save_model(Context(), plain, tmp_path)
    with af.init_empty_weights():
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    config = af.bigmodel.BnbQuantizationConfig(**options, skip_modules=[])
    model = af.bigmodel.load_and_quantize_model(model, config, weights_location=tmp_path, device_map={"": 0})
    x = torch.randn(64, 256)
    with torch.no_grad():
        expected, found = plain(x), model(x.cuda().half()).float().cpu()
    assert float((found - expected).norm() / expected.norm()) < 0.15


def test_a_device_map_fills_the_gpu_first(tmp_path: Path) -> None:
    plain = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    af.save_model(Context(), plain, tmp_path)
    with af.init_empty_weights():
        empty = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    size = 4 * (512 * 512 + 512)
    model: Any = af.load_checkpoint_and_dispatch(
        empty,
        tmp_path,
        device_map="auto",
        max_memory={0: 5 * size, "cpu": 3 * size},
        offload_folder=tmp_path / "offload",
    )
    places = set(model.hf_device_map.values())
    assert 0 in places
    assert places & {"cpu", "disk"}
    x = torch.randn(4, 512)
    torch.testing.assert_close(model(x).cpu(), plain(x), atol=1e-3, rtol=1e-3)
    model(x).sum().backward()


def test_the_batch_size_shrinks_while_the_gpu_is_full() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    tried: list[int] = []

    @af.find_executable_batch_size(starting_batch_size=4)
    def run(batch_size: int) -> int:
        tried.append(batch_size)
        torch.empty(int(free * batch_size / 3.6), dtype=torch.uint8, device="cuda")
        return batch_size

    assert run() == 3
    assert tried == [4, 3]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_profiles_have_kernels() -> None:
    with af.init_context(kwargs_handlers=[af.config.ProfileKwargs(activities=["cpu", "cuda"])]) as ctx:
        with af.profile(ctx) as profiler:
            _ = torch.rand(64, 64, device=ctx.device) @ torch.rand(64, 64, device=ctx.device)
            torch.cuda.synchronize()
    events: Any = profiler.events()
    assert any(event.device_type.name == "CUDA" for event in events)
    assert ProfilerActivity.CUDA in profiler.activities


def test_random_numbers_of_the_gpu_are_restored(tmp_path: Path) -> None:
    with af.init_context() as ctx:
        af.set_seed(1)
        af.save_state(ctx, tmp_path / "state", {"step": 1})
        expected = torch.rand(4, device=ctx.device)
        af.load_state(ctx, tmp_path / "state", {"step": 0})
        assert torch.equal(torch.rand(4, device=ctx.device), expected)


@pytest.mark.parametrize("arguments", [["test"], ["launch", "--num_processes", "1", "docs/examples/fp8.py"]])
def test_commands_use_the_gpu(arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "accelfn", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_environment_names_the_gpu() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "accelfn", "env"], capture_output=True, text=True, timeout=60, check=True
    )
    assert torch.cuda.get_device_name() in told.stdout
