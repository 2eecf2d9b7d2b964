"""``accelfn plan-memory``: plan a device map, or the memory of each rank of a mesh."""

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
from accelfn.launch.plan_ranks import draw_ranks, draw_search

if TYPE_CHECKING:
    from accelfn.bigmodel import DevicePlan

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_DEVICE_OPTIONS = ("max_memory", "device_map", "no_split", "offload_buffers", "fallback_allocation")
_RANK_OPTIONS = (
    *("optimizer", "mixed_precision", "batch", "batch_size", "sequence_length", "activation_checkpointing"),
    *("gradient_accumulation_steps", "sync_each_batch", "num_microbatches"),
)
_SEARCH_OPTIONS = ("ranks", "memory", "axes", "ranks_per_node", "why")


def run(options: argparse.Namespace) -> int:
    """Plan the memory of a model. Effect: prints the plan, or writes it to a file.

    Returns:
        The exit status: 0; 1 if no mesh fits, or a file of weights is damaged; 2 if an argument is invalid.
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
            raise ConfigurationError(f"--max_memory specifies the place {name} twice. Remove one.")
        budgets[place] = size
    form = choose_format(options.format, options.output)
    for_ranks = options.search or options.mesh is not None or options.config_file is not None
    _check_options(options, form, for_ranks=for_ranks)
    _check_search(options)
    refuse_missing_model(options.source, options.output)
    if options.search:
        text, fits = draw_search(options, form)
        show_text(text, options.output)
        return 0 if fits else 1
    if for_ranks:
        show_text(draw_ranks(options, form), options.output)
        return 0
    # Not at the top: accelfn.bigmodel imports torch, which --help and bad input must not wait for.
    from accelfn.bigmodel import PlanOptions, plan_named_map, read_source

    shape = read_source(options.source)
    plan_options = PlanOptions(
        no_split_module_classes=shape.no_split_classes if options.no_split is None else options.no_split,
        dtype=options.dtype,
        offload_buffers=options.offload_buffers,
        fallback_allocation=options.fallback_allocation,
    )
    plan = plan_named_map(shape, options.device_map or "auto", budgets, plan_options)
    show_text(_FORMS[form](plan, options.source), options.output)
    return 0


def _check_options(options: argparse.Namespace, form: str, *, for_ranks: bool) -> None:
    """Refuse options for a device map when ranks are planned, and vice versa."""
    wrong = [name for name in (_DEVICE_OPTIONS if for_ranks else _RANK_OPTIONS) if getattr(options, name)]
    if wrong and for_ranks:
        raise ConfigurationError(
            f"--{wrong[0]} is for the device map of one process, and --mesh, --search and --config_file are "
            "for ranks. Remove one of them."
        )
    if wrong:
        raise ConfigurationError(f"--{wrong[0]} is for ranks. Add --mesh, such as dp_shard=8,tp=2.")
    if for_ranks and form == "html":
        raise ConfigurationError("a plan for ranks can't be drawn as html. Use table, json or svg.")
    text = [name for name in ("batch_size", "sequence_length") if getattr(options, name) is not None]
    if text and options.batch is not None:
        raise ConfigurationError(
            f"--{text[0]} is for a batch of text, and --batch names a function that makes one. Remove one."
        )
    if len(text) == 1:
        raise ConfigurationError(
            "--batch_size and --sequence_length go together, such as --batch_size 8 --sequence_length 2048."
        )


def _check_search(options: argparse.Namespace) -> None:
    """Refuse a search without its sizes, and options that it chooses itself."""
    given = [name for name in _SEARCH_OPTIONS if getattr(options, name)]
    if not options.search:
        if given:
            raise ConfigurationError(f"--{given[0]} is for a search of meshes. Add --search.")
        return
    needed = ("ranks", "memory", *(("batch_size",) if options.batch is None else ()))
    missing = [name for name in needed if getattr(options, name) is None]
    if missing:
        raise ConfigurationError(
            f"--search needs --{missing[0]}: --search --ranks 8192 --memory 80GB --batch_size 1024 "
            "--sequence_length 8192, or --batch MODULE:FUNCTION instead of the last two."
        )
    chosen = ("mesh", "gradient_accumulation_steps", "sync_each_batch", "num_microbatches")
    wrong = [name for name in chosen if getattr(options, name)]
    if wrong:
        raise ConfigurationError(f"--search chooses what --{wrong[0]} says. Remove one of the two.")


def _as_table(plan: DevicePlan, source: str) -> str:
    return str(plan)


def _as_json(plan: DevicePlan, source: str) -> str:
    data = {
        "source": source,
        "device_map": plan.device_map,
        "places": [
            {
                "place": place.place,
                "budget": place.budget,
                "used": place.used,
                "reserved": place.reserved,
                "tensors": [
                    {"name": leaf.name, "bytes": leaf.num_bytes, "kind": leaf.kind} for leaf in place.leaves
                ],
            }
            for place in plan.places
        ],
        "ties": plan.ties,
        "copies": [copy._asdict() for copy in plan.copies],
        "warnings": plan.warnings,
    }
    return json.dumps(data, indent=1)


def _as_svg(plan: DevicePlan, source: str) -> str:
    from accelfn.bigmodel import draw_device_plan_svg

    return draw_device_plan_svg(plan)


def _as_html(plan: DevicePlan, source: str) -> str:
    from accelfn.bigmodel import draw_device_plan_html

    return draw_device_plan_html(plan, f"Device plan of {source}")


_FORMS: Mapping[str, Callable[[DevicePlan, str], str]] = MappingProxyType(
    {"table": _as_table, "json": _as_json, "svg": _as_svg, "html": _as_html}
)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}.")
    return int(text)


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn plan-memory",
        description="Plan the device map of a model; with --mesh or --config_file the memory and traffic of "
        "each rank that trains it; or with --search the mesh. No weight is read.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder with a config.json, safetensors or their index, or MODULE:FUNCTION, which builds the "
        "model",
    )
    parser.add_argument(
        "--max_memory",
        metavar="PLACE=SIZE",
        nargs="+",
        help="capacity of each place: 0=10GB cpu=30GB disk=1TB; other places but the disk aren't used "
        "(free memory of this machine)",
    )
    parser.add_argument("--device_map", choices=_MAPS, help="strategy of the device map (auto)")
    parser.add_argument(
        "--no_split",
        metavar="CLASS",
        nargs="*",
        help="classes whose modules aren't split, such as layers.* in a file (the model's own)",
    )
    parser.add_argument("--dtype", help="dtype to load with, such as bfloat16 or int4 (the model's own)")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE",
        help="plan for the ranks of a mesh: dp_shard=8,tp=2; any number of them",
    )
    parser.add_argument(
        "--config_file",
        metavar="FILE",
        help="configuration of accelfn launch: plan for its ranks, mesh and FSDP options",
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="adamw (the default), adam, adagrad, rmsprop, momentum or sgd; MODULE:CLASS; or the bytes of "
        "its states per parameter; for ranks",
    )
    parser.add_argument(
        "--mixed_precision", choices=("no", "bf16", "fp16", "fp8"), help="mixed precision of the ranks (no)"
    )
    for name, about in (
        (
            "--batch_size",
            "sequences in a rank's batch, in a search in a step of all ranks: count what the batch takes too",
        ),
        ("--sequence_length", "tokens of each sequence"),
        ("--gradient_accumulation_steps", "batches in an accumulation window; for ranks (1)"),
        ("--num_microbatches", "microbatches of a batch in a pipeline (one for each stage)"),
        ("--ranks", "number of ranks to search meshes for"),
        ("--ranks_per_node", "ranks in each node, in a search (8)"),
    ):
        parser.add_argument(name, metavar="N", type=_positive, help=about)
    parser.add_argument(
        "--batch",
        metavar="MODULE:FUNCTION",
        help="the same with another batch: the function returns the model's arguments, as a mapping of "
        "keyword arguments, a list or tuple, or a single one; in a search with the rows of a step",
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of each rank in a search, such as 80GB")
    parser.add_argument(
        "--axes", metavar="AXIS,...", help="axes to search (pp,dp_replicate,dp_shard,tp; there are cp and sp)"
    )
    for name, about in (
        ("--activation_checkpointing", "recompute activations in the backward pass; for ranks"),
        ("--sync_each_batch", "average the gradients of each batch of a window; for ranks"),
        ("--search", "list the meshes in which the model fits, those that send least between nodes first"),
        ("--why", "say of each other mesh why it isn't one of them"),
        ("--offload_buffers", "offload buffers of offloaded modules too"),
        ("--fallback_allocation", "use a smaller later part if the first one is too large for a device"),
    ):
        parser.add_argument(name, action="store_true", help=about)
    parser.add_argument("--format", choices=FORMATS, help="output format (table, or by --output)")
    parser.add_argument("--output", metavar="FILE", help="write to this file")
    return parser
