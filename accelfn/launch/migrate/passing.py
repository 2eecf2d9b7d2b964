"""Pass the state of the loss scale to a function that trains with what its caller has prepared."""

from __future__ import annotations

import ast

from accelfn.launch.migrate.program import Edit
from accelfn.launch.migrate.rewrite import Rewrite
from accelfn.launch.migrate.variables import Variables

_STATE = "Its state of the loss scale must go on in the next call. "


def pass_scaler(rewrite: Rewrite, variables: Variables, function: ast.FunctionDef) -> None:
    """Add a parameter ``scaler`` to a function, and the next state to what it returns.

    It follows the Accelerator among the parameters and arguments; without one it comes first.
    """
    for node in variables.other_uses_of(function):
        rewrite.refuse(node, f"{_STATE}Call {function.name} by its name.")
    arguments = function.args
    parameter = next((one for one in _named(arguments) if variables.is_kind(one, "accelerator")), None)
    if parameter is not None and parameter in _with_defaults(arguments):
        rewrite.refuse(parameter, f"{_STATE}Pass the Accelerator always, without a default.")
    elif parameter is not None:
        rewrite.insert(rewrite.program.end(parameter), ", scaler")
    elif arguments.posonlyargs or arguments.args:
        first = [*arguments.posonlyargs, *arguments.args][0]
        rewrite.insert(rewrite.program.start(first), "scaler, ")
    else:
        rewrite.refuse(function, f"{_STATE}Pass it the Accelerator.", f"def {function.name}")
    has_value = _return_scaler(rewrite, function)
    for call in variables.calls_of(function):
        _rewrite_call(rewrite, variables, call, parameter, has_value=has_value)


def _named(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _with_defaults(arguments: ast.arguments) -> list[ast.arg]:
    positional = [*arguments.posonlyargs, *arguments.args]
    return positional[len(positional) - len(arguments.defaults) :]


def _return_scaler(rewrite: Rewrite, function: ast.FunctionDef) -> bool:
    """Return the state beside what a function returns; and say whether it returns something."""
    program = rewrite.program
    inside = [node for node in ast.walk(function) if node is not function and program.scope(node) is function]
    for node in inside:
        if isinstance(node, ast.Yield | ast.YieldFrom):
            rewrite.refuse(node, f"{_STATE}Write the loop in a function that isn't a generator.")
    returns = [node for node in inside if isinstance(node, ast.Return)]
    has_value = any(node.value is not None for node in returns)
    for node in returns:
        if node.value is not None:
            rewrite.add_item(node.value, "scaler")
        else:
            rewrite.insert(program.end(node), " None, scaler" if has_value else " scaler")
    last = function.body[-1]
    if not isinstance(last, ast.Return):
        if has_value:
            rewrite.refuse(last, f"{_STATE}Return at the end of {function.name} too.")
        elif not program.is_alone(last):
            rewrite.refuse(last, "Write one statement a line.")
        else:
            end = program.line_end(program.end(last))
            newline = program.newline(program.start(function))
            begin = "" if program.source[:end].endswith(("\n", "\r")) else newline
            line = f"{begin}{program.indentation(last)}return scaler{newline}"
            rewrite.statements.append(Edit(end, end, line))
    return has_value


def _rewrite_call(
    rewrite: Rewrite, variables: Variables, call: ast.Call, parameter: ast.arg | None, *, has_value: bool
) -> None:
    program = rewrite.program
    statement = program.parents[call]
    if any(isinstance(one, ast.Starred) for one in call.args) or any(
        one.arg is None for one in call.keywords
    ):
        rewrite.refuse(call, f"{_STATE}Pass the arguments one by one.")
    elif isinstance(statement, ast.Expr):
        rewrite.insert(program.start(statement), "_, scaler = " if has_value else "scaler = ")
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and has_value:
        rewrite.add_item(statement.targets[0], "scaler")
    else:
        rewrite.refuse(
            call, f"{_STATE}Write the call as a statement of its own, or assign what it returns to variables."
        )
    if parameter is None:
        rewrite.lead(call, "scaler")
        return
    for given in (*call.args, *call.keywords):
        value = given.value if isinstance(given, ast.keyword) else given
        if variables.targets_of(value, call) is parameter:
            text = ", scaler=scaler" if isinstance(given, ast.keyword) else ", scaler"
            rewrite.insert(program.after_argument(call, given), text)
