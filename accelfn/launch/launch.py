"""``accelfn launch``: read what is asked for, plan it, and carry it out."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from accelfn import __version__
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.command_line import CommandParser, Parsed, launch_parser, parse_flags
from accelfn.launch.config.accelerate import import_accelerate
from accelfn.launch.config.files import (
    ConfigFile,
    find_config_file,
    is_of_accelerate,
    read_config,
    read_text,
    read_tree,
)
from accelfn.launch.config.options import FILE, OPTIONS, Option, read_value
from accelfn.launch.config.record import LaunchConfig, changed_values, is_active
from accelfn.launch.config.resolve import Resolved, refuse_not_yet, resolve
from accelfn.launch.output import print_origins, write_text
from accelfn.launch.plan.choose import plan_launch
from accelfn.launch.plan.commands import AGENT, LOOPBACK, LaunchPlan, Script, format_plan
from accelfn.launch.plan.machine import read_machine
from accelfn.launch.plan.platforms import read_mpi, read_step, write_sbatch


def make_parser() -> CommandParser:
    """Describe the arguments of the command, for completion."""
    return launch_parser()


def read(argv: Sequence[str]) -> Parsed:
    """Read the arguments after ``launch``. Pure."""
    return parse_flags(argv)


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


def run(parsed: Parsed) -> int:
    """Run ``accelfn launch``. Effect: starts processes, or prints.

    Returns:
        The exit status. A launch takes this process's place, and nothing is returned.

    Raises:
        AccelfnError: What is asked for can't be done.
    """
    environment = os.environ
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
    plan = plan_launch(resolved, script, environment, machine)
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
    tokens = [f"--config_file={parsed.actions['config_file']}"] if "config_file" in parsed.actions else []
    for name, given in parsed.flags.items():
        if OPTIONS[name].section.name != "slurm":
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
    write_text(path, text)
    print(f"wrote {path}{' anew' if is_there else ''}; start it with: sbatch {path}")
    return 0


def refuse_missing(script: Script, resolved: Resolved) -> None:
    """Return what isn't there, before torch is loaded once per process to find out. Effect: reads the disk.

    Files of sections that are switched off don't count.

    Args:
        script: What is to run.
        resolved: Names further files, and where it has their names from.

    Raises:
        ConfigurationError: The script, the module or a file isn't there or can't be read.
    """
    config = resolved.config
    if config.tpu and config.tpu_cluster:
        return  # all of it is on other machines
    if config.compute_environment == "LOCAL_MACHINE":
        _refuse_absent_program(script.name, config)
    for name, option in OPTIONS.items():
        path: object = getattr(config, name)
        if option.kind is not FILE or not isinstance(path, str) or not is_active(config, option):
            continue
        _refuse_absent_file(option, path, resolved)
        if name.endswith("hostfile"):
            _refuse_no_hosts(option, path)
    if config.log_dir is not None and os.path.exists(config.log_dir) and not os.path.isdir(config.log_dir):
        raise ConfigurationError(f"--log_dir {config.log_dir} must be a folder, and is a file. Name another.")


def _refuse_absent_program(name: str, config: LaunchConfig) -> None:
    if config.module:
        _refuse_absent_module(name)
    elif config.no_python:
        if shutil.which(name) is None and os.path.isfile(name):
            raise ConfigurationError(
                f"the program {name!r} can't be executed. Give it the permission: chmod +x"
            )
        if shutil.which(name) is None:
            raise ConfigurationError(f"there is no program {name!r} to run. Check the path or PATH.")
    else:
        _refuse_absent_script(name)


def _refuse_absent_script(name: str) -> None:
    if not os.path.isfile(name):
        raise ConfigurationError(
            f"there is no script {name!r} in {os.getcwd()!r}. Check the path; for a module use -m, for "
            "another program --no_python."
        )
    if not os.access(name, os.R_OK):
        raise ConfigurationError(f"the script {name!r} can't be read. Check its permissions.")


def _refuse_absent_module(name: str) -> None:
    # Only the first part: to find the others Python would have to import it.
    first = name.partition(".")[0]
    here = first and PathFinder.find_spec(first, [os.getcwd()])  # where python -m looks first
    try:
        found = here or find_spec(first)
    except (ImportError, ValueError):
        found = None
    if name.endswith(".py"):
        raise ConfigurationError(
            f"there is no module {name!r} to run. For a file leave -m out; for a module pass its dotted name."
        )
    if found is None or not first:
        raise ConfigurationError(
            f"there is no module {first!r} to run: looked in {os.getcwd()} and {len(sys.path)} more folders. "
            "Check the name, the current folder and PYTHONPATH."
        )


def _refuse_absent_file(option: Option, path: str, resolved: Resolved) -> None:
    origin = resolved.origins[option.name]
    where = "" if origin.source == "flag" else f" (from {origin})"
    there = Path(path).expanduser()
    if not there.is_file():
        what = "it must be a file, and is a folder:" if there.is_dir() else "there is no file"
        raise ConfigurationError(f"{option.flags[0]}: {what} {path!r}{where}. Check the path.")
    if not os.access(there, os.R_OK):
        raise ConfigurationError(f"{option.flags[0]}: {path!r}{where} can't be read. Check its permissions.")


def _refuse_no_hosts(option: Option, path: str) -> None:
    lines = Path(path).expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
    if not any(line.partition("#")[0].strip() for line in lines):
        raise ConfigurationError(
            f"{option.flags[0]}: {path!r} names no host. Write one on each line, such as: node1 slots=8"
        )


def run_plan(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    *,
    log_dir: str | None = None,
    quiet: bool = False,
    script: str = "the script",
) -> int:
    """Start what a plan says. Effect: the command takes this process's place, so nothing returns.

    Args:
        plan: From ``plan_launch``.
        environment: What is inherited; the plan's changes are laid over a copy.
        log_dir: Where torchrun keeps output.
        quiet: Whether to leave the report of a failure out, and the line that a terminal gets at the start.
        script: What is started, for the line that a terminal gets.

    Raises:
        ConfigurationError: A port is in use, or a program is missing.
        MissingExtraError: A package is missing that the processes need.
    """
    for note in plan.notes:
        print(f"accelfn launch: {note}", file=sys.stderr)
    if plan.way == "xla" and find_spec("torch_xla") is None:
        raise MissingExtraError(
            f"--tpu needs the package torch_xla, which isn't installed for {sys.executable}. Get it: pip "
            "install 'torch_xla[tpu]'"
        )
    if shutil.which(plan.argv[0]) is None:
        raise ConfigurationError(f"there is no program {plan.argv[0]!r} to start. Check the PATH.")
    if log_dir is not None:
        try:
            os.makedirs(log_dir, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"--log_dir {log_dir} can't be made: {error.strerror}. Name another."
            ) from None
    # Where machines meet, who holds the port may be one of them, and is asked.
    if plan.rendezvous is None and plan.hosts_port is not None and not is_port_free(plan.hosts_port):
        raise ConfigurationError(
            f"port {plan.hosts_port} of this machine is taken by another program. Give a free one with "
            "--main_process_port; on one machine, leave the flag out and any free port is used."
        )
    if not quiet and sys.stderr.isatty():
        # Until torch has been loaded, which may take seconds, nothing else would be seen.
        several = f"{plan.local_size} processes of " if plan.local_size > 1 else ""
        print(f"accelfn launch: starting {several}{script}; loading torch may take a while.", file=sys.stderr)
    changes = dict(plan.env_changes)
    argv = plan.argv
    if plan.rendezvous is not None:
        compare = (*plan.rendezvous["compare"], *_versions())
        changes["ACCELFN_AGENT_RENDEZVOUS"] = json.dumps({**plan.rendezvous, "compare": compare})
    if quiet:
        changes["ACCELFN_AGENT_QUIET"] = "1"
    if plan.fills_port is not None:
        changes[plan.fills_port] = str(_free_port())
    if plan.way == "mpirun":
        argv = (sys.executable, AGENT, "--command", *argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals, the terminal and the exit status are then the command's own.
    os.execvpe(argv[0], argv, {**environment, **changes})


def is_port_free(port: int) -> bool:
    """Return whether this machine can listen on a port. Effect: binds it for an instant."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's store does: a port in TIME_WAIT after the last run is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _versions() -> list[tuple[str, str]]:
    """Look up versions without importing what they are of."""
    found = {"accelfn": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    found["torch"] = importlib.metadata.version("torch").partition("+")[0]
    return [(f"the version of {name}", version) for name, version in found.items()]


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
