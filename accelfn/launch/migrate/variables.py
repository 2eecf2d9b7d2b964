"""Which variables hold the Accelerator and what it has prepared, and which loops read loaders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from accelfn.launch.migrate.rewrite import Rewrite
from accelfn.launch.migrate.scopes import Key

Kind = Literal["accelerator", "prepared"]
_PREPARING = ("prepare", "prepare_data_loader", "prepare_model", "prepare_optimizer", "prepare_scheduler")


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A use of an attribute of the Accelerator.

    Attributes:
        node: The attribute.
        call: The call, if it is called.
    """

    node: ast.Attribute
    call: ast.Call | None


@dataclass(frozen=True, slots=True, eq=False)
class LoaderLoop:
    """A loop over a prepared loader.

    Attributes:
        node: The loop.
        loader: The loader's name in it.
        batch: The target that a batch is assigned to.
        bar: A progress bar around the loader that would lose its total.
    """

    node: ast.For
    loader: ast.Name
    batch: ast.expr
    bar: ast.Call | None


class Variables:
    """Variables of one program, with what is known of them.

    Attributes:
        kinds: What a variable holds.
        prepares: Statements that prepare something, with the variables that they assign.
        members: Uses of the Accelerator's attributes.
        loops: Loops over prepared loaders.
    """

    def __init__(self, rewrite: Rewrite) -> None:
        """Follow the Accelerator through the program."""
        self._rewrite = rewrite
        self._program = rewrite.program
        self._scopes = rewrite.scopes
        self._calls: dict[str, list[ast.Call]] = {}
        for node in self._program.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self._calls.setdefault(node.func.id, []).append(node)
        self.kinds: dict[Key, Kind] = {}
        self.prepares: dict[ast.Assign, list[Key]] = {}
        for _, call in rewrite.constructors():
            self._add_constructor(call)
        before = -1
        while before != len(self.kinds) + len(self.prepares):
            before = len(self.kinds) + len(self.prepares)
            for node in self._program.nodes:
                self._follow(node)
        self.members: list[Member] = [*self._find_members()]
        self.loops: dict[ast.For, LoaderLoop] = {}
        for node in self._program.nodes:
            loop = self._read_loop(node) if isinstance(node, ast.For) else None
            if loop is not None:
                self.loops[loop.node] = loop

    def kind(self, node: ast.AST) -> Kind | None:
        """Return what a name holds."""
        key = self._scopes.of(node) if isinstance(node, ast.Name | ast.arg) else None
        return None if key is None else self.kinds.get(key)

    def is_kind(self, node: ast.AST, kind: Kind) -> bool:
        """Return whether a node is a name that holds ``kind``."""
        return self.kind(node) == kind

    def loop_of(self, node: ast.AST) -> LoaderLoop | None:
        """Return the innermost loop over a prepared loader around a node, in the same function."""
        scope = self._program.scope(node)
        around = (self.loops.get(above) for above in self._program.above(node) if isinstance(above, ast.For))
        return next((loop for loop in around if loop and self._program.scope(loop.node) is scope), None)

    def targets_of(self, argument: ast.expr, call: ast.Call) -> ast.arg | None:
        """Return the parameter that an argument of a call of one of the program's functions is bound to."""
        key = self._scopes.of(call.func)
        found = self._scopes.bound.get(key, []) if key is not None else []
        if len(found) != 1 or not isinstance(found[0], ast.FunctionDef):
            return None
        arguments = found[0].args
        positional = [*arguments.posonlyargs, *arguments.args]
        if any(isinstance(one, ast.Starred) for one in call.args):
            return None
        for parameter, given in zip(positional, call.args, strict=False):
            if given is argument:
                return parameter
        named = {one.arg: one for one in (*positional, *arguments.kwonlyargs)}
        return next((named.get(one.arg or "") for one in call.keywords if one.value is argument), None)

    def calls_of(self, function: ast.FunctionDef) -> list[ast.Call]:
        """Return the program's calls of one of its functions."""
        name = Key(self._program.scope(function), function.name)
        return [call for call in self._calls.get(function.name, ()) if self._scopes.of(call.func) == name]

    def other_uses_of(self, function: ast.FunctionDef) -> list[ast.Name]:
        """Return the uses of a function's name that aren't calls of it."""
        name = Key(self._program.scope(function), function.name)
        called = {call.func for call in self.calls_of(function)}
        names = (node for node in self._program.nodes if isinstance(node, ast.Name) and node not in called)
        return [node for node in names if node.id == function.name and self._scopes.of(node) == name]

    # --- following -------------------------------------------------------------------------------

    def _add_constructor(self, call: ast.Call) -> None:
        statement = self._program.parents[call]
        target: ast.expr | None = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign):
            target = statement.target
        key = self._scopes.of(target) if isinstance(target, ast.Name) else None
        if key is None:
            self._rewrite.refuse(
                call, "Assign the Accelerator to a variable, not to an attribute or an argument."
            )
        elif self.kinds or len(self._scopes.bound[key]) > 1:
            is_conditional = any(isinstance(above, ast.If) for above in self._program.above(call))
            self._rewrite.refuse(
                call,
                "It is made under a condition. Make it always, with arguments that depend on the condition."
                if is_conditional
                else "Make one Accelerator, in one place: a program needs one context.",
            )
        else:
            self.kinds[key] = "accelerator"

    def _follow(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and node not in self.prepares:
            if self.is_prepared(node.value):
                target = node.targets[0]
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                keys = [self._scopes.of(part) for part in parts]
                found = [key for key in keys if key is not None]
                if len(found) == len(keys):
                    self.prepares[node] = found
                    for key in found:
                        self.kinds.setdefault(key, "prepared")
        elif isinstance(node, ast.arg):
            key = self._scopes.of(node)
            kinds: set[Kind | None] = {self.kind(given) for given in self.given(node)}
            if key is not None and key not in self.kinds and len(kinds) == 1:
                kind = kinds.pop()
                if kind is not None:
                    self.kinds[key] = kind

    def is_prepared(self, value: ast.expr) -> bool:
        """Return whether an expression is of prepared objects: from a call, or another variable of one."""
        if isinstance(value, ast.Name):
            return self.is_kind(value, "prepared")
        if isinstance(value, ast.IfExp):
            return self.is_prepared(value.body) and self.is_prepared(value.orelse)
        if not isinstance(value, ast.Call):
            return False
        if isinstance(value.func, ast.Attribute) and self.is_kind(value.func.value, "accelerator"):
            return value.func.attr in (*_PREPARING, "skip_first_batches")
        return any(
            use.node is value.func and use.name == "skip_first_batches" for use in self._rewrite.imports.uses
        )

    def given(self, parameter: ast.arg) -> Iterator[ast.expr]:
        """Yield what the program's calls pass for a parameter."""
        function = self._program.parents[self._program.parents[parameter]]
        if not isinstance(function, ast.FunctionDef):
            return
        for call in self._calls.get(function.name, ()):
            for given in (*call.args, *(one.value for one in call.keywords)):
                if self.targets_of(given, call) is parameter:
                    yield given

    def _find_members(self) -> Iterator[Member]:
        for node in self._program.nodes:
            if isinstance(node, ast.Attribute) and self.is_kind(node.value, "accelerator"):
                above = self._program.parents[node]
                yield Member(node, above if isinstance(above, ast.Call) and above.func is node else None)

    def _read_loop(self, node: ast.For) -> LoaderLoop | None:
        """Return the loop if it reads a prepared loader, directly or through ``enumerate`` and ``tqdm``."""
        source, batch = node.iter, node.target
        bar: ast.Call | None = None
        is_counted = False
        while isinstance(source, ast.Call) and source.args:
            called = self._program.text(source.func).rpartition(".")[2]
            if called == "enumerate" and not is_counted:
                is_counted = True
            elif called == "tqdm" and bar is None:
                # tqdm(enumerate(loader)) has no total anyway.
                bar = source
            else:
                return None
            source = source.args[0]
        if not isinstance(source, ast.Name) or not self.is_kind(source, "prepared"):
            return None
        if is_counted:
            if not isinstance(batch, ast.Tuple) or len(batch.elts) != 2:
                return None
            batch = batch.elts[1]
        needs_total = (
            bar is not None and bar.args[0] is source and all(one.arg != "total" for one in bar.keywords)
        )
        return LoaderLoop(node, source, batch, bar if needs_total else None)
