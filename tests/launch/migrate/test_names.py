"""The tables name what exists, here and in Accelerate."""

import dataclasses
import importlib
import inspect

import pytest

import accelfn as af
from accelfn import Accelerator
from accelfn.context import ContextOptions
from accelfn.launch.migrate import names

CTX = af.Context()


@pytest.mark.parametrize("name", names.HOMES)
def test_a_name_is_where_the_table_says(name: str) -> None:
    assert hasattr(importlib.import_module(names.HOMES[name]), name)


def test_functions_take_the_context_first_where_the_table_says() -> None:
    firsts = {
        name: next(iter(inspect.signature(getattr(af, name)).parameters), "")
        for name, home in names.HOMES.items()
        if home == "accelfn" and inspect.isfunction(getattr(af, name))
    }
    assert {name for name, first in firsts.items() if first == "ctx"} == set(names.TAKES_CONTEXT)


def test_methods_are_functions_of_that_name() -> None:
    for name, function in (*names.METHODS.items(), *names.FREE_METHODS.items()):
        found = af.checkpoint.save_object if name == "save" else getattr(af, function)
        parameters = list(inspect.signature(found).parameters)
        assert (parameters[0] == "ctx") == (name in names.METHODS), name
    for name in names.DECORATORS:
        assert next(iter(inspect.signature(getattr(af, name)).parameters)) == "ctx"


@pytest.mark.parametrize(
    "text", [*names.PROPERTIES.values(), *(f"ctx.{name}" for name in names.STATE.values())]
)
def test_the_context_has_what_properties_become(text: str) -> None:
    eval(text, {"ctx": CTX})


def test_the_shim_has_the_attributes_of_the_table() -> None:
    accelerator = Accelerator(context=CTX)
    assert [name for name in sorted(names.SHIM_ATTRIBUTES) if not hasattr(accelerator, name)] == []


def test_arguments_are_those_of_the_constructors() -> None:
    ours = set(inspect.signature(Accelerator).parameters)
    assert ours >= names.CONTEXT_ARGUMENTS | names.SHIM_ARGUMENTS
    assert set(ContextOptions.__annotations__) >= names.CONTEXT_ARGUMENTS
    assert tuple(inspect.signature(Accelerator).parameters)[: len(names.POSITIONAL)] == names.POSITIONAL


def test_records_are_ones_of_the_configuration() -> None:
    assert all(dataclasses.is_dataclass(getattr(af, name)) for name in names.RECORDS)


@pytest.mark.slow
def test_accelerate_has_the_names_too() -> None:
    accelerate = pytest.importorskip("accelerate")
    modules = [
        accelerate,
        *(importlib.import_module(f"accelerate.{name}") for name in ("utils", "local_sgd")),
    ]
    modules += [
        importlib.import_module(f"accelerate.{name}")
        for name in ("logging", "tracking", "state", "data_loader")
    ]
    known = {*names.HOMES, *names.INSTEAD} - {"patch_environment"}
    assert [name for name in sorted(known) if not any(hasattr(module, name) for module in modules)] == []
    theirs = dir(accelerate.Accelerator)
    held = {
        "device_placement",
        "step",
        "log_with",
        "rng_types",
        "trackers",
        "dataloader_config",
        "deepspeed_plugin",
    }
    held |= {
        "project_configuration",
        "state",
        "step_scheduler_with_optimizer",
        "has_lomo_optimizer",
        "native_amp",
    }
    assert [name for name in sorted(names.SHIM_ATTRIBUTES - held) if name not in theirs] == []
