"""``accelfn merge-weights``: merge the sharded weights of FSDP into one file."""

import argparse
from pathlib import Path

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser


def run(options: argparse.Namespace) -> int:
    """Merge the weights. Effect: writes a file, and prints its path."""
    if not Path(options.checkpoint_dir).is_dir():
        problem = "is a file" if Path(options.checkpoint_dir).exists() else "doesn't exist"
        raise ConfigurationError(f"the directory {options.checkpoint_dir} {problem}. Check the path.")
    # Imported late, because it imports torch.
    from accelfn.checkpoint import merge_fsdp_weights

    path = merge_fsdp_weights(
        options.checkpoint_dir,
        options.output_path,
        safe_serialization=not options.unsafe_serialization,
        remove_checkpoint_dir=options.remove_checkpoint_dir,
    )
    print(path)
    return 0


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn merge-weights",
        description="Merge the sharded weights of FSDP (torch.distributed.checkpoint) into one file.",
    )
    parser.add_argument(
        "checkpoint_dir",
        metavar="CHECKPOINT_DIR",
        help="directory that contains .metadata",
    )
    parser.add_argument("output_path", metavar="OUTPUT", help="output directory")
    parser.add_argument(
        "--unsafe_serialization",
        action="store_true",
        help="write pytorch_model.bin with torch.save instead of model.safetensors",
    )
    parser.add_argument(
        "--remove_checkpoint_dir", action="store_true", help="remove CHECKPOINT_DIR afterwards"
    )
    return parser
