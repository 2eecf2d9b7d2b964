from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from accelfn.bigmodel import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)


def test_a_module_that_is_registered_twice_ties_each_of_its_parameters() -> None:
    linear = nn.Linear(2, 2)
    assert find_tied_parameters(nn.ModuleDict({"b": linear, "a": linear})) == [
        ["a.weight", "b.weight"],
        ["a.bias", "b.bias"],
    ]


def test_buffers_and_views_are_not_tied() -> None:
    batch = nn.BatchNorm1d(2)
    batch.register_buffer("again", batch.running_mean)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = nn.Parameter(first.weight.data)
    assert find_tied_parameters(nn.Sequential(batch, first, second)) == []


def three() -> Any:
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})


def test_the_first_with_values_becomes_all_of_them() -> None:
    model = three()
    model["a"].to("meta")
    kept = model["b"].weight
    retie_parameters(model, [["a.weight", "b.weight", "c.weight"]])
    assert model["a"].weight is model["b"].weight is model["c"].weight is kept
    assert model["a"].bias.is_meta


def test_meta_parameters_are_not_retied() -> None:
    model = three().to("meta")
    before = [model[name].weight for name in "abc"]
    retie_parameters(model, [["a.weight", "b.weight", "c.weight"]])
    assert all(model[name].weight is old for name, old in zip("abc", before, strict=True))


@pytest.mark.parametrize("name", ["d.weight", "a.other", "weight", "a.b.c"])
def test_unknown_names_are_refused(name: str) -> None:
    model = three()
    before = model["b"].weight
    with pytest.raises(ValueError, match=f"no tensor '{name}'"):
        retie_parameters(model, [["a.weight", "b.weight"], ["a.bias", name]])
    assert model["b"].weight is before is not model["a"].weight


# --- on places -----------------------------------------------------------------------------------


def test_places_of_tied_parameters_are_compared() -> None:
    groups = [["a.x.weight", "b.weight"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in ({"": 0}, {"a": 0, "b": 0}, {"a.x.weight": "cpu", "a": 0, "b.weight": "cpu"}):
            check_tied_parameters_on_same_device(groups, found)
    with pytest.warns(UserWarning, match=r"a\.x\.weight on 0, b\.weight on 'cpu'"):
        check_tied_parameters_on_same_device(groups, {"a": 0, "": "cpu"})
    with pytest.raises(ValueError, match=r"no entry for b\.weight"):
        check_tied_parameters_on_same_device(groups, {"a": 0})


# --- of transformers -----------------------------------------------------------------------------


class PreTrainedModel(nn.Module):
    """Stands for that of transformers, which is known by its name."""

    def __init__(self, head: nn.Module | None, **config: Any) -> None:
        super().__init__()
        self.head = head
        self.config = type("Config", (), config)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


class Custom(nn.Linear):
    def _tie_weights(self) -> None: ...


def test_a_configuration_that_ties() -> None:
    head = nn.Linear(2, 2)
    assert check_tied_parameters_in_config(PreTrainedModel(head, tie_word_embeddings=True))
    assert not check_tied_parameters_in_config(PreTrainedModel(head, tie_word_embeddings=False))
    assert not check_tied_parameters_in_config(PreTrainedModel(None, tie_word_embeddings=True))
    halves = {"is_encoder_decoder": True, "tie_encoder_decoder": True}
    assert check_tied_parameters_in_config(PreTrainedModel(None, **halves))
    assert not check_tied_parameters_in_config(
        PreTrainedModel(None, **{**halves, "is_encoder_decoder": False})
    )
    assert check_tied_parameters_in_config(PreTrainedModel(Custom(2, 2)))
    assert not check_tied_parameters_in_config(nn.Sequential(Custom(2, 2)))
