"""Rewrite a training loop: its steps become one ``optimizer_step``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from accelfn.launch.migrate.program import Edit
from accelfn.launch.migrate.rewrite import Rewrite
from accelfn.launch.migrate.scopes import Key
from accelfn.launch.migrate.variables import LoaderLoop, Member, Variables

CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_SCHEDULE = (
    "one step of the optimizer is one step of its scheduler; Accelerate steps a prepared scheduler once for "
    "each process, so there the schedule ends earlier on several."
)
_WINDOW = (
    "the loss of a short last window is divided by the number of batches that it has; Accelerate divides by "
    "that of a full window."
)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingLoop:
    """A loop over a prepared loader with a backward pass.

    Attributes:
        loop: The loop.
        backward: The backward pass.
        block: The statements that the backward pass is among: of the loop, or of its ``accumulate`` block.
        is_windowed: Whether that is an ``accumulate`` block.
        micro: Name of the variable with the place in the window.
    """

    loop: LoaderLoop
    backward: ast.stmt
    block: list[ast.stmt]
    is_windowed: bool
    micro: str


def rewrite_training_loop(rewrite: Rewrite, variables: Variables, training: TrainingLoop) -> None:
    """Replace the optimizer's step and what belongs to it."""
    loop = training.loop.node
    calls = _calls_in(variables, rewrite, training.loop, ("step", "zero_grad"))
    clears = [(key, statement) for key, name, statement in calls if name == "zero_grad"]
    cleared = {key for key, _ in clears}
    steps = [(key, statement) for key, name, statement in calls if name == "step"]
    optimizers = [(key, statement) for key, statement in steps if key in cleared]
    schedulers = [(key, statement) for key, statement in steps if key not in cleared]
    if not optimizers:
        rewrite.refuse(
            loop, "Step and clear a prepared optimizer in the loop: optimizer.step(), optimizer.zero_grad()."
        )
        return
    if len(optimizers) > 1 or len(cleared) > 1:
        rewrite.refuse(
            optimizers[-1][1],
            "Several steps in one loop: give each optimizer a scaler state of its own, by hand.",
        )
        return
    key, step = optimizers[0]
    block = rewrite.program.block(step)
    parent = rewrite.program.parents[step]
    is_guarded = isinstance(parent, ast.If) and _is_sync(variables, parent.test) and not parent.orelse
    is_plain = block is training.block or (training.is_windowed and block is loop.body)
    if training.is_windowed and not is_plain and not is_guarded:
        rewrite.refuse(
            step, "It is under a condition; the window says when the optimizer steps. Take it out."
        )
        return
    at = block.index(step)
    group, scheduler = _read_group(rewrite, block[at + 1 :], schedulers, [one for _, one in clears])
    for other, statement in schedulers:
        if statement not in group:
            rewrite.refuse(statement, f"Write it right after {key.name}.step(), or prepare no {other.name}.")
    for _, statement in clears:
        if statement in group:
            continue
        is_everywhere = is_plain and any(one is statement for one in (*training.block, *loop.body))
        if not is_everywhere and not any(one is statement for one in block):
            rewrite.refuse(
                statement, f"Write it next to {key.name}.step(): optimizer_step clears the gradients."
            )
        group.append(statement)
    clip, bound = _read_clip(rewrite, variables, training, key, block[at - 1] if at else None)
    for statement in group:
        rewrite.delete_lines(statement)
    if clip is not None:
        rewrite.delete_lines(clip)
    if scheduler is not None:
        rewrite.note(step, _SCHEDULE)
    options = "".join(
        (f", max_norm={bound}" if bound else "", f", scheduler={scheduler}" if scheduler else "")
    )
    call = f"scaler = af.optimizer_step(ctx, {key.name}, scaler{options})"
    _write_step(
        rewrite, training, step, call, block, [*group, step], has_guard=is_guarded or not training.is_windowed
    )
    if training.is_windowed:
        rewrite.note(loop, _WINDOW)
    _check_order(rewrite, training, step, [one for _, one in clears])


def _check_order(
    rewrite: Rewrite, training: TrainingLoop, step: ast.stmt, clears: Sequence[ast.stmt]
) -> None:
    """Refuse what would do something else, since ``optimizer_step`` clears the gradients."""
    for statement in clears:
        if training.backward.lineno < statement.lineno < step.lineno:
            rewrite.refuse(statement, "It clears the gradients before the step. Write it after the step.")
    for node in ast.walk(training.loop.node):
        if isinstance(node, ast.Attribute) and node.attr == "grad" and node.lineno > step.lineno:
            rewrite.refuse(node, "Read gradients before the step: optimizer_step clears them.")
        if isinstance(node, ast.Continue) and training.is_windowed and node.lineno < step.lineno:
            rewrite.refuse(
                node,
                "A batch that is left out would leave its window open. Skip batches with "
                "accelerator.skip_first_batches.",
            )


def _calls_in(
    variables: Variables, rewrite: Rewrite, loop: LoaderLoop, methods: Sequence[str]
) -> list[tuple[Key, str, ast.stmt]]:
    """List the statements of a loop that call a method of a prepared object, in order."""
    found: list[tuple[Key, str, ast.stmt]] = []
    for node in ast.walk(loop.node):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if (
                isinstance(called, ast.Attribute)
                and called.attr in methods
                and variables.loop_of(node) is loop
            ):
                key = rewrite.scopes.of(called.value)
                if key is not None and variables.is_kind(called.value, "prepared"):
                    found.append((key, called.attr, node))
    return sorted(found, key=lambda one: one[2].lineno)


def _read_group(
    rewrite: Rewrite,
    following: Sequence[ast.stmt],
    schedulers: Sequence[tuple[Key, ast.stmt]],
    clears: Sequence[ast.stmt],
) -> tuple[list[ast.stmt], str | None]:
    """Return the statements right after a step that belong to it, and the scheduler's name."""
    group: list[ast.stmt] = []
    scheduler: str | None = None
    for statement in following:
        found = next((key.name for key, one in schedulers if one is statement), None)
        if found is not None and scheduler is None:
            assert isinstance(statement, ast.Expr)
            assert isinstance(statement.value, ast.Call)
            if statement.value.args or statement.value.keywords:
                rewrite.refuse(statement, "Use accelfn.scheduler_step(ctx, scheduler, metric=...) by hand.")
            scheduler = found
        elif statement not in clears:
            break
        group.append(statement)
    return group, scheduler


def _is_sync(variables: Variables, node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "sync_gradients"
        and variables.is_kind(node.value, "accelerator")
    )


def _read_clip(
    rewrite: Rewrite,
    variables: Variables,
    training: TrainingLoop,
    optimizer: Key,
    before: ast.stmt | None,
) -> tuple[ast.stmt | None, str | None]:
    """Return the statement before a step if it clips the norm, and the bound; and rewrite all other clips."""
    merged: ast.stmt | None = None
    bound: str | None = None
    for member in variables.members:
        call = member.call
        if (
            member.node.attr not in CLIPS
            or call is None
            or variables.loop_of(member.node) is not training.loop
        ):
            continue
        statement = rewrite.program.statement(call)
        parent = rewrite.program.parents[statement]
        is_guarded = any(
            isinstance(above, ast.If) and _is_sync(variables, above.test)
            for above in rewrite.program.above(call)
        )
        if training.is_windowed and not is_guarded:
            rewrite.refuse(
                call,
                "Put it under `if accelerator.sync_gradients:`: inside of a window gradients are "
                "neither complete nor averaged.",
            )
            continue
        whole = statement
        if isinstance(parent, ast.If) and _is_sync(variables, parent.test) and len(parent.body) == 1:
            whole = statement if parent.orelse else parent
        if (
            whole is before
            and isinstance(statement, ast.Expr)
            and _is_of_optimizer(rewrite, member, optimizer)
        ):
            merged, bound = whole, rewrite.rendered(call.args[1])
        else:
            _rewrite_clip(rewrite, member, call, statement, optimizer)
    return merged, bound


def _is_of_optimizer(rewrite: Rewrite, member: Member, optimizer: Key) -> bool:
    """Return whether a call clips the norm of all parameters that an optimizer was made with."""
    call = member.call
    if member.node.attr != "clip_grad_norm_" or call is None or len(call.args) != 2 or call.keywords:
        return False
    given = call.args[0]
    made = [
        node.value
        for node in rewrite.program.nodes
        if isinstance(node, ast.Assign)
        and any(rewrite.scopes.of(target) == optimizer for target in node.targets)
        and isinstance(node.value, ast.Call)
    ]
    return len(made) == 1 and bool(made[0].args) and _same_parameters(rewrite, given, made[0].args[0])


def _same_parameters(rewrite: Rewrite, one: ast.expr, other: ast.expr) -> bool:
    keys: list[Key | None] = []
    for node in (one, other):
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Attribute):
            return False
        if node.func.attr != "parameters":
            return False
        keys.append(rewrite.scopes.of(node.func.value))
    return keys[0] is not None and keys[0] == keys[1]


def _rewrite_clip(
    rewrite: Rewrite, member: Member, call: ast.Call, statement: ast.stmt, optimizer: Key
) -> None:
    if not isinstance(statement, ast.Expr | ast.Assign) or statement.value is not call:
        rewrite.refuse(call, "Write it as a statement of its own.")
        return
    if not rewrite.program.is_alone(statement):
        rewrite.refuse(statement, "Write one statement a line.")
        return
    start = rewrite.program.start(statement)
    line = f"scaler = af.unscale_gradients(ctx, {optimizer.name}, scaler)"
    rewrite.insert(start, f"{line}{rewrite.program.newline(start)}{rewrite.program.indentation(statement)}")
    rewrite.replace(member.node, f"af.{member.node.attr}")
    rewrite.lead(call, "ctx")
    rewrite.append(call, "scaler_state=scaler")


def _write_step(
    rewrite: Rewrite,
    training: TrainingLoop,
    step: ast.stmt,
    call: str,
    block: list[ast.stmt],
    group: Sequence[ast.stmt],
    *,
    has_guard: bool,
) -> None:
    """Replace a step; after the ``accumulate`` block if nothing else follows in it."""
    program = rewrite.program
    if not program.is_alone(step, *group) or program.on_line(step)[0] is not step:
        rewrite.refuse(step, "Write one statement a line.")
        return
    start, end = program.start(step), program.end(step)
    if has_guard:
        rewrite.statements.append(Edit(start, end, call))
        return
    outer = inner = program.indentation(step)
    around = program.parents[step]
    unit = inner[len(program.indentation(around)) :]
    is_last = all(one in group for one in block[block.index(step) :])
    if isinstance(around, ast.With) and is_last and len(block) > sum(one in group for one in block):
        outer = program.indentation(around)
    newline = program.newline(start)
    text = f"{outer}if {training.micro}.sync:{newline}{outer}{unit}{call}"
    rewrite.statements.append(Edit(program.line_start(start), end, text))
