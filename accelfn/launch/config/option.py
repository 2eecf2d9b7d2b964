"""What a field of a record says about itself: its kind, its help, and its names outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from accelfn.launch.config.kinds import Kind

__all__ = ("Option", "accelerate_names", "option", "plain_names")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The part of a field that its name, type and default do not say.

    Attributes:
        kind: How the value is written.
        about: Help in a few words; the default is added where it is shown.
        flag: Name of the flag without dashes, where it isn't the section's prefix and the field's name.
        aliases: Further spellings of the flag, such as ``-m``.
        exports: Variables that scripts read the value from: accelfn's name, then Accelerate's.
        secret: Never printed.
        group: Heading in the help, for fields that aren't in a section.
    """

    kind: Kind
    about: str
    flag: str = ""
    aliases: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    secret: bool = False
    group: str = ""


def option(
    kind: Kind,
    about: str,
    *,
    flag: str = "",
    aliases: tuple[str, ...] = (),
    exports: tuple[str, ...] = (),
    secret: bool = False,
    group: str = "",
) -> Mapping[str, Option]:
    """Make the metadata of a dataclass field; see :class:`Option` for the arguments."""
    made = Option(
        kind=kind, about=about, flag=flag, aliases=aliases, exports=exports, secret=secret, group=group
    )
    return MappingProxyType({"option": made})


def accelerate_names(name: str) -> tuple[str, ...]:
    """Name a variable that Accelerate writes with its prefix.

    >>> accelerate_names("MIXED_PRECISION")
    ('ACCELFN_MIXED_PRECISION', 'ACCELERATE_MIXED_PRECISION')
    """
    return (f"ACCELFN_{name}", f"ACCELERATE_{name}")


def plain_names(name: str) -> tuple[str, ...]:
    """Name a variable that Accelerate writes without a prefix.

    >>> plain_names("FSDP_VERSION")
    ('ACCELFN_FSDP_VERSION', 'FSDP_VERSION')
    """
    return (f"ACCELFN_{name}", name)
