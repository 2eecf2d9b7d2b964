"""Recipes for training with 8-bit matrix products.

Building a recipe needs none of the engines: whether one is installed is asked when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from accelfn.context.config.checks import (
    as_choice,
    check_bools,
    check_callables,
    check_ints,
    settle,
    settle_choice,
    unchecked,
    where,
    wrong_type,
)
from accelfn.context.config.enums import FP8AmaxAlgorithm, FP8Backend, FP8Format, FP8OptLevel
from accelfn.context.config.handlers import KwargsHandler
from accelfn.errors import ConfigurationError

__all__ = ("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs")


@dataclass(frozen=True, slots=True)
class TERecipeKwargs(KwargsHandler):
    """Recipe for transformer-engine.

    Attributes:
        use_autocast_during_eval: Whether 8-bit products are used in evaluation too. Default False.
        margin: Exponent taken off the scaling factors. Default 0.
        interval: Steps between two computations of the scaling factors. Default 1.
        fp8_format: HYBRID, E4M3 or E5M2. Default HYBRID.
        amax_history_len: Steps of largest values that are kept. Default 1024.
        amax_compute_algo: "max" or "most_recent". Default most_recent. The engine's own default is "max", so
            an adapter passes this field always, not only when it differs from the default here.
        override_linear_precision: For forward, input gradient and weight gradient: whether the product
            runs in high precision. Default (False, False, False).
        use_mxfp8_block_scaling: Whether blocks of 32 values have a scale each (newest hardware only); the two
            ``amax_*`` fields have no meaning then. Default False.
    """

    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: FP8Format | str = FP8Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: FP8AmaxAlgorithm | str = FP8AmaxAlgorithm.MOST_RECENT
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        _settle_transformer_engine(self)


@dataclass(frozen=True, slots=True)
class AORecipeKwargs(KwargsHandler):
    """Recipe for torchao.

    Attributes:
        config: A ``torchao.float8.Float8LinearConfig``, or ``None`` to build one from the two flags below.
            Default None.
        module_filter_func: Called with a module and its qualified name, says whether it is converted;
            ``None`` leaves out the first and the last Linear and those with a size that is not a
            multiple of 16. Default None.
        pad_inner_dim: Whether inner sizes are padded to a multiple of 16. Unused with ``config``. Default
            True.
        enable_fsdp_float8_all_gather: Whether FSDP2 gathers weights in 8 bits. Unused with ``config``.
            Default True.
    """

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    pad_inner_dim: bool = True
    enable_fsdp_float8_all_gather: bool = True

    def __post_init__(self) -> None:
        """Check the fields."""
        check_callables(self, "module_filter_func")
        check_bools(self, "pad_inner_dim", "enable_fsdp_float8_all_gather")


@dataclass(frozen=True, slots=True)
class MSAMPRecipeKwargs(KwargsHandler):
    """Recipe for MS-AMP.

    Attributes:
        opt_level: "O1" (gradients and their reduction in 8 bits) or "O2" (optimizer state too). Default O2.
    """

    opt_level: FP8OptLevel | str = FP8OptLevel.O2

    def __post_init__(self) -> None:
        """Normalise the field."""
        settle_choice(self, "opt_level", FP8OptLevel)


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8RecipeKwargs(KwargsHandler):
    """One recipe that leaves the engine open; :meth:`for_backend` gives the recipe of an engine.

    Attributes:
        backend: "TE", "AO" or "MSAMP" in any case; ``None`` takes the engine that is installed. Default None.
        opt_level: See :class:`MSAMPRecipeKwargs`. Default O2.
        use_autocast_during_eval: See :class:`TERecipeKwargs`, as for the next seven. Default False.
        margin: Default 0.
        interval: Default 1.
        fp8_format: Default HYBRID.
        amax_history_len: Default 1024.
        amax_compute_algo: Default most_recent.
        override_linear_precision: Default (False, False, False).
        use_mxfp8_block_scaling: Default False.
        pad_inner_dim: See :class:`AORecipeKwargs`. Default True.
        enable_fsdp_float8_all_gather: See :class:`AORecipeKwargs`. Default True.
    """

    # Descriptions of the peer disagree on E4M3 or HYBRID, and on a history of 1 or 1024. HYBRID because
    # gradients need the range of E5M2, 1024 so that one quiet step does not undo the scale; both are
    # also the values of TERecipeKwargs, so that the two ways to ask for the engine train alike.
    backend: FP8Backend | str | None = None
    opt_level: FP8OptLevel | str = FP8OptLevel.O2
    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: FP8Format | str = FP8Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: FP8AmaxAlgorithm | str = FP8AmaxAlgorithm.MOST_RECENT
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False
    pad_inner_dim: bool = True
    enable_fsdp_float8_all_gather: bool = True

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_choice(self, "backend", FP8Backend, optional=True)
        settle_choice(self, "opt_level", FP8OptLevel)
        check_bools(self, "pad_inner_dim", "enable_fsdp_float8_all_gather")
        _settle_transformer_engine(self)

    def for_backend(
        self, backend: FP8Backend | str | None = None
    ) -> TERecipeKwargs | AORecipeKwargs | MSAMPRecipeKwargs:
        """Return the recipe of one engine.

        Args:
            backend: The engine; ``None`` takes the field ``backend``.

        Returns:
            The fields of this record that the engine knows.

        Raises:
            ConfigurationError: No engine is named, or another one than in the field ``backend``.
        """
        chosen = self.backend if backend is None else as_choice("for_backend: backend", backend, FP8Backend)
        if chosen is None:
            raise ConfigurationError(
                f"FP8RecipeKwargs names no backend, got None. Pass one of {', '.join(FP8Backend.values())}."
            )
        if self.backend is not None and chosen != self.backend:
            raise ConfigurationError(
                f"FP8RecipeKwargs is for the backend {self.backend!s}, asked for {chosen!s}. "
                "Use dataclasses.replace to change the backend first."
            )
        if chosen == FP8Backend.AO:
            return AORecipeKwargs(
                pad_inner_dim=self.pad_inner_dim,
                enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather,
            )
        if chosen == FP8Backend.MSAMP:
            return MSAMPRecipeKwargs(opt_level=self.opt_level)
        return TERecipeKwargs(
            use_autocast_during_eval=self.use_autocast_during_eval,
            margin=self.margin,
            interval=self.interval,
            fp8_format=self.fp8_format,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            override_linear_precision=self.override_linear_precision,
            use_mxfp8_block_scaling=self.use_mxfp8_block_scaling,
        )


def _settle_transformer_engine(record: TERecipeKwargs | FP8RecipeKwargs) -> None:
    check_bools(record, "use_autocast_during_eval", "use_mxfp8_block_scaling")
    check_ints(record, "margin", minimum=0)
    check_ints(record, "interval", "amax_history_len", minimum=1)
    settle_choice(record, "fp8_format", FP8Format)
    settle_choice(record, "amax_compute_algo", FP8AmaxAlgorithm)
    override = unchecked(record, "override_linear_precision")
    items = tuple(cast("Iterable[object]", override)) if isinstance(override, (tuple, list)) else ()
    if [type(item) for item in items] != [bool] * 3:
        raise wrong_type(record, "override_linear_precision", "a tuple of three bools")
    settle(record, override_linear_precision=items)
    standard = record.amax_history_len == 1024 and record.amax_compute_algo == FP8AmaxAlgorithm.MOST_RECENT
    if record.use_mxfp8_block_scaling and not standard:
        raise ConfigurationError(
            f"{where(record, 'use_mxfp8_block_scaling')} keeps no history of largest values, got "
            f"amax_history_len={record.amax_history_len}, amax_compute_algo={record.amax_compute_algo!s}. "
            "Leave those two out, or turn block scaling off."
        )
