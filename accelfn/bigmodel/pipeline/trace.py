"""A model as the list of operations that a micro-batch goes through, without its values."""

from __future__ import annotations

import bisect
import copy
import itertools
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.bigmodel.pipeline.batch import Example
from accelfn.bigmodel.pipeline.plan import Unit

__all__ = ("Traced", "crossing", "trace_model", "units_of", "value_of")

_ADVICE = (
    "It is run once on tensors without values. What can't be followed so are branches that depend on the "
    "values of tensors, results other than tensors in tuples, lists, dicts and outputs of transformers (pass "
    "use_cache=False, so that no cache is given back), and layers that quantise or talk to other processes. "
    "Change that part of the model, or spread it with load_checkpoint_and_dispatch instead."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What a model does with a micro-batch.

    Attributes:
        nodes: The operations, in order, without inputs and the output.
        tensors: Of each parameter and buffer that is used: the node that stands for it, by its name.
        constants: What else the operations use: the node of each, and it. Tensors that stand in the code, and
            the parts of it that are called as functions.
        inputs: The node of each leaf of the arguments; None where it isn't used as a tensor.
        outputs: Leaves of the result: nodes, and values that are none.
        out_spec: Of the result, as torch's pytrees have it.
        classes: Name of the class of each module that is called, by its name.
        paths: Of each operation: names of the modules that it stands in, from outer to inner.
    """

    nodes: tuple[fx.Node, ...]
    tensors: Mapping[str, fx.Node]
    constants: Mapping[fx.Node, Any]
    inputs: tuple[fx.Node | None, ...]
    outputs: tuple[Any, ...]
    out_spec: Any
    classes: Mapping[str, str]
    paths: tuple[tuple[str, ...], ...]


def trace_model(
    model: nn.Module,
    example: Example,
    rows: int,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype] | None = None,
) -> Traced:
    """Follow a micro-batch through a model, in evaluation mode. No memory is taken for values.

    Args:
        model: On any devices, such as meta. It isn't changed.
        example: What a call looks like.
        rows: Of a micro-batch.
        device: Where the model will be.
        dtypes: That tensors of the model will have, by their Python ids; else they keep theirs.

    Raises:
        ValueError: It can't be followed, writes into its buffers, or has tensors that are made of others.
    """
    packed = [name for name, one in model.named_parameters() if is_traceable_wrapper_subclass(one)]
    if packed:
        raise ValueError(
            f"prepare_pipeline: {', '.join(packed[:5])}{' and others' if len(packed) > 5 else ''} are made "
            "of other tensors, as those of quantised layers and of models that are spread over ranks, and "
            "the operations between two cuts don't know them. Pass a model with plain weights."
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # In this order, so that tensors of modules are tensors without values in the copy, too.
    known = {
        id(tensor): _without_values(
            mode, tensor, tuple(tensor.shape), device, (dtypes or {}).get(id(tensor), tensor.dtype)
        )
        for tensor in (*model.parameters(), *model.buffers())
    }
    leaves = [
        _without_values(
            mode, leaf, (rows, *leaf.shape[1:]) if has_rows else tuple(leaf.shape), device, leaf.dtype
        )
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf, has_rows in zip(example.leaves, example.is_batch, strict=True)
    ]
    args, kwargs = example.spec.unflatten(leaves)
    try:
        skeleton = copy.deepcopy(model, cast("dict[int, Any]", known)).eval()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of what it does itself
            program: Any = torch.export.export(skeleton, args, kwargs, strict=False)
            if any(_writes(node) for node in program.graph.nodes):
                # What one stage writes another would not see.
                program = program.run_decompositions({})
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(
            f"prepare_pipeline: {type(model).__name__} can't be followed to where it could be cut: "
            f"{type(error).__name__}: {first[:300]}\n{_ADVICE}"
        ) from error
    return _read(program)


def units_of(traced: Traced, no_split_classes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[Unit, ...]]:
    """Give the parts that a stage can begin with: each place where the first operation of a module stands.

    Args:
        traced: The model.
        no_split_classes: Names of classes of modules that aren't cut.

    Returns:
        For each part the number of its first operation, and what the plan has to know of it.
    """
    begins: dict[int, str] = {}
    seen: set[str] = set()
    for number, path in enumerate(traced.paths):
        new = [name for name in path if name not in seen]
        whole = [name for name in path if traced.classes[name] in no_split_classes]
        # A module that isn't cut may begin here itself.
        if number == 0 or (new and not any(name in seen for name in whole)):
            begins[number] = new[0]
        seen.update(path)
    starts = tuple(begins) or (0,)
    traffic = _traffic(traced)
    used: list[set[str]] = [set() for _ in starts]
    number_of = {node: number for number, node in enumerate(traced.nodes)}
    for name, node in traced.tensors.items():
        for user in node.users:
            used[bisect.bisect_right(starts, number_of.get(user, len(traced.nodes))) - 1].add(name)
    units = tuple(
        Unit(begins.get(start, ""), frozenset(names), traffic[start])
        for start, names in zip(starts, used, strict=True)
    )
    return starts, units


def crossing(traced: Traced, start: int) -> tuple[fx.Node, ...]:
    """Give the values that are needed from an operation on and are there before it: inputs, and results.

    Args:
        traced: The model.
        start: Number of the operation.
    """
    last = _last_uses(traced)
    before = (*(node for node in traced.inputs if node is not None), *traced.nodes[:start])
    return tuple(node for node in before if last[node] >= start and _is_value(node))


def _traffic(traced: Traced) -> list[int]:
    """Count before each operation the bytes of the values that are there and needed from it on."""
    last = _last_uses(traced)
    change = [0] * (len(traced.nodes) + 2)
    inputs = ((-1, node) for node in traced.inputs if node is not None)
    for number, node in (*inputs, *enumerate(traced.nodes)):
        if _is_value(node) and last[node] > number:
            change[number + 1] += value_of(node).nbytes
            change[last[node] + 1] -= value_of(node).nbytes
    return list(itertools.accumulate(change))


def _last_uses(traced: Traced) -> dict[fx.Node, int]:
    number_of = {node: number for number, node in enumerate(traced.nodes)}
    inputs = (node for node in traced.inputs if node is not None)
    # What no operation has for its own is the output.
    return {
        node: max((number_of.get(user, len(traced.nodes)) for user in node.users), default=-1)
        for node in (*inputs, *traced.nodes)
    }


def value_of(node: fx.Node) -> torch.Tensor:
    """Give the tensor without values that a node stands for."""
    return cast("torch.Tensor", node.meta["val"])


def _is_value(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _without_values(
    mode: FakeTensorMode,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    # Of the form that it will have on the device: a model of the meta device would be followed as one.
    with mode:
        if tuple(tensor.shape) == shape and not is_traceable_wrapper_subclass(tensor):
            empty = torch.empty_strided(shape, tensor.stride(), dtype=dtype, device=device)
        else:
            empty = torch.empty(shape, dtype=dtype, device=device)
        return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and node.target is not torch.ops.aten.detach_.default


def _read(program: Any) -> Traced:
    graph: fx.Graph = program.graph
    _drop_assertions(graph)
    nodes_by_name = {node.name: node for node in graph.nodes}
    tensors: dict[str, fx.Node] = {}
    constants: dict[fx.Node, Any] = {}
    inputs: list[fx.Node | None] = []
    for spec in program.graph_signature.input_specs:
        node = nodes_by_name[spec.arg.name]
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            if node.users:
                tensors[spec.target] = node
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[node] = program.constants[spec.target]
        elif spec.kind == InputKind.USER_INPUT:
            inputs.append(node if _is_value(node) else None)
        elif node.users:
            raise ValueError(f"prepare_pipeline: the model uses {spec.target}, which no stage can hold.")
    outputs: list[Any] = []
    for spec in program.graph_signature.output_specs:
        if spec.kind == OutputKind.BUFFER_MUTATION:
            raise ValueError(
                f"prepare_pipeline: the model writes into its buffer {spec.target!r} in each forward pass. "
                "With micro-batches it would write several times. Change that, or spread the model with "
                "load_checkpoint_and_dispatch instead."
            )
        if spec.kind == OutputKind.USER_OUTPUT:
            is_constant = isinstance(spec.arg, ConstantArgument)
            outputs.append(spec.arg.value if is_constant else nodes_by_name[spec.arg.name])
    for node in graph.nodes:
        if node.op == "get_attr":
            constants[node] = operator.attrgetter(node.target)(program.graph_module)
    nodes = _operations(graph)
    classes: dict[str, str] = {"": ""}
    paths: list[tuple[str, ...]] = []
    for node in nodes:
        stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        # Of a module that is called again the name has a number behind it.
        names = [(name.split("@")[0], kind) for name, kind in stack.values()] or [("", "")]
        classes.update(
            (name, (kind if isinstance(kind, str) else kind.__qualname__).rpartition(".")[2])
            for name, kind in names
        )
        paths.append(tuple(name for name, _ in names))
    return Traced(
        nodes=nodes,
        tensors=MappingProxyType(tensors),
        constants=MappingProxyType(constants),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        out_spec=program.call_spec.out_spec,
        classes=MappingProxyType(classes),
        paths=tuple(paths),
    )


def _drop_assertions(graph: fx.Graph) -> None:
    """Take out what only compares shapes, which never differ, and what is used by nothing."""
    for node in reversed(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _operations(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Give the operations in order; the parts of a result of several tensors stand right behind it."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        found[node] = None
        if not _is_value(node):
            found.update((user, None) for user in node.users if user.target is operator.getitem)
    return tuple(found)
