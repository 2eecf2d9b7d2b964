"""Run a function of a script on every core of a TPU with torch_xla.

``python -m accelfn.launch.xla FUNCTION N script|module NAME arguments``
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable


def find_function(name: str, script: str, *, is_module: bool) -> Callable[[int], object]:
    """Import a script as a module, and return one of its functions.

    Raises:
        SystemExit: The function doesn't exist.
    """
    if is_module:
        module = importlib.import_module(script)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        # Under its own name, so that spawned processes can import it.
        module = importlib.import_module(os.path.splitext(os.path.basename(script))[0])
    function = getattr(module, name, None)
    if not callable(function):
        sys.exit(
            f"accelfn launch: error: {script} has no function {name!r}. Pass the right one as "
            "--main_training_function."
        )
    return function


def main() -> None:
    """Start the processes of a TPU, and wait for them.

    Raises:
        SystemExit: torch_xla is not installed, or the function doesn't exist.
    """
    name, num_processes, kind, script, *arguments = sys.argv[1:]
    if importlib.util.find_spec("torch_xla") is None:
        sys.exit("accelfn launch: error: --tpu needs torch_xla. Run: pip install 'torch_xla[tpu]'")
    spawn = importlib.import_module("torch_xla.distributed.xla_multiprocessing").spawn
    sys.argv = [script, *arguments]
    function = find_function(name, script, is_module=kind == "module")
    # torch_xla starts either one process or all.
    spawn(function, args=(), nprocs=1 if num_processes == "1" else None)


if __name__ == "__main__":
    main()
