"""``accelfn plan-memory``: where each part of a model would lie, or what each rank of a mesh would hold."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.output import (
    FORMATS,
    choose_format,
    refuse_missing_model,
    show_text,
)
from accelfn.launch.plan_ranks import draw_ranks

if TYPE_CHECKING:
    from accelfn.bigmodel import DevicePlan

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_OF_PLACES = ("max_memory", "device_map", "no_split", "offload_buffers", "fallback_allocation")
_OF_RANKS = ("optimizer", "mixed_precision", "batch", "batch_size", "sequence_length")


def run(options: argparse.Namespace) -> int:
    """Plan where a model lies. Effect: prints the plan, or writes it to a file.

    Returns:
        The exit status: 0; 1 where a file of weights is damaged; 2 after one sentence on what is wrong.
    """
    budgets: dict[int | str, str] | None = None
    for pair in options.max_memory or ():
        name, equals, size = pair.partition("=")
        place = int(name) if name.isdecimal() else name
        if not (name and equals and size):
            raise ConfigurationError(
                f"--max_memory takes PLACE=SIZE, such as 0=10GB or cpu=30GB: got {pair!r}."
            )
        budgets = {} if budgets is None else budgets
        if place in budgets:
            raise ConfigurationError(f"--max_memory gives the place {name} twice. Give it once.")
        budgets[place] = size
    form = choose_format(options.format, options.output)
    is_of_ranks = options.mesh is not None or options.config_file is not None
    _refuse_mixtures(options, form, is_of_ranks=is_of_ranks)
    refuse_missing_model(options.source, options.output)
    if is_of_ranks:
        show_text(draw_ranks(options, form), options.output)
        return 0
    # Not at the top: accelfn.bigmodel loads torch, which --help and bad input do without.
    from accelfn.bigmodel import PlanOptions, plan_named_map, read_source

    shape = read_source(options.source)
    made = PlanOptions(
        no_split_module_classes=shape.no_split_classes if options.no_split is None else options.no_split,
        dtype=options.dtype,
        offload_buffers=options.offload_buffers,
        fallback_allocation=options.fallback_allocation,
    )
    plan = plan_named_map(shape, options.device_map or "auto", budgets, made)
    show_text(_FORMS[form](plan, options.source), options.output)
    return 0


def _refuse_mixtures(options: argparse.Namespace, form: str, *, is_of_ranks: bool) -> None:
    """Refuse flags for places where ranks are planned, and the other way round."""
    mixed = [name for name in (_OF_PLACES if is_of_ranks else _OF_RANKS) if getattr(options, name)]
    if mixed and is_of_ranks:
        raise ConfigurationError(
            f"--{mixed[0]} is for a model that is spread over the places of one process, and --mesh and "
            "--config_file for ranks that train it. Leave one of them out."
        )
    if mixed:
        raise ConfigurationError(
            f"--{mixed[0]} is for ranks that train the model. Add --mesh, such as dp_shard=8,tp=2."
        )
    if is_of_ranks and form == "html":
        raise ConfigurationError(
            "what ranks hold is drawn as a table, as json or as svg, not as html. Choose one of them."
        )
    if (options.batch_size is None) != (options.sequence_length is None):
        raise ConfigurationError(
            "--batch_size and --sequence_length go together, such as --batch_size 8 --sequence_length 2048."
        )
    if options.batch_size is not None and options.batch is not None:
        raise ConfigurationError(
            "--batch_size makes a batch of text, and --batch names a function that makes one. Leave one out."
        )


def _as_table(plan: DevicePlan, source: str) -> str:
    return str(plan)


def _as_json(plan: DevicePlan, source: str) -> str:
    facts = {
        "source": source,
        "device_map": plan.device_map,
        "places": [
            {
                "place": one.place,
                "budget": one.budget,
                "used": one.used,
                "reserved": one.reserved,
                "tensors": [
                    {"name": leaf.name, "bytes": leaf.num_bytes, "kind": leaf.kind} for leaf in one.leaves
                ],
            }
            for one in plan.places
        ],
        "ties": plan.ties,
        "copies": [copy._asdict() for copy in plan.copies],
        "warnings": plan.warnings,
    }
    return json.dumps(facts, indent=1)


def _as_svg(plan: DevicePlan, source: str) -> str:
    from accelfn.bigmodel import draw_device_plan_svg

    return draw_device_plan_svg(plan)


def _as_html(plan: DevicePlan, source: str) -> str:
    from accelfn.bigmodel import draw_device_plan_html

    return draw_device_plan_html(plan, f"Where {source} lies")


_FORMS: Mapping[str, Callable[[DevicePlan, str], str]] = MappingProxyType(
    {"table": _as_table, "json": _as_json, "svg": _as_svg, "html": _as_html}
)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"it must be a number from 1, got {text!r}.")
    return int(text)


def make_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn plan-memory",
        description="Say where each part of a model would lie, or with --mesh or --config_file, what each "
        "rank that trains it would hold. No weight is read.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder with a config.json of transformers, safetensors or their index, or MODULE:FUNCTION, "
        "which gives a module",
    )
    parser.add_argument(
        "--max_memory",
        metavar="PLACE=SIZE",
        nargs="+",
        help="what each place may hold: 0=10GB cpu=30GB disk=1TB; others aren't used, but for the disk "
        "(what this machine has free)",
    )
    parser.add_argument("--device_map", choices=_MAPS, help="how to spread it (auto)")
    parser.add_argument(
        "--no_split",
        metavar="CLASS",
        nargs="*",
        help="classes whose modules stay whole, such as layers.* in a file (those that the model names)",
    )
    parser.add_argument("--dtype", help="with which it will be loaded, such as bfloat16 or int4 (its own)")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE",
        help="plan for the ranks of a mesh that train it: dp_shard=8,tp=2; any number of them",
    )
    parser.add_argument(
        "--config_file",
        metavar="FILE",
        help="of accelfn launch: plan for its ranks, its mesh and its options of FSDP",
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="adamw (as without it), adam, adagrad, rmsprop, momentum or sgd; for ranks",
    )
    parser.add_argument(
        "--mixed_precision", choices=("no", "bf16", "fp16"), help="in which ranks compute (no)"
    )
    for name, about in (
        ("--batch_size", "rows of text in a rank's batch: count what the batch takes too; for ranks"),
        ("--sequence_length", "tokens of each of these rows"),
    ):
        parser.add_argument(name, metavar="N", type=_positive, help=about)
    parser.add_argument(
        "--batch",
        metavar="MODULE:FUNCTION",
        help="the same with another batch: the function gives what the model is called with, a mapping of "
        "keyword arguments, a list or tuple of arguments, or one",
    )
    for name, about in (
        ("--offload_buffers", "buffers of what is offloaded are offloaded too"),
        ("--fallback_allocation", "put something smaller where the next part is too large for a device"),
    ):
        parser.add_argument(name, action="store_true", help=about)
    parser.add_argument("--format", choices=FORMATS, help="how it is drawn (table, or by --output)")
    parser.add_argument("--output", metavar="FILE", help="write it to this file")
    return parser
