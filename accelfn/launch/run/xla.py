"""Run a function of a script on every core of a TPU, through torch_xla.

``python -m accelfn.launch.run.xla FUNCTION N script|module NAME arguments``
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType


def find_function(name: str, script: str, *, is_module: bool) -> Callable[[int], object]:
    """Import a script as a module, and give its function. Effect: runs the module's top level.

    Raises:
        SystemExit: There is no such function.
    """
    if is_module:
        module = importlib.import_module(script)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        module = _import_file(script)
    function = getattr(module, name, None)
    if not callable(function):
        sys.exit(
            f"accelfn launch: error: {script} has no function {name!r} to run on each core of the TPU. "
            "Name the right one with --main_training_function."
        )
    return function


def _import_file(path: str) -> ModuleType:
    # Under its own name, so that processes that are spawned can import it again.
    return importlib.import_module(os.path.splitext(os.path.basename(path))[0])


def main() -> None:
    """Start the processes of a TPU. Effect: starts them and waits.

    Raises:
        SystemExit: torch_xla is not installed, or the script has no such function.
    """
    name, num_processes, kind, script, *arguments = sys.argv[1:]
    if importlib.util.find_spec("torch_xla") is None:
        sys.exit("accelfn launch: error: --tpu needs torch_xla. Run: pip install 'torch_xla[tpu]'")
    spawn = importlib.import_module("torch_xla.distributed.xla_multiprocessing").spawn
    sys.argv = [script, *arguments]
    function = find_function(name, script, is_module=kind == "module")
    # torch_xla takes one process or all of them.
    spawn(function, args=(), nprocs=1 if num_processes == "1" else None)


if __name__ == "__main__":
    main()
