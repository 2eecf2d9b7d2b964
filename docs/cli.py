"""Write the reference page of flags: ``python docs/cli.py``."""

import pathlib

from accelfn.launch.command_line import ACTIONS
from accelfn.launch.main import COMMANDS
from accelfn.launch.options import OPTIONS, Option

__all__ = ("PAGE", "make_page")

PAGE = pathlib.Path(__file__).parent / "pages" / "reference" / "cli.md"

#: The guide of each other command, whose `--help` lists its flags.
GUIDES = {
    "config": "config",
    "env": "self-test",
    "test": "self-test",
    "estimate-memory": "estimate",
    "checkpoint": "checkpoint-command",
    "plan-memory": "plan-ranks",
    "runs": "tracking",
    "merge-weights": "small-commands",
    "to-fsdp2": "small-commands",
    "tpu-config": "small-commands",
    "completion": "launch",
}

HEAD = """# accelfn launch: all flags

<!-- Written by docs/cli.py from the table of options; change accelfn/launch/options.py and run it again. -->

`accelfn launch [flags] script [arguments of the script]`. The guide is [Launching](../guide/launch.md). In
flag names, `-` and `_` are equivalent. A flag with BOOL needs no value, and also exists as `--no_...`, which
switches it off. Each option can also be set by a variable and in a
[config file](../guide/launch.md#a-configuration-file), under the names listed here. Flags take precedence
over variables, and variables over the file. "Exported as" lists the variables of the script's processes.
"""


def make_page() -> str:
    """Return the text of the page.

    >>> make_page() == PAGE.read_text()
    True
    """
    lines = [HEAD, "## The command itself", "", "| Flag | |", "| --- | --- |"]
    for action in ACTIONS.values():
        metavar = "" if action.kind.is_bool else f" {action.kind.metavar}"
        names = ", ".join(f"`{name}{metavar}`" for name in action.flags)
        lines.append(f"| {names} | {action.about} |")
    heading = ""
    for option in OPTIONS.values():
        section = option.section
        title = f"{section.title} (a section)" if section.title == "TPU" and section.name else section.title
        if title != heading:
            heading = title
            lines += ["", f"## {title}", "", "| Flag | | Default | Variable | In a file | Exported as |"]
            lines.append("| --- | --- | --- | --- | --- | --- |")
        lines.append(_row(option))
    lines += ["", "## The other commands", "", "| Command | |", "| --- | --- |"]
    for name, (_, about) in COMMANDS.items():
        if name in GUIDES:
            lines.append(f"| [`accelfn {name}`](../guide/{GUIDES[name]}.md) | {about} |")
    return "\n".join(lines) + "\n"


def _row(option: Option) -> str:
    metavar = f" {option.kind.metavar}"
    names = ", ".join(f"`{flag}{metavar}`" for flag in option.flags)
    default = "" if option.default is None else f"`{option.kind.write(option.default)}`"
    variables = ", ".join(f"`{name}`" for name in option.variables)
    exports = ", ".join(f"`{name}`" for name in option.exports)
    return f"| {names} | {option.help} | {default} | {variables} | `{option.path}` | {exports} |"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(make_page())
