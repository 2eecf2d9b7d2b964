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

def train_and_log(ctx):
    log = Log()
    train(ctx, log)
    return log.read(ctx)


def show(*parts):
    \"\"\"Print what ranks logged, as one process would have, and the norms of what was trained.\"\"\"
    numbers = join_ranks(parts)
    for name, (values, *_) in numbers.series.items():
        print(name, *(f"{one:.5g}" for value in values for one in value.flatten().tolist()))
    for name, states in numbers.states.items():
        tensors = {}
        for state in reversed(states):
            tensors |= {**state.parameters, **state.buffers}
        for key, tensor in sorted(tensors.items()):
            print(f"{name}.{key} {tensor.double().norm().item():.5g}")

"""
_IMPORTS = """\
from accelfn.testing.programs.run import Log
from accelfn.testing.programs.verdict import join_ranks"""


def script(program: Program) -> str:
    """Return a program as a file of its own, which runs it on one rank and in its layout.

    It prints for both what a verdict compares, joined over the ranks: losses, norms and what else is logged,
    and the norm of each parameter and buffer at the end. Functions and classes of the grammar's scope are
    printed with it, or imported where the grammar says so; any other value is printed as Python shows it. A
    function of ``__main__`` is printed with the names that it uses.

    Raises:
        ValueError: A function is a lambda, or was made within another: no text of its own defines it.
    """
    grammar, text = program.grammar, program.source()
    first = f"# {program}\nfrom __future__ import annotations\n{IMPORTS}{grammar.imports}{_IMPORTS}"
    made = [first, *_definitions(text, program), text.strip("\n")]
    if "FOLDER" in text:
        made.insert(1, 'FOLDER = tempfile.mkdtemp() + "/checkpoint"')
    return "\n\n\n".join(made) + _ENDING + _calls(program)


def _calls(program: Program) -> str:
    """Return the lines that run it: in two parts if it resumes elsewhere."""
    alone = program.but(world="processes").reference().but(dp=1)
    lines: list[str] = []
    for heading, of_one in (("one rank", True), (str(program), False)):
        lines.append(f"print({f'# {heading}'!r})")
        parts = (0, 1) if program["resume"] else (0,)
        calls = [_call(Job(program, "", part), alone if of_one else None) for part in parts]
        if len(parts) == 1:
            lines.append(f"show({calls[0]})")
        else:
            lines += ["PART = 0", f"first = {calls[0]}", "PART = 1", f"show(first, {calls[1]})"]
    return "\n".join(lines) + "\n"


def _call(job: Job, alone: Program | None) -> str:
    if alone is not None:
        return f"run_ranks(train_and_log, 1, {_listed('processes', context_arguments(alone))})"
    layout = job.layout
    options = _listed(layout["world"], world_arguments(layout), context_arguments(layout))
    return f"run_ranks(train_and_log, {layout.num_ranks}, {options})"


def _listed(world: str, *options: str) -> str:
    return ", ".join([repr(world), *filter(None, options)])


def _definitions(text: str, program: Program) -> list[str]:
    """Return the source of the names that a text uses, each after those that it uses itself."""
    made: dict[str, str] = {}

    def define(name: str, scope: Mapping[str, Any]) -> None:
        if name in made or name not in scope:
            return
        value = scope[name]
        if inspect.ismodule(value):
            made[name] = f"import {value.__name__} as {name}"
        elif not (inspect.isclass(value) or inspect.isfunction(value)):
            made[name] = f"{name} = {value!r}"
        elif program.grammar.is_imported and _is_importable(value):
            made[name] = f"from {value.__module__} import {value.__name__} as {name}"
        elif "<" in value.__qualname__:
            raise ValueError(
                f"script: {name} is {value.__qualname__}, which no text of its own defines. Use a function "
                "or class at the top of a module."
            )
        else:
            made[name] = ""  # in work: a class may name itself
            source = textwrap.dedent(inspect.getsource(value)).strip("\n")
            around = vars(sys.modules["__main__"]) if value.__module__ == "__main__" else scope
            for used in _names_in(source):
                define(used, around)
            del made[name]
            made[name] = source if value.__name__ == name else f"{source}\n\n{name} = {value.__name__}"

    for name in _names_in(text):
        define(name, {**parts.SCOPE, **program.grammar.scope})
    return [*made.values()]


def _is_importable(value: Any) -> bool:
    module = sys.modules.get(value.__module__)
    return value.__module__ != "__main__" and getattr(module, value.__name__, None) is value


def _names_in(source: str) -> list[str]:
    names = (node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return [*dict.fromkeys(names)]
