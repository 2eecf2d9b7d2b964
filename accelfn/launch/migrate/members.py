"""Rewrite uses of the Accelerator's attributes and methods."""

from __future__ import annotations

import ast
from collections.abc import Callable

from accelfn.launch.migrate import names
from accelfn.launch.migrate.program import Edit, Program, Scope
from accelfn.launch.migrate.rewrite import Rewrite
from accelfn.launch.migrate.training import CLIPS
from accelfn.launch.migrate.variables import LoaderLoop, Member, Variables

# A tree that makes a line longer than this gets lines of its own.
_LINE = 90
_NEEDS_LOOP = (
    "Use it in a `for` loop over a prepared loader, in the same function: it needs the batch's place."
)
_NOT_LOGGED = "accelerator.log is left out: it does nothing, since the program never calls init_trackers."
_NEEDS_SCALER = "Use it in the function that prepares and trains: it needs the state of the loss scale."


class Members:
    """Edits of attributes and methods, while they are collected.

    Attributes:
        rewrite: All edits.
        program: The program.
        variables: What its variables hold.
        introduced: New names, and where they are needed first.
        scalers: The statement after which a function has a scaler state.
        micros: Name of the place in the window, for each loop that yields it.
    """

    def __init__(self, rewrite: Rewrite) -> None:
        """Follow the Accelerator through the program."""
        self.rewrite: Rewrite = rewrite
        self.program: Program = rewrite.program
        self.variables: Variables = Variables(rewrite)
        self.introduced: dict[str, ast.AST] = {}
        self.scalers: dict[Scope, ast.stmt] = {}
        self.micros: dict[LoaderLoop, str] = {}
        self._methods: dict[str, Callable[[ast.Attribute, ast.Call], None]] = {
            "accumulate": self._rewrite_accumulate,
            "backward": self._rewrite_backward,
            "end_training": self._rewrite_end_training,
            "gather_for_metrics": self._rewrite_gather_for_metrics,
            "get_tracker": self._rewrite_get_tracker,
            "init_trackers": self._rewrite_init_trackers,
            "load_state": self._rewrite_load_state,
            "log": self._rewrite_log,
            "prepare": self._rewrite_prepare,
            "register_for_checkpointing": self._rewrite_register,
            "save_state": self._rewrite_save_state,
        }

    def micro(self, node: ast.AST) -> str | None:
        """Return the name of the place in the window at a node; None outside of loops that yield it."""
        loop = self.variables.loop_of(node)
        return None if loop is None else self.micros.get(loop)

    def training_loops(self) -> list[LoaderLoop]:
        """Return the loops with a backward pass."""
        loops = (
            self.variables.loop_of(one.node) for one in self.variables.members if one.node.attr == "backward"
        )
        return [loop for loop in loops if loop is not None]

    # --- attributes and methods ------------------------------------------------------------------

    def rewrite_member(self, member: Member) -> None:
        """Rewrite one use, or refuse it."""
        node, call, name = member.node, member.call, member.node.attr
        above = self.program.parents[node]
        if call is None:
            self._rewrite_attribute(node, above)
        elif name in CLIPS:
            if self.variables.loop_of(node) not in self.training_loops():
                self.rewrite.refuse(call, "Clip in the loop that calls backward.")
        elif name in names.METHODS or name in names.FREE_METHODS:
            self._rewrite_call(node, call, names.METHODS.get(name) or names.FREE_METHODS[name])
        else:
            self._methods.get(name, self._refuse_call)(node, call)

    def _refuse_call(self, node: ast.Attribute, call: ast.Call) -> None:
        del call
        self._refuse_member(node)

    def _refuse_member(self, node: ast.Attribute) -> None:
        remedy = names.MEMBER_INSTEAD.get(
            node.attr, "There is no function for it that is known to do the same."
        )
        self.rewrite.refuse(node, remedy)

    def _rewrite_attribute(self, node: ast.Attribute, above: ast.AST) -> None:
        name = node.attr
        if not isinstance(node.ctx, ast.Load):
            self.rewrite.refuse(
                node, "The context is frozen: pass the value to init_context, or use ctx.replace."
            )
        elif name == "state" and isinstance(above, ast.Attribute):
            if above.attr in names.STATE:
                self.rewrite.replace(above, f"ctx.{names.STATE[above.attr]}")
            else:
                self.rewrite.refuse(above, "The context has no such name.")
        elif name == "sync_gradients":
            micro = self.micro(node)
            if micro is None:
                self.rewrite.refuse(node, _NEEDS_LOOP)
            else:
                self.rewrite.replace(node, f"{micro}.sync")
        elif name == "optimizer_step_was_skipped":
            if self._has_scaler(node):
                self.rewrite.replace(node, "af.step_was_skipped(ctx, scaler)")
        elif name in names.DECORATORS and self._is_decorator(node, above):
            self.rewrite.replace(node, f"af.{name}(ctx)")
        elif name in names.PROPERTIES:
            self.rewrite.replace(node, names.PROPERTIES[name])
        else:
            self._refuse_member(node)

    def _is_decorator(self, node: ast.expr, above: ast.AST) -> bool:
        return isinstance(above, ast.FunctionDef) and any(one is node for one in above.decorator_list)

    def _has_scaler(self, node: ast.expr) -> bool:
        made = self.scalers.get(self.program.scope(node))
        if made is not None and made.lineno < node.lineno:
            return True
        self.rewrite.refuse(node, _NEEDS_SCALER)
        return False

    def _rewrite_call(self, node: ast.Attribute, call: ast.Call, function: str) -> None:
        for keyword in call.keywords:
            given, start = keyword.arg or "", self.program.start(keyword)
            if given in names.DROPPED_ARGUMENTS:
                self.rewrite.refuse(call, f"{given} is an option of init_context here, or of the loader.")
            elif given in names.RENAMED_ARGUMENTS:
                self.rewrite.edits.append(Edit(start, start + len(given), names.RENAMED_ARGUMENTS[given]))
        if node.attr.startswith("prepare_") and len(call.args) > 1:
            self.rewrite.refuse(call, "Pass the object alone: other arguments aren't the function's.")
        self.rewrite.replace(node, f"af.{function}")
        if node.attr in names.METHODS:
            self.rewrite.lead(call, "ctx")

    def _rewrite_prepare(self, node: ast.Attribute, call: ast.Call) -> None:
        statement = self.program.statement(call)
        if statement not in self.variables.prepares:
            self.rewrite.refuse(call, "Assign what it returns to variables.")
        elif call.keywords or any(isinstance(one, ast.Starred) for one in call.args):
            self.rewrite.refuse(call, "Pass the objects one by one, without other arguments.")
        else:
            self.rewrite.replace(node, "af.prepare")
            self.rewrite.lead(call, "ctx")

    def _rewrite_accumulate(self, node: ast.Attribute, call: ast.Call) -> None:
        micro = self.micro(node)
        if micro is None:
            self.rewrite.refuse(call, _NEEDS_LOOP)
            return
        self.rewrite.replace(node, "af.accumulate")
        self.rewrite.lead(call, f"ctx, {micro}")

    def _rewrite_backward(self, node: ast.Attribute, call: ast.Call) -> None:
        micro = self.micro(node)
        if micro is None or self.program.scope(node) not in self.scalers:
            return  # refused already
        if len(call.args) != 1 or any(one.arg in (None, "learning_rate") for one in call.keywords):
            self.rewrite.refuse(call, "Pass the loss, and keyword arguments of torch's backward.")
            return
        self.rewrite.insert(self.program.start(self.program.statement(call)), "scaler = ")
        self.rewrite.replace(node, "af.backward")
        self.rewrite.lead(call, "ctx")
        self.rewrite.insert(self.program.after_argument(call, call.args[0]), f", scaler, {micro}")

    def _rewrite_gather_for_metrics(self, node: ast.Attribute, call: ast.Call) -> None:
        micro = self.micro(node)
        if micro is None:
            self.rewrite.refuse(call, _NEEDS_LOOP)
        elif len(call.args) != 1 or call.keywords:
            self.rewrite.refuse(call, "Pass one tree. For objects use accelfn.gather_objects_for_metrics.")
        else:
            self.rewrite.replace(node, "af.gather_for_metrics")
            self.rewrite.lead(call, "ctx")
            self.rewrite.append(call, micro)

    # --- checkpoints -----------------------------------------------------------------------------

    def _rewrite_register(self, node: ast.Attribute, call: ast.Call) -> None:
        keys = [self.rewrite.scopes.of(one) for one in call.args]
        scope = self.program.scope(node)
        statement = self.program.statement(call)
        is_passed = self.scalers.get(scope) is scope
        if (
            scope not in self.scalers
            or is_passed
            or call.keywords
            or None in keys
            or not isinstance(statement, ast.Expr)
        ):
            self.rewrite.refuse(call, "Pass variables, in the function that prepares and trains.")
            return
        self.rewrite.delete_lines(statement)
        if len(self.program.block(statement)) == 1:
            self.rewrite.refuse(statement, "Write it next to prepare.")

    def _tree(self, call: ast.Call) -> str:
        """Return the tree of what the function around a call prepares and registers."""
        scope = self.program.scope(call)
        held = [
            key.name
            for statement, keys in self.variables.prepares.items()
            if self.program.scope(statement) is scope and self._is_new(statement)
            for key in keys
        ]
        registered = [
            argument.id
            for member in self.variables.members
            if member.node.attr == "register_for_checkpointing" and member.call is not None
            for argument in member.call.args
            if isinstance(argument, ast.Name) and self.program.scope(argument) is scope
        ]
        entries = [f'"{name}": {name}' for name in dict.fromkeys((*held, *registered, "scaler"))]
        statement = self.program.statement(call)
        indentation = self.program.indentation(statement)
        if len(indentation) + len(", ".join(entries)) + len(self.program.text(call)) < _LINE:
            return f"{{{', '.join(entries)}}}"
        newline = f"{self.program.newline(self.program.start(statement))}{indentation}"
        lines = "".join(f"{newline}    {entry}," for entry in entries)
        return f"{{{lines}{newline}}}"

    def _is_new(self, statement: ast.Assign) -> bool:
        """Return whether a statement prepares, and isn't another name of what is prepared."""
        called = statement.value.func if isinstance(statement.value, ast.Call) else None
        return isinstance(called, ast.Attribute) and called.attr != "skip_first_batches"

    def _rewrite_save_state(self, node: ast.Attribute, call: ast.Call) -> None:
        if self._checks_directory(node, call):
            self.rewrite.replace(node, "af.save_state")
            self.rewrite.lead(call, "ctx")
            self.rewrite.append(call, self._tree(call))

    def _rewrite_load_state(self, node: ast.Attribute, call: ast.Call) -> None:
        if not isinstance(self.program.parents[call], ast.Expr):
            self.rewrite.refuse(call, "Write it as a statement of its own.")
        elif self._checks_directory(node, call):
            self.rewrite.insert(self.program.start(call), "scaler = ")
            self.rewrite.replace(node, "af.load_state")
            self.rewrite.lead(call, "ctx")
            self.rewrite.append(call, self._tree(call))
            self.rewrite.insert(self.program.end(call), '["scaler"]')

    def _checks_directory(self, node: ast.Attribute, call: ast.Call) -> bool:
        named = [one for one in call.keywords if one.arg in ("output_dir", "input_dir")]
        if len(call.args) + len(named) != 1 or len(named) != len(call.keywords):
            self.rewrite.refuse(call, "Pass the directory alone, as the first argument.")
            return False
        scope = self.program.scope(node)
        if self.scalers.get(scope) is scope:
            self.rewrite.refuse(call, "Call it in the function that prepares: it saves what that prepares.")
            return False
        for keyword in named:
            start = self.program.start(keyword)
            self.rewrite.edits.append(Edit(start, self.program.start(keyword.value), ""))
        return self._has_scaler(node)

    # --- trackers and the end --------------------------------------------------------------------

    def _rewrite_init_trackers(self, node: ast.Attribute, call: ast.Call) -> None:
        statement = self.program.statement(call)
        scope = self.program.scope(node)
        has_log_with = any(
            keyword.arg in (None, "log_with")
            for _, made in self.rewrite.constructors()
            for keyword in made.keywords
        )
        if self.program.parents[statement] is not scope or not isinstance(statement, ast.Expr):
            self.rewrite.refuse(
                call, "Call it on every process, without a condition: trackers act on the main one."
            )
        elif not has_log_with:
            self.rewrite.refuse(
                call,
                "Pass log_with to the Accelerator: without it nothing is tracked there, and JSON lines here.",
            )
        elif len(call.args) > 2:
            self.rewrite.refuse(call, "Name the arguments after config.")
        else:
            self.rewrite.insert(self.program.start(call), "trackers = ")
            self.rewrite.replace(node, "af.init_trackers")
            self.rewrite.lead(call, "ctx")
            for config in call.args[1:]:
                self.rewrite.insert(self.program.start(config), "config=")
            self.introduced["trackers"] = call

    def _has_trackers(self, node: ast.AST) -> bool:
        scope = self.program.scope(node)
        return any(
            member.node.attr == "init_trackers" and self.program.scope(member.node) is scope
            for member in self.variables.members
        )

    def _rewrite_log(self, node: ast.Attribute, call: ast.Call) -> None:
        statement = self.program.statement(call)
        is_statement = isinstance(statement, ast.Expr) and statement.value is call
        if is_statement and all(one.node.attr != "init_trackers" for one in self.variables.members):
            self.rewrite.note(call, _NOT_LOGGED)
            if len(self.program.block(statement)) > 1:
                self.rewrite.delete_lines(statement)
            else:
                self.rewrite.statements.append(Edit(self.program.start(call), self.program.end(call), "pass"))
        elif not self._has_trackers(node):
            self.rewrite.refuse(call, "Call it in the function that calls init_trackers.")
        elif len(call.args) > 2:
            self.rewrite.refuse(call, "Name the arguments after step.")
        else:
            self.rewrite.replace(node, "af.log")
            self.rewrite.lead(call, "trackers")

    def _rewrite_get_tracker(self, node: ast.Attribute, call: ast.Call) -> None:
        if not self._has_trackers(node):
            self.rewrite.refuse(call, "Call it in the function that calls init_trackers.")
        else:
            self.rewrite.replace(node, "af.get_tracker")
            self.rewrite.lead(call, "trackers")

    def _rewrite_end_training(self, node: ast.Attribute, call: ast.Call) -> None:
        statement = self.program.statement(call)
        if not isinstance(statement, ast.Expr) or not self.program.is_alone(statement):
            self.rewrite.refuse(call, "Write it as a statement of its own.")
            return
        start = self.program.start(statement)
        lines = ["af.finish(trackers)"] if self._has_trackers(node) else []
        lines.append("af.close_context(ctx)")
        text = f"{self.program.newline(start)}{self.program.indentation(statement)}".join(lines)
        self.rewrite.statements.append(Edit(start, self.program.end(statement), text))
