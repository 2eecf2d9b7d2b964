"""``accelfn launch``: resolve the configuration, plan the launch, and execute it."""

from __future__ import annotations

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
from typing import NoReturn

from accelfn import __version__
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.cluster import read_mpi, read_step
from accelfn.launch.command_line import CommandParser, Parsed, launch_parser, parse_flags
from accelfn.launch.config import LaunchConfig, is_active
from accelfn.launch.config_file import ConfigFile, find_config_file, read_config
from accelfn.launch.kinds import FILE
from accelfn.launch.machine import read_machine
from accelfn.launch.options import OPTIONS, read_value
from accelfn.launch.output import print_origins
from accelfn.launch.plan import plan_launch
from accelfn.launch.plan_commands import LOOPBACK, LaunchPlan, Script, format_plan
from accelfn.launch.sources import Resolved, resolve


def make_parser() -> CommandParser:
    """Build the parser of the command, for completion."""
    return launch_parser()


def read(argv: Sequence[str]) -> Parsed:
    """Parse the arguments after ``launch``. Pure."""
    return parse_flags(argv)


def load_config(given: str | None, environment: Mapping[str, str]) -> ConfigFile | None:
    """Read the config file in effect, or return None if there is none.

    A config file of Accelerate is imported, with a note on stderr.

    Raises:
        ConfigurationError: The file was requested and doesn't exist, or its content is invalid.
        MissingExtraError: The file is YAML, and PyYAML isn't installed.
    """
    path, is_requested = find_config_file(given, environment, sys.platform, os.path.expanduser("~"))
    if not is_requested and not os.path.exists(path):
        return None
    file = read_config(path)
    for note in file.notes:
        _print(note)
    return file


def run(parsed: Parsed) -> int:
    """Run ``accelfn launch``. Effect: replaces this process by the launch, or prints.

    Returns:
        The exit status. Does not return from a launch.

    Raises:
        AccelfnError: The options are invalid, or a file is missing.
    """
    environment = os.environ
    if "help" in parsed.actions:
        print(launch_parser().format_help().rstrip())
        return 0
    file = load_config(parsed.actions.get("config_file"), environment)
    resolved = resolve(parsed.flags, environment, file, _read_step(parsed, environment))
    if "print_config" in parsed.actions:
        print_origins(resolved)
        return 0
    if parsed.script is None:
        raise ConfigurationError("no script given. Run: accelfn launch [flags] train.py")
    script = Script(parsed.script, parsed.script_args)
    config = resolved.config
    check_files(script, resolved)
    if config.compute_environment == "AMAZON_SAGEMAKER":
        return _print_sagemaker(resolved, script, dry_run="dry_run" in parsed.actions)
    plan = plan_launch(resolved, script, environment, read_machine(environment))
    if "dry_run" in parsed.actions:
        print(format_plan(plan))
        return 0
    if config.use_deepspeed and not config.no_python and find_spec("deepspeed") is None:
        raise MissingExtraError(
            f"--use_deepspeed needs DeepSpeed, which isn't installed for {sys.executable}. Run: pip install "
            "'accelfn[deepspeed]'"
        )
    return run_plan(plan, environment, config, script)


def _print_sagemaker(resolved: Resolved, script: Script, *, dry_run: bool) -> int:
    from accelfn.launch.sagemaker import plan_sagemaker  # no other launch needs it

    config = resolved.config
    files = (config.sagemaker_inputs_file, config.sagemaker_metrics_file)
    inputs, metrics = (None if path is None else Path(path).read_text(encoding="utf-8") for path in files)
    plan = plan_sagemaker(resolved, script, inputs=inputs, metrics=metrics)
    if not dry_run:
        raise ConfigurationError(
            "AMAZON_SAGEMAKER: accelfn launch doesn't start the job. --dry_run prints the arguments of the "
            "estimator of AWS's sagemaker package, which does."
        )
    print(plan)
    return 0


def _read_step(parsed: Parsed, environment: Mapping[str, str]) -> Mapping[str, tuple[object, str]]:
    """Read number and rank of the machines from srun or mpirun, unless the user has set another number."""
    option = OPTIONS["num_machines"]
    texts = [parsed.flags[option.name].text] if option.name in parsed.flags else []
    texts += [environment[name] for name in option.variables if environment.get(name, "").strip()]
    try:
        num_machines = read_value(option, texts[0]) if texts else None
    except ValueError:
        num_machines = None  # resolve() reports it
    if num_machines == 1:
        return {}
    step = read_step(environment) or read_mpi(environment)
    # Rank and address hold only for the number of machines in the step.
    return {} if step and num_machines not in (None, step[option.name][0]) else step


def check_files(script: Script, resolved: Resolved) -> None:
    """Check that the script and all files of active options exist, before torch is imported.

    Raises:
        ConfigurationError: A file or a module doesn't exist, or can't be read.
    """
    config = resolved.config
    if config.tpu and config.tpu_cluster:
        return  # the files are on the machines of the TPU
    if config.module:
        _check_module(script.name)
    elif config.no_python:
        _check_program(script.name)
    else:
        advice = "For a module use -m, for another program --no_python."
        _check_file(f"the script {script.name!r}", script.name, advice)
    for name, option in OPTIONS.items():
        path: object = getattr(config, name)
        if option.kind is FILE and isinstance(path, str) and is_active(config, option):
            origin = resolved.origins[name]
            where = "" if origin.source == "flag" else f" (from {origin})"
            _check_file(f"{option.flags[0]}: the file {path!r}{where}", os.path.expanduser(path))


def _check_file(what: str, name: str, advice: str = "") -> None:
    if not os.path.isfile(name):
        problem = "is a directory" if os.path.isdir(name) else f"doesn't exist in {os.getcwd()!r}"
        raise ConfigurationError(f"{what} {problem}. Check the path. {advice}".rstrip())
    if not os.access(name, os.R_OK):
        raise ConfigurationError(f"{what} can't be read. Check its permissions.")


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        if os.path.isfile(name):
            raise ConfigurationError(f"the program {name!r} is not executable. Run: chmod +x {name}")
        raise ConfigurationError(f"no program {name!r}. Check the path and PATH.")


def _check_module(name: str) -> None:
    if name.endswith(".py"):
        raise ConfigurationError(
            f"no module {name!r}. For a file leave -m out; for a module pass its dotted name."
        )
    # Only the top-level package: finding a submodule would import it.
    top = name.partition(".")[0]
    try:
        # python -m searches the current directory first.
        spec = PathFinder.find_spec(top, [os.getcwd()]) or find_spec(top) if top else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigurationError(
            f"no module {top!r} in {os.getcwd()} or {len(sys.path)} other directories. Check the name, the "
            "current directory and PYTHONPATH."
        )


def run_plan(
    plan: LaunchPlan, environment: Mapping[str, str], config: LaunchConfig, script: Script
) -> NoReturn:
    """Execute a plan. Effect: replaces this process by the command; does not return.

    Args:
        plan: From ``plan_launch``.
        environment: Variables to inherit.
        config: Whether to print nothing, and where torchrun's logs go.
        script: For the line at the start.

    Raises:
        ConfigurationError: A port is in use, or a program is missing.
        MissingExtraError: torch_xla is missing.
    """
    for note in plan.notes:
        _print(note)
    if plan.way == "xla" and find_spec("torch_xla") is None:
        raise MissingExtraError(
            f"--tpu needs torch_xla, which isn't installed for {sys.executable}. Run: pip install "
            "'torch_xla[tpu]'"
        )
    if shutil.which(plan.argv[0]) is None:
        raise ConfigurationError(f"no program {plan.argv[0]!r}. Check PATH.")
    if config.log_dir is not None:
        os.makedirs(config.log_dir, exist_ok=True)
    # With a rendezvous of machines, another of them may hold the port; they compare themselves first.
    if plan.rendezvous is None and plan.hosts_port is not None and not is_port_free(plan.hosts_port):
        raise ConfigurationError(
            f"port {plan.hosts_port} of this machine is in use by another program. Pass a free one as "
            "--main_process_port, or on one machine leave the flag out to use any free port."
        )
    if not config.quiet and sys.stderr.isatty():
        # Importing torch may take seconds without any other output.
        several = f"{plan.local_size} processes of " if plan.local_size > 1 else ""
        _print(f"starting {several}{script.name}; importing torch may take a while.")
    changes = dict(plan.env_changes)
    if plan.rendezvous is not None:
        compare = (*plan.rendezvous["compare"], *_versions())
        changes["ACCELFN_AGENT_RENDEZVOUS"] = json.dumps({**plan.rendezvous, "compare": compare})
    if config.quiet:
        changes["ACCELFN_AGENT_QUIET"] = "1"
    if plan.fills_port is not None:
        changes[plan.fills_port] = str(_free_port())
    sys.stdout.flush()
    sys.stderr.flush()
    # exec, so that signals, the terminal and the exit status are those of the command.
    os.execvpe(plan.argv[0], plan.argv, {**environment, **changes})


def is_port_free(port: int) -> bool:
    """Return whether this machine can listen on a port. Effect: briefly binds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's store does: a port in TIME_WAIT after the previous run counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _versions() -> list[tuple[str, str]]:
    """Return versions to compare between machines, without importing the packages."""
    import importlib.metadata  # takes a fifth of the time of a launch, and one machine doesn't need it

    versions = {"accelfn": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    versions["torch"] = importlib.metadata.version("torch").partition("+")[0]
    return [(f"the version of {name}", version) for name, version in versions.items()]


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _print(note: str) -> None:
    print(f"accelfn launch: {note}", file=sys.stderr)
