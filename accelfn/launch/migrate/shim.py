"""The first level: the program keeps its Accelerator, which comes from accelfn."""

from __future__ import annotations

import ast

from accelfn.launch.migrate import names
from accelfn.launch.migrate.rewrite import Rewrite
from accelfn.launch.migrate.scopes import Key

_NUMBERS = (
    "accelfn steps a prepared scheduler once for each step of its optimizer, Accelerate once for each "
    'process; and a short last window is divided by its own length. With Accelerator(compat="accelerate") '
    "both are as in Accelerate."
)
_PRIVATE = "It is private in Accelerate. "


def to_shim(rewrite: Rewrite) -> None:
    """Collect the edits and refusals that keep the Accelerator."""
    rewrite.rewrite_imports(None)
    rewrite.check_records()
    variables: dict[Key, str] = {}
    receivers: set[str] = set()
    for _, call in rewrite.constructors():
        rewrite.check_constructor(call, names.CONTEXT_ARGUMENTS | names.SHIM_ARGUMENTS)
        rewrite.note(call, _NUMBERS)
        statement = rewrite.program.parents[call]
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            receivers.add(ast.unparse(target))
            key = rewrite.scopes.of(target)
            if key is not None:
                variables[key] = key.name
    rewrite.rewrite_functions(".context", variables)
    for node in rewrite.program.nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in receivers:
            _check_attribute(rewrite, node)


def _check_attribute(rewrite: Rewrite, node: ast.Attribute) -> None:
    name = node.attr
    if name not in names.SHIM_ATTRIBUTES:
        private = _PRIVATE if name.startswith("_") else ""
        rewrite.refuse(
            node, private + names.MEMBER_INSTEAD.get(name, "accelfn.Accelerator has no such name.")
        )
    above = rewrite.program.parents[node]
    if name == "state" and isinstance(above, ast.Attribute):
        if above.attr not in names.STATE:
            rewrite.refuse(above, "accelerator.state is the frozen context, which has no such name.")
        elif above.attr != names.STATE[above.attr]:
            # The Accelerator has Accelerate's name for it.
            rewrite.replace(above, f"{rewrite.program.text(node.value)}.{above.attr}")
    if name == "dataloader_config" and isinstance(above, ast.Attribute) and isinstance(above.ctx, ast.Store):
        rewrite.refuse(above, "Pass it as a field of dataloader_config=DataLoaderConfiguration(...).")
    is_clip = name in ("clip_grad_norm_", "clip_grad_value_")
    if is_clip and is_in_accumulate(rewrite, node) and not is_guarded(rewrite, node):
        rewrite.refuse(
            node,
            f"Put it under `if {rewrite.program.text(node.value)}.sync_gradients:`: inside of a "
            "window gradients are neither complete nor averaged.",
        )


def is_in_accumulate(rewrite: Rewrite, node: ast.AST) -> bool:
    """Return whether a node is in a ``with accelerator.accumulate(...)`` block."""
    return any(
        isinstance(above, ast.With)
        and any(
            isinstance(item.context_expr, ast.Call)
            and isinstance(item.context_expr.func, ast.Attribute)
            and item.context_expr.func.attr == "accumulate"
            for item in above.items
        )
        for above in rewrite.program.above(node)
    )


def is_guarded(rewrite: Rewrite, node: ast.AST) -> bool:
    """Return whether a node is under a condition that mentions ``sync_gradients``."""
    return any(
        isinstance(above, ast.If)
        and any(
            isinstance(one, ast.Attribute) and one.attr == "sync_gradients" for one in ast.walk(above.test)
        )
        for above in rewrite.program.above(node)
    )
