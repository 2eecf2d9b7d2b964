"""The configuration of a launch, and where its values come from."""

from accelfn.launch.config.fields import FIELD_OF, FIELDS, SECTIONS, Field, Section, build_config
from accelfn.launch.config.files import (
    CONFIG_VERSION,
    ConfigFile,
    default_path,
    find_config_file,
    format_config,
    parse_config,
    read_config,
)
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.config.sources import Given, Origin, Resolved, origin_rows, resolve

__all__ = (
    "CONFIG_VERSION",
    "FIELDS",
    "FIELD_OF",
    "SECTIONS",
    "ConfigFile",
    "Field",
    "Given",
    "LaunchConfig",
    "Origin",
    "Resolved",
    "Section",
    "build_config",
    "default_path",
    "find_config_file",
    "format_config",
    "origin_rows",
    "parse_config",
    "read_config",
    "resolve",
)
