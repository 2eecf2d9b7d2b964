"""``accelfn launch``: read what is asked for, plan it, and carry it out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelfn.errors import ConfigurationError, MissingExtraError, NotAvailableError
from accelfn.launch.command_line import Parsed, launch_parser, parse_flags
from accelfn.launch.config.accelerate import import_accelerate
from accelfn.launch.config.files import (
    ConfigFile,
    find_config_file,
    is_of_accelerate,
    read_config,
    read_text,
    read_tree,
)
from accelfn.launch.config.options import OPTIONS, read_value
from accelfn.launch.config.record import changed_values
from accelfn.launch.config.resolve import Resolved, refuse_not_yet, resolve
from accelfn.launch.inputs import refuse_missing
from accelfn.launch.output import print_origins
from accelfn.launch.plan.choose import plan_launch
from accelfn.launch.plan.machine import read_machine
from accelfn.launch.plan.platforms import read_mpi, read_step, write_sbatch
from accelfn.launch.plan.record import Script, format_plan
from accelfn.launch.run import run_plan


def run_launch(argv: Sequence[str]) -> int:
    """Run ``accelfn launch``. Effect: starts processes, or prints.

    Args:
        argv: Arguments after ``launch``.

    Returns:
        The exit status: 2 after one sentence on what is wrong with the input; else the script's. A single
        process takes this one's place, and nothing is returned.
    """
    try:
        return _launch(parse_flags(argv), os.environ)
    except (ConfigurationError, MissingExtraError, NotAvailableError) as error:
        print(f"accelfn launch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def load_config(given: str | None, environment: Mapping[str, str]) -> ConfigFile | None:
    """Read the config file that counts, if there is one. Effect: reads the disk.

    A file of Accelerate is read as one, and a line on the standard error stream says so.

    Raises:
        ConfigurationError: It was asked for and isn't there, or something in it is wrong.
        MissingExtraError: It is YAML and PyYAML isn't installed.
    """
    path, was_asked_for = find_config_file(given, environment, sys.platform, os.path.expanduser("~"))
    if not was_asked_for and not os.path.exists(path):
        return None
    if os.path.isfile(path) and is_of_accelerate(tree := read_tree(read_text(path), path)):
        config, notes = import_accelerate(tree, path)
        for note in (f"{path} is a configuration of Accelerate, and is read as one.", *notes):
            print(f"accelfn launch: {note}", file=sys.stderr)
        return ConfigFile(path=path, values=changed_values(config), lines={})
    return read_config(path)


def _launch(parsed: Parsed, environment: Mapping[str, str]) -> int:
    if "help" in parsed.actions:
        print(launch_parser().format_help().rstrip())
        return 0
    try:
        os.getcwd()
    except OSError:
        raise ConfigurationError("the current folder isn't there any more. Change to one that is.") from None
    file = load_config(parsed.actions.get("config_file"), environment)
    writes_script = parsed.actions.get("sbatch")
    if writes_script is None:
        step = _read_step(parsed, environment)
    else:
        # srun will say on each node which one it is.
        step = {"machine_rank": (0, "srun"), "main_process_ip": ("first-node-of-srun", "srun")}
    resolved = resolve(parsed.flags, environment, file, step, writes_sbatch=writes_script is not None)
    if "print_config" in parsed.actions:
        print_origins(resolved)
        return 0
    if parsed.script is None:
        raise ConfigurationError("no script given. Name one: accelfn launch [flags] train.py")
    script = Script(parsed.script, parsed.script_args)
    config = resolved.config
    refuse_not_yet(resolved)
    refuse_missing(script, resolved)
    if writes_script is not None:
        return _write_sbatch(parsed, resolved, script, environment, writes_script)
    machine = read_machine(environment, wants_mpi=config.mpirun_hostfile is not None)
    worker = str(Path(__file__).parent / "run" / "worker.py")
    plan = plan_launch(resolved, script, environment, machine, worker=worker)
    if "dry_run" in parsed.actions:
        print(format_plan(plan))
        return 0
    return run_plan(plan, environment, log_dir=config.log_dir, quiet=config.quiet, script=script.name)


# Stands in every script that --sbatch has written.
_MARK = "-m accelfn launch"


def _read_step(parsed: Parsed, environment: Mapping[str, str]) -> Mapping[str, tuple[object, str]]:
    """Ask srun and mpirun which machine of how many this is, unless the user says how many there are."""
    option = OPTIONS["num_machines"]
    texts = [parsed.flags[option.name].text] if option.name in parsed.flags else []
    texts += [environment[name] for name in option.variables if environment.get(name, "").strip()]
    try:
        chosen = read_value(option, texts[0]) if texts else None
    except ValueError:
        chosen = None  # the sentence about it comes with all that is read
    if chosen == 1:
        return {}
    step = read_step(environment) or read_mpi(environment)
    # Rank and address are those of the step's machines, not of as many as the user has in mind.
    return {} if step and chosen not in (None, step[option.name][0]) else step


def _write_sbatch(
    parsed: Parsed, resolved: Resolved, script: Script, environment: Mapping[str, str], path: str
) -> int:
    secret = [name for name in parsed.flags if OPTIONS[name].secret]
    tokens = [f"--config_file={parsed.actions['config_file']}"] if "config_file" in parsed.actions else []
    for name, given in parsed.flags.items():
        if OPTIONS[name].section.name != "slurm" and name not in secret:
            tokens += [f"--{name}={text}" for text in given.text.split("\n")]
    text = write_sbatch(resolved.config, script, tokens, read_machine(environment))
    if "dry_run" in parsed.actions:
        print(text, end="")
        return 0
    there = Path(path)
    is_there = there.is_file()
    if is_there and f" {_MARK} " not in there.read_text(encoding="utf-8", errors="replace"):
        raise ConfigurationError(
            f"--sbatch {path} is there and none of these scripts. Name another, or remove it."
        )
    for name in secret:
        # A job's script lies about, and SLURM keeps a copy of it.
        print(
            f"accelfn launch: --{name} isn't written into {path}. Set {OPTIONS[name].variables[0]} where you "
            "call sbatch, which passes variables on.",
            file=sys.stderr,
        )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--sbatch {path} can't be written: {error.strerror}.") from None
    print(f"wrote {path}{' anew' if is_there else ''}; start it with: sbatch {path}")
    return 0
