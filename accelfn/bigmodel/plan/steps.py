"""Single steps of spreading a model, for programs that call them as Accelerate has them.

:func:`accelfn.plan_device_map` doesn't use them: it does the same for a whole model in less time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from accelfn.bigmodel.plan.budgets import convert_file_size_to_int
from accelfn.bigmodel.plan.sizes import read_class_names

__all__ = ("fallback_allocate", "get_module_size_with_ties")

Parts = Sequence[tuple[str, Any]]


def get_module_size_with_ties(
    tied_params: Iterable[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: Parts
) -> tuple[int, list[str], list[Any]]:
    """Count a module together with the modules that have its tied parameters too.

    Args:
        tied_params: Names of the tied parameters outside of the module.
        module_size: Its own bytes.
        module_sizes: Of :func:`compute_module_sizes`.
        modules_to_treat: Names and modules that have no place yet. A parameter that is in none of them has
            one, and adds nothing.

    Returns:
        The bytes of all of them, and the names and the modules that come along, each once.
    """
    names: list[str] = []
    modules: list[Any] = []
    for tied in tied_params:
        found = next((one for one in modules_to_treat if f"{tied}.".startswith(f"{one[0]}.")), None)
        if found is None:
            continue
        name, module = found
        if name not in names:
            names.append(name)
            modules.append(module)
            module_size += module_sizes.get(name, 0)
        module_size -= module_sizes.get(tied, 0)
    return module_size, names, modules


def fallback_allocate(
    modules: Parts,
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Collection[str] | str | None = None,
    tied_parameters: Iterable[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[tuple[str, Any]]]:
    """Find the first module or tensor that isn't larger than a limit, also inside of others.

    Args:
        modules: Names and modules that have no place yet, in order. The list is left as it is.
        module_sizes: Of :func:`compute_module_sizes`.
        size_limit: In bytes or such as ``"10GB"``.
        no_split_module_classes: Names of classes in whose modules it doesn't look.
        tied_parameters: Groups of names, as :func:`find_tied_parameters` gives them.

    Returns:
        Its name, itself, and what else has no place, where the modules around it are split; None, None and
        all of them if there is none.

    Raises:
        ValueError: The limit has another form.
    """
    limit = convert_file_size_to_int(size_limit)
    kept = frozenset(read_class_names(no_split_module_classes))
    groups = [tuple(names) for names in tied_parameters or ()]

    def look(parts: Parts) -> tuple[tuple[str, Any], list[tuple[str, Any]]] | None:
        for number, (name, part) in enumerate(parts):
            before, after = [*parts[:number]], [*parts[number + 1 :]]
            outside = [
                tied
                for names in groups
                if any(_is_in(one, name) for one in names)
                for tied in names
                if not _is_in(tied, name)
            ]
            size, _, _ = get_module_size_with_ties(outside, module_sizes.get(name, 0), module_sizes, modules)
            if size <= limit:
                return (name, part), [*before, *after]
            if isinstance(part, nn.Module) and type(part).__name__ not in kept:
                below: list[tuple[str, Any]] = [
                    (f"{name}.{key}", one)
                    for key, one in (*part.named_parameters(recurse=False), *part.named_children())
                ]
                found = look(below) if any(part.children()) else None
                if found is not None:
                    return found[0], [*before, *found[1], *after]
        return None

    found = look(modules)
    if found is None:
        return None, None, list(modules)
    return *found[0], found[1]


def _is_in(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")
