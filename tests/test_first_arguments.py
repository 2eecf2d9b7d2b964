"""Every public function that takes a context says so to whoever forgets it."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.data import plan_microbatch

PUBLIC: dict[str, Any] = {name: getattr(af, name) for name in af.__all__}
TAKES_CONTEXT = [
    name
    for name, value in PUBLIC.items()
    if inspect.isfunction(value) and next(iter(inspect.signature(value).parameters), "") == "ctx"
]


def required(name: str, kind: Any) -> list[str]:
    """Name the parameters after the context that have no default."""
    parameters = list(inspect.signature(PUBLIC[name]).parameters.values())[1:]
    return [item.name for item in parameters if item.default is item.empty and item.kind is kind]


def use(name: str, *given: Any) -> None:
    """Call the function, and enter or iterate what it returns."""
    named = dict.fromkeys(required(name, inspect.Parameter.KEYWORD_ONLY))
    returned = PUBLIC[name](*given, **named)
    if hasattr(returned, "__enter__"):
        returned.__enter__()
    elif hasattr(returned, "__next__"):
        next(returned)


@pytest.mark.parametrize("name", TAKES_CONTEXT)
def test_a_forgotten_context_is_named(name: str) -> None:
    others = required(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    said = rf"^{name}: the first argument must be the Context, got Linear\. Write {name}"
    with pytest.raises(TypeError, match=said):
        use(name, nn.Linear(1, 1), *(None for _ in others))


@pytest.mark.parametrize("name", TAKES_CONTEXT)
def test_a_forgotten_context_is_named_where_other_arguments_are_missing_for_it(name: str) -> None:
    said = f"^{name}: the first argument must be the Context, got"
    with pytest.raises(TypeError, match=f"{said} Tensor"):
        PUBLIC[name](torch.ones(2))
    with pytest.raises(TypeError, match=f"{said} nothing"):
        PUBLIC[name]()


def test_an_accelerator_holds_the_context() -> None:
    with pytest.raises(
        TypeError, match=r"got Accelerator\. Write prepare\(ctx, \.\.\.\), where ctx is accelerator"
    ):
        PUBLIC["prepare"](af.Accelerator(cpu=True), nn.Linear(1, 1))


def test_what_takes_no_context_says_so() -> None:
    with pytest.raises(TypeError, match=r"^unwrap_model: takes no Context\. Write unwrap_model\(model\)"):
        PUBLIC["unwrap_model"](af.Context(), nn.Linear(1, 1))


def test_other_first_arguments_are_named() -> None:
    ctx, model = af.Context(), nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"^load_model: takes no Context\. Write load_model\(model, \.\.\.\)"):
        PUBLIC["load_model"](ctx, model, "folder")
    with pytest.raises(TypeError, match=r"device_placement\. Write Accelerator\(context=ctx\)"):
        PUBLIC["Accelerator"](ctx)
    with pytest.raises(TypeError, match=r"^set_seed: seed must be an int, got '42' of type str"):
        PUBLIC["set_seed"]("42")
    scaler, accelerator = af.init_scaler(ctx), af.Accelerator(context=ctx)
    for clip in ("clip_grad_norm_", "clip_grad_value_"):
        said = rf"^{clip}: takes parameters, got the module Linear\. Pass model\.parameters\(\)"
        with pytest.raises(TypeError, match=said):
            PUBLIC[clip](ctx, model, 1.0, scaler_state=scaler)
        with pytest.raises(TypeError, match=said):
            getattr(accelerator, clip)(model, 1.0)


def takers(parameter: str) -> list[str]:
    return [name for name in TAKES_CONTEXT if parameter in inspect.signature(PUBLIC[name]).parameters]


def swapped(name: str, **given: object) -> None:
    """Call the function with these, and None for what else it needs."""
    known = inspect.signature(PUBLIC[name]).parameters
    needed = dict.fromkeys(required(name, inspect.Parameter.POSITIONAL_OR_KEYWORD))
    PUBLIC[name](af.Context(), **{**needed, **{key: value for key, value in given.items() if key in known}})


@pytest.mark.parametrize("name", takers("scaler_state"))
def test_a_state_of_another_kind_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: scaler_state must be a StepState, got MicroBatch"):
        swapped(name, scaler_state=plan_microbatch(0, 0, 1, 1), micro=None)


@pytest.mark.parametrize("name", takers("micro"))
def test_a_micro_batch_of_another_kind_is_named(name: str) -> None:
    state = af.init_scaler(af.Context())
    with pytest.raises(TypeError, match=f"^{name}: micro must be a MicroBatch, got StepState"):
        swapped(name, scaler_state=state, micro=state)


@pytest.mark.parametrize("name", ["optimizer_step", "unscale_gradients"])
def test_an_optimizer_of_another_kind_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: optimizer must be a torch optimizer .* got MicroBatch"):
        PUBLIC[name](af.Context(), plan_microbatch(0, 0, 1, 1), af.init_scaler(af.Context()))


@pytest.mark.parametrize("name", ["save_state", "load_state", "save_model"])
def test_a_directory_at_the_wrong_place_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=rf"^{name}: the directory must be a str or .* {name}\(\.\.\., direct"
    ):
        PUBLIC[name](af.Context(), *([tmp_path, {}] if name == "save_model" else [{}, tmp_path]))
