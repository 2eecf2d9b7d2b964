"""One stage of a model: the operations between two cuts, and the tensors that they use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import fx, nn

from accelfn.bigmodel.offload.blocks import Slot, slots_of
from accelfn.bigmodel.pipeline.trace import Traced, crossing, value_of

__all__ = ("Code", "Holder", "Stage", "cut_out", "find_slot", "form_of", "hold", "let_go")


class Code(NamedTuple):
    """What a stage does.

    Attributes:
        run: Takes the tensors, the constants and the values that come in, and gives what goes out.
        tensors: Names of parameters and buffers.
        constants: Tensors that stand in the code.
        comes_in: What comes in, in order, on the meta device.
        goes_out: What goes out.
    """

    run: fx.GraphModule
    tensors: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]
    comes_in: tuple[torch.Tensor, ...]
    goes_out: tuple[torch.Tensor, ...]


def cut_out(traced: Traced, start: int, stop: int) -> Code:
    """Put the operations from ``start`` on and before ``stop`` into a function of their own. Pure.

    What a later stage needs and an earlier one has goes through all that lie between.

    Args:
        traced: The model.
        start: Number of the first operation.
        stop: Number of the first one that isn't in it.
    """
    is_last = stop == len(traced.nodes)
    comes = crossing(traced, start)
    results = tuple(one for one in traced.outputs if isinstance(one, fx.Node))
    goes = results if is_last else crossing(traced, stop)
    inside = traced.nodes[start:stop]
    needed = {one for node in inside for one in node.all_input_nodes} | set(goes)
    tensors = [(name, node) for name, node in traced.tensors.items() if node in needed]
    used = {node: one for node, one in traced.constants.items() if node in needed}
    constants = [node for node, one in used.items() if isinstance(one, torch.Tensor)]
    functions = [node for node in used if node not in constants]
    graph = fx.Graph()
    known = {
        node: graph.placeholder(node.name) for node in (*(node for _, node in tensors), *constants, *comes)
    }
    known |= {node: graph.get_attr(node.name) for node in functions}
    for node in inside:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in goes))
    for node in graph.nodes:
        node.meta.clear()  # it holds all of the model's graph
    return Code(
        run=fx.GraphModule({node.name: used[node] for node in functions}, graph),
        tensors=tuple(name for name, _ in tensors),
        constants=tuple(used[node] for node in constants),
        comes_in=tuple(map(form_of, comes)),
        goes_out=tuple(map(form_of, goes)),
    )


def form_of(node: fx.Node) -> torch.Tensor:
    """Give what a node stands for on the meta device."""
    value = value_of(node)
    return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")


class Holder(nn.Module):
    """Holds tensors under the names that they have in a model, and computes nothing."""


class Stage(nn.Module):
    """A part of a model, called with the values that come in, in order.

    Attributes:
        held: Its parameters and buffers.
        code: What it does with them.
    """

    def __init__(self, held: Holder, code: Code) -> None:
        """Put together what is held, and what is done with it."""
        super().__init__()
        self.held = held
        self.code = code
        slots = dict(slots_of(held))
        self._slots = tuple(slots[name] for name in code.tensors)

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give what goes out: of the last stage the tensors of the result."""
        tensors = (slot.read() for slot in self._slots)
        return cast("tuple[torch.Tensor, ...]", self.code.run(*tensors, *self.code.constants, *values))


def hold(model: nn.Module, names: Iterable[str], device: torch.device) -> Holder:
    """Take tensors of a model to a device.

    A tensor that is there already, or on the meta device, is the model's own; another one is a copy.

    Args:
        model: It isn't changed.
        names: Of its parameters and buffers, as torch names them.
        device: Where to.
    """
    held = Holder()
    copies: dict[int, torch.Tensor] = {}
    for name in names:
        slot = find_slot(model, name)
        tensor = slot.read()
        new = copies.setdefault(id(tensor), tensor if tensor.is_meta else _moved(tensor, device))
        *path, key = name.split(".")
        owner: nn.Module = held
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, Holder())
            owner = owner.get_submodule(part)
        if slot.is_parameter:
            owner.register_parameter(key, cast("nn.Parameter", new))
        else:
            owner.register_buffer(key, new)
    return held


def find_slot(model: nn.Module, name: str) -> Slot:
    """Find where a tensor hangs, by any of its names."""
    path, _, key = name.rpartition(".")
    owner = model.get_submodule(path)
    return Slot(owner, key, key in dict(owner.named_parameters(recurse=False)))


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = tensor.detach().to(device)
    if moved.device == tensor.device:
        return tensor
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def let_go(model: nn.Module, kept: Holder) -> None:
    """Leave in a model only the tensors that a stage holds. The others go to the meta device.

    Writes into the model, and into nothing that others hold of it.
    """
    now = {id(find_slot(model, name).read()): slot.read() for name, slot in slots_of(kept)}
    for _, slot in tuple(slots_of(model)):
        tensor = slot.read()
        slot.write(now.setdefault(id(tensor), _on_meta(tensor)))


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
