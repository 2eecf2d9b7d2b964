"""``accelfn test``: launch the self-test, checks whose results are known, with the configured setup."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from accelfn.errors import ConfigurationError
from accelfn.launch import launch
from accelfn.launch.command_line import FLAG_NOTE, CommandParser, normalize_flag, parse_flags

_MODULE = "accelfn.launch.self_test_rank"

#: Names of all checks, in order.
CHECK_NAMES = (
    "ranks and settings",
    "collectives",
    "random states",
    "mesh",
    "loader, shuffled",
    "loader, even batches",
    "loader, resumed",
    "training, fp32",
    "training, as configured",
    "checkpoint round trip",
)

#: Faults to inject on the last rank, to see that they are detected.
FAULTS = ("settings", "value", "seed", "data", "model", "hang", "death")


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after ``test``; those of ``accelfn launch`` are in ``launch_flags``.

    Raises:
        ConfigurationError: A flag is unknown or invalid, or a script is given.
    """
    options, launch_flags = make_parser().parse_known_args([normalize_flag(token) for token in argv])
    script = parse_flags(launch_flags).script
    if script is not None:
        raise ConfigurationError(
            f"accelfn test takes no script, got {script!r}. Pass only flags of accelfn launch."
        )
    if options.timeout <= 0:
        raise ConfigurationError(f"--timeout must be positive, got {options.timeout:g}.")
    return argparse.Namespace(**vars(options), launch_flags=launch_flags)


def run(options: argparse.Namespace) -> int:
    """Launch the self-test as ``accelfn launch`` does any script: the main process prints the results."""
    return launch.run(parse_flags(launch_arguments(options)))


def launch_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the arguments of ``accelfn launch`` that launch the self-test. Pure."""
    return (
        *(*options.launch_flags, "-m", _MODULE, "--timeout", f"{options.timeout:g}"),
        *(("--fault", options.fault) if options.fault else ()),
        *(("--folder", options.folder) if options.folder else ()),
        *(part for name in options.only for part in ("--only", name)),
    )


def make_parser() -> CommandParser:
    """Build the parser of the flags that the program of the ranks has too."""
    parser = CommandParser(
        prog="accelfn test",
        usage="accelfn test [--config_file FILE] [flags of accelfn launch]",
        description="Launch the self-test like a script, and print which checks pass.",
        epilog=f"All other flags are those of accelfn launch, such as --cpu --num_processes 2. {FLAG_NOTE}",
    )
    only = "run only this check; repeatable"
    folder = "directory for checkpoints, shared by all nodes"
    wait = "seconds for which ranks wait for each other (120)"
    fault = "inject a fault on the last rank, to see that it is detected"
    parser.add_argument(
        "--only", metavar="CHECK", action="append", default=[], choices=CHECK_NAMES, help=only
    )
    parser.add_argument("--folder", metavar="DIR", default="", help=folder)
    parser.add_argument("--timeout", metavar="S", type=float, default=120.0, help=wait)
    parser.add_argument("--fault", choices=FAULTS, default="", help=fault)
    return parser
