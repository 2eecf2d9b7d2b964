"""Whether a program's loaders may shuffle, as far as its source tells."""

from __future__ import annotations

import ast

from accelfn.launch.migrate.rewrite import Rewrite
from accelfn.launch.migrate.scopes import Key
from accelfn.launch.migrate.variables import Variables

# The keywords that choose the order.
_ORDERING = ("shuffle", "sampler", "batch_sampler")


def find_shuffle(rewrite: Rewrite, variables: Variables) -> ast.AST | None:
    """Return a loader that shuffles, or a loop over one that isn't known; None if none may shuffle."""
    program = rewrite.program
    made = [node for node in program.nodes if isinstance(node, ast.Call) and _makes_loader(node)]
    shuffled = next((call for call in made if not _is_sequential(call)), None)
    loops = sorted(variables.loops, key=lambda loop: loop.lineno)
    if shuffled is not None and loops:
        return shuffled
    unknown = (
        loop for loop in loops if not _is_made_here(rewrite, variables, variables.loops[loop].loader, ())
    )
    return next(unknown, None)


def _makes_loader(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] == "DataLoader"


def _is_sequential(call: ast.Call) -> bool:
    # The positional arguments before `shuffle` are the data and the batch's size.
    given = [*call.args[2:], *(one.value for one in call.keywords if one.arg in (*_ORDERING, None))]
    return all(isinstance(one, ast.Constant) and not one.value for one in given)


def _is_made_here(rewrite: Rewrite, variables: Variables, node: ast.expr, seen: tuple[Key, ...]) -> bool:
    """Return whether an expression is a loader that this file makes."""
    scopes = rewrite.scopes
    if isinstance(node, ast.Call):
        function = scopes.of(node.func)
        bound = [] if function is None else scopes.bound.get(function, [])
        return _makes_loader(node) or any(isinstance(one, ast.FunctionDef) for one in bound)
    key = scopes.of(node)
    if key is None or key in seen:
        return key is not None
    sources = [
        source for target in scopes.bound.get(key, []) for source in _sources(rewrite, variables, target)
    ]
    others = [one for one in sources if not (isinstance(one, ast.Name) and scopes.of(one) == key)]
    return bool(others) and all(
        one is not None and _is_made_here(rewrite, variables, one, (*seen, key)) for one in others
    )


def _sources(rewrite: Rewrite, variables: Variables, target: ast.AST) -> list[ast.expr | None]:
    """Return what a variable is assigned from; None for what isn't followed."""
    if isinstance(target, ast.arg):
        return [*variables.given(target)] or [None]
    statement = rewrite.program.statement(target)
    if not isinstance(statement, ast.Assign) or not isinstance(target, ast.expr):
        return [None]
    value, place = statement.value, statement.targets[0]
    if isinstance(value, ast.IfExp):
        parts = [value.body, value.orelse]
    elif statement in variables.prepares and isinstance(value, ast.Call) and value.args:
        targets = place.elts if isinstance(place, ast.Tuple) else [place]
        parts = [value.args[targets.index(target)] if len(targets) > 1 else value.args[0]]
    else:
        parts = [value]
    # A part may be `skip_first_batches(loader, n)`.
    return [
        one.args[0] if isinstance(one, ast.Call) and one.args and variables.is_prepared(one) else one
        for one in parts
    ]
