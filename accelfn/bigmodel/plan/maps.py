"""Device maps: made, checked, and found for what a caller asks for."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TypeAlias, cast

from torch import nn

from accelfn.bigmodel.places import Place, PlaceLike, read_place
from accelfn.bigmodel.plan.budgets import MaxMemory, balance_budgets, get_max_memory
from accelfn.bigmodel.plan.near import tell_unknown
from accelfn.bigmodel.plan.plan import DevicePlan, PlanOptions, plan_device_map
from accelfn.bigmodel.plan.shape import ModelShape, read_shape, require_shape
from accelfn.bigmodel.plan.sizes import AnyDtype

__all__ = (
    "MAP_NAMES",
    "DeviceMap",
    "check_device_map",
    "infer_auto_device_map",
    "plan_named_map",
    "resolve_device_map",
)

DeviceMap: TypeAlias = "str | Mapping[str, PlaceLike]"
"""``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, or places by names of modules."""

MAP_NAMES = ("auto", "balanced", "balanced_low_0", "sequential")
_MOST_NAMES = 5
_NO_DTYPES: Mapping[str, AnyDtype] = MappingProxyType({})


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Place]:
    """Decide where each part of a model lies, by sizes: see :func:`plan_device_map` for how.

    Ranks: local. Only sizes are read, so the model may be on the meta device.

    Args:
        model: Any module.
        max_memory: As :func:`get_max_memory` takes it. None for what this machine has free.
        no_split_module_classes: Names of classes whose modules stay whole, such as those with residual
            connections. Of a name that is the class of no module a warning tells, unless the model has it in
            ``_no_split_modules``.
        dtype: With which the model will be loaded; see :func:`compute_module_sizes`.
        special_dtypes: Dtypes of single tensors, by name; the model has to have all of them.
        verbose: Print each decision.
        clean_result: Name a module instead of all its parts, where these lie in one place.
        offload_buffers: Whether buffers of what is offloaded are offloaded too; it silences a warning.
        fallback_allocation: Where the first part for an accelerator is too large for it, put the first one
            there that isn't.

    Returns:
        Place by name of a module or a tensor; ``""`` is the whole model.

    Raises:
        ValueError: Something fits nowhere: the error says what it needs, and what each place has. Or an
            argument has another form.
        TypeError: ``model`` is no module, ``max_memory`` is no mapping, or a size is neither a text nor a
            number.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    >>> infer_auto_device_map(model, {0: 210, "cpu": "1GB"})
    {'0': 0, '1': 'cpu', '2': 'cpu'}
    """
    options = PlanOptions(
        no_split_module_classes=no_split_module_classes or (),
        dtype=dtype,
        special_dtypes=special_dtypes or _NO_DTYPES,
        clean_result=clean_result,
        offload_buffers=offload_buffers,
        fallback_allocation=fallback_allocation,
    )
    say = print if verbose else None
    shape = read_shape(model, "infer_auto_device_map")
    plan = plan_device_map(shape, get_max_memory(max_memory), options, say=say)
    return _with_warnings(plan)


def _with_warnings(plan: DevicePlan) -> dict[str, Place]:
    for text in plan.warnings:
        warnings.warn(text, stacklevel=3)
    return plan.device_map


def plan_named_map(
    shape: ModelShape,
    name: str,
    max_memory: MaxMemory | None = None,
    options: PlanOptions | None = None,
) -> DevicePlan:
    """Plan what one of the names of maps stands for.

    ``"auto"`` and ``"balanced"`` spread a model evenly over the accelerators, ``"balanced_low_0"`` leaves the
    first one as free as it can, and ``"sequential"`` fills one after the other.

    Ranks: local.

    Args:
        shape: Of the model.
        name: One of ``MAP_NAMES``.
        max_memory: As :func:`get_max_memory` takes it. None for what this machine has free.
        options: See :class:`PlanOptions`.

    Raises:
        ValueError: There is no such name, or as :func:`plan_device_map` does.
        TypeError: As :func:`plan_device_map` does.
    """
    require_shape("plan_named_map", shape)
    if name not in MAP_NAMES:
        raise ValueError(
            f"device_map must be one of {', '.join(map(repr, MAP_NAMES))}, or places by names of modules "
            f"such as {{'': 0}}: got {name!r}."
        )
    options = PlanOptions() if options is None else options
    budgets = get_max_memory(max_memory)
    if name != "sequential":
        budgets = balance_budgets(
            shape,
            budgets,
            options.no_split_module_classes,
            options.dtype,
            options.special_dtypes,
            low_zero=name == "balanced_low_0",
            leave_tenth=max_memory is None,
        )
    return plan_device_map(shape, budgets, options)


def resolve_device_map(
    model: nn.Module,
    device_map: DeviceMap,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Place]:
    """Return the map that a caller asks for, by a name or as it is.

    Ranks: local. Only sizes are read, so the model may be on the meta device.

    Args:
        model: Any module.
        device_map: A name, see :func:`plan_named_map`; or a map, which is checked.
        max_memory: As :func:`get_max_memory` takes it; for a name.
        no_split_module_classes: Names of classes whose modules stay whole. None for those that the model
            itself names in ``_no_split_modules``, as models of transformers do.
        dtype: With which the model will be loaded.
        special_dtypes: Dtypes of single tensors, by name.
        offload_buffers: Whether buffers of what is offloaded are offloaded too.
        fallback_allocation: See :class:`PlanOptions`.

    Returns:
        Place by name of a module or a tensor.

    Raises:
        ValueError: As :func:`plan_named_map` and :func:`check_device_map` do.
        TypeError: ``model`` is no module, ``device_map`` neither a name nor a map; or as
            :func:`plan_named_map` does.
    """
    if isinstance(device_map, Mapping):
        found = {name: read_place(place, f"device_map[{name!r}]") for name, place in device_map.items()}
        check_device_map(model, found)
        return found
    if not isinstance(cast("object", device_map), str):
        raise TypeError(
            f"device_map takes one of {', '.join(map(repr, MAP_NAMES))}, or places by names of modules such "
            f"as {{'': 0}}: got {device_map!r}."
        )
    shape = read_shape(model)
    given = shape.no_split_classes if no_split_module_classes is None else no_split_module_classes
    options = PlanOptions(
        no_split_module_classes=given,
        dtype=dtype,
        special_dtypes=special_dtypes or _NO_DTYPES,
        offload_buffers=offload_buffers,
        fallback_allocation=fallback_allocation,
    )
    return _with_warnings(plan_named_map(shape, device_map, max_memory, options))


def check_device_map(model: nn.Module, device_map: Mapping[str, PlaceLike]) -> None:
    """Check that a map names what a model has, and has a place for all that its state dict holds.

    Ranks: local.

    Args:
        model: Any module.
        device_map: Places by names of modules, parameters or buffers; ``""`` is the whole model.

    Raises:
        ValueError: A name isn't in the model, a tensor is neither named nor in a module that is, or there is
            no such place.
        TypeError: ``model`` is no module, or ``device_map`` no mapping.
    """
    shape = read_shape(model, "check_device_map")
    if not isinstance(cast("object", device_map), Mapping):
        raise TypeError(
            f"device_map takes places by names of modules, such as {{'': 0}}: got {device_map!r}. "
            "load_checkpoint_and_dispatch takes 'auto' and the like, and infer_auto_device_map makes a map."
        )
    modules = {module.name for module in shape.root.modules()}
    leaves = list(shape.root.leaves())
    known = modules | {leaf.name for leaf in leaves}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        raise ValueError(f"device_map names what the model doesn't have: {tell_unknown(unknown, known)}.")
    for name, place in device_map.items():
        read_place(place, f"device_map[{name!r}]")
    lost = [
        leaf.name for leaf in leaves if leaf.kind != "temporary" and not _is_covered(leaf.name, device_map)
    ]
    if lost:
        more = f" and {len(lost) - _MOST_NAMES} more" if len(lost) > _MOST_NAMES else ""
        raise ValueError(
            f"device_map has no place for {', '.join(lost[:_MOST_NAMES])}{more}. Name "
            f"{'it' if len(lost) == 1 else 'them'}, a module around, or the whole model as ''."
        )


def _is_covered(name: str, device_map: Mapping[str, object]) -> bool:
    while name not in device_map:
        if not name:
            return False
        name = name.rpartition(".")[0]
    return True
