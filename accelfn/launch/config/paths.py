"""Files that a configuration names, and that must be there when it is used."""

from __future__ import annotations

import os

from accelfn.errors import ConfigurationError
from accelfn.launch.config.fields import FIELDS, SECTIONS, value_of
from accelfn.launch.config.kinds import FILE
from accelfn.launch.config.sources import Resolved

__all__ = ("refuse_missing_files",)


def refuse_missing_files(resolved: Resolved) -> None:
    """Refuse a file that isn't there, before anything is started that would look for it. Looks at the disk.

    Files of sections that are switched off don't count.

    Raises:
        ConfigurationError: There is no such file.
    """
    off = {
        section.name
        for section in SECTIONS
        if section.switch and getattr(resolved.config, section.switch) != section.on
    }
    for field in FIELDS:
        path: object = value_of(resolved.config, field)
        if field.kind is not FILE or field.section in off or not isinstance(path, str):
            continue
        reason = "there is no file" if not os.path.exists(path) else "it must be a file, and is a folder:"
        if not os.path.isfile(path):
            origin = resolved.origins[field.name]
            where = "" if origin.source == "flag" else f" (from {origin})"
            raise ConfigurationError(f"{field.flags[0]}: {reason} {path!r}{where}. Check the path.")
