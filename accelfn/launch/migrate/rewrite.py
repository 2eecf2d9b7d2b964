"""What both levels of the migration share: edits, remarks, imports and the constructor."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelfn.launch.migrate import names
from accelfn.launch.migrate.program import Edit, Program, Remark
from accelfn.launch.migrate.scopes import Imports, Key, Scopes, Use


class Rewrite:
    """The edits of one program, while they are collected.

    Attributes:
        program: The program.
        scopes: Its variables.
        imports: What it imports from Accelerate.
        edits: Edits within expressions.
        statements: Edits of whole lines, which may contain some of ``edits``.
        refusals: What isn't understood.
        notes: What changes in the program's numbers.
    """

    def __init__(self, program: Program) -> None:
        """Read the imports of a program."""
        self.program: Program = program
        self.scopes: Scopes = Scopes(program)
        self.imports: Imports = Imports(self.scopes)
        self.edits: list[Edit] = []
        self.statements: list[Edit] = []
        self.refusals: list[Remark] = []
        self.notes: list[Remark] = []

    # --- collecting ------------------------------------------------------------------------------

    def refuse(self, node: ast.AST, remedy: str, construct: str | None = None) -> None:
        """Note something that isn't understood."""
        line = self.program.text(node).partition("\n")[0].strip().removesuffix(":")
        text = line if construct is None else construct
        self.refusals.append(Remark(getattr(node, "lineno", 1), text[:80], remedy))

    def note(self, node: ast.AST, text: str) -> None:
        """Note something that changes numbers, once."""
        if all(text != one.text for one in self.notes):
            self.notes.append(Remark(getattr(node, "lineno", 1), "", text))

    def replace(self, node: ast.expr, text: str) -> None:
        """Replace an expression."""
        if not self.program.is_located(node):
            self.refuse(node, "Take it out of the f-string; this Python doesn't know its place there.")
        else:
            self.edits.append(Edit(self.program.start(node), self.program.end(node), text))

    def insert(self, offset: int, text: str) -> None:
        """Insert a text."""
        self.edits.append(Edit(offset, offset, text))

    def delete_lines(self, statement: ast.stmt) -> None:
        """Delete a statement, with its lines if nothing else is on them."""
        program = self.program
        start, end = program.start(statement), program.end(statement)
        if program.is_alone(statement):
            start, end = program.line_start(start), program.line_end(end)
        else:
            line = program.on_line(statement)
            at = line.index(statement)
            if at:
                start = program.end(line[at - 1])
            elif len(line) > 1:
                end = program.start(line[1])
            else:
                self.refuse(statement, "Write one statement a line.")
                return
        self.statements.append(Edit(start, end, ""))

    def rendered(self, node: ast.AST) -> str:
        """Return the source of a node after the edits inside of it."""
        start, end = self.program.start(node), self.program.end(node)
        text, shift = self.program.text(node), 0
        for edit in sorted(self.edits, key=lambda edit: edit[:2]):
            if start <= edit.start and edit.end <= end:
                first, last = edit.start - start + shift, edit.end - start + shift
                text = text[:first] + edit.text + text[last:]
                shift += len(edit.text) - (edit.end - edit.start)
        return text

    def final_edits(self) -> tuple[Edit, ...]:
        """Return all edits, without those that edits of lines contain."""

        def is_inside(edit: Edit) -> bool:
            return any(line.start <= edit.start < line.end >= edit.end for line in self.statements)

        left = (edit for edit in dict.fromkeys(self.edits) if not is_inside(edit))
        # Where both insert, lines come before what begins the next line.
        return tuple(sorted((*dict.fromkeys(self.statements), *left), key=lambda edit: edit[:2]))

    # --- calls -----------------------------------------------------------------------------------

    def lead(self, call: ast.Call, text: str) -> None:
        """Insert a first argument."""
        has_others = bool(call.args or call.keywords)
        self.insert(self.program.before_arguments(call), f"{text}, " if has_others else text)

    def append(self, call: ast.Call, text: str) -> None:
        """Insert a last argument into a call that has some already."""
        last: ast.AST = max((*call.args, *call.keywords), key=self.program.end)
        self.insert(self.program.after_argument(call, last), f", {text}")

    def add_item(self, node: ast.expr, text: str) -> None:
        """Write a second item after an expression, which becomes one item if it is a tuple."""
        start, end = self.program.start(node), self.program.end(node)
        if isinstance(node, ast.Tuple) and not self.program.has_parentheses(node):
            self.insert(start, "(")
            self.insert(end, f"), {text}")
        else:
            self.insert(end, f", {text}")

    # --- what both levels do ---------------------------------------------------------------------

    def rewrite_imports(self, package: str | None) -> None:
        """Import from accelfn.

        Args:
            package: Short name of the package, whose import replaces that of the Accelerator; None to keep
                importing the class.
        """
        for statement, remedy in self.imports.odd:
            self.refuse(statement, remedy)
        for statement in self.imports.names:
            self._rewrite_from(statement, package)
        for statement in self.imports.packages:
            alias = statement.names[0]
            kept = "" if alias.asname is None else f" as {alias.asname}"
            self._replace_statement(
                statement, f"import accelfn as {package}" if package else f"import accelfn{kept}"
            )
        for use in self.imports.uses:
            if package is not None and use.name == "Accelerator":
                continue  # the constructor is replaced
            if use.root is not None and self._check_name(use.name, use.node):
                root = package or (use.root.id if self._is_renamed(use.root) else "accelfn")
                home = names.HOMES[use.name].removeprefix("accelfn")
                self.replace(use.node, f"{root}{home}.{use.name}")

    def _is_renamed(self, root: ast.Name) -> bool:
        key = self.scopes.of(root)
        statements = self.scopes.bound[key] if key is not None else []
        return any(isinstance(one, ast.Import) and one.names[0].asname is not None for one in statements)

    def _check_name(self, name: str, node: ast.AST) -> bool:
        if name in names.HOMES:
            return True
        shown = name or self.program.text(node)
        self.refuse(node, names.INSTEAD.get(name, names.ELSEWHERE), f"{shown} of accelerate")
        return False

    def _rewrite_from(self, statement: ast.ImportFrom, package: str | None) -> None:
        if {self._check_name(alias.name, statement) for alias in statement.names} != {True}:
            return
        by_home: dict[str, list[str]] = {}
        for alias in statement.names:
            kept = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
            if package is None or alias.name != "Accelerator":
                by_home.setdefault(names.HOMES[alias.name], []).append(kept)
        text = self.program.text(statement)
        homes = list(by_home)
        if len(by_home) == 1 and sum(map(len, by_home.values())) == len(statement.names):
            # Only the module is another one: the rest, with its comments, stays.
            start = self.program.start(statement) + text.index(statement.module or "", len("from"))
            self.edits.append(Edit(start, start + len(statement.module or ""), homes[0]))
            return
        lines = (
            [f"import accelfn as {package}"] if sum(map(len, by_home.values())) < len(statement.names) else []
        )
        lines += [f"from {home} import {', '.join(imported)}" for home, imported in by_home.items()]
        if "#" in text:
            self.refuse(statement, "Write its comment on a line of its own: the import is split.")
            return
        self._replace_statement(statement, *lines)

    def _replace_statement(self, statement: ast.stmt, *lines: str) -> None:
        if len(lines) > 1 and not self.program.is_alone(statement):
            self.refuse(statement, "Write one statement a line.")
            return
        start = self.program.start(statement)
        joined = f"{self.program.newline(start)}{self.program.indentation(statement)}".join(lines)
        self.edits.append(Edit(start, self.program.end(statement), joined))

    def check_records(self) -> None:
        """Refuse records that are made with positional arguments."""
        for use in self.imports.uses:
            call = self.program.parents[use.node]
            if (
                use.name in names.RECORDS
                and isinstance(call, ast.Call)
                and call.func is use.node
                and call.args
            ):
                self.refuse(call, f"Name its arguments: {use.name}({self._named(call)}).")

    def _named(self, call: ast.Call) -> str:
        return f"NAME={self.program.text(call.args[0])}"[:60]

    def rewrite_functions(self, context: str | None, is_context_at: dict[Key, str]) -> None:
        """Pass the context to functions of Accelerate that take none.

        Args:
            context: What follows the variable, such as ``.context``; None for nothing.
            is_context_at: The variables that hold an Accelerator, and their names afterwards.
        """
        for use in self.imports.uses:
            call = self.program.parents[use.node]
            is_call = isinstance(call, ast.Call) and call.func is use.node
            if use.name not in names.TAKES_CONTEXT and use.name != "set_seed":
                continue
            if not is_call:
                if use.name != "set_seed":
                    self.refuse(
                        use.node, f"Call {use.name} where it is used: its first argument is the context here."
                    )
                continue
            assert isinstance(call, ast.Call)
            if use.name == "set_seed" and not any(one.arg == "device_specific" for one in call.keywords):
                continue
            found = next(self._visible(call, is_context_at), None)
            if found is None:
                self.refuse(call, f"{use.name} takes the context here, and none is known at this line.")
                continue
            text = f"{found}{context or ''}"
            if use.name == "set_seed":
                self.append(call, f"ctx={text}")
                continue
            if use.name == "broadcast" and isinstance(self.program.parents[call], ast.Expr):
                self.refuse(call, "Assign what broadcast returns: here it leaves its argument as it was.")
            self.lead(call, text)
            default = names.TAKES_CONTEXT[use.name]
            if default and len(call.args) < 2 and all(one.arg != "reduction" for one in call.keywords):
                self.append(call, default)

    def _visible(self, node: ast.AST, wanted: dict[Key, str]) -> Iterator[str]:
        for key, name in wanted.items():
            if self.scopes.resolve(key.name, node) == key:
                yield name

    def constructors(self) -> Iterator[tuple[Use, ast.Call]]:
        """Yield each call that makes an Accelerator."""
        for use in self.imports.uses:
            call = self.program.parents[use.node]
            if use.name == "Accelerator" and isinstance(call, ast.Call) and call.func is use.node:
                yield use, call

    def check_constructor(self, call: ast.Call, allowed: frozenset[str]) -> None:
        """Refuse arguments of the constructor that aren't among ``allowed``."""
        if any(isinstance(one, ast.Starred) for one in call.args) or len(call.args) > len(names.POSITIONAL):
            self.refuse(call, "Name the arguments: their order differs between versions of Accelerate.")
            return
        given = [*zip(names.POSITIONAL, call.args, strict=False)]
        for name, node in (*given, *((one.arg, one) for one in call.keywords if one.arg is not None)):
            if name not in allowed:
                remedy = names.ARGUMENT_INSTEAD.get(name, "It is no argument of Accelerate 1.15 either.")
                self.refuse(node, remedy, f"Accelerator({name}=...)")
