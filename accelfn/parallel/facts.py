"""The facts of a model that plans need: names, shapes and blocks, of real or meta parameters."""

from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from inspect import Parameter, getsource, signature
from math import prod
from textwrap import dedent
from threading import Lock
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

# CPython counts the depth of parses for all threads together; overlapping ones raise SystemError.
_PARSING = Lock()

# Attributes of attention modules: numbers of heads, and features of one head.
_COUNTS = (
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)
_DIMS = ("head_dim", "head_size", "attention_head_size")


class Heads(NamedTuple):
    """The heads of an attention module.

    Attributes:
        counts: Its numbers of heads, by the attribute's name.
        dim: Features of one head; None if no attribute has it.
    """

    counts: Mapping[str, int]
    dim: int | None


class Experts(NamedTuple):
    """A module that may hold experts.

    Attributes:
        num_experts: Its attribute ``num_experts``; None without one.
        takes: Arguments of its ``forward``, by their number: "counts" for ``(x, counts)``, or
            "routes" for ``(hidden, index, weights)``.
    """

    num_experts: int | None
    takes: Literal["counts", "routes"]


class ModelFacts(NamedTuple):
    """The outline of a model. A value without modules and tensors.

    Attributes:
        shapes: Shape of each parameter, by its name; a tied parameter has an entry for each of its names.
        dtypes: Dtype of each parameter.
        trainable: Names of the parameters that require a gradient.
        ties: Names of each tied parameter, in the order of ``named_parameters``.
        kinds: Class of each module, by its name; the model itself has the name "".
        order: Names of the modules in the order of their calls, as far as the source of the forwards around
            the blocks shows it, and else in the order of registration. A module with several names is listed
            under each of them.
        aliases: First name of a module with several names, by each of the others.
        blocks: Names of the modules that repeat, in the model's order: those whose classes the model lists in
            ``_no_split_modules``, else the items of lists of modules of one class.
        containers: Names of the modules without a ``forward`` of their own, such as ``nn.ModuleList``.
        tp_plan: The tensor parallel plan of the model's authors: style by pattern; None without one.
        layers: "linear" or "embedding" for each module of these classes and their subclasses.
        heads: Heads of attention modules, by their names.
        experts: Modules with parameters of their own whose ``forward`` has the arguments of experts.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    trainable: frozenset[str]
    ties: tuple[tuple[str, ...], ...]
    kinds: Mapping[str, str]
    order: tuple[str, ...]
    aliases: Mapping[str, str]
    blocks: tuple[str, ...]
    containers: frozenset[str]
    tp_plan: Mapping[str, str] | None
    layers: Mapping[str, str]
    heads: Mapping[str, Heads]
    experts: Mapping[str, Experts]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, those of tied ones included."""
        return tuple(self.shapes)

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of the parameters, each parameter once: by its first name."""
        others = {name for group in self.ties for name in group[1:]}
        return tuple(name for name in self.shapes if name not in others)

    def numel(self, *names: str) -> int:
        """Return the number of elements of the named parameters."""
        return sum(prod(self.shapes[name]) for name in names)

    def size_bytes(self, *names: str) -> int:
        """Return the bytes of the named parameters."""
        return sum(prod(self.shapes[name]) * self.dtypes[name].itemsize for name in names)

    def only(self, modules: Container[str], parameters: Container[str]) -> ModelFacts:
        """Return the facts of a part of the model.

        Args:
            modules: Names of the modules that are left.
            parameters: Names of the parameters that are left.
        """
        ties = (tuple(name for name in group if name in parameters) for group in self.ties)
        return self._replace(
            shapes={name: shape for name, shape in self.shapes.items() if name in parameters},
            dtypes={name: dtype for name, dtype in self.dtypes.items() if name in parameters},
            trainable=frozenset(name for name in self.trainable if name in parameters),
            ties=tuple(group for group in ties if len(group) > 1),
            kinds={name: kind for name, kind in self.kinds.items() if name in modules},
            order=tuple(name for name in self.order if self.aliases.get(name, name) in modules),
            aliases={name: first for name, first in self.aliases.items() if first in modules},
            blocks=tuple(name for name in self.blocks if name in modules),
            containers=frozenset(name for name in self.containers if name in modules),
            layers={name: layer for name, layer in self.layers.items() if name in modules},
            heads={name: heads for name, heads in self.heads.items() if name in modules},
            experts={name: experts for name, experts in self.experts.items() if name in modules},
        )

    def without(self, blocks: Collection[str]) -> ModelFacts:
        """Return the facts of the model without some blocks."""
        gone = set(blocks)
        return self.only(
            {name for name in self.kinds if owner_of(name, gone) is None},
            {name for name in self.shapes if owner_of(name, gone) is None},
        )


def read_facts(model: nn.Module) -> ModelFacts:
    """Read the facts of a model, whose parameters may be on the meta device.

    Ranks: local.

    Raises:
        TypeError: It isn't a model.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    >>> model[1].weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    >>> facts = read_facts(model)
    >>> facts.shapes["1.weight"], facts.numel(*facts.names), facts.kinds["0"]
    ((2, 3), 17, 'Linear')
    """
    if not isinstance(cast("object", model), nn.Module):
        raise TypeError(
            f"the model must be a torch.nn.Module, got {model!r}. Its parameters may be on the meta device."
        )
    named = dict(model.named_parameters(remove_duplicate=False))
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in named.items():
        by_parameter.setdefault(id(parameter), []).append(name)
    modules = modules_of(model)
    first = {id(module): name for name, module in modules.items()}
    with_aliases = cast(
        "dict[str, nn.Module]", dict(cast("Any", model).named_modules(remove_duplicate=False))
    )
    blocks = _blocks(model, modules)
    return ModelFacts(
        shapes={name: tuple(parameter.shape) for name, parameter in named.items()},
        dtypes={name: parameter.dtype for name, parameter in named.items()},
        trainable=frozenset(name for name, parameter in named.items() if parameter.requires_grad),
        ties=tuple(tuple(names) for names in by_parameter.values() if len(names) > 1),
        kinds={name: type(module).__name__ for name, module in modules.items()},
        order=_order(model, blocks),
        aliases={
            name: first[id(module)] for name, module in with_aliases.items() if first[id(module)] != name
        },
        blocks=blocks,
        containers=frozenset(name for name, module in modules.items() if _is_container(module)),
        tp_plan=_tp_plan(model),
        layers={
            name: "linear" if isinstance(module, nn.Linear) else "embedding"
            for name, module in modules.items()
            if isinstance(module, (nn.Linear, nn.Embedding))
        },
        heads={name: heads for name, module in modules.items() if (heads := _heads(module)) is not None},
        experts=_experts(modules),
    )


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name, each once; the model itself has the name ""."""
    found: dict[str, nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    return found


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """List the items of each outermost ``ModuleList`` whose items are all of one class, by name. Pure.

    >>> repeated_blocks(nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), nn.ReLU()))
    ('0.0', '0.1')
    """

    def find(module: nn.Module, prefix: str) -> Iterator[str]:
        children = list(module.named_children())
        repeats = isinstance(module, nn.ModuleList) and len({type(child) for _, child in children}) == 1
        for name, child in children:
            if repeats:
                yield f"{prefix}{name}"
            else:
                yield from find(child, f"{prefix}{name}.")

    return tuple(find(model, ""))


def owner_of(name: str, modules: frozenset[str] | set[str]) -> str | None:
    """Return the innermost of ``modules`` that contains a parameter or module, by its name; None for none.

    >>> owner_of("layers.0.mlp.weight", {"", "layers.0", "layers.1"})
    'layers.0'
    """
    while name:
        if name in modules:
            return name
        name = name.rpartition(".")[0]
    return "" if "" in modules else None


def table_text(rows: Mapping[str, str]) -> str:
    r"""Format lines of text by title, which may have several, as a table.

    >>> print(table_text({"model": "Linear", "mesh": "dp 2\ntp 2"}))
    model  Linear
    mesh   dp 2
           tp 2
    """
    width = max(map(len, rows))
    indent = "\n" + " " * (width + 2)
    return "\n".join(f"{title.ljust(width)}  {text.replace(chr(10), indent)}" for title, text in rows.items())


def list_text(names: Iterable[str]) -> str:
    """Return names of modules in a line; of more than four the first two and the last.

    >>> list_text(f"layers.{number}" for number in range(80))
    'layers.0, layers.1, ..., layers.79 (80)'
    """
    found = [name or "the model" for name in names]
    if len(found) <= 4:
        return ", ".join(found)
    return f"{found[0]}, {found[1]}, ..., {found[-1]} ({len(found)})"


def _blocks(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    listed = {kind for module in modules.values() for kind in _no_split(module)}
    named = tuple(name for name, module in modules.items() if name and type(module).__name__ in listed)
    return named or repeated_blocks(model)


def _no_split(module: nn.Module) -> tuple[str, ...]:
    """Return the classes in transformers' ``_no_split_modules``, which wrappers such as peft's pass on."""
    found: object = getattr(module, "_no_split_modules", None)
    if not isinstance(found, (list, tuple, set, frozenset)):
        return ()
    return tuple(name for name in cast("list[object]", found) if isinstance(name, str))


def _order(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all modules in the order of their calls, as far as it is known."""
    around = {""}
    for name in blocks:
        while name := name.rpartition(".")[0]:
            around.add(name)
    found: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        found.append(name)
        places = _places_of_calls(type(module)) if name in around and not _is_container(module) else {}
        children: list[tuple[tuple[int, int], str, nn.Module]] = []
        registered = cast("dict[str, nn.Module | None]", vars(module)["_modules"])
        for key, child in registered.items():  # unlike named_children(), with aliases
            if child is not None:
                place = children[-1][0] if children else (0, 0)  # unknown: with the child registered before
                children.append((places.get(key, place), key, child))
        for _, key, child in sorted(children, key=lambda child: child[0]):
            visit(child, f"{name}.{key}" if name else key)

    visit(model, "")
    return tuple(found)


def _places_of_calls(kind: type[nn.Module]) -> dict[str, tuple[int, int]]:
    """Return where a class's ``forward`` calls a child, or loops over it: line and column, if only once."""
    try:
        source = dedent(getsource(kind.forward))
        with _PARSING:
            tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):  # no source
        return {}
    places: dict[str, set[tuple[int, int]]] = {}

    for node in ast.walk(tree):
        place: tuple[int, int] = (0, 0)
        used: Iterable[ast.AST | None] = ()
        if isinstance(node, ast.Call):  # at its end, after its arguments
            place = (node.end_lineno or 0, node.end_col_offset or 0)
            used = (node.func, getattr(node.func, "value", None))  # self.norm(x), or self.norms[0](x)
        elif isinstance(node, (ast.For, ast.comprehension)):
            place = (node.iter.lineno, node.iter.col_offset)
            used = ast.walk(node.iter)
        for item in used:
            if (
                isinstance(item, ast.Attribute)
                and isinstance(item.value, ast.Name)
                and item.value.id == "self"
            ):
                places.setdefault(item.attr, set()).add(place)
    return {name: next(iter(found)) for name, found in places.items() if len(found) == 1}


def _is_container(module: nn.Module) -> bool:
    return type(module).forward in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _tp_plan(model: nn.Module) -> Mapping[str, str] | None:
    found: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return dict(cast("Mapping[str, str]", found)) if isinstance(found, Mapping) else None


def _heads(module: nn.Module) -> Heads | None:
    stated = {name: value for name in (*_COUNTS, *_DIMS) if type(value := vars(module).get(name)) is int}
    dim = next((stated[name] for name in _DIMS if name in stated), None)
    counts = {name: value for name, value in stated.items() if name in _COUNTS}
    return Heads(counts, dim) if stated else None


def _experts(modules: Mapping[str, nn.Module]) -> Mapping[str, Experts]:
    numbers: dict[type, int | None] = {}
    found: dict[str, Experts] = {}
    for name, module in modules.items():
        kind = type(module)
        if next(module.parameters(recurse=False), None) is None:
            continue
        if kind not in numbers:
            numbers[kind] = _num_arguments(kind)
        count = getattr(module, "num_experts", None)
        if numbers[kind] in (2, 3):
            takes: Literal["counts", "routes"] = "counts" if numbers[kind] == 2 else "routes"
            found[name] = Experts(count if type(count) is int else None, takes)
    return found


def _num_arguments(kind: type[nn.Module]) -> int | None:
    """Return the number of positional arguments of a class's ``forward``; None if it is unknown."""
    try:
        taken = [*signature(kind.forward).parameters.values()][1:]
    except ValueError:
        return None
    return sum(
        argument.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for argument in taken
    )
