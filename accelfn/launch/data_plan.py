"""``accelfn data-plan``: show which rank reads which samples."""

import argparse

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.output import write_text


def run(options: argparse.Namespace) -> int:
    """Print the plan, and write it as SVG with ``--svg``.

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
            f"--start must be at most --num_samples {options.num_samples}, got {options.start}."
        )
    if options.num_processes % options.sharing:
        raise ConfigurationError(
            f"--sharing must divide --num_processes {options.num_processes}, got {options.sharing}."
        )
    # Imported late, because accelfn.data imports torch.
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
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn data-plan",
        description="Show which rank reads which samples of an epoch in each step. Samples are numbered in "
        "the order of the epoch; those in parentheses are padding.",
    )
    numbers = (
        ("--num_samples", "number of samples", None),
        ("--batch_size", "batch size of the DataLoader", None),
        ("--num_processes", "number of ranks (1)", 1),
        ("--sharing", "ranks that share a batch, with tensor or context parallelism (1)", 1),
        ("--start", "number of samples already read (0)", 0),
    )
    for name, about, default in numbers:
        parser.add_argument(
            name, type=int, metavar="N", help=about, default=default, required=default is None
        )
    for name, about in (
        ("--split_batches", "split batches between the ranks"),
        ("--no_even_batches", "don't pad the last step"),
        ("--drop_last", "drop an incomplete last step"),
    ):
        parser.add_argument(name, action="store_true", help=about)
    parser.add_argument("--svg", metavar="FILE", help="also write an SVG image to this file")
    return parser
