"""``accelfn plan-memory --mesh``: say what each rank of a mesh would hold of a model in training."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from typing import TYPE_CHECKING, Any

from accelfn.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

    from accelfn.context import Context, ContextOptions

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
    import torch

    from accelfn.bigmodel.model_info import read_dtype
    from accelfn.bigmodel.source import build_source
    from accelfn.parallel import plan_memory, plan_model

    ctx = _context(options)
    model = build_source(options.source)
    if options.dtype is not None:
        dtype = read_dtype(options.dtype, "--dtype")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigurationError(
                f"--dtype {options.dtype} is for inference only. Use a dtype to train in, such as bfloat16."
            )
        model = model.to(dtype)
    plan = plan_model(ctx, model)
    batch = _batch(ctx, model, options)
    budget = plan_memory(ctx, model, optimizer=options.optimizer or "adamw", batch=batch)
    if form == "table":
        return f"{plan}\n\n{budget}"
    if form == "svg":
        return budget.svg()
    return json.dumps(
        {
            "source": options.source,
            "mesh": {axis: plan.mesh.size(axis) for axis in plan.mesh.active()},
            "bytes": {
                **budget._asdict(),
                "held": budget.held,
                "total": budget.total,
                "moved": dict(budget.moved),
            },
        },
        indent=1,
    )


def _batch(ctx: Context, model: nn.Module, options: argparse.Namespace) -> Any:
    """Return the batch that the arguments name, this rank's piece of it; None without any."""
    import torch

    from accelfn.bigmodel.source import call_on_meta
    from accelfn.data import shard_sequence

    if options.batch is not None:
        return call_on_meta(options.batch)
    if options.batch_size is None:
        return None
    kind = type(model).__name__
    if getattr(model, "main_input_name", None) != "input_ids":
        raise ConfigurationError(
            f"--batch_size makes a batch of text, as models of transformers take it, and {kind} says nothing "
            "of input_ids. Use --batch MODULE:FUNCTION, a function that gives what the model is called with."
        )
    ids = torch.empty(options.batch_size, options.sequence_length, dtype=torch.long, device="meta")
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
    from accelfn.context.config import ParallelismConfig

    asked: ContextOptions = {}
    size: int | None = None
    if options.config_file is not None:
        asked, size = _configured(options.config_file)
    if options.mesh is not None:
        sizes: dict[str, Any] = {f"{axis}_size": size for axis, size in read_mesh(options.mesh).items()}
        asked["parallelism_config"] = ParallelismConfig(**sizes)
        size = asked["parallelism_config"].total_size
    if options.mixed_precision is not None:
        asked["mixed_precision"] = options.mixed_precision
    if size is None:
        raise ConfigurationError(
            f"{options.config_file} says neither num_processes nor a mesh. Add --mesh, such as dp_shard=8."
        )
    return plan_context(size, **asked)


def _configured(path: str) -> tuple[ContextOptions, int | None]:
    """Return what a configuration file asks of a context, as ``accelfn launch`` has it, and its ranks."""
    from accelfn.context.config import read_settings
    from accelfn.context.options import merge_settings
    from accelfn.launch.config import resolve
    from accelfn.launch.launch import load_config
    from accelfn.launch.plan.choose import plan_variables
    from accelfn.launch.plan.machine import Machine

    resolved = resolve({}, {}, load_config(path, os.environ))
    asked = merge_settings({}, read_settings(plan_variables(resolved, Machine(), {}, 1)))
    asked.pop("cpu", None)
    mesh = asked.get("parallelism_config")
    return asked, resolved.config.num_processes or (None if mesh is None else mesh.total_size)
