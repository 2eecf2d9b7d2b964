"""Which scope each name of a program belongs to, and what a program imports from Accelerate."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from accelfn.launch.migrate.program import Program, Scope

PACKAGE = "accelerate"
# Modules inside the package that names are imported from.
_MODULES = frozenset(
    (
        *("accelerator", "big_modeling", "checkpointing", "data_loader", "dataclasses", "hooks"),
        *("imports", "inference", "launchers", "local_sgd", "logging", "memory", "memory_utils"),
        *("modeling", "offload", "operations", "optimizer", "other", "random", "scheduler"),
        *("state", "tracking", "utils"),
    )
)


class Key(NamedTuple):
    """A variable.

    Attributes:
        scope: The function, class or module that it belongs to.
        name: Its name.
    """

    scope: Scope
    name: str


class Scopes:
    """The variables of a program. Comprehensions count as part of the function around them."""

    def __init__(self, program: Program) -> None:
        """Find where each name is bound."""
        self.program: Program = program
        self.bound: dict[Key, list[ast.AST]] = {}
        self._outer: set[Key] = set()
        for node in program.nodes:
            self._bind(node)
        for key in self._outer:
            self.bound.pop(key, None)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Module):
            return
        scope = self.program.scope(node)
        names: Iterable[str] = ()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names = (node.id,)
        elif isinstance(node, ast.arg):
            names = (node.arg,)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (node.name,)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name is not None:
            names = (node.name,)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            self._outer |= {Key(scope, name) for name in node.names}
        for name in names:
            self.bound.setdefault(Key(scope, name), []).append(node)

    def resolve(self, name: str, at: ast.AST) -> Key | None:
        """Return the variable that a name means at a node; None for a builtin or an unknown one."""
        scope: Scope = at if isinstance(at, ast.Module) else self.program.scope(at)
        is_innermost = True
        while True:
            key = Key(scope, name)
            if key in self.bound and (is_innermost or not isinstance(scope, ast.ClassDef)):
                return key
            if isinstance(scope, ast.Module):
                return None
            scope, is_innermost = self.program.scope(scope), False

    def of(self, node: ast.AST) -> Key | None:
        """Return the variable of a name, an argument or a keyword's value; None for anything else."""
        if isinstance(node, ast.Name):
            return self.resolve(node.id, node)
        return Key(self.program.scope(node), node.arg) if isinstance(node, ast.arg) else None

    def identifiers(self) -> frozenset[str]:
        """Return all names of variables, functions and arguments that the program has."""
        used = {node.id for node in self.program.nodes if isinstance(node, ast.Name)}
        return frozenset(used | {key.name for key in self.bound})


class Use(NamedTuple):
    """A use of a name of Accelerate.

    Attributes:
        node: The name, or the attribute of the imported package.
        name: The name in Accelerate.
        root: The name of the package in ``node``; None where the name itself was imported.
    """

    node: ast.expr
    name: str
    root: ast.Name | None


class Imports:
    """What a program imports from Accelerate, and where it uses it.

    Attributes:
        names: Statements that import names.
        packages: Statements that import the package.
        odd: Statements that import in other ways, with what to do instead.
        uses: Each use of an imported name.
    """

    def __init__(self, scopes: Scopes) -> None:
        """Read the imports of a program."""
        self.names: list[ast.ImportFrom] = []
        self.packages: list[ast.Import] = []
        self.odd: list[tuple[ast.stmt, str]] = []
        self.uses: list[Use] = []
        self._scopes = scopes
        self._locals: dict[Key, str | None] = {}
        for node in scopes.program.nodes:
            if isinstance(node, ast.ImportFrom) and not node.level:
                self._read_from(node)
            elif isinstance(node, ast.Import):
                self._read_import(node)
        for node in scopes.program.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                key = scopes.of(node)
                if key is not None and key in self._locals:
                    self._add_use(node, self._locals[key])

    def _read_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module.partition(".")[0] != PACKAGE:
            return
        scope = self._scopes.program.scope(node)
        if any(alias.name == "*" for alias in node.names):
            self.odd.append((node, "Import each name that the program uses."))
        elif module == PACKAGE and any(alias.name in _MODULES for alias in node.names):
            self.odd.append((node, f"Import the names themselves: `from {PACKAGE}.utils import set_seed`."))
        else:
            self.names.append(node)
            for alias in node.names:
                self._locals[Key(scope, alias.asname or alias.name)] = alias.name

    def _read_import(self, node: ast.Import) -> None:
        inside = [alias for alias in node.names if alias.name.partition(".")[0] == PACKAGE]
        if not inside:
            return
        if len(node.names) > 1 or inside[0].name != PACKAGE:
            self.odd.append((node, f"Write `import {PACKAGE}` on a line of its own."))
            return
        self.packages.append(node)
        self._locals[Key(self._scopes.program.scope(node), inside[0].asname or PACKAGE)] = None

    def _add_use(self, node: ast.Name, name: str | None) -> None:
        if name is not None:
            self.uses.append(Use(node, name, None))
            return
        found: ast.expr = node
        parents = self._scopes.program.parents
        while True:
            above = parents[found]
            if not isinstance(above, ast.Attribute):
                self.uses.append(Use(found, "", node))
                return
            found = above
            if found.attr not in _MODULES:
                self.uses.append(Use(found, found.attr, node))
                return
