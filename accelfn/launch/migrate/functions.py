"""The second level: methods of the Accelerator become functions of a context."""

from __future__ import annotations

import ast
from collections.abc import Callable

from accelfn.launch.migrate import names
from accelfn.launch.migrate.program import Edit, Scope
from accelfn.launch.migrate.rewrite import Rewrite
from accelfn.launch.migrate.scopes import Key
from accelfn.launch.migrate.training import CLIPS, TrainingLoop, rewrite_training_loop
from accelfn.launch.migrate.variables import LoaderLoop, Member, Variables

# A tree that makes a line longer than this gets lines of its own.
_LINE = 90
_NEEDS_LOOP = (
    "Use it in a `for` loop over a prepared loader, in the same function: it needs the batch's place."
)
_NEEDS_SCALER = "Use it in the function that prepares and trains: it needs the state of the loss scale."
_ORDER = (
    "with shuffle=True, accelfn draws another order for the same seed, the same at any number of processes."
)


class ToFunctions:
    """The second level's edits, while they are collected."""

    def __init__(self, rewrite: Rewrite) -> None:
        """Follow the Accelerator through the program."""
        self.rewrite: Rewrite = rewrite
        self.program = rewrite.program
        self.variables: Variables = Variables(rewrite)
        self._introduced: dict[str, ast.AST] = {}
        self._scalers: dict[Scope, list[Key]] = {}
        self._trackers: dict[Scope, ast.AST] = {}
        self._micros: dict[LoaderLoop, str] = {}
        self._done: set[ast.stmt] = set()
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

    def collect(self) -> None:
        """Collect the edits and refusals."""
        self.rewrite.rewrite_imports("af")
        self.rewrite.check_records()
        accelerators = {key: "ctx" for key, kind in self.variables.kinds.items() if kind == "accelerator"}
        self.rewrite.rewrite_functions(None, accelerators)
        if not accelerators:
            return
        for _, call in self.rewrite.constructors():
            self._rewrite_constructor(call)
        self._name_micros()
        training = self._find_training()
        for member in self.variables.members:
            self._rewrite_member(member)
        self._rename_variables()
        for loop in self._micros:
            self._rewrite_loop(loop)
        for one in training:
            self._done |= rewrite_training_loop(self.rewrite, self.variables, one)
        self._rewrite_left_steps()
        self._check_names()

    # --- the context -----------------------------------------------------------------------------

    def _rewrite_constructor(self, call: ast.Call) -> None:
        self.rewrite.check_constructor(call, names.CONTEXT_ARGUMENTS)
        for name, node in zip(names.POSITIONAL, call.args, strict=False):
            self.rewrite.insert(self.program.start(node), f"{name}=")
        self.rewrite.replace(call.func, "af.init_context")
        self._introduced["ctx"] = call
        self._introduced["af"] = call
        self.rewrite.note(call, _ORDER)

    def _rename_variables(self) -> None:
        """Rename the variables of the Accelerator, and refuse uses of it as a value."""
        for node in self.program.nodes:
            if not isinstance(node, ast.Name | ast.arg) or not self.variables.is_kind(node, "accelerator"):
                continue
            above = self.program.parents[node]
            if isinstance(node, ast.arg):
                start = self.program.start(node)
                self.rewrite.edits.append(Edit(start, start + len(node.arg), "ctx"))
                if node.annotation is not None:
                    self._rewrite_annotation(node.annotation)
            elif isinstance(node.ctx, ast.Store):
                self.rewrite.replace(node, "ctx")
                if isinstance(above, ast.AnnAssign):
                    self._rewrite_annotation(above.annotation)
            elif not isinstance(above, ast.Attribute):
                self._rewrite_passed(node, above)

    def _rewrite_annotation(self, annotation: ast.expr) -> None:
        if any(use.node is annotation and use.name == "Accelerator" for use in self.rewrite.imports.uses):
            self.rewrite.replace(annotation, "af.Context")
        else:
            self.rewrite.refuse(annotation, "Write `Accelerator`, or nothing.")

    def _rewrite_passed(self, node: ast.Name, above: ast.AST) -> None:
        call = self.program.parents[above] if isinstance(above, ast.keyword) else above
        parameter = self.variables.targets_of(node, call) if isinstance(call, ast.Call) else None
        if parameter is None or not self.variables.is_kind(parameter, "accelerator"):
            statement = self.program.statement(node)
            self.rewrite.refuse(
                statement, "The Accelerator is used as a value. Pass it to functions of this file only."
            )
            return
        self.rewrite.replace(node, "ctx")
        if isinstance(above, ast.keyword):
            start = self.program.start(above)
            self.rewrite.edits.append(Edit(start, start + len(above.arg or ""), "ctx"))

    def _check_names(self) -> None:
        """Refuse new names that the program has already."""
        used = self.rewrite.scopes.identifiers()
        for name, node in self._introduced.items():
            held = {key.name for key, kind in self.variables.kinds.items() if kind == "accelerator"}
            if name in used and name not in held:
                self.rewrite.refuse(node, f"Rename the program's own {name!r} first.", f"the new name {name}")

    # --- loops -----------------------------------------------------------------------------------

    def _name_micros(self) -> None:
        """Name the variable with the place in the window, for each loop that needs it."""
        needed: list[LoaderLoop] = []
        for member in self.variables.members:
            if member.node.attr in ("accumulate", "backward", "gather_for_metrics", "sync_gradients"):
                loop = self.variables.loop_of(member.node)
                if loop is not None and loop not in needed:
                    needed.append(loop)
        for loop in sorted(needed, key=lambda one: one.node.lineno):
            around = self.variables.loop_of(loop.node)
            name = "inner_micro" if around in self._micros else "micro"
            if around is not None and self._micros.get(around) == "inner_micro":
                self.rewrite.refuse(loop.node, "Put the loop into a function of its own: three are nested.")
            self._micros[loop] = name
            self._introduced[name] = loop.node

    def _micro(self, node: ast.AST) -> str | None:
        loop = self.variables.loop_of(node)
        return None if loop is None else self._micros.get(loop)

    def _rewrite_loop(self, loop: LoaderLoop) -> None:
        batch = self.program.text(loop.batch)
        if isinstance(loop.batch, ast.Tuple) and not self._has_parentheses(loop.batch):
            batch = f"({batch})"
        micro = self._micros[loop]
        is_counted = loop.batch is not loop.node.target
        self.rewrite.replace(loop.batch, f"({batch}, {micro})" if is_counted else f"{batch}, {micro}")
        if (
            not is_counted
            and self._has_parentheses(loop.node.target)
            and not isinstance(loop.batch, ast.Tuple)
        ):
            self.rewrite.refuse(loop.node, "Write the loop's variable without parentheses.")
        self.rewrite.replace(loop.loader, f"af.microbatches(ctx, {loop.loader.id})")
        if loop.bar is not None:
            self.rewrite.append(loop.bar, f"total=len({loop.loader.id})")

    def _has_parentheses(self, node: ast.expr) -> bool:
        text = self.program.text(node)
        if not isinstance(node, ast.Tuple):
            return self.program.source[: self.program.start(node)].rstrip().endswith("(")
        return text.startswith("(") and (
            not node.elts or self.program.start(node.elts[0]) > self.program.start(node)
        )

    def _find_training(self) -> list[TrainingLoop]:
        """Find the loops with a backward pass, and give their functions a scaler state."""
        found: list[TrainingLoop] = []
        for member in self.variables.members:
            if member.node.attr != "backward" or member.call is None:
                continue
            loop = self.variables.loop_of(member.node)
            statement = self.program.statement(member.node)
            if loop is None:
                self.rewrite.refuse(
                    member.call,
                    "Call it in a `for` loop over a loader that was prepared, "
                    "and that the program holds in a variable.",
                )
            elif any(one.loop is loop for one in found):
                self.rewrite.refuse(member.call, "Add the losses, and call backward once for each batch.")
            elif not isinstance(statement, ast.Expr) or statement.value is not member.call:
                self.rewrite.refuse(member.call, "Write it as a statement of its own.")
            else:
                training = self._read_training(loop, statement)
                if training is not None and self._add_scaler(loop):
                    found.append(training)
        return found

    def _read_training(self, loop: LoaderLoop, statement: ast.stmt) -> TrainingLoop | None:
        block = self.program.block(statement)
        around = self.program.parents[statement]
        is_windowed = isinstance(around, ast.With) and any(
            self._is_accumulate(item.context_expr) for item in around.items
        )
        outside = block if not is_windowed else self.program.block(self.program.statement(around))
        if outside is not loop.node.body:
            self.rewrite.refuse(
                statement, "Write it in the loop's body, or in an accumulate block there, and not deeper."
            )
            return None
        if not is_windowed and self._has_windows():
            self.rewrite.refuse(
                loop.node,
                "The Accelerator has windows of several batches: use accumulate in the "
                "loop, or leave gradient_accumulation_steps out.",
            )
            return None
        return TrainingLoop(loop, block, is_windowed, self._micros[loop])

    def _is_accumulate(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "accumulate"
            and self.variables.is_kind(node.func.value, "accelerator")
        )

    def _has_windows(self) -> bool:
        return any(
            keyword.arg in ("gradient_accumulation_steps", "gradient_accumulation_plugin")
            for _, call in self.rewrite.constructors()
            for keyword in call.keywords
        )

    def _add_scaler(self, loop: LoaderLoop) -> bool:
        """Make a scaler state after the objects of a loop were prepared."""
        scope = self.program.scope(loop.node)
        if scope in self._scalers:
            return True
        around = [loop.node, *self.program.above(loop.node)]
        blocks = [self.program.block(one) for one in around if isinstance(one, ast.stmt) and one is not scope]
        before = [
            statement
            for statement in self.variables.prepares
            if self.program.scope(statement) is scope
            and statement.lineno < loop.node.lineno
            and any(self.program.block(statement) is block for block in blocks)
            and isinstance(statement.value, ast.Call)
        ]
        if not before:
            self.rewrite.refuse(
                loop.node, "Prepare the model and the loop's loader in the same function, before it."
            )
            return False
        last = max(before, key=lambda one: one.lineno)
        if not self.program.is_alone(last):
            self.rewrite.refuse(last, "Write one statement a line.")
            return False
        end = self.program.line_end(self.program.end(last))
        line = f"{self.program.indentation(last)}scaler = af.init_scaler(ctx){self.program.newline(end - 1)}"
        self.rewrite.statements.append(Edit(end, end, line))
        self._introduced["scaler"] = loop.node
        self._scalers[scope] = []
        return True

    def _rewrite_left_steps(self) -> None:
        """Rewrite steps of schedulers outside of training loops, and refuse those of optimizers."""
        calls = [
            (node, node.func, self.rewrite.scopes.of(node.func.value))
            for node in self.program.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("step", "zero_grad")
            and self.variables.is_kind(node.func.value, "prepared")
        ]
        cleared = {key for _, method, key in calls if method.attr == "zero_grad"}
        for call, method, key in calls:
            statement = self.program.statement(call)
            if method.attr != "step" or statement in self._done:
                continue
            is_training = any(self.variables.loop_of(call) is loop for loop in self._training_loops())
            if is_training and any(one.line == statement.lineno for one in self.rewrite.refusals):
                continue
            if key in cleared or is_training:
                self.rewrite.refuse(statement, "Step in a loop over a prepared loader that calls backward.")
            elif call.args or call.keywords or self.program.scope(call) not in self._scalers:
                self.rewrite.refuse(statement, "Use accelfn.scheduler_step(ctx, scheduler, scaler) by hand.")
            else:
                self.rewrite.replace(method, "af.scheduler_step")
                self.rewrite.lead(call, f"ctx, {self.program.text(method.value)}, scaler")

    def _training_loops(self) -> list[LoaderLoop | None]:
        return [
            self.variables.loop_of(one.node) for one in self.variables.members if one.node.attr == "backward"
        ]

    # --- attributes and methods ------------------------------------------------------------------

    def _rewrite_member(self, member: Member) -> None:
        node, call, name = member.node, member.call, member.node.attr
        above = self.program.parents[node]
        if call is None:
            self._rewrite_attribute(node, above)
        elif name in CLIPS:
            if self.variables.loop_of(node) not in self._training_loops():
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
            micro = self._micro(node)
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

    def _has_scaler(self, node: ast.AST) -> bool:
        if self.program.scope(node) in self._scalers:
            return True
        self.rewrite.refuse(node, _NEEDS_SCALER)
        return False

    def _rewrite_call(self, node: ast.Attribute, call: ast.Call, function: str) -> None:
        for keyword in call.keywords:
            if keyword.arg in names.DROPPED_ARGUMENTS:
                self.rewrite.refuse(
                    call, f"{keyword.arg} is an option of init_context here, or of the loader."
                )
            elif keyword.arg in names.RENAMED_ARGUMENTS:
                start = self.program.start(keyword)
                renamed = names.RENAMED_ARGUMENTS[keyword.arg]
                self.rewrite.edits.append(Edit(start, start + len(keyword.arg), renamed))
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
        micro = self._micro(node)
        if micro is None:
            self.rewrite.refuse(call, _NEEDS_LOOP)
            return
        self.rewrite.replace(node, "af.accumulate")
        self.rewrite.lead(call, f"ctx, {micro}")

    def _rewrite_backward(self, node: ast.Attribute, call: ast.Call) -> None:
        micro = self._micro(node)
        if micro is None or self.program.scope(node) not in self._scalers:
            return  # refused already
        if len(call.args) != 1 or any(one.arg in (None, "learning_rate") for one in call.keywords):
            self.rewrite.refuse(call, "Pass the loss, and keyword arguments of torch's backward.")
            return
        self.rewrite.insert(self.program.start(self.program.statement(call)), "scaler = ")
        self.rewrite.replace(node, "af.backward")
        self.rewrite.lead(call, "ctx")
        self.rewrite.insert(self.program.after_argument(call, call.args[0]), f", scaler, {micro}")

    def _rewrite_gather_for_metrics(self, node: ast.Attribute, call: ast.Call) -> None:
        micro = self._micro(node)
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
        if scope not in self._scalers or call.keywords or None in keys or not isinstance(statement, ast.Expr):
            self.rewrite.refuse(call, "Pass variables, in the function that prepares and trains.")
            return
        self._scalers[scope] += [key for key in keys if key is not None]
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
        entries = ", ".join(f'"{name}": {name}' for name in dict.fromkeys((*held, *registered, "scaler")))
        statement = self.program.statement(call)
        indentation = self.program.indentation(statement)
        if len(indentation) + len(entries) + len(self.program.text(call)) < _LINE:
            return f"{{{entries}}}"
        newline = self.program.newline(self.program.start(statement))
        return f"{{{newline}{indentation}    {entries}{newline}{indentation}}}"

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
        if len(call.args) != 1 or call.keywords:
            self.rewrite.refuse(call, "Pass the directory alone, as the first argument.")
            return False
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
            self._introduced["trackers"] = call
            self._trackers[scope] = call

    def _has_trackers(self, node: ast.AST) -> bool:
        scope = self.program.scope(node)
        return any(
            member.node.attr == "init_trackers" and self.program.scope(member.node) is scope
            for member in self.variables.members
        )

    def _rewrite_log(self, node: ast.Attribute, call: ast.Call) -> None:
        if not self._has_trackers(node):
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
