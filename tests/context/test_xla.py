"""XLA's devices, on a stand-in for torch_xla in ``tests/stand_ins``: what it is asked for, and results."""

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.context import device_random_state, seed_torch, set_device_random_state, wait_for_device
from accelfn.context.device_modules import device_module
from accelfn.errors import ConfigurationError, MissingExtraError, NotAvailableError

STAND_INS = Path(__file__).parents[1] / "stand_ins"
XLA = torch.device("xla:0")


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> Generator[Any, None, None]:
    """Install the stand-in, request XLA, and keep "its" tensors on the CPU."""
    monkeypatch.setattr(sys, "path", [str(STAND_INS), *sys.path])
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    stand_in: Any = importlib.import_module("torch_xla")
    with stand_in.OnHost():
        yield stand_in
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]:
        del sys.modules[name]


def test_one_process_has_its_device_and_accelerates_name(xla: Any) -> None:
    with af.init_context(mixed_precision="bf16") as ctx:
        assert (str(ctx.device), ctx.num_processes, ctx.distributed_type) == ("xla:0", 1, "XLA")
        assert ctx.replace(mixed_precision="no").mixed_precision == "no"
        with pytest.raises(ConfigurationError, match="'fp16' isn't supported on device 'xla'"):
            ctx.replace(mixed_precision="fp16")


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({"ACCELFN_TORCH_DEVICE": "xla", "PJRT_DEVICE": ""}, {}, "xla:0"),
        ({"USE_TORCH_XLA": "false"}, {}, "cpu"),
        ({}, {"cpu": True}, "cpu"),
        ({"ACCELFN_DOWNCAST_BF16": "true"}, {"mixed_precision": "bf16"}, "xla:0"),
    ],
)
def test_variables_decide(
    variables: dict[str, str],
    options: dict[str, Any],
    expected: str,
    xla: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with af.init_context(**options) as ctx:
        assert str(ctx.device) == expected


MESH, FSDP = af.ParallelismConfig(tp_size=2), af.FullyShardedDataParallelPlugin(fsdp_version=2)


@pytest.mark.parametrize(
    ("state", "options", "error", "message"),
    [
        ({}, {"mixed_precision": "fp16"}, ConfigurationError, "which supports: no, bf16"),
        ({}, {"parallelism_config": MESH}, NotAvailableError, "a mesh, which accelfn doesn't support on XLA"),
        ({"hosts": 2}, {"fsdp_plugin": FSDP}, NotAvailableError, "runs on one host, and this is one of 2"),
        ({"devices": 2}, {}, NotAvailableError, "runs 2 ranks as threads of this process"),
    ],
)
def test_what_xla_cannot_do_is_refused(
    state: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    xla: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime: Any = importlib.import_module("torch_xla.runtime")
    if "devices" in state:
        monkeypatch.setattr(runtime, "SIZE", 8)
    runtime.state.update(state)
    with pytest.raises(error, match=message):
        af.init_context(**options)


def test_without_torch_xla_the_variable_and_the_remedy_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(MissingExtraError, match=r"PJRT_DEVICE.*pip install 'torch_xla\[tpu\]'"):
        af.init_context()


def test_random_states_memory_and_waiting(xla: Any) -> None:
    seed_torch(7)
    state = device_random_state(XLA)
    assert (state.dtype, state.numel()) == (torch.uint8, 8)
    seed_torch(8)
    assert not torch.equal(device_random_state(XLA), state)
    set_device_random_state(XLA, state)
    assert torch.equal(device_random_state(XLA), state)
    assert device_module("xla").mem_get_info() == (7, 10)
    wait_for_device(XLA)
    assert [call[0] for call in xla.calls] == ["sync", "wait_device_ops"]


def test_batches_and_steps_start_what_was_recorded(xla: Any) -> None:
    ctx = af.init_context(mixed_precision="bf16")
    loader = DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=2)
    model = nn.Linear(3, 1)
    model, optimizer, loader = af.prepare(ctx, model, torch.optim.SGD(model.parameters()), loader)
    scaler = af.init_scaler(ctx)
    for (batch,), micro in af.microbatches(ctx, loader):
        del xla.calls[:-1]
        scaler = af.backward(ctx, model(batch).sum(), scaler, micro)
        assert [call[0] for call in xla.calls] == ["sync"]
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        assert [call[0] for call in xla.calls] == ["sync", "sync"]


def test_fsdp_shards_parameters_outputs_and_batches_over_all_devices_of_the_host(xla: Any) -> None:
    ctx = af.init_context(fsdp_plugin=FSDP)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    plan = af.plan_model(ctx, model)
    assert "sharding   parameters, gradients and batches sharded along their first dimension" in str(plan)
    names = [name for name, _ in model.named_parameters()]
    prepared = af.prepare_model(ctx, model)
    assert prepared is model
    assert [name for name, _ in prepared.named_parameters()] == names
    assert ("fsdp", "Sequential") in xla.calls
    loader = af.prepare_data_loader(ctx, DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=4))
    del xla.calls[:]
    ((batch,),) = loader
    prepared(batch)
    assert xla.calls[-2:] == [
        ("mark_sharding", (4, 3), ("fsdp", None)),
        ("mark_sharding", (4, 1), ("fsdp", None)),
    ]


def run(size: int) -> list[dict[str, Any]]:
    """Run the training program on a world of stand-ins."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = f"{Path(__file__).parents[2]}{os.pathsep}{STAND_INS}"
    stand_in = {"XLA_STAND_IN_SIZE": str(size), "XLA_STAND_IN_PORT": str(port)}
    shared = {"PJRT_DEVICE": "TPU", "PYTHONPATH": path, **stand_in}
    started = [
        subprocess.Popen(
            [sys.executable, str(STAND_INS / "train_on_xla.py")],
            env={**os.environ, **shared, "XLA_STAND_IN_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in started]
    return [json.loads(output) for output in outputs]


@pytest.mark.slow
def test_two_processes_train_the_model_of_one_through_torch_xlas_process_group() -> None:
    (alone,), pair = run(1), run(2)
    for rank, report in enumerate(pair):
        assert (report["type"], report["device"], report["model"]) == ("XLA", "xla:0", "Sequential")
        assert report["world"] == [rank, 2, "xla"]
        assert report["losses"] == pytest.approx(alone["losses"], abs=1e-6)
        assert report["weights"] == pytest.approx(alone["weights"], abs=1e-4)
        assert report["collectives"] == ["allreduce"]
        assert report["syncs"] == alone["syncs"] == 4 + 2  # each batch, and each of the two steps
        assert report["scattered"] == [2.0 * rank, 2.0 * rank + 1]
