"""Every field of a configuration and every flag of the launcher is read by somebody."""

import ast
import dataclasses
from pathlib import Path

import pytest

import accelfn
from accelfn import config
from accelfn.config.settings import VARIABLES, Settings
from accelfn.launch.options import OPTIONS

ROOT = Path(accelfn.__file__).parent
# Fields that nobody reads by name, and why that isn't a request that is ignored.
UNREAD = {
    "DeepSpeedPlugin.msamp_opt_level": "of enable_msamp, which is refused",
    "DistributedDataParallelKwargs.check_reduction": "passed on to torch, which ignores it",
    "GradientAccumulationPlugin.adjust_scheduler": "its docstring says that it has no effect",
    "TorchDynamoPlugin.fullgraph": "passed on to torch.compile",
}


def names_read(folder: Path, *but: str) -> set[str]:
    """List the attributes that code reads, and the names that it has as texts."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        if path.relative_to(ROOT).as_posix() in but:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


@pytest.mark.slow
def test_every_field_of_a_record_is_read() -> None:
    read = names_read(ROOT)
    records = {
        name: kind
        for name, kind in vars(config).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not Settings
    }
    unread = {
        f"{name}.{field.name}"
        for name, kind in records.items()
        for field in dataclasses.fields(kind)
        if field.name not in read
    }
    assert unread == UNREAD.keys()
    assert len(records) > 15


@pytest.mark.slow
def test_every_flag_of_the_launcher_is_read() -> None:
    # Neither the table of options nor what checks their combinations uses them.
    by_launcher = names_read(ROOT / "launch", "launch/config/options.py", "launch/config/record.py")
    by_context = {name for variable in VARIABLES for name in variable.names}
    unread = {
        name
        for name, option in OPTIONS.items()
        if name not in by_launcher and not by_context.intersection(option.variables)
    }
    # Lengths come from each batch, and there is one implementation to choose from.
    assert {name.removeprefix("parallelism_config_sp_") for name in unread} == {
        *("seq_length", "seq_length_is_variable", "attn_implementation")
    }
