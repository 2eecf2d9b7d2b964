"""Write the page of flags from the table that reads them: ``python docs/cli.py``."""

import pathlib

from accelfn.launch.config import FIELDS, Field
from accelfn.launch.flags import ACTIONS

__all__ = ("PAGE", "make_page")

PAGE = pathlib.Path(__file__).parent / "pages" / "reference" / "cli.md"

HEAD = """# accelfn launch: all flags

<!-- Written by docs/cli.py from the table of fields; change accelfn/launch/config/ and run it again. -->

`accelfn launch [flags] script [arguments of the script]`. The guide is [Launching](../guide/launch.md). In
names of flags `-` and `_` mean the same. A flag without a value, and one with BOOL, also exists as
`--no_...`, which switches off. Each field may also stand in a variable and in a
[configuration file](../guide/launch.md#a-configuration-file), under the names given here; the flag wins over
the variable, and the variable over the file. "Handed on as" names the variables that the script's processes
get.
"""


def make_page() -> str:
    """Give the text of the page.

    >>> make_page() == PAGE.read_text()
    True
    """
    lines = [HEAD, "## The command itself", "", "| Flag | |", "| --- | --- |"]
    for action in ACTIONS:
        metavar = f" {action.metavar}" if action.metavar else ""
        names = ", ".join(f"`{name}{metavar}`" for name in (f"--{action.name}", *action.aliases))
        lines.append(f"| {names} | {action.about} |")
    heading = ""
    for field in FIELDS:
        if field.group != heading:
            heading = field.group
            title = f"{heading} (a section)" if heading == "TPU" and field.section else heading
            lines += ["", f"## {title}", "", "| Flag | | Default | Variable | In a file | Handed on as |"]
            lines.append("| --- | --- | --- | --- | --- | --- |")
        lines.append(_row(field))
    return "\n".join(lines) + "\n"


def _row(field: Field) -> str:
    metavar = "" if not field.kind.metavar else f" {field.kind.metavar}"
    names = ", ".join(f"`{flag}{metavar}`" for flag in field.flags)
    about = field.about + (f": {field.kind.accepts}" if field.kind.metavar == "NAME" else "")
    default = "" if field.default is None else f"`{field.kind.write(field.default)}`"
    variables = ", ".join(f"`{name}`" for name in field.variables)
    exports = ", ".join(f"`{name}`" for name in field.exports)
    return f"| {names} | {about} | {default} | {variables} | `{field.path}` | {exports} |"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(make_page())
