from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from torch import nn

from accelfn.bigmodel import LeafShape, ModelShape, read_shape, shape_from_leaves
from tests.bigmodel.plan.trees import Tree, build, trees


def leaves(shape: ModelShape) -> list[LeafShape]:
    return list(shape.root.leaves())


@given(trees())
def test_a_shape_names_every_tensor_and_module_once(tree: Tree) -> None:
    model = build(tree)
    shape = read_shape(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found = {leaf.name: leaf for leaf in leaves(shape)}
    assert len(found) == len(leaves(shape))
    assert found.keys() == {*parameters, *buffers}
    assert {name for name, leaf in found.items() if leaf.kind == "parameter"} == parameters.keys()
    persistent = {name for name, leaf in found.items() if leaf.kind != "non_persistent"}
    assert persistent == model.state_dict().keys()
    for name, tensor in {**parameters, **buffers}.items():
        leaf = found[name]
        assert (leaf.num_bytes, leaf.numel, leaf.dtype) == (tensor.nbytes, tensor.numel(), tensor.dtype)
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
    assert [module.name for module in shape.root.modules()] == [name for name, _ in modules]
    # Ties are the names of one object.
    for one, leaf in found.items():
        for other, second in found.items():
            is_same = {**parameters, **buffers}[one] is {**parameters, **buffers}[other]
            assert (one == other or (leaf.tie is not None and leaf.tie == second.tie)) == is_same
    assert all(found[name].tie == number for number, names in enumerate(shape.ties) for name in names)
    assert shape.num_bytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_the_order_is_parameters_then_modules_then_buffers() -> None:
    model = nn.Module()
    model.register_buffer("early", torch.zeros(1))
    model.block = nn.BatchNorm1d(2)
    model.last = nn.Parameter(torch.zeros(1))
    names = [leaf.name for leaf in leaves(read_shape(model))]
    assert names == ["last", *(f"block.{name}" for name in model.block.state_dict()), "early"]


def test_wrapper_tensors_count_their_inner_tensors() -> None:
    nested: Any = torch.nested
    model: Any = nn.Module()
    weight = nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    model.weight = nn.Parameter(weight, requires_grad=False)
    (leaf,) = leaves(read_shape(model))
    assert not leaf.is_plain
    assert leaf.num_bytes >= 5 * 4


def test_a_lazy_layer_is_named() -> None:
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet"):
        read_shape(nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(3)))


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (None, ("Block",)),
        ("Layer", ("Layer", "Block")),
        ({"Layer", "Block", "Another"}, ("Another", "Block", "Layer")),
    ],
)
def test_no_split_classes_of_a_model_and_its_modules(classes: object, expected: tuple[str, ...]) -> None:
    model: Any = nn.ModuleList([nn.Identity()])
    model._no_split_modules = classes
    model[0]._no_split_modules = ("Block",)
    assert read_shape(model).no_split_classes == expected


# --- from names ----------------------------------------------------------------------------------


def leaf(name: str) -> LeafShape:
    return LeafShape(name, 4, 1, torch.float32)


def test_names_are_ordered_by_their_numbers_and_lists_are_classes() -> None:
    names = ["layers.10.w", "layers.2.w", "embed.w", "layers.2.mlp.0.w", "head"]
    shape = shape_from_leaves(map(leaf, names), [("embed.w", "head")])
    in_order = ["head", "embed.w", "layers.2.w", "layers.2.mlp.0.w", "layers.10.w"]
    assert [one.name for one in leaves(shape)] == in_order
    classes = {module.name: module.class_name for module in shape.root.modules()}
    assert classes["layers.2"] == classes["layers.10"] == "layers.*"
    assert classes["layers.2.mlp.0"] == "mlp.*"
    assert shape.ties == (("embed.w", "head"),)
    assert shape.num_bytes == 16
    (only,) = (module for module in shape_from_leaves([leaf("0.w")]).root.children)
    assert only.class_name == "*"


@pytest.mark.parametrize(
    ("names", "ties", "message"),
    [
        (["a", "a"], [], "a is repeated"),
        (["a", "a.b"], [], "a can't be a tensor and contain a.b"),
        (["a.b", "a"], [], "a is repeated, or is also the name of a module"),
        (["a"], [("a", "b")], "ties: there is no tensor b"),
    ],
)
def test_names_that_no_model_has_are_refused(
    names: list[str], ties: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shape_from_leaves(map(leaf, names), ties)
