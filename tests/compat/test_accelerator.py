"""The Accelerator under the alias: windows, metrics and checkpoints as programs written for it know them."""

# torch leaves these partly untyped.
# pyright: reportUnknownMemberType=false

import pathlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accelfn as af
from accelfn.compat import operations
from accelfn.compat.accelerator import Accelerator
from accelfn.compat.current import current
from accelfn.compat.records import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from accelfn.compat.states import PartialState
from accelfn.compat.trackers import get_available_trackers, register_tracker_class
from accelfn.config import LoggerType
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from accelfn.tracking import JSONLTracker
from tests.launch.forked import Job, run_jobs

Loader: Any = DataLoader  # of lists, which torch reads and its types refuse
pytestmark = pytest.mark.usefixtures("alone")


def prepared(accelerator: Accelerator, rows: int = 5) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    loader = Loader(torch.arange(rows).float().unsqueeze(1))
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def test_a_window_counts_calls_and_ends_with_the_loader() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(accelerator)
    seen: list[Any] = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum() * 0 + model.bias.sum())
            gradient: Any = model.bias.grad
            seen.append((accelerator.step, accelerator.sync_gradients, gradient.item()))
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [(1, False, 0.5), (2, True, 1.0), (3, False, 0.5), (4, True, 1.0), (0, True, 0.5)]


def test_a_window_can_go_on_in_the_next_pass() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    _, _, loader = prepared(accelerator, rows=3)
    syncs: list[bool] = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate():
                syncs.append(accelerator.sync_gradients)
    assert syncs == [False, True, False, True, False, True]


def test_metrics_are_cut_at_the_end_of_a_loader() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(Loader(list(range(5)), batch_size=2))
    gathered = [accelerator.gather_for_metrics(batch.repeat(2)).tolist() for batch in loader]
    assert gathered == [[0, 1, 0, 1], [2, 3, 2, 3], [4]]
    for batch in loader:
        objects = accelerator.gather_for_metrics([str(row) for row in batch], use_gather_object=True)
    assert objects == ["tensor(4)"]  # pyright: ignore[reportPossiblyUnboundVariable]
    assert accelerator.gather_for_metrics(torch.arange(3)).tolist() == [0, 1, 2]


def test_arithmetic_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    current().notes = frozenset()
    with pytest.warns(UserWarning, match="this program has Accelerate's arithmetic") as said:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert said[0].filename == __file__, "the line that makes it"
    assert accelerator.compat == "accelerate"
    recwarn.clear()
    Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert not recwarn


def test_losses_of_ranks_that_share_sequences_are_averaged_as_there() -> None:
    def run(ctx: af.Context) -> float:
        weight = torch.ones((), requires_grad=True)
        af.Accelerator(context=ctx, compat="accelerate").backward(weight * 3)
        with pytest.raises(ConfigurationError, match="ranks along cp share sequences"):
            af.Accelerator(context=ctx).backward(weight * 3)
        assert weight.grad is not None
        return weight.grad.item()

    with pytest.warns(UserWarning, match="Ranks that share sequences have equal weights"):
        found = run_ranks(run, 2, parallelism_config=af.ParallelismConfig(cp_size=2))
    assert found == [3.0, 3.0]


def test_checkpoints_take_objects_in_order_and_leave_loaders_alone(tmp_path: pathlib.Path) -> None:
    def make() -> tuple[Accelerator, Any, Any, Any]:
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(tmp_path)))
        first, optimizer, loader = prepared(accelerator)
        second = accelerator.prepare(nn.Linear(1, 1))  # of the same kind, without a name
        accelerator.register_for_checkpointing(
            torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.optim.lr_scheduler.StepLR(optimizer, 2)
        )
        assert [accelerator._models, accelerator._dataloaders] == [[first, second], [loader]]  # pyright: ignore[reportPrivateUsage]
        assert len(accelerator._custom_objects) == 2  # pyright: ignore[reportPrivateUsage]
        return accelerator, first, second, loader

    accelerator, kept, second, loader = make()
    with torch.no_grad():
        second.bias.fill_(7)
    for _ in loader:
        accelerator.save_state(tmp_path / "here")
        break
    del kept
    accelerator, first, second, loader = make()
    accelerator.load_state(tmp_path / "here")
    assert second.bias.item() == 7 != first.bias.item()
    assert len([*loader]) == 5, "the program skips batches itself"
    other = accelerator.prepare(Loader(list(range(5))))
    assert [accelerator.loaders.name_of(one) for one in (loader, other)] == ["loader", "loader_1"]


def test_no_sync_takes_the_model_by_name_and_scale_is_the_engines() -> None:
    accelerator = Accelerator(cpu=True)
    model, _, _ = prepared(accelerator)
    with accelerator.no_sync(model=model):
        accelerator.backward(model(torch.ones(1, 1)).sum(), scale_wrt_gas=False)
    assert accelerator.scaler is None
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is model


# Run by both: each batch is clipped, also where its window stays open.
CLIPS = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = DataLoader(torch.arange(42).float().reshape(14, 3) / 14)
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
said = []
for row in rows:
    with accelerator.accumulate(model):
        accelerator.backward(model(row).square().sum())
        accelerator.unscale_gradients()
        said.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        accelerator.clip_grad_value_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
weights = torch.cat([one.detach().flatten() for one in model.parameters()])
accelerator.print(accelerator.gather(torch.cat([torch.tensor(said), weights])).tolist())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("peer")
def test_an_open_window_is_clipped_as_the_peer_clips_it(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "clips.py"
    program.write_text(CLIPS)
    jobs = [Job(str(program), (), world, {}, aliased) for world in (1, 2) for aliased in (False, True)]
    theirs, own, of_two, own_of_two = run_jobs(jobs, tmp_path, 110, ("torch._dynamo",))
    assert own == theirs != ""
    assert own_of_two == of_two != ""


@pytest.mark.slow
def test_options_are_there_under_the_peers_names(peer: Any) -> None:
    accelerator, theirs = Accelerator(cpu=True), peer.Accelerator(cpu=True)
    names = ("autocast", "scaler", "init", "profile", "fp8_recipe", "te_recipe", "ao_recipe", "msamp_recipe")
    values = ("fp8_enabled", "has_fp8_handler", "delayed_fp8_autocast", "flag_tensor", "rng_types")
    for name in (*(f"{one}_handler" for one in names), *values):
        assert getattr(accelerator, name) == getattr(theirs, name), name
    assert accelerator.fp8_backend.value == theirs.fp8_backend.value
    assert str(accelerator.state) == str(theirs.state)
    assert str(PartialState()) == str(peer.PartialState())


def test_options_can_be_asked() -> None:
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp], log_with=LoggerType.JSONL, project_dir="x")
    assert accelerator.ddp_handler is ddp
    assert accelerator.log_with == [LoggerType.JSONL]
    handle = accelerator.register_save_state_pre_hook(print)
    assert [*accelerator._save_model_state_pre_hook.values()] == [print]  # pyright: ignore[reportPrivateUsage]
    handle.remove()
    assert not accelerator._load_model_state_pre_hook  # pyright: ignore[reportPrivateUsage]
    accelerator.set_trigger()
    assert accelerator.flag_tensor == 1
    assert accelerator.state.deepspeed_plugins is None


def test_a_handler_that_is_set_is_used_from_then_on() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    assert not accelerator.context.precision.autocast.enabled
    assert accelerator.autocast_handler == AutocastKwargs(enabled=False)
    accelerator.init_handler = InitProcessGroupKwargs()
    accelerator.ddp_handler = None
    assert accelerator.handlers == [AutocastKwargs(enabled=False), InitProcessGroupKwargs()]
    accelerator.autocast_handler.enabled = True
    assert accelerator.context.precision.autocast.enabled


def test_what_the_program_changes_later_counts_for_what_follows(tmp_path: pathlib.Path) -> None:
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    loading = DataLoaderConfiguration()
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=loading)
    assert accelerator.project_configuration is project
    assert accelerator.dataloader_config is loading
    kept = prepared(accelerator)
    project.iteration, project.total_limit = 5, 1
    saved: list[Any] = [accelerator.save_state() for _ in range(2)]
    accelerator.project_configuration.iteration = 9
    accelerator.load_state(saved[1])
    assert accelerator.save_iteration == 9, "loading doesn't lower it"
    saved.append(accelerator.save_state())
    assert [one.name for one in saved] == ["checkpoint_5", "checkpoint_6", "checkpoint_9"]
    assert ([*saved[0].parent.glob("checkpoint_*")], project.iteration) == ([saved[2]], 10)
    project.set_directories(tmp_path / "other")
    project.logging_dir = tmp_path / "logs"
    assert accelerator.save_state().parents[1] == tmp_path / "other"
    accelerator.log_with = ["jsonl"]
    accelerator.init_trackers("mine")
    assert (tmp_path / "logs").is_dir()
    loading.split_batches = True
    accelerator.even_batches = False
    accelerator.rng_types.append("torch")
    assert (accelerator.split_batches, loading.even_batches) == (True, False)
    assert accelerator.context.rng_types == ("generator", "torch")
    with pytest.raises(ConfigurationError, match="rng_types takes torch"):
        accelerator.rng_types = ["dice"]
    project.total_limit = 0
    with pytest.raises(ConfigurationError, match="total_limit"):
        accelerator.save_state()
    del kept


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("backwrd", "Did you mean backward?"),
        ("deepspeed_ulysses_dl_adapter", "sp_size"),
        ("quux", r"fn\.$"),
    ],
)
def test_an_attribute_that_isnt_there_names_a_near_one(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(Accelerator(cpu=True), name)


def test_options_that_moved_are_named() -> None:
    with pytest.warns(UserWarning, match=r"no effect .*DataLoaderConfiguration\(split_batches=True\)"):
        assert not Accelerator(cpu=True, split_batches=True).split_batches


def test_a_registered_tracker_has_a_name(tmp_path: pathlib.Path) -> None:
    register_tracker_class(type("Mine", (JSONLTracker,), {"name": "mine"}))
    accelerator = Accelerator(cpu=True, log_with="mine", project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0}, step=3)
    (events,) = accelerator.get_tracker("mine", unwrap=True).iterdir()
    assert '"values": {"loss": 1.0}' in events.read_text()
    with pytest.raises(TypeError, match="takes a subclass of GeneralTracker"):
        register_tracker_class(int)  # pyright: ignore[reportArgumentType]


def test_all_trackers_are_those_that_accelerate_knows() -> None:
    known = get_available_trackers()
    assert "jsonl" not in known
    accelerator = Accelerator(cpu=True, log_with=["all", *known[:1]], project_dir="x")
    assert [str(one) for one in accelerator.log_with] == known
    mine = type("Mine", (JSONLTracker,), {"name": "mine"})("x")
    found = Accelerator(cpu=True, log_with=[mine, LoggerType.ALL], project_dir="x").log_with
    assert found == [mine, *known]


def on_two_ranks(ctx: af.Context) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    model, optimizer, _ = prepared(accelerator)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    tensor = torch.tensor([float(rank)])
    same = operations.broadcast(tensor, 1) is tensor
    listed: list[Any] = [rank]
    loader = accelerator.prepare(Loader(list(range(5)), batch_size=2))
    ended: list[Any] = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    return {
        "rate": optimizer.param_groups[0]["lr"],
        "gathered": operations.gather_object([rank, "a"]),
        "broadcast": (same, tensor.item(), operations.broadcast_object_list(listed), listed),
        "mean": operations.reduce(torch.tensor(float(rank))).item(),
        "copied": operations.copy_tensor_to_devices(None if rank else torch.tensor([5.0])).tolist(),
        "padded": operations.pad_across_processes(torch.ones(rank + 1)).tolist(),
        "ended": ended,
        "world": (ctx.num_processes, str(accelerator.distributed_type)),
        "wrapped": accelerator.unwrap_model(model) is not model,
    }


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_work_together() -> None:
    first, second = af.testing.run_ranks(on_two_ranks, 2, "processes", cpu=True)
    assert (first.pop("padded"), second.pop("padded")) == ([1.0, 0.0], [1.0, 1.0])
    assert first == second
    assert first == {
        "rate": 0.1 * 0.5 * 0.5,  # the scheduler stepped once per rank
        "gathered": [0, "a", 1, "a"],
        "broadcast": (True, 1.0, [0], [0]),
        "mean": 0.5,
        "copied": [5.0],
        "ended": [[0, 1, 2, 3], [4]],
        "world": (2, "DistributedType.MULTI_CPU"),
        "wrapped": True,
    }
