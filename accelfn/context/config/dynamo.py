"""Options of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelfn.context.config.checks import check_bools, settle_choice, settle_options, where
from accelfn.context.config.enums import DynamoBackend, DynamoMode
from accelfn.context.config.handlers import NOT_PASSED_ON, KwargsHandler
from accelfn.context.config.options import thaw
from accelfn.errors import ConfigurationError

__all__ = ("TorchDynamoPlugin",)


@dataclass(frozen=True, slots=True)
class TorchDynamoPlugin(KwargsHandler):
    """How models are compiled.

    Attributes:
        backend: A ``DynamoBackend`` or its name in any case; "no" compiles nothing. Default NO.
        mode: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs. Default default.
        fullgraph: Whether a graph break is an error. Default False.
        dynamic: True traces with sizes as symbols, False compiles per shape, ``None`` lets torch decide.
            Default None.
        options: Options of the backend, instead of a ``mode``. Default None.
        disable: Whether ``torch.compile`` does nothing, for a test. Default False.
        use_regional_compilation: Whether repeated blocks are compiled one by one instead of the whole
            model; not an argument of ``torch.compile``, so not part of ``to_kwargs()``. Default False.
    """

    backend: DynamoBackend | str = DynamoBackend.NO
    mode: DynamoMode | str = DynamoMode.DEFAULT
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = field(default=False, metadata=NOT_PASSED_ON)

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_choice(self, "backend", DynamoBackend)
        settle_choice(self, "mode", DynamoMode)
        check_bools(self, "fullgraph", "disable", "use_regional_compilation")
        check_bools(self, "dynamic", optional=True)
        settle_options(self, "options", optional=True)
        if self.options is not None and self.mode != DynamoMode.DEFAULT:
            raise ConfigurationError(
                f"{where(self, 'mode')} and options exclude each other, got mode={self.mode!s} and "
                f"options={thaw(self.options)!r}. torch.compile takes one of the two: leave the other out."
            )

    def to_kwargs(self) -> dict[str, Any]:
        """Return what differs from the default, with the backend and mode in torch's spelling."""
        # A slots dataclass is a second class object, which super() without arguments does not know.
        kwargs = KwargsHandler.to_kwargs(self)
        for name in ("backend", "mode"):
            if name in kwargs:
                kwargs[name] = str(kwargs[name]).lower()
        return kwargs
