"""The source of a program with its syntax tree, and edits of the source."""

from __future__ import annotations

import ast
import bisect
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from accelfn.errors import ConfigurationError

_LINE_END = re.compile(r"\r\n|\r|\n")
# What may stand between the parts of an expression in parentheses.
_NOTHING = re.compile(r"(?:\s|\\|#[^\r\n]*)*")
_OPENING = re.compile(r"(?:[\s)]|\\|#[^\r\n]*)*\(")
# A function, lambda or class, or the module.
Scope = ast.AST
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)


class Edit(NamedTuple):
    """One replacement in a source.

    Attributes:
        start: Offset of the first character that is replaced.
        end: Offset after the last one; equal to ``start`` for an insertion.
        text: What stands there afterwards.
    """

    start: int
    end: int
    text: str


class Remark(NamedTuple):
    """Something about one line of a program.

    Attributes:
        line: Its number, from 1.
        construct: What stands there.
        text: What is to be known or done about it.
    """

    line: int
    construct: str
    text: str


class Program:
    """A source and its tree. Offsets count characters of the source.

    Attributes:
        source: The source.
        tree: Its syntax tree.
        nodes: All nodes of the tree, in the order of ``ast.walk``.
        parents: The parent of each node but the root.
    """

    def __init__(self, source: str, name: str = "<program>") -> None:
        """Parse a source.

        Raises:
            ConfigurationError: It isn't Python.
        """
        try:
            tree = ast.parse(source, name)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            message = getattr(error, "msg", str(error))
            raise ConfigurationError(
                f"{name}:{line}: this Python can't parse it: {message}. Correct the program first."
            ) from error
        self.source: str = source
        self.tree: ast.Module = tree
        self.nodes: tuple[ast.AST, ...] = tuple(ast.walk(tree))
        self.parents: dict[ast.AST, ast.AST] = {
            child: node for node in self.nodes for child in ast.iter_child_nodes(node)
        }
        self._starts: list[int] = [0, *(match.end() for match in _LINE_END.finditer(source))]

    def _offset(self, line: int, column: int) -> int:
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.source)
        # The columns of ast count bytes of UTF-8.
        return start + len(self.source[start:end].encode()[:column].decode(errors="ignore"))

    def start(self, node: ast.AST) -> int:
        """Return the offset of a node."""
        return self._offset(getattr(node, "lineno", 1), getattr(node, "col_offset", 0))

    def end(self, node: ast.AST) -> int:
        """Return the offset after a node."""
        return self._offset(getattr(node, "end_lineno", 1), getattr(node, "end_col_offset", 0))

    def text(self, node: ast.AST) -> str:
        """Return the source of a node."""
        return self.source[self.start(node) : self.end(node)]

    def line_start(self, offset: int) -> int:
        """Return the offset of the line of an offset."""
        return self._starts[bisect.bisect_right(self._starts, offset) - 1]

    def line_end(self, offset: int) -> int:
        """Return the offset after the line of an offset, with its line break."""
        following = bisect.bisect_right(self._starts, offset)
        return self._starts[following] if following < len(self._starts) else len(self.source)

    def newline(self, offset: int) -> str:
        """Return the line break at the end of a line, or of the program's first line."""
        for start in (self.line_start(offset), 0):
            found = _LINE_END.search(self.source, start)
            if found is not None:
                return found[0]
        return "\n"

    def indentation(self, statement: ast.AST) -> str:
        """Return the white space before a statement."""
        start = self.start(statement)
        return self.source[self.line_start(start) : start]

    def on_line(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of a block that share lines with one of them, in order, with itself."""
        last = statement.end_lineno or 0
        block = self.block(statement)
        return [one for one in block if one.lineno <= last and (one.end_lineno or 0) >= statement.lineno]

    def is_alone(self, statement: ast.stmt, *others: ast.stmt) -> bool:
        """Return whether no other statement but ``others`` is on the lines of a statement."""
        line = self.on_line(statement)
        if any(one is not statement and one not in others for one in line):
            return False
        rest = self.source[self.end(line[-1]) : self.line_end(self.end(line[-1]))].strip()
        return not self.indentation(line[0]).strip() and (not rest or rest.startswith("#"))

    def is_located(self, node: ast.expr) -> bool:
        """Return whether a node is where the tree says; before Python 3.12 f-strings may move it."""
        if not any(isinstance(above, ast.JoinedStr) for above in self.above(node)):
            return True
        try:
            found = ast.parse(self.text(node), mode="eval").body
        except SyntaxError:
            return False
        return ast.unparse(found) == ast.unparse(node)

    def has_parentheses(self, node: ast.expr) -> bool:
        """Return whether a tuple is in parentheses of its own, or another expression begins after one."""
        if not isinstance(node, ast.Tuple):
            return self.source[: self.start(node)].rstrip().endswith("(")
        begin = self.start(node)
        return self.source.startswith("(", begin) and (not node.elts or self.start(node.elts[0]) > begin)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope(self, node: ast.AST) -> Scope:
        """Return the function, lambda or class around a node, or the module."""
        return next(above for above in self.above(node) if isinstance(above, _SCOPES))

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is, or is part of."""
        if isinstance(node, ast.stmt):
            return node
        return next(above for above in self.above(node) if isinstance(above, ast.stmt))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that a statement is in."""
        fields: Iterator[tuple[str, Any]] = ast.iter_fields(self.parents[statement])
        lists = (cast("list[ast.stmt]", value) for _, value in fields if isinstance(value, list))
        return next(block for block in lists if any(item is statement for item in block))

    def before_arguments(self, call: ast.Call) -> int:
        """Return the offset of the first argument of a call, or of the closing parenthesis."""
        opening = _OPENING.match(self.source, self.end(call.func))
        assert opening is not None
        first = _NOTHING.match(self.source, opening.end())
        assert first is not None
        return first.end() if call.args or call.keywords else opening.end()

    def after_argument(self, call: ast.Call, argument: ast.AST) -> int:
        """Return the offset after an argument of a call, with the parentheses around it."""
        offset = self.end(argument)
        if isinstance(argument, ast.keyword):
            offset = self.end(argument.value)
        closing = offset
        # Only white space, comments, a comma and parentheses can follow, up to the next argument.
        for match in re.compile(r"#[^\r\n]*|[^)\s]|\)").finditer(self.source, offset, self.end(call) - 1):
            if match[0] == ")":
                closing = match.end()
            elif not match[0].startswith(("#", "\\")):
                break
        return closing


def apply_edits(source: str, edits: Iterable[Edit]) -> str:
    """Return a source after edits that don't overlap. Pure.

    >>> apply_edits("a = b", [Edit(4, 5, "c"), Edit(0, 0, "x = ")])
    'x = a = c'
    """
    parts: list[str] = []
    done = 0
    for start, end, text in sorted(edits, key=lambda edit: edit[:2]):
        parts += [source[done:start], text]
        done = end
    return "".join((*parts, source[done:]))


def diff(name: str, before: str, after: str) -> str:
    r"""Return a unified diff that ``patch -p0`` applies; empty if nothing changes. Pure.

    Lines end where Python ends them, and keep their line breaks.

    >>> print(diff("a.py", "x = 1", "x = 2"), end="")
    --- a.py
    +++ a.py
    @@ -1 +1 @@
    -x = 1
    \ No newline at end of file
    +x = 2
    \ No newline at end of file
    """
    lines = difflib.unified_diff(_lines(before), _lines(after), name, name)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return "".join(ended)


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)
