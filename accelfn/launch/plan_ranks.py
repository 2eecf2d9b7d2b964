"""``accelfn plan-memory --mesh`` and ``--search``: what ranks hold of a model in training, and send."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import pkgutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from accelfn.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

    from accelfn.context import Context, ContextOptions
    from accelfn.parallel import Traffic
    from accelfn.parallel.planning.optimizer_states import OptimizerKind

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp", "ep")


def draw_ranks(options: argparse.Namespace, form: str) -> str:
    """Plan the model that the arguments name for the ranks that they name.

    Effect: imports what builds the model, and reads the configuration file.

    Args:
        options: Of ``accelfn plan-memory``: ``mesh`` or ``config_file``, or both, where the mesh wins.
        form: "table", "json" or "svg".

    Raises:
        AccelfnError: The mesh, the file or the model don't fit each other.
        ValueError: The model can't be built, or there is no such dtype.
    """
    from accelfn.parallel import plan_model
    from accelfn.parallel.planning.memory import budget_of
    from accelfn.parallel.planning.optimizer_states import states_of
    from accelfn.parallel.planning.step import plan_step

    ctx = _context(options)
    model = _model(options)
    states = states_of(_optimizer(options), "--optimizer")
    plan = None if ctx.strategy.engine is not None else plan_model(ctx, model)
    # Both follow from one run of the model.
    budget, traffic = budget_of(ctx, plan_step(ctx, model, batch=_batch(ctx, model, options)), states)
    if form == "table":
        return "\n\n".join(str(part) for part in (plan, budget, traffic) if part is not None)
    if form == "svg":
        return budget.svg()
    mesh = traffic.mesh
    return json.dumps(
        {
            "source": options.source,
            "mesh": {axis: mesh.size(axis) for axis in mesh.active()},
            "bytes": {
                **budget._asdict(),
                "held": budget.held,
                "total": budget.total,
                "peak": budget.peak,
                "moved": dict(budget.moved),
            },
            "traffic": traffic_json(traffic),
        },
        indent=1,
    )


def traffic_json(traffic: Traffic) -> dict[str, Any]:
    """Return a step's traffic as JSON has it."""
    return {"exchanges": [one._asdict() for one in traffic.exchanges]}


def draw_search(options: argparse.Namespace, form: str) -> tuple[str, bool]:
    """Search the meshes of a number of ranks for those that fit the model that the arguments name.

    Effect: as :func:`draw_ranks`.

    Args:
        options: Of ``accelfn plan-memory``, with ``search``.
        form: "table", "json" or "svg".

    Returns:
        The text, and whether the model fits in a mesh.

    Raises:
        AccelfnError: The arguments are invalid or don't fit the model.
        ValueError: The model can't be built, or there is no such dtype.
    """
    from accelfn.bigmodel.source import call_on_meta
    from accelfn.parallel.planning.search import DEFAULT_AXES, search_meshes
    from accelfn.tree import count_rows, slice_tensors
    from accelfn.weights.index import parse_size

    axes = DEFAULT_AXES if options.axes is None else options.axes.split(",")
    shared = [axis for axis in ("cp", "sp") if axis in axes]
    if options.batch is not None and shared:
        raise ConfigurationError(
            f"--axes {shared[0]} shares sequences, and --batch doesn't say which dimension they have. Leave "
            f"{shared[0]} out, or use --batch_size and --sequence_length."
        )
    model = _model(options)
    batch = None if options.batch is None else call_on_meta(options.batch)
    num_rows = options.batch_size
    if batch is not None:
        num_rows = count_rows(batch, "batch", "--search: the batch of --batch is split")
    asked, _ = _asked(options)
    for name in ("parallelism_config", "gradient_accumulation_steps", "gradient_accumulation_plugin"):
        asked.pop(name, None)

    def make_batch(ctx: Context, rows: int) -> Any:
        if batch is not None:
            return slice_tensors(batch, slice(rows))
        return _text(ctx, model, rows, options.sequence_length)

    search = search_meshes(
        options.ranks,
        model,
        memory=parse_size(options.memory, "--memory"),
        num_rows=num_rows,
        make_batch=make_batch,
        optimizer=_optimizer(options),
        axes=axes,
        ranks_per_node=options.ranks_per_node or 8,
        **asked,
    )
    fits = bool(search.layouts)
    if form == "svg":
        return search.svg(), fits
    if form == "table":
        return f"{search}\n\n{search.why()}" if options.why and search.refused else str(search), fits
    text = json.dumps(
        {
            "source": options.source,
            "layouts": [
                {
                    "mesh": one.name,
                    "rows": one.rows,
                    "num_batches": one.num_batches,
                    "bytes": {**one.budget._asdict(), "total": one.budget.total},
                    "traffic": traffic_json(one.traffic),
                    "between_nodes": one.between_nodes,
                }
                for one in search.layouts
            ],
            "refused": [one._asdict() for one in search.refused],
        },
        indent=1,
    )
    return text, fits


def _model(options: argparse.Namespace) -> nn.Module:
    import torch

    from accelfn.bigmodel.model_info import read_dtype
    from accelfn.bigmodel.source import build_source

    model = build_source(options.source)
    if options.dtype is None:
        return model
    dtype = read_dtype(options.dtype, "--dtype")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(
            f"--dtype {options.dtype} is for inference only. Use a dtype to train in, such as bfloat16."
        )
    return model.to(dtype)


def _optimizer(options: argparse.Namespace) -> OptimizerKind:
    """Return the optimizer that the arguments name: a name, a class, or bytes per parameter."""
    given: str = options.optimizer or "adamw"
    if ":" in given:
        try:
            return cast("OptimizerKind", pkgutil.resolve_name(given))
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"--optimizer {given}: {error}.") from error
    try:
        return float(given)
    except ValueError:
        return given


def _batch(ctx: Context, model: nn.Module, options: argparse.Namespace) -> Any:
    """Return the batch that the arguments name, this rank's piece of it; None without any."""
    from accelfn.bigmodel.source import call_on_meta

    if options.batch is not None:
        return call_on_meta(options.batch)
    if options.batch_size is None:
        return None
    return _text(ctx, model, options.batch_size, options.sequence_length)


def _text(ctx: Context, model: nn.Module, rows: int, length: int) -> Any:
    """Return this rank's part of a batch of text."""
    import torch

    from accelfn.data import shard_sequence

    kind = type(model).__name__
    if getattr(model, "main_input_name", None) != "input_ids":
        raise ConfigurationError(
            f"--batch_size makes a batch of text, as models of transformers take it, and {kind} says nothing "
            "of input_ids. Use --batch MODULE:FUNCTION, a function that gives what the model is called with."
        )
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    batch = {"input_ids": ids}
    if kind.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel")):
        batch["labels"] = ids
    return shard_sequence(ctx, batch, dict.fromkeys(batch, 1))


def read_mesh(text: str) -> dict[str, int]:
    """Read the sizes of a mesh's axes. Pure.

    Raises:
        ConfigurationError: An axis is unknown or named twice, or its size isn't a number from 1.

    >>> read_mesh("dp_shard=8,tp=2")
    {'dp_shard': 8, 'tp': 2}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (one.strip() for one in part.partition("="))
        if not size.isdecimal() or not int(size):
            raise ConfigurationError(
                "--mesh takes AXIS=SIZE with sizes from 1, such as dp_shard=8,tp=2: got "
                f"{part.strip() or text!r}."
            )
        if axis not in _AXES:
            close = difflib.get_close_matches(axis, _AXES, 1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise ConfigurationError(f"--mesh: no axis {axis!r}. {hint}Axes are {', '.join(_AXES)}.")
        if axis in sizes:
            raise ConfigurationError(f"--mesh gives {axis} twice. Give it once.")
        sizes[axis] = int(size)
    return sizes


def _context(options: argparse.Namespace) -> Context:
    """Return the context that a script would have, started with the configuration on ranks of the mesh."""
    from accelfn.context import plan_context

    asked, size = _asked(options)
    if size is None:
        raise ConfigurationError(
            f"{options.config_file} says neither num_processes nor a mesh. Add --mesh, such as dp_shard=8."
        )
    return plan_context(size, **asked)


def _asked(options: argparse.Namespace) -> tuple[ContextOptions, int | None]:
    """Return the options of a context that the arguments ask for, and the number of its ranks."""
    from accelfn.context.config import (
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
    )

    asked: ContextOptions = {}
    size: int | None = None
    if options.config_file is not None:
        asked, size = _configured(options.config_file)
    if options.mesh is not None:
        sizes: dict[str, Any] = {f"{axis}_size": size for axis, size in read_mesh(options.mesh).items()}
        if options.num_microbatches is not None:
            sizes["pp_handler"] = PipelineParallelConfig(num_microbatches=options.num_microbatches)
        asked["parallelism_config"] = ParallelismConfig(**sizes)
        size = asked["parallelism_config"].total_size
    if options.mixed_precision is not None:
        asked["mixed_precision"] = options.mixed_precision
    if options.activation_checkpointing:
        plugin = asked.get("fsdp_plugin") or FullyShardedDataParallelPlugin(fsdp_version=2)
        asked["fsdp_plugin"] = replace(plugin, activation_checkpointing=True)
    if options.gradient_accumulation_steps is not None:
        asked.pop("gradient_accumulation_steps", None)
        asked["gradient_accumulation_plugin"] = GradientAccumulationPlugin(
            num_steps=options.gradient_accumulation_steps, sync_each_batch=options.sync_each_batch
        )
    return asked, size


def _configured(path: str) -> tuple[ContextOptions, int | None]:
    """Return what a configuration file asks of a context, as ``accelfn launch`` has it, and its ranks."""
    from accelfn.context.config import read_settings
    from accelfn.context.options import merge_settings
    from accelfn.launch.launch import load_config
    from accelfn.launch.machine import Machine
    from accelfn.launch.plan import machine_variables
    from accelfn.launch.sources import resolve

    resolved = resolve({}, {}, load_config(path, os.environ))
    asked = merge_settings({}, read_settings(machine_variables(resolved, Machine(), {}, 1)))
    asked.pop("cpu", None)
    mesh = asked.get("parallelism_config")
    return asked, resolved.config.num_processes or (None if mesh is None else mesh.total_size)
