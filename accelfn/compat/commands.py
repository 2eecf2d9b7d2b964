"""The parts of Accelerate's command line that programs import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from accelfn.launch.config.files import find_config_file
from accelfn.launch.launch import load_config

default_config_file: str = find_config_file(None, {}, sys.platform, str(Path.home()))[0]


class LaunchValues:
    """The values of a configuration of launches."""

    def __init__(self, values: dict[str, Any]) -> None:
        """Show values by name, as attributes."""
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(vars(self))


def load_config_from_file(config_file: str | None) -> LaunchValues:
    """Read a configuration of ``accelfn config`` or ``accelerate config``.

    Raises:
        ConfigurationError: The file doesn't exist, or its content is invalid.
    """
    file = load_config(config_file, os.environ)
    return LaunchValues({} if file is None else dict(file.values))


def launch_main() -> None:
    """Run ``accelfn launch --compat`` with this process's arguments."""
    from accelfn.launch.main import main

    sys.exit(main(["launch", "--compat", *sys.argv[1:]]))
