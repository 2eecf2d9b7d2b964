"""Every name that the documents ask for is there with its parameters, or says what it waits for."""

# pyright: reportUnknownMemberType=false

import inspect
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelfn
from accelfn import (
    Accelerator,
    AutocastKwargs,
    Context,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelfn.context.config import VARIABLES
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.launch.flags import parse_flags
from accelfn.launch.main import main
from tests.accelerator.asked_names import ASKED, NO_DEFAULT, AskedName, parameters_of, tables

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "names.md"

# Something else than the default for each argument of the constructor.
EXAMPLES: dict[str, Any] = {
    "device_placement": False,
    "split_batches": True,
    "mixed_precision": "bf16",
    "gradient_accumulation_steps": 2,
    "cpu": True,
    "dataloader_config": DataLoaderConfiguration(non_blocking=True),
    "deepspeed_plugin": DeepSpeedPlugin(),
    "fsdp_plugin": FullyShardedDataParallelPlugin(),
    "megatron_lm_plugin": MegatronLMPlugin(),
    "rng_types": ["torch"],
    "log_with": "jsonl",
    "project_dir": "run",
    "project_config": ProjectConfiguration(total_limit=5),
    "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2),
    "step_scheduler_with_optimizer": False,
    "kwargs_handlers": [AutocastKwargs(cache_enabled=True)],
    "dynamo_backend": "eager",
    "dynamo_plugin": TorchDynamoPlugin(backend="eager"),
    "parallelism_config": ParallelismConfig(),
    "dispatch_batches": True,
    "even_batches": False,
    "use_seedable_sampler": True,
}

# Arguments for each method that waits for a part.
CALLS: dict[str, tuple[Any, ...]] = {
    "save": (torch.ones(1), "file"),
    "save_state": ("folder",),
    "load_state": ("folder",),
    "register_for_checkpointing": (nn.Linear(1, 1), nn.Linear(1, 1)),
    "register_save_state_pre_hook": (print,),
    "register_load_state_pre_hook": (print,),
    "get_state_dict": (nn.Linear(1, 1),),
}


def given(value: Any) -> list[tuple[str, Any]]:
    """Names and defaults of what ``value`` takes, as in :func:`parameters_of`."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        (stars.get(one.kind, "") + name, NO_DEFAULT if one.default is one.empty else one.default)
        for name, one in inspect.signature(value).parameters.items()
        if name != "self"
    ]


def difference(documented: Iterable[tuple[str, Any]], found: list[tuple[str, Any]]) -> str:
    """Say what of the documented parameters isn't found, in their order; further ones may be between."""
    rest = iter(found)
    for name, default in documented:
        here = next((value for other, value in rest if other == name), found)
        if here is found:
            return f"no parameter {name}"
        if here is NO_DEFAULT and default is not NO_DEFAULT:
            return f"no default of {name}"
        if here != default:
            return f"the default of {name} is {here!r}"
    return ""


def owner(asked: AskedName) -> Any:
    if asked.home.startswith("accelfn"):
        return import_module(asked.home)
    return getattr(accelfn, asked.home)


def found_missing(asked: AskedName) -> str:
    """Say what is wrong with the name today; "" when it is as documented."""
    if asked.kind == "argument":
        return wrong_argument(asked)
    if asked.kind == "command":
        return wrong_command(asked)
    if asked.kind == "variable":
        names = {name for variable in VARIABLES for name in variable.names}
        return "" if asked.name in names else "not read"
    if asked.kind in ("property", "attribute"):
        return "" if hasattr(Accelerator(context=Context()), asked.name) else f"no {asked.kind}"
    value = getattr(owner(asked), asked.name, None)
    if value is None:
        return f"no {asked.kind}"
    form = asked.written_here
    if "(" not in form:
        return ""
    documented, found = parameters_of(form), given(value)
    if asked.kind != "class":  # whose fields are given by name
        positional = [name for name, _ in documented if "*" not in name]
        if "*" not in form and [name for name, _ in found][: len(positional)] != positional:
            return difference(documented, found) or "another order"
    return difference(documented, found)


def wrong_argument(asked: AskedName) -> str:
    if asked.name not in inspect.signature(Accelerator).parameters:
        return f"no argument {asked.name}"
    wrong = difference(parameters_of(asked.written_here), given(Accelerator))
    if wrong:
        return wrong
    options: dict[str, Any] = {"cpu": True, asked.name: EXAMPLES[asked.name]}
    try:
        Accelerator(**options).close()
    except NotAvailableError as error:
        return "refused: " + str(error).partition(" asks for ")[2].partition(", and")[0]
    return ""


def wrong_command(asked: AskedName) -> str:
    command, *words = asked.written_here.removeprefix("accelfn ").split()
    try:
        if command == "launch":
            parse_flags(words)
        else:
            main([command, *words, "--help"])
    except ConfigurationError:
        return "not a command"
    except SystemExit as stopped:
        return "not a command" if stopped.code else ""
    return ""


def identify(asked: AskedName) -> str:
    return f"{asked.kind}: {asked.documented.partition('(')[0]}"


@pytest.mark.parametrize("asked", [one for one in ASKED if not one.part], ids=identify)
def test_a_name_is_there_as_documented(asked: AskedName) -> None:
    found = found_missing(asked)
    assert found == asked.missing, (
        f"{asked.documented}: found {found!r}, the table says {asked.missing!r}. If it has been built, take "
        "the mark out of tests/accelerator/asked_names.py."
    )


@pytest.mark.parametrize("asked", [one for one in ASKED if one.part], ids=identify)
def test_what_waits_for_a_part_says_so(asked: AskedName) -> None:
    if asked.kind == "argument":
        assert f"refused: {asked.part}" in found_missing(asked).replace("sharding by ", "")
    elif asked.kind == "command":
        assert found_missing(asked) == "not a command"
    elif asked.home == "accelfn":
        assert found_missing(asked) == f"no {asked.kind}"
    else:
        accelerator = Accelerator(context=Context())
        with pytest.raises(NotAvailableError, match=rf"^Accelerator\.{asked.name} needs {asked.part}, and"):
            getattr(accelerator, asked.name)(*CALLS[asked.name])
        if asked.kind == "method":
            assert found_missing(asked) == ""


def test_arguments_of_the_constructor_are_in_the_documented_order() -> None:
    documented = [one.name for one in ASKED if one.kind == "argument" and "no argument" not in one.missing]
    assert list(inspect.signature(Accelerator).parameters)[: len(documented)] == documented
    assert set(EXAMPLES) == {one.name for one in ASKED if one.kind == "argument"}


@pytest.mark.parametrize(
    ("form", "found", "said"),
    [
        ("f(a, b=1)", [("a", NO_DEFAULT), ("b", 1)], ""),
        ("f(a, b=1)", [("a", NO_DEFAULT), ("b", 1), ("c", 2)], ""),
        ("f(a, b=1)", [("a", NO_DEFAULT), ("b", 2)], "the default of b is 2"),
        ("f(a, b=1)", [("b", 1), ("a", NO_DEFAULT)], "no parameter b"),
        ("f(*a, b=None, **c)", [("*a", NO_DEFAULT), ("b", None)], "no parameter **c"),
        ("f()", [], ""),
    ],
)
def test_the_comparison_can_fail(form: str, found: list[tuple[str, Any]], said: str) -> None:
    assert difference(parameters_of(form), found) == said


def test_no_name_stands_twice_in_the_table() -> None:
    names = [(one.kind, one.home, one.documented) for one in ASKED]
    assert len(set(names)) == len(names)


def test_the_page_has_these_tables() -> None:
    assert tables() in PAGE.read_text(), (
        f"{PAGE} is out of date: put the output of python -m tests.accelerator.asked_names in it"
    )
