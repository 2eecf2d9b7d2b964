# pyright: reportUnknownMemberType=false

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelfn.bigmodel.align_hooks import AlignDevicesHook, align_module_device, has_offloaded_params
from accelfn.bigmodel.hooks import (
    add_hook_to_module,
    hook_of,
    remove_hook_from_module,
)
from accelfn.bigmodel.offload_folder import OffloadedWeightsLoader, offload_state_dict
from accelfn.weights.stored import mapped_from
from tests.bigmodel.load.layouts import on_meta
from tests.bigmodel.offload.trees import same

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Elsewhere(torch.Tensor):
    """A tensor that reports another device until it is moved."""

    @staticmethod
    def of(tensor: torch.Tensor) -> "Elsewhere":
        return tensor.as_subclass(Elsewhere)

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride] - a stand-in
        return torch.device("meta")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A copy to the host that isn't waited for could be read before it is there.
        assert not kwargs.get("non_blocking")
        return self.as_subclass(torch.Tensor)


class Scaled(nn.Module):
    """Has a parameter, a buffer that counts, one that isn't saved, and a module inside."""

    calls: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3))
        self.inner = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.ones(3), persistent=False)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.weight.data_ptr())
        with torch.no_grad():
            self.calls.add_(1)
        return self.inner(x) * self.weight + self.shift + self.calls


# --- moves without offloading --------------------------------------------------------------------


def test_arguments_and_outputs_are_moved() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, more: Any, kept: Any = None) -> dict[str, Any]:
            assert [type(one) for one in (x, more["y"], more["kept"], kept)] == [
                *(torch.Tensor, torch.Tensor),
                *(Elsewhere, Elsewhere),
            ]
            return {"a": x, "kept": x, "n": 3, "deep": [{"kept": x, "b": x}]}

    more = {"y": Elsewhere.of(X), "kept": Elsewhere.of(X)}
    hook = AlignDevicesHook("cpu", io_same_device=True, skip_keys=["kept"])
    module = add_hook_to_module(Model(), hook)
    out = module(Elsewhere.of(X), more=more, kept=Elsewhere.of(X))
    assert [out["a"].is_meta, out["deep"][0]["b"].is_meta] == [True, True]
    assert [out["kept"].is_meta, out["deep"][0]["kept"].is_meta, out["n"]] == [False, False, 3]
    assert isinstance(more["y"], Elsewhere)  # the caller's own dict is as it was

    module = add_hook_to_module(nn.Identity(), AlignDevicesHook("cpu", skip_keys="kept"))
    assert not module(Elsewhere.of(X)).is_meta


def test_places_and_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="execution_device"):
        AlignDevicesHook("disk", offload=True)
    wrong = {**Scaled().state_dict(), "weight": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"'weight' is .*\(3,\) in the model, but .*\(4,\)"):
        offloaded(Scaled(), "cpu", weights_map=wrong)


def test_tensors_without_values_are_refused() -> None:
    module = on_meta(Scaled())
    with pytest.raises(ValueError, match="'weight', 'calls' are on the meta device"):
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    assert hook_of(module) is None
    module.weight, module.calls = Scaled().weight, Scaled().calls
    add_hook_to_module(module, AlignDevicesHook("cpu"))  # those of the module inside don't matter
    with pytest.raises(ValueError, match=r"'inner\.weight', 'inner\.bias' are on the meta"):
        add_hook_to_module(module, AlignDevicesHook("cpu", place_submodules=True))


# --- offloading ----------------------------------------------------------------------------------


def offloaded(module: Scaled, place: str, **options: Any) -> Scaled:
    hook = AlignDevicesHook(place, offload=True, place_submodules=True, **options)
    assert add_hook_to_module(module, hook) is module
    return module


@pytest.mark.parametrize(
    ("place", "buffers", "given"),
    [("cpu", False, None), ("cpu:0", True, None), ("cpu:0", False, dict)],
)
def test_outputs_of_an_offloaded_module_are_unchanged(
    place: str, buffers: bool, given: Callable[[Any], Any] | None
) -> None:
    plain = Scaled()
    weights = None if given is None else given(Scaled().state_dict())
    module = Scaled() if given is None else on_meta(Scaled())
    offloaded(module, place, weights_map=weights, offload_buffers=buffers)
    with torch.no_grad():
        for _ in range(3):  # the buffer counts
            assert torch.equal(module(X), plain(X))
    assert has_offloaded_params(module)
    assert same(module.state_dict(), plain.state_dict())
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            assert torch.equal(again(X), copy.deepcopy(plain)(X))
    remove_hook_from_module(module)
    assert torch.equal(module(X), plain(X))


def test_stored_parameters_stay_the_same_objects() -> None:
    module = Scaled()
    parameters = dict(module.named_parameters())
    add_hook_to_module(module, AlignDevicesHook("cpu:0", place_submodules=True))
    assert torch.equal(module(X), Scaled()(X))
    offloaded(module, "cpu:0")
    at_rest = module.weight.data_ptr()
    module(X)
    assert module.weight.data_ptr() == at_rest
    assert module.seen[1] != at_rest  # a copy was used
    offloaded(module, "cpu")
    module(X)
    assert module.seen[2] == module.weight.data_ptr()  # in place
    assert all(one is parameters[name] for name, one in module.named_parameters())


def test_resident_buffers_get_the_values_of_the_mapping() -> None:
    trained = nn.BatchNorm1d(3)
    trained(X)
    weights = {name: one.clone() for name, one in trained.state_dict().items()}
    module = nn.BatchNorm1d(3)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert torch.equal(module.eval()(X), trained.eval()(X))
    module.train()(X)
    assert all(torch.equal(weights[name], one) for name, one in trained.state_dict().items())


def test_an_offload_folder_stays_mapped(tmp_path: Path) -> None:
    state = Scaled().state_dict()
    offload_state_dict(tmp_path, state)
    module = offloaded(on_meta(Scaled()), "cpu", weights_map=OffloadedWeightsLoader(save_folder=tmp_path))
    for name, one in module.named_parameters():
        found = mapped_from(one)
        assert found is not None
        assert found.path.name == f"{name}.dat"
    assert torch.equal(module(X), Scaled()(X))
    hook = hook_of(module)
    assert isinstance(hook, AlignDevicesHook)
    assert hook.stream is not None  # which lets pages go


# --- looking at what is offloaded ----------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
def test_writes_on_a_device_are_kept(offload: bool) -> None:
    module = offloaded(Scaled(), "cpu:0") if offload else Scaled()
    weight, at_rest, expected = module.weight, module.weight.data_ptr(), module.weight.detach() * 2
    with align_module_device(module, None if offload else "cpu:0"):
        assert module.weight is weight
        assert weight.data_ptr() != at_rest
        weight.data.mul_(2)
    assert weight.data_ptr() == at_rest
    assert torch.equal(weight, expected)

    def fill_and_fail() -> None:
        with align_module_device(module, "cpu:0"):
            module.weight = nn.Parameter(torch.full((3,), 7.0))
            raise KeyError

    with pytest.raises(KeyError):
        fill_and_fail()
    assert torch.equal(module.weight, torch.full((3,), 7.0))
    assert torch.equal(weight, expected)  # what hung there before
    assert torch.equal(module.inner.bias, Scaled().inner.bias)
