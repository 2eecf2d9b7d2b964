"""Checkpoints of an Accelerator: by name, whole, as the functions write them, and as programs expect them."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

import copy
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn import Accelerator, Context, DataLoaderConfiguration
from accelfn.config import GradScalerKwargs, ProjectConfiguration
from accelfn.data import loader_state
from accelfn.errors import (
    CheckpointMismatchError,
    ConfigurationError,
    NoCheckpointError,
    RemoteRankError,
)
from accelfn.testing import run_ranks
from tests.training.models import one_weight, sgd, values

Weights = dict[str, torch.Tensor]


class Generator(nn.Linear):
    """A model of its own class."""


class Critic(nn.Linear):
    """Another one."""


class Counter:
    """Something that isn't prepared, and has a state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Run:
    """The training loop of the documents, over two epochs of data in batches of two."""

    def __init__(self, ctx: Context, seed: int = 0, dropout: float = 0.0) -> None:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(9)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        rows = TensorDataset(torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator))
        loader = DataLoader(rows, batch_size=2, shuffle=True)
        self.accelerator = Accelerator(context=ctx)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, StepLR(optimizer, 2, gamma=0.9), loader
        )
        self.losses: list[float] = []

    def steps(self) -> Iterator[int]:
        """Train, and pause after each batch."""
        number = 0
        while self.loader.epoch < 2:
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    with self.accelerator.autocast():
                        loss = nn.functional.mse_loss(self.model(x), y)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(float(loss.detach()))
                self.counter.value += 1
                number += 1
                yield number

    def weights(self) -> Weights:
        return {name: value.clone() for name, value in af.unwrap_model(self.model).state_dict().items()}


def small(ctx: Context | None = None) -> tuple[Accelerator, nn.Linear]:
    """Make an accelerator with a model; whoever drops the model takes it out of what is saved."""
    accelerator = Accelerator(context=ctx or Context())
    return accelerator, accelerator.prepare(nn.Linear(1, 1))


def scale_of(accelerator: Accelerator) -> float:
    return float(accelerator._scaling.state.scale)  # pyright: ignore[reportPrivateUsage]


def is_equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stop(steps: Iterator[int], number: int) -> None:
    next(one for one in steps if one == number)


# --- training goes on ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "on", "mode"), [(1, "memory", "fp16"), (2, "memory", "no"), (2, "processes", "fp16")]
)
def test_a_run_that_is_resumed_amid_an_epoch_goes_on_bit_for_bit(
    tmp_path: Path, world: int, on: Any, mode: Any
) -> None:
    def run(ctx: Context) -> None:
        dropout = 0.0 if on == "memory" and world > 1 else 0.5  # threads draw from one generator
        through = Run(ctx, dropout=dropout)
        for number in through.steps():
            if number == 8:  # in the second epoch on two ranks, in the first one on one
                assert through.accelerator.save_state(tmp_path / "at") == tmp_path / "at"
        again = Run(ctx, 5, dropout)
        stop(again.steps(), 3)  # so that there is something to bring back
        again = Run(ctx, 5, dropout) if ctx.num_processes == 1 else again
        again.accelerator.load_state(tmp_path / "at")
        assert again.counter.value == 8
        count = sum(1 for _ in again.steps())
        assert is_equal(through.weights(), again.weights())
        assert through.losses[8:] == again.losses[-count:]
        assert len(through.losses) == 24 // world
        assert scale_of(again.accelerator) == scale_of(through.accelerator)
        assert mode == "no" or scale_of(again.accelerator) != 2.0**17

    run_ranks(
        run,
        world,
        on=on,
        mixed_precision=mode,
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**17, growth_interval=2)] if mode == "fp16" else [],
        dataloader_config=DataLoaderConfiguration(data_seed=3),
    )


def test_a_program_that_skips_batches_saves_the_place_in_the_data(tmp_path: Path) -> None:
    one = Run(Context())
    rest = one.accelerator.skip_first_batches(one.loader, 5)
    batches = iter(rest)
    next(batches)
    one.accelerator.save_state(tmp_path / "at")
    again = Run(Context())
    again.accelerator.load_state(tmp_path / "at")
    assert loader_state(again.loader).consumed == 12
    assert all(
        torch.equal(mine, theirs)
        for pair in zip(again.loader, batches, strict=True)
        for mine, theirs in zip(*pair, strict=True)
    )


# --- names ---------------------------------------------------------------------------------------


def gan(same: bool = False) -> tuple[nn.Module, nn.Module]:
    kinds = (nn.Linear, nn.Linear) if same else (Generator, Critic)
    return kinds[0](2, 2), kinds[1](2, 2)


def stored_names(path: Path) -> dict[str, list[str]]:
    tree = json.loads((path / "manifest.json").read_text().partition("\n")[0])["tree"]
    return {kind: sorted(tree[kind]) for kind in ("models", "optimizers", "schedulers", "loaders", "objects")}


def test_two_models_prepared_in_another_order_load_what_is_theirs(tmp_path: Path) -> None:
    def begin(in_order: bool) -> tuple[Accelerator, list[nn.Module], list[torch.optim.AdamW], list[Any]]:
        models: list[nn.Module] = [Generator(2, 2), Critic(2, 2)]
        optimizers = [torch.optim.AdamW(one.parameters()) for one in models]
        accelerator = Accelerator(context=Context())
        objects = [*models, *optimizers]
        return accelerator, models, optimizers, [accelerator.prepare(*objects[:: 1 if in_order else -1])]

    accelerator, models, optimizers, held = begin(True)
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    names = stored_names(accelerator.save_state(tmp_path / "at"))
    assert names["models"] == ["model.Critic", "model.Generator"]
    assert names["optimizers"] == ["optimizer.model.Critic", "optimizer.model.Generator"]
    second, others, other_optimizers, held_too = begin(False)
    second.load_state(tmp_path / "at")
    for one, other in zip(models, others, strict=True):
        torch.testing.assert_close(values(one), values(other), rtol=0, atol=0)
    for one, other in zip(optimizers, other_optimizers, strict=True):
        assert str(one.state_dict()) == str(other.state_dict())
    del held, held_too


@pytest.mark.parametrize(("world", "afterwards"), [(1, True), (2, False)])
def test_two_that_only_their_order_tells_apart_need_names(
    tmp_path: Path, world: int, afterwards: bool
) -> None:
    def run(ctx: Context) -> dict[str, list[str]]:
        accelerator = Accelerator(context=ctx)
        generator, critic = gan(same=True)
        pair = [sgd(generator), sgd(critic)]
        if afterwards:
            generator, critic, optimizer, other = accelerator.prepare(generator, critic, *pair)
            with pytest.raises(
                ConfigurationError, match=r"(?s)'model.Linear'.*checkpoint_names\(teacher=..."
            ):
                accelerator.save_state(tmp_path / "at")
            accelerator.checkpoint_names(generator=generator, critic=critic, late=other)
        else:
            optimizer, generator, critic, other = accelerator.prepare(
                pair[0], generator=generator, critic=critic, late=pair[1]
            )
        assert (optimizer.optimizer, other.optimizer) == tuple(pair)
        assert isinstance(generator, nn.Module)
        return stored_names(accelerator.save_state(tmp_path / "at"))

    for names in run_ranks(run, world):
        assert (names["models"], names["optimizers"]) == (["critic", "generator"], ["late", "optimizer"])


def test_optimizers_schedules_and_loaders_are_named_by_what_they_are_for(tmp_path: Path) -> None:
    accelerator = Accelerator(context=Context())
    generator, critic = gan(same=True)
    optimizers = [torch.optim.SGD(one.parameters()) for one in (generator, critic)]
    schedules = [LambdaLR(one, lambda step: 1.0) for one in optimizers]
    loaders = [DataLoader(TensorDataset(torch.ones(size))) for size in (3, 5)]
    held = accelerator.prepare(*schedules, *optimizers, *loaders, generator=generator, critic=critic)
    names = stored_names(accelerator.save_state(tmp_path / "at"))
    assert names["optimizers"] == ["optimizer.critic", "optimizer.generator"]
    assert names["schedulers"] == ["scheduler.optimizer.critic", "scheduler.optimizer.generator"]
    assert names["loaders"] == ["loader.TensorDataset.3", "loader.TensorDataset.5"]
    assert len(held) == 8


# --- registered objects --------------------------------------------------------------------------


def test_objects_that_can_not_be_registered_are_all_named_and_none_is_registered(tmp_path: Path) -> None:
    accelerator = Accelerator(context=Context())
    with pytest.raises(ValueError, match=r"int \(3\), wrong \('text'\)"):
        accelerator.register_for_checkpointing(Counter(), 3, fine=Counter(), wrong="text")
    with pytest.raises(ValueError, match="two objects would be saved as 'Counter'"):
        accelerator.register_for_checkpointing(Counter(), Counter())
    with pytest.raises(ConfigurationError, match="no prepared or registered object is alive"):
        accelerator.save_state(tmp_path / "at")
    one, other = Counter(), Counter()
    accelerator.register_for_checkpointing(one, one, other=other)
    accelerator.register_for_checkpointing(one)
    with pytest.raises(ValueError, match="'other'"):
        accelerator.register_for_checkpointing(other=Counter())
    one.value, other.value = 3, 4
    path = accelerator.save_state(tmp_path / "at")
    assert stored_names(path)["objects"] == ["Counter", "other"]
    one.value = other.value = 0
    accelerator.load_state(path)
    assert (one.value, other.value) == (3, 4)


# --- where they are ------------------------------------------------------------------------------


def project(folder: Path, **options: Any) -> dict[str, Any]:
    options = {"automatic_checkpoint_naming": True, **options}
    return {"project_config": ProjectConfiguration(project_dir=str(folder), **options)}


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_are_numbered_and_old_ones_go_after_the_new_one_is_there(
    tmp_path: Path, world: int
) -> None:
    def run(ctx: Context) -> tuple[list[str], int, list[str]]:
        accelerator, model = small(ctx)
        assert accelerator.save_iteration == 0
        names = [accelerator.save_state().name for _ in range(12)]
        accelerator.wait_for_everyone()
        assert accelerator.save_iteration == 12
        there = sorted(os.listdir(tmp_path / "checkpoints"))
        accelerator.wait_for_everyone()
        # A run that resumes goes on saving; so does one that only uses the old folder.
        for resumes in (True, False):
            second = Accelerator(context=ctx)
            second.prepare(model)
            if resumes:
                second.load_state()
                assert second.save_iteration == 12
            names.append(second.save_state().name)
        second.load_state(tmp_path / "checkpoints" / names[-2])
        names.append(second.save_state().name)
        accelerator.wait_for_everyone()
        return names, second.save_iteration, there

    for names, number, there in run_ranks(run, world, **project(tmp_path, total_limit=2)):
        assert names == [f"checkpoint_{number}" for number in range(15)]
        assert number == 15
        assert there == ["checkpoint_10", "checkpoint_11"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_13", "checkpoint_14"]


def test_an_explicit_directory_counts_too_and_options_are_passed_on(tmp_path: Path) -> None:
    accelerator, model = small()
    assert accelerator.save_state(tmp_path / "a", step=7, metric=0.5) == tmp_path / "a"
    assert accelerator.save_iteration == 1
    report = af.verify_checkpoint(tmp_path / "a")
    assert (report.step, report.metric) == (7, 0.5)
    handle = accelerator.save_state(tmp_path / "b", step=8, asynchronous=True, keep=af.Keep(last=1))
    assert handle.result() == tmp_path / "b"
    assert os.listdir(tmp_path) == ["b"]
    before = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path)  # a directory of checkpoints
    assert torch.equal(model.weight, before)


def test_calls_that_say_nothing_clear_are_errors_on_all_ranks(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        accelerator, model = small(ctx)
        naming = Accelerator(context=ctx.replace(**project(tmp_path)))
        no_folder = ProjectConfiguration(automatic_checkpoint_naming=True)
        homeless = Accelerator(context=ctx.replace(project_config=no_folder))
        naming.prepare(model)
        homeless.prepare(model)
        save, load, at = accelerator.save_state, accelerator.load_state, tmp_path / "at"
        calls: list[tuple[Callable[[], object], type[Exception], str]] = [
            (save, ConfigurationError, "save_state: needs a directory"),
            (load, ConfigurationError, "load_state: needs a directory"),
            (lambda: save(at, save_latest=True), TypeError, "unknown arguments: save_latest"),
            (lambda: load(at, optimizer=False), TypeError, "unknown arguments: optimizer"),
            (lambda: load(at, {"pickle_module": pickle}), TypeError, "unknown arguments: pickle_module"),
            (lambda: load(at, map_location=cast("Any", "cuda:0")), TypeError, "map_location must be"),
            (lambda: load(at, map_location=cast("Any", torch.device("cpu"))), TypeError, "map_location must"),
            (lambda: naming.save_state(at), ConfigurationError, "output_dir was passed too"),
            (lambda: naming.save_state(step=3), ConfigurationError, "step was passed too"),
            (homeless.save_state, ConfigurationError, "project_dir="),
            (naming.load_state, NoCheckpointError, "checkpoints"),
        ]
        for call, error, text in calls:
            with pytest.raises(error, match=text):
                call()

    run_ranks(run, 2)
    assert os.listdir(tmp_path) == []


def test_what_one_rank_can_not_name_no_rank_saves(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        accelerator = Accelerator(context=ctx)
        models = [nn.Linear(1, 1) for _ in range(1 + ctx.rank)]
        for model in models:
            accelerator.prepare_model(model, evaluation_mode=True)
        for use in (accelerator.save_state, accelerator.load_state):
            with pytest.raises(ConfigurationError if ctx.rank else RemoteRankError, match="Name them"):
                use(tmp_path / "at")

    run_ranks(run, 2)


def test_a_folder_of_accelerate_says_how_to_turn_it_into_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "random_states_0.pkl").write_bytes(b"")
    accelerator, model = small()
    with pytest.raises(NoCheckpointError, match="accelfn checkpoint convert"):
        accelerator.load_state(tmp_path)
    del model


def test_options_of_loading(tmp_path: Path) -> None:
    one = Run(Context())
    one.accelerator.save_state(tmp_path / "at")
    accelerator = Accelerator(context=Context())
    model = accelerator.prepare(copy.deepcopy(one.model))
    nn.init.zeros_(model[0].weight)
    with pytest.raises(CheckpointMismatchError, match="partial=True"):
        accelerator.load_state(tmp_path / "at")
    state = torch.get_rng_state()
    accelerator.load_state(
        tmp_path / "at", {"weights_only": True}, partial=True, random_state=False, map_location="cpu"
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert is_equal(model.state_dict(), one.model.state_dict())
    del model
    wider = accelerator.prepare(nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(CheckpointMismatchError, match=r"models/model/2\.weight"):
        accelerator.load_state(tmp_path / "at", partial=True)
    accelerator.load_state(tmp_path / "at", partial=True, strict=False)
    assert torch.equal(wider[0].weight, one.model[0].weight)


@pytest.mark.parametrize(("before", "after"), [("fp16", "no"), ("no", "fp16"), ("fp16", "fp16")])
def test_the_loss_scale_comes_back_where_there_is_one(tmp_path: Path, before: str, after: str) -> None:
    handlers = [GradScalerKwargs(init_scale=2.0**10, growth_interval=1)]

    def begin(mode: Any) -> tuple[Accelerator, Any, Any]:
        ctx = Context().replace(mixed_precision=mode, kwargs_handlers=handlers)
        accelerator = Accelerator(context=ctx)
        model = one_weight()
        return accelerator, *accelerator.prepare(model, sgd(model))

    accelerator, model, optimizer = begin(before)
    accelerator.backward(model(torch.ones(1, 1)).mean())
    optimizer.step()
    accelerator.save_state(tmp_path / "at")
    second, *held = begin(after)
    first = scale_of(second)
    second.load_state(tmp_path / "at")
    assert first == (2.0**10 if after == "fp16" else 1)
    assert scale_of(second) == (2.0**11 if (before, after) == ("fp16", "fp16") else first)
    del held


# --- hooks, and files for other programs ---------------------------------------------------------


def save_pretrained(model: nn.Module, folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    Path(folder, "config.json").write_text("{}")
    af.save_tree(os.path.join(folder, "weights"), dict(af.unwrap_model(model).state_dict()))


@pytest.mark.parametrize(("world", "automatic"), [(1, True), (2, False)])
def test_hooks_save_and_load_models_in_folders_of_their_own(
    tmp_path: Path, world: int, automatic: bool
) -> None:
    def hooked(ctx: Context, seed: int) -> tuple[Accelerator, list[nn.Module]]:
        torch.manual_seed(seed)
        accelerator = Accelerator(context=ctx)
        folders: dict[type[nn.Module], str] = {Generator: "unet", Critic: "text"}

        # As the training scripts of diffusers do it.
        def save(models: list[nn.Module], weights: list[Weights], output_dir: str) -> None:
            if accelerator.is_main_process:
                for index in reversed(range(len(models))):
                    model = accelerator.unwrap_model(models[index])
                    if type(model) in folders:
                        save_pretrained(model, os.path.join(output_dir, folders[type(model)]))
                        weights.pop(index)

        def load(models: list[nn.Module], input_dir: str) -> None:
            for index in reversed(range(len(models))):
                model = accelerator.unwrap_model(models[index])
                if type(model) in folders:
                    models.pop(index)
                    folder = os.path.join(input_dir, folders[type(model)])
                    model.load_state_dict(af.load_tree(os.path.join(folder, "weights")))

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        return accelerator, [*accelerator.prepare(Generator(2, 2), Critic(2, 2), nn.Linear(2, 2))]

    def run(ctx: Context) -> None:
        first, models = hooked(ctx, 1)
        path = first.save_state(None if automatic else tmp_path / "at")
        assert stored_names(path)["models"] == ["model.Linear"]
        second, others = hooked(ctx, 2)
        second.load_state(None if automatic else path)
        attachments = {name.partition("/")[2] for name in af.verify_checkpoint(path).attachments}
        assert {"unet/config.json", "text/weights/manifest.json"} <= attachments
        for one, other in zip(models, others, strict=True):
            torch.testing.assert_close(values(one), values(other), rtol=0, atol=0)

    options: dict[str, Any] = project(tmp_path) if automatic else {}
    run_ranks(run, world, **options)
    assert os.listdir(tmp_path) == ["checkpoints" if automatic else "at"]


def test_a_model_that_a_hook_does_not_load_may_be_in_the_checkpoint(tmp_path: Path) -> None:
    accelerator = Accelerator(context=Context())
    generator, critic = accelerator.prepare(*gan())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state(tmp_path / "at")
    before = critic.weight.detach().clone()
    for one in (generator, critic):
        nn.init.zeros_(one.weight)

    def leave_generator(models: list[nn.Module], input_dir: str) -> None:
        models.remove(generator)

    handle = accelerator.register_load_state_pre_hook(leave_generator)
    accelerator.load_state(tmp_path / "at")
    assert not generator.weight.any()
    assert torch.equal(critic.weight, before)
    other = Accelerator(context=Context())
    other.prepare(generator, critic)
    other.register_load_state_pre_hook(leave_generator)
    with pytest.raises(CheckpointMismatchError, match="objects"):  # only the model may be left out
        other.load_state(tmp_path / "at")
    handle.remove()


def test_what_a_hook_raises_is_raised_on_all_ranks_and_nothing_is_left(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        accelerator, model = small(ctx)
        accelerator.save_state(tmp_path / "at")

        def fail(*_: Any) -> None:
            if ctx.rank == 1:
                raise RuntimeError("no more hooks")

        accelerator.register_save_state_pre_hook(fail)
        accelerator.register_load_state_pre_hook(fail)
        for use in (accelerator.save_state, accelerator.load_state):
            with pytest.raises(RuntimeError if ctx.rank else RemoteRankError, match="no more hooks"):
                use(tmp_path / "at")
        del model

    run_ranks(run, 2)
    assert os.listdir(tmp_path) == ["at"]


def test_weights_that_a_hook_has_changed_are_an_error(tmp_path: Path) -> None:
    accelerator, model = small()
    accelerator.register_save_state_pre_hook(
        lambda models, weights, output_dir: weights[0].update(bias=torch.zeros(1))
    )
    with pytest.raises(ConfigurationError, match="a hook has changed the weights"):
        accelerator.save_state(tmp_path / "at")
    assert os.listdir(tmp_path) == []
    del model


@pytest.mark.parametrize("world", [1, 2])
def test_weights_for_other_programs_are_in_it(tmp_path: Path, world: int) -> None:
    def run(ctx: Context) -> list[Weights]:
        accelerator = Accelerator(context=ctx)
        torch.manual_seed(0)
        first = accelerator.prepare(*gan())
        accelerator.save_state(tmp_path / "two", safe_serialization=False)
        accelerator.free_memory()
        one = accelerator.prepare(first[0])
        path = accelerator.save_state(tmp_path / "one", False)
        assert [name.partition("/")[2] for name in af.verify_checkpoint(path).attachments] == [
            "pytorch_model.bin"
        ]
        accelerator.load_state(path)
        return [dict(af.unwrap_model(model).state_dict()) for model in (*first, one)]

    generator, critic, one = run_ranks(run, world)[0]
    for name, weights in (
        ("two/files-*/pytorch_model_model.Generator.bin", generator),
        ("two/files-*/pytorch_model_model.Critic.bin", critic),
        ("one/files-*/pytorch_model.bin", one),
    ):
        (path,) = tmp_path.glob(name)
        assert is_equal(torch.load(path, weights_only=True), weights)


# --- what calls a function -----------------------------------------------------------------------


def test_objects_and_state_dicts(tmp_path: Path) -> None:
    def run(ctx: Context) -> list[str]:
        accelerator, model = small(ctx)
        accelerator.save({"rank": ctx.rank}, tmp_path / "object.pt")
        accelerator.save(
            accelerator.get_state_dict(model), tmp_path / "m.safetensors", safe_serialization=True
        )
        return sorted(accelerator.get_state_dict(model, unwrap=False))

    plain = ["bias", "weight"]
    wrapped = [f"module.{name}" for name in plain]
    assert run_ranks(run, 1) == [plain]
    assert run_ranks(run, 2, on="processes") == [wrapped] * 2
    assert torch.load(tmp_path / "object.pt", weights_only=True) == {"rank": 0}
    assert sorted(load_file(tmp_path / "m.safetensors")) == plain
