"""State classes are views of the current context."""

# Programs use these names.
# pyright: reportPrivateUsage=false

from enum import Enum

import pytest
import torch
from torch import nn

from accelfn.compat import constants
from accelfn.compat.accelerator import Accelerator
from accelfn.compat.current import current
from accelfn.compat.records import TorchDynamoPlugin
from accelfn.compat.states import AcceleratorState, GradientState, PartialState, is_initialized
from accelfn.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("alone")


def test_a_state_joins_the_ranks_once() -> None:
    assert PartialState._shared_state == {}
    with pytest.raises(TypeError, match="unknown arguments bakend"):
        PartialState(bakend="gloo")
    state = PartialState(cpu=True, backend=None)
    assert (state.num_processes, state.process_index, state.device.type) == (1, 0, "cpu")
    assert all((state.is_main_process, state.is_local_main_process, state.is_last_process))
    assert PartialState._shared_state["num_processes"] == 1
    world = current().world
    assert PartialState().distributed_type == "NO"
    assert current().world is world
    PartialState._reset_state()
    assert PartialState._shared_state == {}
    assert not state.initialized
    assert PartialState().initialized
    assert current().world is world, "the ranks stay connected"


def test_options_need_an_accelerator() -> None:
    with pytest.raises(ConfigurationError, match="Make an Accelerator first"):
        AcceleratorState()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    state = AcceleratorState()
    assert (state.mixed_precision, state.deepspeed_plugin, state.fsdp_plugin) == ("bf16", None, None)
    assert accelerator.state.mixed_precision == "bf16"
    assert is_initialized()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not is_initialized()
    assert not state.initialized
    assert PartialState._shared_state == {}


def test_the_launchers_fsdp_is_the_states_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer gathers what it saves if the state has a plugin, and peft sets its ``auto_wrap_policy``."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    plugin = accelerator.state.fsdp_plugin
    assert (plugin.fsdp_version, str(plugin.state_dict_type)) == (2, "FULL_STATE_DICT")
    assert plugin.freeze() == accelerator.context.strategy.fsdp
    plugin.auto_wrap_policy = "NO_WRAP"
    accelerator.prepare(nn.Linear(1, 1))
    assert plugin.freeze() == accelerator.context.strategy.fsdp, "also what is set before prepare"


def test_the_launchers_mesh_is_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "1")
    sizes = Accelerator(cpu=True).state.parallelism_config
    assert (sizes.tp_size, sizes.cp_enabled, sizes.total_size) == (1, False, 1)


def test_a_kind_of_world_is_printed_with_the_name_of_its_class() -> None:
    class DistributedType(str, Enum):
        NO = "NO"

    kind, theirs = Accelerator(cpu=True).distributed_type, DistributedType.NO
    assert (f"{kind}", str(kind), repr(kind)) == (f"{theirs}", "DistributedType.NO", repr(theirs))
    assert kind == "NO" == constants.DistributedType.NO
    assert kind is PartialState().distributed_type
    assert str(constants.FP8BackendType.TE) == "FP8BackendType.TE"


def test_the_newest_accelerator_is_current_and_isnt_kept_alive() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=3)
    second = Accelerator(cpu=True)
    assert (first.gradient_state.num_steps, GradientState().num_steps) == (3, 1)
    del second
    assert current().accelerator is first, "the newest one that is alive"
    assert (GradientState().num_steps, GradientState().sync_gradients) == (3, True)
    del first
    assert current().accelerator is None


def test_options_outlive_an_accelerator_that_isnt_kept() -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager")
    Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=plugin)
    assert current().accelerator is None
    state = AcceleratorState()
    assert (state.initialized, state.mixed_precision, state.dynamo_plugin) == (True, "bf16", plugin)
    assert current().context.mixed_precision == "bf16"
    AcceleratorState._reset_state()
    with pytest.raises(ConfigurationError, match="Make an Accelerator first"):
        AcceleratorState()


def test_every_operation_is_checked_from_when_a_program_asks_for_it() -> None:
    state = PartialState(cpu=True)
    assert (state.debug, current().context.debug) == (False, False)
    state.debug = True
    assert (state.debug, current().context.debug, Accelerator(cpu=True).state.debug) == (True, True, True)
    state.debug = False
    assert (state.debug, current().context.debug) == (False, False)


def test_a_program_can_close_its_own_window() -> None:
    accelerator = Accelerator(cpu=True)
    state = accelerator.gradient_state
    state._set_sync_gradients(False)  # as transformers' Trainer does
    assert not accelerator.sync_gradients
    assert not GradientState().sync_gradients
    assert state.plugin_kwargs["sync_each_batch"] is False
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)


def test_process_control_without_a_context(capsys: pytest.CaptureFixture[str]) -> None:
    state = PartialState(cpu=True)
    state.print("here")
    assert capsys.readouterr().out == "here\n"
    assert state.on_main_process(lambda: 1)() == 1
    assert state.on_process(process_index=0)(lambda: 2)() == 2
    with state.split_between_processes([1, 2]) as part, state.main_process_first():
        assert part == [1, 2]
    state.wait_for_everyone()
    assert "Num processes: 1" in repr(state)


def test_a_state_is_pickled_as_a_view() -> None:
    state = PartialState(cpu=True)
    twin = object.__new__(PartialState)
    twin.__setstate__(state.__getstate__())
    assert state.__getstate__() == {}
    assert twin.device == torch.device("cpu")


def test_states_show_what_they_hold_by_name() -> None:
    assert GradientState._shared_state == AcceleratorState._shared_state == {}
    assert PartialState(cpu=True).__dict__["num_processes"] == 1
    accelerator = Accelerator(cpu=True)
    assert vars(accelerator.state)["mixed_precision"] == "no"
    assert accelerator.state.__dict__["device"] == torch.device("cpu")
    assert accelerator.gradient_state.__dict__.keys() == GradientState._shared_state.keys()
    assert GradientState().__dict__["sync_gradients"] is True
    assert accelerator.state.__dict__.keys() > PartialState().__dict__.keys()
