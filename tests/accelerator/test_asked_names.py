"""Every name of docs/pages/names.md is there with its parameters, or says what it waits for."""

# pyright: reportUnknownMemberType=false

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from accelfn import (
    Accelerator,
    Context,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
)
from accelfn.config import (
    VARIABLES,
    AutocastKwargs,
    DeepSpeedPlugin,
    MegatronLMPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelfn.errors import NotAvailableError
from accelfn.launch.command_line import parse_flags
from accelfn.launch.main import main

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "names.md"
NO_DEFAULT = inspect.Parameter.empty

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


class Row(NamedTuple):
    kind: str  # first word of the table's title
    form: str  # how it is written here
    here: str

    @property
    def name(self) -> str:
        return re.split(r"[(=]", self.form)[0]


def rows() -> list[Row]:
    found: list[Row] = []
    kind = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            kind = line.split()[1].rstrip(",")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            form = cells[1] if cells[1].startswith("`") else cells[0]
            found.append(Row(kind, form.partition("`, in ")[0].strip("`"), cells[1]))
    return found


def documented(form: str) -> list[tuple[str, Any]]:
    """Names and defaults of the parameters in ``name(...)``, or of the argument ``name=default``."""
    inside = form.partition("(")[2].removesuffix(")") if "(" in form else form
    (function,) = ast.parse(f"def _({inside}): ...").body
    assert isinstance(function, ast.FunctionDef)
    names = function.args
    defaults = [NO_DEFAULT] * (len(names.args) - len(names.defaults)) + list(
        map(ast.literal_eval, names.defaults)
    )
    found = [(one.arg, default) for one, default in zip(names.args, defaults, strict=True)]
    found += [(f"*{names.vararg.arg}", NO_DEFAULT)] if names.vararg else []
    for one, default in zip(names.kwonlyargs, names.kw_defaults, strict=True):
        found.append((one.arg, NO_DEFAULT if default is None else ast.literal_eval(default)))
    return found + ([(f"**{names.kwarg.arg}", NO_DEFAULT)] if names.kwarg else [])


def given(value: Any) -> list[tuple[str, Any]]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        (stars.get(one.kind, "") + name, one.default)
        for name, one in inspect.signature(value).parameters.items()
        if name != "self"
    ]


def check_parameters(form: str, value: Any, in_order: bool = True) -> None:
    """What is documented is there with its default, in its order; further parameters may follow."""
    wanted, found = documented(form), given(value)
    defaults = dict(found)
    assert {name: defaults.get(name, "missing") for name, _ in wanted} == dict(wanted)
    if in_order and "*" not in form:
        assert found[: len(wanted)] == wanted


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.kind}: {row.name}")
def test_a_name_is_there_as_documented(row: Row) -> None:
    if row.kind == "Arguments":
        check_parameters(row.form, Accelerator, in_order=False)
        options: dict[str, Any] = {"cpu": True, row.name: EXAMPLES[row.name]}
        waits_for = row.here.partition("waits for ")[2]
        if waits_for:
            with pytest.raises(NotAvailableError, match=waits_for):
                Accelerator(**options)
        else:
            Accelerator(**options).close()
    elif row.kind in ("Properties", "Attributes"):
        assert hasattr(Accelerator(context=Context()), row.name)
    elif row.kind == "Variables":
        assert row.name in {name for variable in VARIABLES for name in variable.names}
    elif row.kind == "Commands":
        command, *words = row.form.removeprefix("accelfn ").split()
        if command == "launch":
            parse_flags(words)
        else:
            assert main([command, *words, "--help"]) == 0
    else:
        home = import_module(row.here.partition("in `")[2].strip("`") or "accelfn")
        owner, _, name = row.name.rpartition(".")
        holder: Any = home
        if row.kind == "Methods":
            holder = getattr(home, owner) if owner else Accelerator
            assert hasattr(home, name) or "as a function" not in row.here
        value = getattr(holder, name)
        if "(" in row.form:  # the fields of classes are given by name
            check_parameters(row.form, value, in_order=row.kind != "Handlers")


def test_arguments_of_the_constructor_are_in_the_documented_order() -> None:
    names = [row.name for row in rows() if row.kind == "Arguments"]
    assert list(inspect.signature(Accelerator).parameters)[: len(names)] == names
    assert set(EXAMPLES) == set(names)


def test_the_comparison_can_fail() -> None:
    def function(a: int, b: int = 1) -> None: ...

    check_parameters("f(a, b=1)", function)
    for form in ("f(a, b=2)", "f(b=1, a=2)", "f(a, *b)", "f(a, c)"):
        with pytest.raises(AssertionError):
            check_parameters(form, function)
