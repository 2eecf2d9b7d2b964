"""Which modules of a model FSDP gathers and frees as units of their own. Pure."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from accelfn.context.config import AutoWrapPolicy, FullyShardedDataParallelPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, modules_of, owner_of


def choose_units(
    plugin: FullyShardedDataParallelPlugin, facts: ModelFacts, wrapped: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Return the names of the units, inner ones before those around them; the model itself, "", is last.

    Without a policy the model's blocks are units, and what is left of it is the last one.

    Args:
        plugin: Says the policy.
        facts: Of the model.
        wrapped: What a policy that is a callable has chosen: :func:`names_of_wrapped`.

    Raises:
        ConfigurationError: A class that should be a unit isn't in the model, or tied parameters would be in
            two units.
    """
    policy = plugin.auto_wrap_policy
    if wrapped is not None:
        chosen = set(wrapped)
    elif policy == AutoWrapPolicy.NO_WRAP:
        chosen: set[str] = set()
    elif policy == AutoWrapPolicy.SIZE_BASED_WRAP:
        chosen = _by_size(facts, plugin.min_num_params)
    elif plugin.transformer_cls_names_to_wrap:
        chosen = _by_class(facts, tuple(plugin.transformer_cls_names_to_wrap))
    else:
        chosen = set(facts.blocks)
        if not chosen and policy == AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
            raise ConfigurationError(
                f"auto_wrap_policy=TRANSFORMER_BASED_WRAP: {facts.kinds['']} names no blocks "
                "(_no_split_modules), and has no list of modules of one class. Pass "
                "transformer_cls_names_to_wrap."
            )
    # A list of modules has no forward that could gather anything.
    chosen -= facts.containers | {""}
    if wrapped is None and not plugin.transformer_cls_names_to_wrap:  # nobody has asked for these by name
        _leave_ties_together(facts, chosen)
    units = (*(name for name in reversed(tuple(facts.kinds)) if name in chosen), "")
    _check_ties(facts, frozenset(units))
    return units


def _by_class(facts: ModelFacts, classes: tuple[str, ...]) -> set[str]:
    known = sorted(set(facts.kinds.values()))
    for name in classes:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(
                f"transformer_cls_names_to_wrap names {name!r}, and {facts.kinds['']} has no module of that "
                f"class.{hint} Its classes are {', '.join(known)}."
            )
    return {name for name, kind in facts.kinds.items() if kind in classes}


def _by_size(facts: ModelFacts, least: int) -> set[str]:
    """Find modules with at least so many parameters that aren't in units inside of them."""
    modules = frozenset(facts.kinds)
    left = dict.fromkeys(facts.kinds, 0)
    for name in facts.own_names:
        left[owner_of(name, modules) or ""] += facts.numel(name)
    chosen: set[str] = set()
    for name in reversed(tuple(facts.kinds)):  # what is inside of a module comes after it
        if not name:
            continue
        if left[name] >= least and name not in facts.containers:
            chosen.add(name)
        else:
            left[owner_of(name.rpartition(".")[0], modules) or ""] += left[name]
    return chosen


def _leave_ties_together(facts: ModelFacts, chosen: set[str]) -> None:
    """Let units go that a tied parameter would be in together with another one."""
    torn = True
    while torn:
        torn = False
        for group in facts.ties:
            owners = {owner_of(name, chosen) for name in group}
            if len(owners) > 1:
                torn = True
                chosen.difference_update(one for one in owners if one is not None)


def _check_ties(facts: ModelFacts, units: frozenset[str]) -> None:
    for group in facts.ties:
        owners = {name: owner_of(name, units) for name in group}
        if len(set(owners.values())) > 1:
            first, second = next(
                (one, other) for one in group for other in group if owners[one] != owners[other]
            )
            raise ConfigurationError(
                f"{first} and {second} are one tied parameter, and the policy puts them into two units: "
                f"{owners[first] or 'the model'!s} and {owners[second] or 'the model'!s}. FSDP gathers a "
                "parameter with one unit: leave both modules to the unit around them, or untie them."
            )


def names_of_wrapped(policy: Callable[..., Any], model: nn.Module) -> tuple[str, ...]:
    """Return the modules that a policy of the user's chooses.

    Args:
        policy: Called with each module but the model itself, and says whether it is a unit. One that takes
            ``recurse`` is called as torch's policies are, with ``recurse=False`` and ``nonwrapped_numel``.
        model: Real or meta.
    """
    takes = inspect.signature(policy).parameters
    as_torch = "recurse" in takes

    def wants(module: nn.Module) -> bool:
        if not as_torch:
            return bool(policy(module))
        return bool(policy(module, False, sum(one.numel() for one in module.parameters())))

    return tuple(name for name, module in modules_of(model).items() if name and wants(module))


def names_of_ignored(
    ignored: Iterable[nn.Module] | str | None, model: nn.Module, facts: ModelFacts
) -> tuple[str, ...]:
    """Return the names of the parameters that FSDP shall leave alone.

    Raises:
        ConfigurationError: Nothing in the model matches, or an ignored parameter is trained: nobody would
            average its gradient.
    """
    if ignored is None:
        return ()
    if isinstance(ignored, str):
        pattern = re.compile(ignored)
        modules = {name for name in facts.kinds if pattern.fullmatch(name)}
    else:
        names: Mapping[int, str] = {id(module): name for name, module in modules_of(model).items()}
        given = tuple(ignored)
        strangers = [type(one).__name__ for one in given if id(one) not in names]
        if strangers:
            raise ConfigurationError(
                f"ignored_modules holds a {strangers[0]} that is not in the {facts.kinds['']}. Pass its own "
                "modules, or a regular expression for their names."
            )
        modules = {names[id(one)] for one in given}
    found = tuple(name for name in facts.names if owner_of(name, modules) is not None)
    if not modules:
        raise ConfigurationError(
            f"ignored_modules={ignored!r} matches no module of the {facts.kinds['']}. It must match a whole "
            f"name, such as {next(iter(name for name in facts.kinds if name), '')!r}."
        )
    trained = [name for name in found if name in facts.trainable]
    if trained:
        raise ConfigurationError(
            f"ignored_modules holds {trained[0]}, which is trained: FSDP doesn't average the gradients of "
            "what it ignores, so ranks would drift apart. Freeze it, or leave it out of ignored_modules."
        )
    return found
