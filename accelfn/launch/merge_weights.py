"""``accelfn merge-weights``: merge the sharded weights of FSDP into one file."""

import argparse
import os

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser


def run(options: argparse.Namespace) -> int:
    """Merge the weights. Effect: writes a file, and prints its path."""
    folder: str = options.checkpoint_dir
    if not os.path.isdir(folder):
        problem = "is a file" if os.path.exists(folder) else "doesn't exist"
        raise ConfigurationError(f"the directory {folder} {problem}. Check the path.")
    # Imported late, because it imports torch.
    from accelfn.checkpoint import merge_fsdp_weights

    is_safe, removes = not options.unsafe_serialization, options.remove_checkpoint_dir
    print(merge_fsdp_weights(folder, options.output_path, is_safe, removes))
    return 0


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn merge-weights",
        description="Merge the sharded weights of FSDP (torch.distributed.checkpoint) into one file.",
    )
    add = parser.add_argument
    add("checkpoint_dir", metavar="CHECKPOINT_DIR", help="directory that contains .metadata")
    add("output_path", metavar="OUTPUT", help="output directory")
    add("--unsafe_serialization", action="store_true", help="write pytorch_model.bin with torch.save instead")
    add("--remove_checkpoint_dir", action="store_true", help="remove CHECKPOINT_DIR afterwards")
    return parser
