from typing import Any

from accelfn.launch import LaunchPlan, Machine, Script, parse_flags, plan_launch, resolve
from accelfn.launch.config_file import parse_config


def plan_of(
    line: str, *argv: str, env: dict[str, str] | None = None, file: str = "", **machine: Any
) -> LaunchPlan:
    """Plan a launch of the flags and the script in a line, or in ``argv`` behind it."""
    parsed = parse_flags((*line.split(), *argv))
    assert parsed.script is not None
    config_file = parse_config(file, "a.yaml") if file else None
    resolved = resolve(parsed.flags, env or {}, config_file)
    facts: dict[str, Any] = {"cores": 8, **machine}
    return plan_launch(resolved, Script(parsed.script, parsed.script_args), env or {}, Machine(**facts))
