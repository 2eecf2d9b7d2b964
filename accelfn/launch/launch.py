"""``accelfn launch``: read what is asked for, plan it, and carry it out."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.config.fields import FIELDS
from accelfn.launch.config.files import ConfigFile, find_config_file, read_config
from accelfn.launch.config.paths import refuse_missing_files
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.config.sources import Resolved, resolve
from accelfn.launch.flags import Parsed, format_help, parse_flags, spell
from accelfn.launch.output import print_origins
from accelfn.launch.plan.choose import count_processes, plan_launch
from accelfn.launch.plan.machine import read_machine
from accelfn.launch.plan.mpirun import read_mpi
from accelfn.launch.plan.record import Script, format_plan
from accelfn.launch.plan.slurm import read_step, write_sbatch
from accelfn.launch.run import run_plan

__all__ = ("load_config", "run_launch")


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
    except (ConfigurationError, MissingExtraError) as error:
        print(f"accelfn launch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def load_config(given: str | None, environment: Mapping[str, str]) -> ConfigFile | None:
    """Read the configuration file that counts, if there is one. Effect: reads the disk.

    Raises:
        ConfigurationError: It was asked for and isn't there, or something in it is wrong.
        MissingExtraError: It is YAML and PyYAML isn't installed.
    """
    path, was_asked_for = find_config_file(given, environment, sys.platform, os.path.expanduser("~"))
    return read_config(path) if was_asked_for or os.path.exists(path) else None


def _launch(parsed: Parsed, environment: Mapping[str, str]) -> int:
    if "help" in parsed.actions:
        print(format_help())
        return 0
    file = load_config(parsed.actions.get("config_file"), environment)
    writes_script = parsed.actions.get("sbatch")
    if writes_script is None:
        step = read_step(environment) or read_mpi(environment)
    else:
        # srun will say on each node which one it is.
        step = {"machine_rank": (0, "srun"), "main_process_ip": ("first-node-of-srun", "srun")}
    resolved = resolve(parsed.flags, environment, file, step)
    if "print_config" in parsed.actions:
        print_origins(resolved)
        return 0
    if parsed.script is None:
        raise ConfigurationError("no script given. Name one: accelfn launch [flags] train.py")
    script = Script(parsed.script, parsed.script_args)
    config = resolved.config
    _refuse_missing(script, config)
    refuse_missing_files(resolved)
    if writes_script is not None:
        return _write_sbatch(parsed, resolved, script, environment, writes_script)
    machine = read_machine(environment, wants_mpi=config.mpirun.hostfile is not None)
    worker = str(Path(__file__).parent / "run" / "worker.py")
    plan = plan_launch(resolved, script, environment, machine, worker=worker)
    if "dry_run" in parsed.actions:
        print(format_plan(plan))
        return 0
    return run_plan(
        plan,
        environment,
        num_processes=count_processes(config, machine),
        log_dir=config.log_dir,
        quiet=config.quiet,
    )


def _write_sbatch(
    parsed: Parsed, resolved: Resolved, script: Script, environment: Mapping[str, str], path: str
) -> int:
    tokens: list[str] = []
    secret = [field for field in FIELDS if field.secret]
    hidden = {flag for field in secret for flag in field.flags}
    skip = False
    for token in parsed.tokens:
        name = spell(token).partition("=")[0]
        if skip:
            skip = False
        elif name == "--sbatch" or name.startswith("--slurm_") or name in hidden:
            skip = "=" not in token
        else:
            tokens.append(token)
    for field in secret:
        if field.name in parsed.flags:
            # A job's script lies about, and SLURM keeps a copy of it.
            print(
                f"accelfn launch: {field.flags[0]} isn't written into {path}. Set {field.variables[0]} where "
                "you call sbatch, which hands variables on.",
                file=sys.stderr,
            )
    text = write_sbatch(resolved.config, script, tokens, read_machine(environment))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--sbatch {path} can't be written: {error.strerror}.") from None
    print(f"wrote {path}; start it with: sbatch {path}")
    return 0


def _refuse_missing(script: Script, config: LaunchConfig) -> None:
    """Say what is wrong with the script's name, before torch is loaded once per process to find out."""
    if config.module or config.compute_environment != "LOCAL_MACHINE" or config.tpu_options.use_cluster:
        return  # finding a module runs its parent packages, which is the script's own business
    if config.no_python:
        if shutil.which(script.name) is None:
            raise ConfigurationError(f"there is no program {script.name!r} to run. Check the path or PATH.")
        return
    path = Path(script.name)
    if not path.is_file():
        word = script.name.lower() in ("true", "false", "yes", "no")
        hint = (
            f"a flag without a value stands before it: write --flag={script.name}, or --no_flag"
            if word
            else "Check the path; for a module use -m, for another program --no_python"
        )
        raise ConfigurationError(f"there is no script {script.name!r} in {os.getcwd()!r}. {hint}.")
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"the script {script.name!r} can't be read. Check its permissions.")
