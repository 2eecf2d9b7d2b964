"""8-bit matrix products: which linear layers compute in fp8, and by which engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from accelfn.config import (
    AORecipeKwargs,
    FP8Backend,
    Fp8Choice,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    choose_fp8,
    list_fp8_packages,
)
from accelfn.context import Context, DeviceFacts, check_fp8, read_hardware
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, modules_of
from accelfn.parallel.strategies.fsdp_plan import ignored_at
from accelfn.parallel.strategies.strategy import Application, Planning

#: Names of the engines' packages, for people.
_PACKAGES: Mapping[FP8Backend, str] = MappingProxyType(
    {FP8Backend.AO: "torchao", FP8Backend.TE: "transformer-engine", FP8Backend.MSAMP: "MS-AMP"}
)
#: Attribute of a model that MS-AMP has converted.
MSAMP_READY = "_accelfn_msamp"
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
        gathers: Whether FSDP gathers the weights in fp8. Their scales are then computed together before each
            forward pass.
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
        lines.append(f"{len(layers)} layer{'s' * (len(layers) > 1)}: {_few(layers)}")
        if self.gathers:
            lines.append("weights gathered in 8 bits")
        by_reason: dict[str, list[str]] = {}
        for name, why in self.kept.items():
            by_reason.setdefault(why, []).append(name)
        lines += [f"not {_few(names)}: {why}" for why, names in by_reason.items()]
        return "\n".join(lines)


def _few(names: list[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ..., {names[-1]}"


def fp8_backend_of(ctx: Context) -> FP8Backend | None:
    """Return the engine of a context's 8-bit matrix products; None without mixed precision "fp8".

    Raises:
        MissingExtraError: It isn't installed.
    """
    choice = _choice_of(ctx)
    return None if choice is None else choice.backend


def _choice_of(ctx: Context) -> Fp8Choice | None:
    if ctx.mixed_precision != "fp8":
        return None
    return choose_fp8(ctx.precision.fp8_recipe, list_fp8_packages())


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
        choice: The engine, from :func:`accelfn.config.choose_fp8`.
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
    ends: dict[str, str] = {}
    if linears and choice.backend != FP8Backend.TE:
        ends = {linears[-1]: "the last linear layer", linears[0]: "the first linear layer"}
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
    gathers = False
    if is_sharded and isinstance(recipe, AORecipeKwargs):
        gathers = bool((recipe.config or recipe).enable_fsdp_float8_all_gather)
    norms = _norms(facts) if choice.backend == FP8Backend.TE else ()
    return Fp8Plan(choice, tuple(converted), norms, kept, gathers, emulated)


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
    engine: str = "none",
    axes: Collection[str] = (),
    ignored: Iterable[str] = (),
) -> Fp8Plan | None:
    """Return the plan for a context, None without fp8; see :func:`plan_fp8`.

    Args:
        ctx: The device and the precision.
        facts: Of the complete model.
        model: The model, if there is one.
        engine: That averages its gradients; "shard" for FSDP.
        axes: Of the mesh, those of more than one rank that the model is prepared for.
        ignored: Names of the parameters that FSDP ignores.

    Raises:
        ConfigurationError: No layer would compute in fp8, the device can't, or the engine can't be combined
            with an option.
        MissingExtraError: The engine isn't installed.
    """
    choice = _choice_of(ctx)
    if choice is None:
        return None
    _refuse_combinations(ctx, choice, axes)
    if choice.backend == FP8Backend.MSAMP and MSAMP_READY not in vars(model or nn.Module()):
        raise ConfigurationError(
            "prepare_model: MS-AMP converts a model together with its optimizer. Pass both to one call of "
            "prepare, or prepare a model that isn't trained with ctx.replace(mixed_precision='bf16')."
        )
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
    return plan_fp8(choice, facts, device, is_sharded=engine == "shard", filtered=filtered, ignored=ignored)


def _refuse_combinations(ctx: Context, choice: Fp8Choice, axes: Collection[str]) -> None:
    """Refuse what an engine of 8-bit products can't be combined with. Pure."""
    plugin = ctx.strategy.fsdp
    is_ao, is_msamp = (choice.backend == one for one in (FP8Backend.AO, FP8Backend.MSAMP))
    for what, is_asked, reason in (
        ("tp_size", "tp" in axes, "its layers can't be shared by ranks"),
        ("pp_size", "pp" in axes and not is_ao, "it needs a forward pass of the complete model"),
        ("ep_size", "ep" in axes and not is_ao, "it needs equal numbers of rows in each step"),
        (
            "activation_checkpointing",
            not is_ao and plugin is not None and plugin.activation_checkpointing,
            "the recomputed products would not be in 8 bits",
        ),
        (
            'reduction="canonical"',
            not is_ao and ctx.reduction is not None,
            "its scales depend on the number of steps on each rank",
        ),
        ("dp_shard_size or fsdp_plugin", is_msamp and "dp_shard" in axes, "its weights can't be sharded"),
    ):
        if is_asked:
            raise ConfigurationError(
                f"mixed_precision='fp8' by {_PACKAGES[choice.backend]} can't be combined with {what}: "
                f"{reason}. Leave one of the two out, or use mixed_precision='bf16'."
            )


def with_msamp(ctx: Context, objects: Sequence[Any]) -> list[Any]:
    """Return the objects of a call of ``prepare``, after MS-AMP has converted them if it is the engine.

    Ranks: local.

    Raises:
        ConfigurationError: There isn't exactly one model with one optimizer.
    """
    found = list(objects)
    choice = None if ctx.strategy.engine is not None else _choice_of(ctx)
    if choice is None or not isinstance(choice.recipe, MSAMPRecipeKwargs):
        return found
    models = [index for index, item in enumerate(found) if isinstance(item, nn.Module)]
    optimizers = [index for index, item in enumerate(found) if isinstance(item, Optimizer)]
    if not models or MSAMP_READY in vars(found[models[0]]):
        return found
    if (len(models), len(optimizers)) != (1, 1):
        raise ConfigurationError(
            f"prepare: MS-AMP converts one model together with its optimizer: got {len(models)} model(s) and "
            f"{len(optimizers)} optimizer(s). Pass one of each, in a call for each model."
        )
    _refuse_combinations(ctx, choice, () if ctx.mesh is None else ctx.mesh.plan.active())
    from accelfn.parallel.engines.msamp import initialize

    (model,), (optimizer,) = models, optimizers
    found[model], found[optimizer] = initialize(ctx, found[model], found[optimizer], choice.recipe)
    setattr(found[model], MSAMP_READY, True)
    return found


def names_of_filtered(accept: Callable[[Any, str], bool], model: nn.Module) -> frozenset[str]:
    """Return the names of the linear layers that a user's filter selects."""
    return frozenset(
        name
        for name, module in modules_of(model).items()
        if isinstance(module, nn.Linear) and accept(module, name)
    )


def apply_fp8(model: nn.Module, plan: Fp8Plan) -> None:
    """Convert layers of a model as planned. Writes into it; names of parameters don't change.

    Ranks: local.

    Args:
        model: On any device, also meta.
        plan: From :func:`plan_fp8`.
    """
    recipe = plan.choice.recipe
    if isinstance(recipe, AORecipeKwargs):
        from accelfn.parallel.engines import torchao

        torchao.convert(model, plan.converted, recipe, gathers=plan.gathers, emulated=plan.emulated)
    elif plan.backend == FP8Backend.TE:
        from accelfn.parallel.engines import transformer_engine

        transformer_engine.convert(model, plan.converted, plan.norms)


def plan(at: Planning) -> Fp8Plan | None:
    """Return which layers compute in 8 bits; None without mixed precision "fp8"."""
    axes = at.mesh.active()
    return plan_fp8_of(at.ctx, at.facts, at.model, engine=at.engine, axes=axes, ignored=ignored_at(at))


def apply(plan: Fp8Plan, at: Application) -> None:
    """Convert layers."""
    apply_fp8(at.model, plan)


def apply_around(plan: Fp8Plan, at: Application) -> None:
    """Wrap the forward of a model, compiled if it is to be, whose layers are told when to compute in fp8."""
    if isinstance(plan.choice.recipe, TERecipeKwargs):
        from accelfn.parallel.engines import transformer_engine

        transformer_engine.with_fp8_autocast(at.model, plan.choice.recipe)
