"""Print a program as a file that runs by itself."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from accelfn.testing.programs import parts
from accelfn.testing.programs.grammar import Program
from accelfn.testing.programs.layouts import context_arguments, world_arguments
from accelfn.testing.programs.run import IMPORTS, Job

_ENDING = """

def train_quietly(ctx):
    logged = []

    def log(name, value):
        if name in ("loss", "total", "norm"):
            weight = max(float(getattr(value, "weight", 1)), 1e-9)
            logged.append((name, round(getattr(value, "value", value).item() / weight, 5)))

    train(ctx, log)
    return logged

"""


def script(program: Program) -> str:
    """Return a program as a file of its own: it prints losses and norms on one rank, and in its layout.

    Functions and classes of the grammar's scope are printed with it, or imported where the grammar says so;
    any other value is printed as Python shows it.
    """
    grammar, text = program.grammar, program.source()
    first = f"# {program}\nfrom __future__ import annotations\n{IMPORTS}{grammar.imports}".strip("\n")
    made = [first, *_definitions(text, program), text.strip("\n")]
    if "FOLDER" in text:
        made.insert(1, 'FOLDER = tempfile.mkdtemp() + "/checkpoint"')
    alone = program.but(world="processes").reference()
    return "\n\n\n".join(made) + _ENDING + _calls(program, alone)


def _calls(program: Program, alone: Program) -> str:
    """Return the lines that run it, once more with the other part for a program that resumes elsewhere."""
    if not program["resume"]:
        options = context_arguments(alone.but(dp=1))
        lines = [f"print(run_ranks(train_quietly, 1, {_listed('processes', options)})[0])"]
        return "\n".join([*lines, _call(Job(program, ""))]) + "\n"
    return "\n".join(f"PART = {part}\n{_call(Job(program, '', part))}" for part in (0, 1)) + "\n"


def _call(job: Job) -> str:
    layout = job.layout
    options = _listed(layout["world"], world_arguments(layout), context_arguments(layout))
    return f"print(run_ranks(train_quietly, {layout.num_ranks}, {options})[0])"


def _listed(world: str, *options: str) -> str:
    return ", ".join([repr(world), *filter(None, options)])


def _definitions(text: str, program: Program) -> list[str]:
    """Return the source of the names that a text uses, each after those that it uses itself."""
    scope: Mapping[str, Any] = {**parts.SCOPE, **program.grammar.scope}
    made: dict[str, str] = {}

    def define(name: str) -> None:
        if name in made or name not in scope:
            return
        value = scope[name]
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            made[name] = f"{name} = {value!r}"
        elif program.grammar.is_imported and _is_importable(value):
            made[name] = f"from {value.__module__} import {value.__name__} as {name}"
        else:
            made[name] = ""  # in work: a class may name itself
            source = textwrap.dedent(inspect.getsource(value)).strip("\n")
            for used in _names_in(source):
                define(used)
            del made[name]
            made[name] = source if value.__name__ == name else f"{source}\n\n{name} = {value.__name__}"

    for name in _names_in(text):
        define(name)
    return [*made.values()]


def _is_importable(value: Any) -> bool:
    module = sys.modules.get(value.__module__)
    return value.__module__ != "__main__" and getattr(module, value.__name__, None) is value


def _names_in(source: str) -> list[str]:
    names = (node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return [*dict.fromkeys(names)]
