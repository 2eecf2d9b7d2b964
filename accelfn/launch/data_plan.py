"""``accelfn data-plan``: draw which rank reads which samples."""

import argparse

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.output import write_text


def run(options: argparse.Namespace) -> int:
    """Draw the plan that the arguments describe. Effect: prints it, and writes a file where one is named.

    Returns:
        The exit status.


    >>> run(make_parser().parse_args(["--num_samples=5", "--batch_size=2", "--num_processes=2"]))
            step 0  step 1
    rank 0  0 1     4 (0)
    rank 1  2 3     (1 2)
    0
    """
    for name, least in (
        ("num_samples", 0),
        ("batch_size", 1),
        ("num_processes", 1),
        ("sharing", 1),
        ("start", 0),
    ):
        given = getattr(options, name)
        if given < least:
            raise ConfigurationError(f"--{name} must be at least {least}, got {given}.")
    if options.start > options.num_samples:
        raise ConfigurationError(
            f"--start must lie within the samples: got --start {options.start} of {options.num_samples}."
        )
    if options.num_processes % options.sharing:
        raise ConfigurationError(
            f"--sharing must divide the number of ranks: got --num_processes {options.num_processes} and "
            f"--sharing {options.sharing}."
        )
    # Not at the top: accelfn.data loads torch, which --help and bad input do without.
    from accelfn.data.picture import draw_plan, draw_plan_svg
    from accelfn.data.plan import plan_epoch

    plan = plan_epoch(
        options.num_samples,
        options.batch_size,
        options.num_processes // options.sharing,
        split_batches=options.split_batches,
        even_batches=not options.no_even_batches,
        drop_last=options.drop_last,
        start=options.start,
    )
    print(draw_plan(plan, sharing=options.sharing).removesuffix("\n"))
    if options.svg is not None:
        write_text(options.svg, draw_plan_svg(plan, sharing=options.sharing))
    return 0


def make_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn data-plan",
        description="Draw which rank reads which samples of an epoch, in which step. Positions count along "
        "the order of the epoch; those in brackets are padding.",
    )
    numbers = (
        ("--num_samples", "samples of the epoch", None),
        ("--batch_size", "batch size of the DataLoader", None),
        ("--num_processes", "ranks (1)", 1),
        ("--sharing", "ranks that share each batch, by tensor or context parallelism (1)", 1),
        ("--start", "samples that have been read already (0)", 0),
    )
    for name, about, default in numbers:
        parser.add_argument(
            name, type=int, metavar="N", help=about, default=default, required=default is None
        )
    for name, about in (
        ("--split_batches", "the batch size is that of all ranks together"),
        ("--no_even_batches", "leave the last step short instead of filling it up"),
        ("--drop_last", "leave out an incomplete last step"),
    ):
        parser.add_argument(name, action="store_true", help=about)
    parser.add_argument("--svg", metavar="FILE", help="also write the picture to this file")
    return parser
