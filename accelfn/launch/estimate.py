"""``accelfn estimate-memory``: estimate the memory of a model without loading it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from typing import TYPE_CHECKING, Any

from accelfn.errors import MissingExtraError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.output import refuse_missing_model

if TYPE_CHECKING:
    from accelfn.bigmodel.model_info import ModelShape


def run(options: argparse.Namespace) -> int:
    """Estimate the memory of a model. Effect: prints the estimate.

    Nothing is downloaded, and no weight is read.

    Returns:
        The exit status: 0; 1 if a file is damaged; 2 if an argument is invalid.
    """
    if options.library_name != "timm":
        refuse_missing_model(options.model)
    # Not at the top: accelfn.bigmodel imports torch, which --help and bad input must not wait for.
    from accelfn.bigmodel.drawing import draw_estimate, draw_estimate_html, draw_estimate_svg
    from accelfn.bigmodel.estimate import ESTIMATED_DTYPES, estimate_json, estimate_memory

    dtypes = [name for value in options.dtypes or () for name in value.split(",") if name]
    estimate = estimate_memory(_shape(options), dtypes or ESTIMATED_DTYPES)
    if options.format == "json":
        text = json.dumps({"model": options.model, **estimate_json(estimate)}, indent=2)
    else:
        draw = {"table": draw_estimate, "svg": draw_estimate_svg, "html": draw_estimate_html}[options.format]
        text = draw(estimate, os.path.basename(os.path.normpath(options.model)) or options.model)
    print(text.removesuffix("\n"))
    return 0


def _shape(options: argparse.Namespace) -> ModelShape:
    from accelfn.bigmodel.model_info import read_shape
    from accelfn.bigmodel.source import read_source

    if options.library_name != "timm":
        return read_source(options.model, trust_remote_code=options.trust_remote_code)
    from accelfn.bigmodel.empty import init_empty_weights

    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise MissingExtraError(
            "--library_name timm needs timm, which isn't installed: pip install timm"
        ) from error
    with init_empty_weights(include_buffers=True):
        try:
            model = timm.create_model(options.model, pretrained=False)
        except RuntimeError as error:
            raise ValueError(f"timm has no model {options.model!r}: {error}") from error
    return read_shape(model)


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn estimate-memory",
        description="Estimate the memory of a model in several dtypes: all weights, the largest layer, and "
        "training with Adam. Nothing is downloaded, and no weight is read.",
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a folder with a config.json; a folder, file or index of safetensors; or MODULE:FUNCTION",
    )
    add("--dtypes", metavar="DTYPE", nargs="+", help="such as float32 bfloat16 int8 int4 (the common ones)")
    formats = ("table", "json", "svg", "html")
    add("--format", choices=formats, default="table", help="output format (table)")
    add("--library_name", choices=("transformers", "timm"), help="library of MODEL; timm: MODEL is its name")
    add("--trust_remote_code", action="store_true", help="run Python code in MODEL's folder")
    return parser
