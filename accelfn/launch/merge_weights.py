"""``accelfn merge-weights``: one file of weights, of the folder that FSDP's ranks wrote."""

import argparse
from pathlib import Path

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser


def run(options: argparse.Namespace) -> int:
    """Run ``accelfn merge-weights``. Effect: writes the file, and says where it is.

    Returns:
        The exit status: 0; 1 where the folder is damaged or the disk fails; 2 for bad input.
    """
    if not Path(options.checkpoint_dir).is_dir():
        what = "it is a file" if Path(options.checkpoint_dir).exists() else "there is no such directory"
        raise ConfigurationError(f"{options.checkpoint_dir}: {what}. Check the path.")
    # Not at the top: it loads torch, which --help and bad input do without.
    from accelfn.checkpoint import merge_fsdp_weights

    made = merge_fsdp_weights(
        options.checkpoint_dir,
        options.output_path,
        safe_serialization=not options.unsafe_serialization,
        remove_checkpoint_dir=options.remove_checkpoint_dir,
    )
    print(made)
    return 0


def make_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn merge-weights",
        description="Put the sharded weights of FSDP (torch.distributed.checkpoint) together into one file.",
    )
    parser.add_argument("checkpoint_dir", metavar="CHECKPOINT_DIR", help="the folder with .metadata in it")
    parser.add_argument("output_path", metavar="OUTPUT", help="directory for the file")
    parser.add_argument(
        "--unsafe_serialization",
        action="store_true",
        help="pytorch_model.bin by torch.save, and not model.safetensors",
    )
    parser.add_argument(
        "--remove_checkpoint_dir", action="store_true", help="remove the folder once the file is written"
    )
    return parser
