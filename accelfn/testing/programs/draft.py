"""The text of a program while features write their lines into it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

_SLOT = re.compile(r"( *)<<(\w+)>>")
_BEGIN = re.compile(r"( *)<<(\w+)")
_WORD = re.compile(r"\{\{(\w+)\}\}")


class Draft:
    """The text of a program: a skeleton with slots, blocks and words, which features fill.

    - ``<<name>>`` alone on a line is a slot: the lines that were added to it stand there.
    - ``<<name`` and ``name>>`` enclose a block: the headers that were put around it, such as ``if ready:``,
      stand before it, and it is indented below them. A block without any line goes with its headers.
    - ``{{name}}`` is a word: an expression, or a list of names with commas between them.

    What is added may have slots, blocks and words itself.

    Attributes:
        words: Expressions by name.
        names: Lists of names by name.
        mesh: Source of the arguments of the world of ranks, by name.
        options: Source of the arguments of ``ctx.replace``, by name.
    """

    def __init__(self) -> None:
        """Begin without any line."""
        self.words: dict[str, str] = {}
        self.names: dict[str, list[str]] = {}
        self.mesh: dict[str, str] = {}
        self.options: dict[str, str] = {}
        self._lines: dict[str, list[str]] = {}
        self._headers: dict[str, list[str]] = {}

    def add(self, slot: str, text: str) -> None:
        """Add lines to a slot, after those that are there."""
        self._lines.setdefault(slot, []).extend(textwrap.dedent(text).strip("\n").splitlines())

    def wrap(self, block: str, header: str) -> None:
        """Put a header around a block, inside of those that are there."""
        self._headers.setdefault(block, []).append(header)

    def text(self, skeleton: str) -> str:
        """Return the skeleton with everything in its place."""
        lines = self._expanded(skeleton.strip("\n").splitlines())
        return "\n".join(lines) + "\n"

    def _expanded(self, lines: Sequence[str]) -> list[str]:
        made: list[str] = []
        rest = iter(lines)
        for line in rest:
            if slot := _SLOT.fullmatch(line):
                indent, name = slot.groups()
                made += self._expanded([indent + added for added in self._lines.get(name, ())])
            elif begin := _BEGIN.fullmatch(line):
                indent, name = begin.groups()
                inside: list[str] = []
                for part in rest:
                    if part.strip() == f"{name}>>":
                        break
                    inside.append(part)
                headers = self._headers.get(name, [])
                block = self._expanded(["    " * len(headers) + part for part in inside])
                if block:
                    made += [
                        self._worded(f"{indent}{'    ' * depth}{header}")
                        for depth, header in enumerate(headers)
                    ]
                made += block
            else:
                made.append(self._worded(line))
        return made

    def _worded(self, line: str) -> str:
        def word(match: re.Match[str]) -> str:
            name = match.group(1)
            return self.words[name] if name in self.words else ", ".join(self.names[name])

        while line != (line := _WORD.sub(word, line)):
            pass
        return line
