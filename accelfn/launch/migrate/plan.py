"""Plan what changes in a program written for Accelerate."""

from __future__ import annotations

from typing import Literal, NamedTuple

from accelfn.launch.migrate.functions import ToFunctions
from accelfn.launch.migrate.program import Edit, Program, Remark, apply_edits, diff
from accelfn.launch.migrate.rewrite import Rewrite
from accelfn.launch.migrate.shim import to_shim

Level = Literal["functions", "shim"]


class Migration(NamedTuple):
    """What changes in a program.

    Attributes:
        name: The program's file.
        source: The program as it is.
        edits: Replacements, in order; none if something is refused.
        refusals: What isn't understood, in order of lines, with what to do.
        notes: What changes in the program's numbers, in order of lines.
    """

    name: str
    source: str
    edits: tuple[Edit, ...]
    refusals: tuple[Remark, ...]
    notes: tuple[Remark, ...]

    @property
    def text(self) -> str:
        """The program afterwards."""
        return apply_edits(self.source, self.edits)

    @property
    def diff(self) -> str:
        """The change as a unified diff; empty if there is none."""
        return diff(self.name, self.source, self.text)


def plan_migration(source: str, name: str = "<program>", *, to: Level = "functions") -> Migration:
    """Plan how a program written for Hugging Face Accelerate is changed for accelfn. Pure.

    What isn't edited stays as it is, byte for byte. A program that has nothing of Accelerate stays as it is.

    Args:
        source: The program.
        name: Its file, for messages and the diff.
        to: ``"functions"`` rewrites the loop: the methods of the Accelerator become functions of a context.
            ``"shim"`` keeps the loop, with :class:`accelfn.Accelerator`.

    Raises:
        ConfigurationError: The source isn't Python.

    >>> print(plan_migration('''from accelerate import Accelerator
    ... accelerator = Accelerator(cpu=True)
    ... accelerator.print(accelerator.process_index)
    ... ''', "hello.py").diff, end="")
    --- hello.py
    +++ hello.py
    @@ -1,3 +1,3 @@
    -from accelerate import Accelerator
    -accelerator = Accelerator(cpu=True)
    -accelerator.print(accelerator.process_index)
    +import accelfn as af
    +ctx = af.init_context(cpu=True)
    +af.print_once(ctx, ctx.rank)
    """
    rewrite = Rewrite(Program(source, name))
    if to == "functions":
        ToFunctions(rewrite).collect()
    else:
        to_shim(rewrite)
    refusals = tuple(sorted(dict.fromkeys(rewrite.refusals)))
    edits = () if refusals else rewrite.final_edits()
    return Migration(name, source, edits, refusals, tuple(sorted(rewrite.notes)))
