"""``accelfn merge-weights``: one file of weights, of the folder that FSDP's ranks wrote."""

import sys
from collections.abc import Sequence
from pathlib import Path

from accelfn.launch.command_line import CommandParser, read_arguments


def run_merge_weights(argv: Sequence[str]) -> int:
    """Run ``accelfn merge-weights``. Effect: writes the file, and says where it is.

    Args:
        argv: Arguments after ``merge-weights``.

    Returns:
        The exit status: 0; 1 where the folder is damaged or the disk fails; 2 for bad input.

    Raises:
        SystemExit: 0 after ``--help``; 2 after one sentence on what is wrong.
    """
    parser = merge_weights_parser()
    options = read_arguments(parser, argv)
    if not Path(options.checkpoint_dir).is_dir():
        what = "it is a file" if Path(options.checkpoint_dir).exists() else "there is no such directory"
        parser.error(f"{options.checkpoint_dir}: {what}. Check the path.")
    # Not at the top: it loads torch, which --help and bad input do without.
    from accelfn.checkpoint import merge_fsdp_weights
    from accelfn.errors import AccelfnError, DamagedCheckpointError

    try:
        made = merge_fsdp_weights(
            options.checkpoint_dir,
            options.output_path,
            safe_serialization=not options.unsafe_serialization,
            remove_checkpoint_dir=options.remove_checkpoint_dir,
        )
    except DamagedCheckpointError as error:
        print(f"{parser.prog}: damaged: {error}", file=sys.stderr)
        return 1
    except (AccelfnError, FileExistsError, ValueError) as error:
        print(f"{parser.prog}: error: {str(error).removeprefix('merge_fsdp_weights: ')}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    print(made)
    return 0


def merge_weights_parser() -> CommandParser:
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
