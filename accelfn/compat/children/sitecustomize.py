"""Installs the alias in a Python process that a program under the alias has started.

Its directory is first on PYTHONPATH then, so that Python imports this module when it starts; the
sitecustomize that it would have imported is imported after it.
"""

import os
import sys

_VARIABLE = "ACCELFN_COMPAT_CHILD"


def _run() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    own = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    try:
        import sitecustomize  # pyright: ignore[reportUnusedImport] # noqa: F401 -- the environment's own
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own
    try:
        from accelfn.compat import install
    except ModuleNotFoundError as error:  # another Python, without accelfn or its packages
        if error.name not in ("accelfn", "torch"):
            raise
    else:
        install()


if _VARIABLE in os.environ:
    _run()
