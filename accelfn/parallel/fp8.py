"""8-bit matrix products: which linear layers compute in fp8, and by which engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from accelfn.context import Context, DeviceFacts, check_fp8, read_hardware
from accelfn.context.config import (
    AORecipeKwargs,
    FP8AmaxAlgorithm,
    FP8Backend,
    Fp8Choice,
    TERecipeKwargs,
    choose_fp8,
    list_fp8_packages,
)
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, modules_of

#: Names of the engines' packages, for people.
_PACKAGES: Mapping[FP8Backend, str] = MappingProxyType(
    {FP8Backend.AO: "torchao", FP8Backend.TE: "transformer-engine", FP8Backend.MSAMP: "MS-AMP"}
)
# The hardware multiplies tiles of this size.
_TILE = 16
# Class of a linear layer that torchao has converted already.
_CONVERTED = "Float8Linear"
_MAX_ROWS = 8


class Fp8Plan(NamedTuple):
    """How a model computes matrix products in 8 bits. A value.

    Attributes:
        choice: The engine, why it was chosen, and its recipe.
        converted: Names of the linear layers that compute in fp8.
        norms: Names of the layer normalisations that transformer-engine replaces by its own.
        kept: Why a linear layer stays in high precision, by its name.
        gathers: Whether FSDP gathers the weights in fp8; their scales are then computed at once after each
            change of the weights.
        emulated: Whether values are rounded to fp8, but multiplied in float32.
    """

    choice: Fp8Choice
    converted: tuple[str, ...]
    norms: tuple[str, ...]
    kept: Mapping[str, str]
    gathers: bool
    emulated: bool

    @property
    def backend(self) -> FP8Backend:
        """The engine."""
        return self.choice.backend

    def only(self, facts: ModelFacts) -> Fp8Plan:
        """Return the plan of a part of the model."""
        return self._replace(
            converted=tuple(name for name in self.converted if name in facts.kinds),
            norms=tuple(name for name in self.norms if name in facts.kinds),
            kept={name: why for name, why in self.kept.items() if name in facts.kinds},
        )

    def __str__(self) -> str:
        """Return the lines of the model plan's table."""
        lines = [f"by {_PACKAGES[self.backend]}, {self.choice.why}"]
        if self.emulated:
            lines.append("emulated: rounded to 8 bits, multiplied in float32")
        if self.backend == FP8Backend.MSAMP:
            return "\n".join(lines)
        layers = [*self.converted, *self.norms]
        lines.append(f"{len(layers)} layers: {_few(layers)}")
        if self.gathers:
            lines.append("weights gathered in 8 bits; their scales computed at once after each step")
        by_reason: dict[str, list[str]] = {}
        for name, why in self.kept.items():
            by_reason.setdefault(why, []).append(name)
        lines += [f"not {_few(names)}: {why}" for why, names in by_reason.items()]
        return "\n".join(lines)


def _few(names: list[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ..., {names[-1]}"


def plan_fp8(
    choice: Fp8Choice,
    facts: ModelFacts,
    device: DeviceFacts,
    *,
    is_sharded: bool = False,
    filtered: Collection[str] | None = None,
    ignored: Iterable[str] = (),
) -> Fp8Plan:
    """Plan which layers of a model compute in fp8. Pure.

    torchao converts all plain linear layers except the first and the last one of the model, whose rounding
    costs most, and those with a size that isn't a multiple of 16; or those that the user's filter selects.
    transformer-engine converts all with sizes that are multiples of 16, and layer normalisations.

    Args:
        choice: The engine, from :func:`accelfn.context.config.choose_fp8`.
        facts: Of the complete model.
        device: Where it computes.
        is_sharded: Whether FSDP shards the model.
        filtered: The linear layers that ``module_filter_func`` selects; None without a filter.
        ignored: Names of the parameters that FSDP ignores.

    Raises:
        ConfigurationError: No layer would compute in fp8, or the device can't.
    """
    emulated = check_fp8(choice, device)
    recipe = choice.recipe
    if isinstance(recipe, TERecipeKwargs):
        _check_blocks(recipe)
    if choice.backend == FP8Backend.MSAMP:  # which replaces the weights itself
        return Fp8Plan(choice, (), (), {}, False, emulated)
    linears = [name for name in facts.order if facts.layers.get(name) == "linear"]
    ends = {} if choice.backend == FP8Backend.TE else _ends(linears)
    tied = {name for group in facts.ties for name in group}
    aliased = set(facts.aliases.values())
    left_out = frozenset(ignored)
    converted: list[str] = []
    kept: dict[str, str] = {}
    for name in linears:
        weight = f"{name}.weight"
        if facts.kinds[name] == _CONVERTED:
            why = ""
        elif facts.kinds[name] != "Linear":
            why = f"a {facts.kinds[name]}, which may be more than a linear layer"
        elif not name:
            why = "the model itself, which can't be replaced in place: put it into another module"
        elif weight in tied or name in aliased:
            why = "shared with another layer"
        elif weight in left_out:
            why = "ignored by FSDP"
        elif filtered is not None:
            why = "" if name in filtered else "module_filter_func leaves it out"
        else:
            sizes = [size for size in facts.shapes[weight] if size % _TILE]
            why = ends.get(name, f"size {sizes[0]} is not a multiple of {_TILE}" if sizes else "")
        if why:
            kept[name] = why
        else:
            converted.append(name)
    if not converted:
        raise ConfigurationError(_nothing(facts, kept))
    gathers = is_sharded and isinstance(recipe, AORecipeKwargs) and _gathers(recipe)
    norms = _norms(facts) if choice.backend == FP8Backend.TE else ()
    return Fp8Plan(choice, tuple(converted), norms, kept, gathers, emulated)


def _ends(linears: list[str]) -> dict[str, str]:
    return {linears[-1]: "the last linear layer", linears[0]: "the first linear layer"} if linears else {}


def _gathers(recipe: AORecipeKwargs) -> bool:
    if recipe.config is None:
        return recipe.enable_fsdp_float8_all_gather
    return bool(recipe.config.enable_fsdp_float8_all_gather)


def _norms(facts: ModelFacts) -> tuple[str, ...]:
    return tuple(
        name
        for name, kind in facts.kinds.items()
        if name
        and kind == "LayerNorm"
        and f"{name}.bias" in facts.shapes
        and len(facts.shapes[f"{name}.weight"]) == 1
    )


def _check_blocks(recipe: TERecipeKwargs) -> None:
    default = TERecipeKwargs()
    for name in ("amax_history_len", "amax_compute_algo"):
        value = getattr(recipe, name)
        if recipe.use_mxfp8_block_scaling and value != getattr(default, name):
            raise ConfigurationError(
                f"TERecipeKwargs: {name}={value!s} configures scales from the past, and "
                "use_mxfp8_block_scaling computes them from the present values. Leave one of the two out."
            )


def _nothing(facts: ModelFacts, kept: Mapping[str, str]) -> str:
    lines = [
        f"mixed_precision='fp8': no layer of the {facts.kinds['']} would compute in fp8"
        + (":" if kept else ", since it has no linear layer.")
    ]
    lines += [f"  {name or 'the model'}: {why}" for name, why in [*kept.items()][:_MAX_ROWS]]
    if len(kept) > _MAX_ROWS:
        lines.append(f"  ... and {len(kept) - _MAX_ROWS} more")
    lines.append(
        "Pass AORecipeKwargs(module_filter_func=...), which selects layers in place of the default rule, or "
        "prepare this model with ctx.replace(mixed_precision='bf16')."
    )
    return "\n".join(lines)


def plan_fp8_of(
    ctx: Context,
    facts: ModelFacts,
    model: nn.Module | None = None,
    *,
    is_sharded: bool = False,
    ignored: Iterable[str] = (),
) -> Fp8Plan | None:
    """Return the plan for a context, None without fp8; see :func:`plan_fp8`.

    Raises:
        ConfigurationError: The engine can't be combined with the context's options.
        MissingExtraError: The engine isn't installed.
    """
    if ctx.mixed_precision != "fp8":
        return None
    choice = choose_fp8(ctx.precision.fp8_recipe, list_fp8_packages())
    refuse_combinations(ctx, choice)
    accept = choice.recipe.module_filter_func if isinstance(choice.recipe, AORecipeKwargs) else None
    filtered = None
    if accept is not None:
        if model is None:
            raise ConfigurationError(
                "plan_model: module_filter_func needs the model's modules, which its facts don't have. Pass "
                "the model."
            )
        filtered = names_of_filtered(accept, model)
    device = next(
        (one for one in read_hardware().devices if one.type == ctx.device.type),
        DeviceFacts(type=ctx.device.type),
    )
    return plan_fp8(choice, facts, device, is_sharded=is_sharded, filtered=filtered, ignored=ignored)


def refuse_combinations(ctx: Context, choice: Fp8Choice) -> None:
    """Refuse options that an engine of 8-bit products can't be combined with. Pure."""


def names_of_filtered(accept: Callable[[Any, str], bool], model: nn.Module) -> frozenset[str]:
    """Return the names of the linear layers that a user's filter selects."""
    return frozenset(
        name
        for name, module in modules_of(model).items()
        if isinstance(module, nn.Linear) and accept(module, name)
    )


def apply_fp8(model: nn.Module, plan: Fp8Plan | None) -> None:
    """Convert layers of a model as planned. Writes into it; names of parameters don't change.

    Ranks: local.

    Args:
        model: On any device, also meta.
        plan: From :func:`plan_fp8`; None changes nothing.
    """
    if plan is None:
        return
    if plan.backend == FP8Backend.AO:
        from accelfn.parallel.engines.torchao import convert

        convert(model, plan)
