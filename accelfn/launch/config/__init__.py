"""The configuration of a launch and the sources of its values."""

from accelfn.launch.config.files import (
    ConfigFile,
    default_path,
    find_config_file,
    format_config,
    parse_config,
    read_config,
)
from accelfn.launch.config.options import OPTIONS, Option
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.config.resolve import Given, Origin, Resolved, origin_rows, resolve

__all__ = (
    "OPTIONS",
    "ConfigFile",
    "Given",
    "LaunchConfig",
    "Option",
    "Origin",
    "Resolved",
    "default_path",
    "find_config_file",
    "format_config",
    "origin_rows",
    "parse_config",
    "read_config",
    "resolve",
)
