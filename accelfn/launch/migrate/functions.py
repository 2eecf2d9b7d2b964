"""The second level: methods of the Accelerator become functions of a context."""

from __future__ import annotations

import ast

from accelfn.launch.migrate import names
from accelfn.launch.migrate.members import Members
from accelfn.launch.migrate.passing import pass_scaler
from accelfn.launch.migrate.program import Edit
from accelfn.launch.migrate.shuffle import find_shuffle
from accelfn.launch.migrate.training import TrainingLoop, rewrite_training_loop
from accelfn.launch.migrate.variables import LoaderLoop

_NOT_FOLLOWED = (
    "It isn't known what it holds here. Make an Accelerator in this file, and pass it to functions that this "
    "file calls."
)
_ORDER = (
    "with shuffle=True, accelfn draws another order for the same seed, the same at any number of processes."
)


class ToFunctions(Members):
    """The second level's edits, while they are collected."""

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
            self.rewrite_member(member)
        self._rename_variables()
        for loop in self.micros:
            self._rewrite_loop(loop)
        shuffle = find_shuffle(self.rewrite, self.variables)
        if shuffle is not None:
            self.rewrite.note(shuffle, _ORDER)
        for one in training:
            rewrite_training_loop(self.rewrite, self.variables, one)
        self._rewrite_left_steps()
        self._check_followed()
        self._check_names()

    # --- the context -----------------------------------------------------------------------------

    def _rewrite_constructor(self, call: ast.Call) -> None:
        self.rewrite.check_constructor(call, names.CONTEXT_ARGUMENTS)
        for name, node in zip(names.POSITIONAL, call.args, strict=False):
            self.rewrite.insert(self.program.start(node), f"{name}=")
        self.rewrite.replace(call.func, "af.init_context")
        self.introduced["ctx"] = call
        self.introduced["af"] = call

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

    def _check_followed(self) -> None:
        """Refuse uses of the class and of its objects that weren't followed."""
        replaced = {edit.start for edit in self.rewrite.edits}
        for use in self.rewrite.imports.uses:
            if use.name == "Accelerator" and self.program.start(use.node) not in replaced:
                self.rewrite.refuse(use.node, _NOT_FOLLOWED)
        held = {key.name for key, kind in self.variables.kinds.items() if kind == "accelerator"}
        for node in self.program.nodes:
            if isinstance(node, ast.arg) and node.arg in held and self.variables.kind(node) is None:
                self.rewrite.refuse(node, _NOT_FOLLOWED)
            if isinstance(node, ast.Attribute) and node.attr == "step_was_skipped":
                self.rewrite.refuse(node, "Use accelfn.step_was_skipped(ctx, scaler).")

    def _check_names(self) -> None:
        """Refuse new names that the program has already."""
        used = self.rewrite.scopes.identifiers()
        for name, node in self.introduced.items():
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
            name = "inner_micro" if around in self.micros else "micro"
            if around is not None and self.micros.get(around) == "inner_micro":
                self.rewrite.refuse(loop.node, "Put the loop into a function of its own: three are nested.")
            self.micros[loop] = name
            self.introduced[name] = loop.node

    def _rewrite_loop(self, loop: LoaderLoop) -> None:
        batch = self.program.text(loop.batch)
        if isinstance(loop.batch, ast.Tuple) and not self.program.has_parentheses(loop.batch):
            batch = f"({batch})"
        micro = self.micros[loop]
        is_counted = loop.batch is not loop.node.target
        self.rewrite.replace(loop.batch, f"({batch}, {micro})" if is_counted else f"{batch}, {micro}")
        if (
            not is_counted
            and self.program.has_parentheses(loop.node.target)
            and not isinstance(loop.batch, ast.Tuple)
        ):
            self.rewrite.refuse(loop.node, "Write the loop's variable without parentheses.")
        self.rewrite.replace(loop.loader, f"af.microbatches(ctx, {loop.loader.id})")
        if loop.bar is not None:
            self.rewrite.append(loop.bar, f"total=len({loop.loader.id})")

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
        return TrainingLoop(loop, statement, block, is_windowed, self.micros[loop])

    def _is_accumulate(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "accumulate"
            and self.variables.is_kind(node.func.value, "accelerator")
        )

    def _has_windows(self) -> bool:
        return any(
            len(call.args) > names.POSITIONAL.index("gradient_accumulation_steps")
            or any(
                keyword.arg in ("gradient_accumulation_steps", "gradient_accumulation_plugin")
                and ast.unparse(keyword.value) != "1"
                for keyword in call.keywords
            )
            for _, call in self.rewrite.constructors()
        )

    def _add_scaler(self, loop: LoaderLoop) -> bool:
        """Have a scaler state at a loop: made after what it uses was prepared, here or in the caller."""
        scope = self.program.scope(loop.node)
        if self.scalers.get(scope) is scope or self._make_scaler(loop.node):
            return True  # a function's loops go on with one state
        if isinstance(scope, ast.FunctionDef) and scope not in self.scalers:
            calls = self.variables.calls_of(scope)
            if calls and all(self._make_scaler(self.program.statement(call)) for call in calls):
                pass_scaler(self.rewrite, self.variables, scope)
                self.scalers[scope] = scope
                return True
        self.rewrite.refuse(
            loop.node,
            "Prepare the model and the loop's loader in the same function, before it; or in the one function "
            "that calls it with them.",
        )
        return False

    def _make_scaler(self, node: ast.stmt) -> bool:
        """Make a scaler state after the objects that a statement uses were prepared."""
        scope = self.program.scope(node)
        around = [node, *self.program.above(node)]
        blocks = [self.program.block(one) for one in around if isinstance(one, ast.stmt) and one is not scope]
        before = [
            statement
            for statement in self.variables.prepares
            if self.program.scope(statement) is scope
            and statement.lineno < node.lineno
            and any(self.program.block(statement) is block for block in blocks)
            and isinstance(statement.value, ast.Call)
        ]
        if scope in self.scalers:
            return self.scalers[scope] in before
        if not before:
            return False
        last = max(before, key=lambda one: one.lineno)
        if not self.program.is_alone(last):
            self.rewrite.refuse(last, "Write one statement a line.")
        end = self.program.line_end(self.program.end(last))
        line = f"{self.program.indentation(last)}scaler = af.init_scaler(ctx){self.program.newline(end - 1)}"
        self.rewrite.statements.append(Edit(end, end, line))
        self.introduced["scaler"] = node
        self.scalers[scope] = last
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
            if method.attr != "step" or self.variables.loop_of(call) in self.training_loops():
                continue  # the loop's steps are rewritten or refused
            if key in cleared:
                self.rewrite.refuse(statement, "Step in a loop over a prepared loader that calls backward.")
            elif call.args or call.keywords or self.program.scope(call) not in self.scalers:
                self.rewrite.refuse(statement, "Use accelfn.scheduler_step(ctx, scheduler, scaler) by hand.")
            else:
                self.rewrite.replace(method, "af.scheduler_step")
                self.rewrite.lead(call, f"ctx, {self.program.text(method.value)}, scaler")
