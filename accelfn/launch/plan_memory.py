"""``accelfn plan-memory``: plan a device map, or the memory of each rank of a mesh."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser, positive
from accelfn.launch.output import refuse_missing_model

if TYPE_CHECKING:
    from torch import nn

    from accelfn.context import Context, ContextOptions

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp", "ep")
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_PRECISIONS = ("no", "bf16", "fp16", "fp8")
# The flags that don't go with each plan, and why.
_OF_DEVICES = (("max_memory", "device_map", "no_split"), "for the device map of one process")
_OF_RANKS = (
    ("optimizer", "mixed_precision", "batch_size", "activation_checkpointing", "gradient_accumulation_steps"),
    "for ranks: add --mesh, such as dp_shard=8,tp=2",
)


def run(options: argparse.Namespace) -> int:
    """Plan the memory of a model. Effect: prints the plan.

    Returns:
        The exit status: 0; 1 if a file of weights is damaged; 2 if an argument is invalid.
    """
    of_ranks = options.mesh is not None or options.config_file is not None
    names, why = _OF_DEVICES if of_ranks else _OF_RANKS
    for name in names:
        if getattr(options, name):
            raise ConfigurationError(f"--{name} is {why}.")
    if (options.batch_size is None) != (options.sequence_length is None):
        raise ConfigurationError(
            "--batch_size and --sequence_length go together, such as --batch_size 8 --sequence_length 2048."
        )
    refuse_missing_model(options.source)
    facts, table = (_plan_mesh if of_ranks else _plan_devices)(options)
    print(json.dumps({"source": options.source, **facts}, indent=1) if options.json else table)
    return 0


# --- A device map ---------------------------------------------------------------------------------


def _plan_devices(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    budgets: dict[int | str, str] = {}
    for pair in options.max_memory or ():
        name, equals, size = pair.partition("=")
        if not (name and equals and size):
            raise ConfigurationError(
                f"--max_memory takes PLACE=SIZE, such as 0=10GB or cpu=30GB: got {pair!r}."
            )
        place = int(name) if name.isdecimal() else name
        if place in budgets:
            raise ConfigurationError(f"--max_memory specifies the place {name} twice. Remove one.")
        budgets[place] = size
    # Not at the top: it imports torch, which --help and bad input must not wait for.
    from accelfn.bigmodel import PlanOptions, plan_named_map, read_source

    shape = read_source(options.source)
    classes = shape.no_split_classes if options.no_split is None else options.no_split
    asked = PlanOptions(no_split_module_classes=classes, dtype=options.dtype)
    plan = plan_named_map(shape, options.device_map or "auto", budgets or None, asked)
    names = ("place", "budget", "used", "reserved")
    places = [{name: getattr(place, name) for name in names} for place in plan.places]
    return {"device_map": plan.device_map, "places": places, "warnings": plan.warnings}, str(plan)


# --- Ranks of a mesh ------------------------------------------------------------------------------


def _plan_mesh(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from accelfn.context import plan_context
    from accelfn.parallel import plan_memory, plan_model, plan_traffic

    asked, size = _asked(options)
    if size is None:
        raise ConfigurationError(
            f"{options.config_file} says neither num_processes nor a mesh. Add --mesh, such as dp_shard=8."
        )
    ctx, model = plan_context(size, **asked), _model(options)
    batch = options.batch_size and _text(ctx, model, options.batch_size, options.sequence_length)
    plan = None if ctx.strategy.engine is not None else plan_model(ctx, model)
    budget = plan_memory(ctx, model, batch=batch, optimizer=_optimizer(options))
    traffic = plan_traffic(ctx, model, batch=batch)
    sums = {name: getattr(budget, name) for name in ("held", "total", "peak")}
    facts = {
        "mesh": {axis: traffic.mesh.size(axis) for axis in traffic.mesh.active()},
        "bytes": {**budget._asdict(), **sums, "moved": dict(budget.moved)},
        "exchanges": [one._asdict() for one in traffic.exchanges],
    }
    return facts, "\n\n".join(str(part) for part in (plan, budget, traffic) if part is not None)


def _asked(options: argparse.Namespace) -> tuple[ContextOptions, int | None]:
    """Return the options of a context that the arguments ask for, and the number of its ranks."""
    from accelfn.config import FullyShardedDataParallelPlugin, ParallelismConfig

    asked: ContextOptions = {}
    size: int | None = None
    if options.config_file is not None:
        asked, size = _configured(options.config_file)
    if options.mesh is not None:
        mesh = asked["parallelism_config"] = ParallelismConfig(**_read_mesh(options.mesh))
        size = mesh.total_size
    if options.mixed_precision is not None:
        asked["mixed_precision"] = options.mixed_precision
    if options.activation_checkpointing:
        plugin = asked.get("fsdp_plugin") or FullyShardedDataParallelPlugin(fsdp_version=2)
        asked["fsdp_plugin"] = replace(plugin, activation_checkpointing=True)
    if options.gradient_accumulation_steps is not None:
        asked["gradient_accumulation_steps"] = options.gradient_accumulation_steps
    return asked, size


def _configured(path: str) -> tuple[ContextOptions, int | None]:
    """Return what a configuration file asks of a context, as ``accelfn launch`` has it, and its ranks."""
    from accelfn.config import read_settings
    from accelfn.context.options import merge_settings
    from accelfn.launch.launch import load_config
    from accelfn.launch.plan import exported_variables
    from accelfn.launch.sources import resolve

    resolved = resolve({}, {}, load_config(path, os.environ))
    asked = merge_settings({}, read_settings(exported_variables(resolved)))
    asked.pop("cpu", None)
    mesh = asked.get("parallelism_config")
    return asked, resolved.config.num_processes or (None if mesh is None else mesh.total_size)


def _read_mesh(text: str) -> dict[str, Any]:
    """Return the sizes of a mesh such as ``dp_shard=8,tp=2``, as ``ParallelismConfig`` takes them."""
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in _AXES or not size.isdecimal() or not int(size) or f"{axis}_size" in sizes:
            raise ConfigurationError(
                f"--mesh takes AXIS=SIZE, each of {', '.join(_AXES)} once with a size from 1, such as "
                f"dp_shard=8,tp=2: got {part or text!r}."
            )
        sizes[f"{axis}_size"] = int(size)
    return sizes


# --- Models and batches ---------------------------------------------------------------------------


def _model(options: argparse.Namespace) -> nn.Module:
    from accelfn.bigmodel.model_info import read_dtype
    from accelfn.bigmodel.source import build_source

    model = build_source(options.source)
    dtype: Any = None if options.dtype is None else read_dtype(options.dtype, "--dtype")
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ConfigurationError(
            f"--dtype {options.dtype} is for inference only. Use a dtype to train in, such as bfloat16."
        )
    return model if dtype is None else model.to(dtype)


def _optimizer(options: argparse.Namespace) -> str | float:
    """Return the optimizer that the arguments name: a name, or bytes per parameter."""
    given: str = options.optimizer or "adamw"
    try:
        return float(given)
    except ValueError:
        return given


def _text(ctx: Context, model: nn.Module, rows: int, length: int) -> Any:
    """Return this rank's part of a batch of text."""
    import torch

    from accelfn.data import shard_sequence

    kind = type(model).__name__
    if getattr(model, "main_input_name", None) != "input_ids":
        raise ConfigurationError(
            f"--batch_size makes a batch of text, as models of transformers take it, and {kind} says nothing "
            "of input_ids. Plan it in Python, where accelfn.plan_memory takes any batch."
        )
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    batch = {"input_ids": ids}
    if kind.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel")):
        batch["labels"] = ids
    return shard_sequence(ctx, batch, dict.fromkeys(batch, 1))


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn plan-memory",
        description="Plan the device map of a model, or with --mesh or --config_file the memory and traffic "
        "of each rank that trains it. No weight is read.",
    )
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="a folder with a config.json, safetensors or their index, or "
        "MODULE:FUNCTION, which builds the model",
    )
    add(
        "--max_memory",
        metavar="PLACE=SIZE",
        nargs="+",
        help="capacity of each place: 0=10GB cpu=30GB "
        "disk=1TB; other places but the disk aren't used (free memory of this machine)",
    )
    add("--device_map", choices=_MAPS, help="strategy of the device map (auto)")
    add("--no_split", metavar="CLASS", nargs="*", help="classes whose modules aren't split (the model's own)")
    add("--dtype", help="dtype to load with, such as bfloat16 or int4 (the model's own)")
    add("--mesh", metavar="AXIS=SIZE", help="plan for the ranks of a mesh: dp_shard=8,tp=2; any number")
    add("--config_file", metavar="FILE", help="configuration of accelfn launch: plan for its ranks and mesh")
    add("--optimizer", metavar="NAME", help="adamw (the default), sgd, ..., or the bytes per parameter")
    add("--mixed_precision", choices=_PRECISIONS, help="mixed precision of the ranks (no)")
    add("--activation_checkpointing", action="store_true", help="recompute activations")
    for name, about in (
        ("--batch_size", "sequences in a rank's batch"),
        ("--sequence_length", "tokens of each sequence"),
        ("--gradient_accumulation_steps", "batches in an accumulation window (1)"),
    ):
        add(name, metavar="N", type=positive, help=about)
    add("--json", action="store_true", help="print JSON")
    return parser
