"""What a plan knows of a model: the same from real and from meta parameters."""

import gc
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import torch
from torch import nn

from accelfn.parallel.facts import ModelFacts, owner_of, read_facts, repeated_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Named(Tower):
    _no_split_modules = ("Linear",)
    _tp_plan = {"layers.*.up": "colwise"}  # noqa: RUF012 -- as transformers has it


def test_meta_parameters_tell_as_much_as_real_ones() -> None:
    with torch.device("meta"):
        planned = Tower()
        planned.head.weight = planned.embed.weight
    assert read_facts(planned) == read_facts(Tower())


def test_a_tied_parameter_has_all_its_names_and_counts_once() -> None:
    facts = read_facts(Tower())
    assert facts.ties == (("embed.weight", "head.weight"),)
    assert "head.weight" in facts.names
    assert "head.weight" not in facts.own_names
    assert facts.numel(*facts.own_names) == 24 + 2 * (32 + 8 + 32)
    assert facts.size_bytes("head.weight") == 96
    assert facts.trainable == set(facts.names) - {"embed.weight", "head.weight"}


def test_blocks_are_what_the_model_lists_else_what_repeats() -> None:
    assert read_facts(Tower()).blocks == repeated_blocks(Tower()) == ("layers.0", "layers.1")
    named = read_facts(Named())
    assert named.blocks == ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head")
    assert read_facts(nn.Linear(1, 1)).blocks == ()


def test_a_model_says_how_it_is_split_by_tensors() -> None:
    assert read_facts(Tower()).tp_plan is None
    assert read_facts(Named()).tp_plan == {"layers.*.up": "colwise"}


def test_containers_have_no_forward() -> None:
    facts = read_facts(Tower())
    assert facts.containers == {"layers"}
    assert facts.kinds[""] == "Tower"
    assert facts.kinds["layers.0"] == "Block"


def test_a_parameter_belongs_to_the_innermost_module_by_whole_parts_of_its_name() -> None:
    units = {"", "layers.1", "layers.1.up"}
    assert owner_of("layers.1.up.weight", units) == "layers.1.up"
    assert owner_of("layers.1.down.weight", units) == "layers.1"
    assert owner_of("layers.10.up.weight", units) == ""
    assert owner_of("layers.10.up.weight", {"layers.1"}) is None


def test_threads_read_models_at_once() -> None:
    model = nn.TransformerEncoderLayer(4, 2)

    def switch_threads(phase: str, info: dict[str, int]) -> None:
        sleep(0.00001)

    def read(depth: int) -> list[ModelFacts]:
        # CPython compares the depth of the stack before a parse and after it.
        return read(depth - 1) if depth else [read_facts(model) for _ in range(3)]

    threshold = gc.get_threshold()
    gc.callbacks.append(switch_threads)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(read, range(0, 20, 5)))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(switch_threads)
    assert found == [[read_facts(model)] * 3] * 4
