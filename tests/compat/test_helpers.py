"""The small functions that programs import: packages, versions, variables, trees, configurations."""

# torch leaves these partly untyped.
# pyright: reportUnknownMemberType=false

import operator
import os
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.compat import available, engines, helpers, operations
from accelfn.compat.__main__ import build_parser, main
from accelfn.compat.names import names_of
from accelfn.errors import ConfigurationError

VERSIONS = ["1.0", "1.0.0", "1.0.dev0", "1.0rc1", "1.0.post1", "2.10.1+cpu", "2.9", "10.0"]


@pytest.mark.slow
def test_versions_are_ordered_as_the_peer_orders_them(peer: Any) -> None:
    version: Any = pytest.importorskip("packaging.version")
    for one, other, sign in product(VERSIONS, ("1.0", "2.9", "2.10.1", "10.0"), ("<", "<=", ">", ">=")):
        theirs = peer.utils.compare_versions(version.parse(one), sign, other)
        assert available.compare_versions(one, sign, other) == theirs
    assert available.is_torch_version(">=", "2.0")
    with pytest.raises(ValueError, match="operation must be one of"):
        available.compare_versions("1", "~", "2")


@pytest.mark.slow
def test_packages_are_available_as_for_the_peer(peer: Any) -> None:
    # They take a version, or ask for other packages or a variable.
    others = {"is_torch_version", "is_fp8_available", "is_megatron_lm_available", "is_rich_available"}
    known = names_of("accelerate.utils.imports")
    names = {name for name in known if name.startswith("is_") and hasattr(peer.utils, name)}
    for name in names - others:
        assert getattr(available, name)() == bool(getattr(peer.utils, name)()), name


def test_variables_are_set_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELFN_TEST_ONE", "before")
    with helpers.patch_environment(accelfn_test_one=1, accelfn_test_two="yes"):
        assert os.environ["ACCELFN_TEST_ONE"] == "1"
        assert helpers.parse_flag_from_env("ACCELFN_TEST_TWO")
        assert helpers.get_int_from_env(["ACCELFN_NONE", "ACCELFN_TEST_ONE"], 5) == 1
        with helpers.clear_environment():
            assert not os.environ
    assert os.environ["ACCELFN_TEST_ONE"] == "before"
    assert "ACCELFN_TEST_TWO" not in os.environ
    with pytest.raises(ConfigurationError, match="neither yes nor no"):
        helpers.str_to_bool("perhaps")


class Pair(NamedTuple):
    first: Any
    second: Any


trees = st.recursive(
    st.just(torch.ones(2)) | st.integers(),
    lambda inner: (
        st.lists(inner) | st.builds(Pair, inner, inner) | st.dictionaries(st.text(max_size=2), inner)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(tree=trees)
def test_a_function_is_applied_to_every_tensor_as_by_the_peer(peer: Any, tree: Any) -> None:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    assert str(operations.recursively_apply(double, tree)) == str(peer.utils.recursively_apply(double, tree))


def test_a_function_refuses_what_isnt_a_tensor() -> None:
    with pytest.raises(TypeError, match="takes nested lists, tuples and dicts of tensors, got str"):
        operations.recursively_apply(operator.neg, ["a"], error_on_other_type=True)
    assert operations.get_shape({"a": torch.ones(2, 3)}) == {"a": [2, 3]}
    assert operations.ignorant_find_batch_size("a") is None


def test_shared_tensors_are_written_once() -> None:
    weight = torch.ones(2, 3)
    cleaned = helpers.clean_state_dict_for_safetensors({"a": weight, "b": weight, "c": weight.T, "d": 1})
    assert sorted(cleaned) == ["a", "c", "d"]
    assert cleaned["c"].is_contiguous()


def test_modules_and_texts() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    assert helpers.get_module_class_from_name(model, "ReLU") is nn.ReLU
    assert helpers.get_module_class_from_name(model, "GELU") is None
    assert helpers.get_module_children_bottom_up(model)[-1] is model
    assert (helpers.is_compiled_module(model), helpers.is_peft_model(model)) == (False, False)
    assert helpers.recursive_getattr(model, "0.weight") is model[0].weight
    assert helpers.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert helpers.get_pretty_name(nn.Linear) == "Linear"
    assert not helpers.is_port_in_use(helpers.get_free_port())


def test_a_deepspeed_configuration_can_be_asked() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    settings = {"zero_optimization": zero, "fp16": {"enabled": False}}
    config = engines.HfDeepSpeedConfig(settings)
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (False, True, True)
    assert config.get_value("zero_optimization.stage") == 3
    assert config.get_value("a.b", 7) == 7
    assert (config.is_false("fp16.enabled"), config.is_true("fp16.enabled")) == (True, False)
    config.del_config_sub_tree("zero_optimization.offload_param")
    with pytest.raises(ValueError, match="nothing"):
        config.del_config_sub_tree("nothing", must_exist=True)
    assert config.config == {"zero_optimization": {"stage": 3}, "fp16": {"enabled": False}}


@pytest.mark.parametrize(
    ("line", "script", "rest", "is_module"),
    [
        ("train.py -m x", "train.py", "-m x", False),
        ("train.py --help", "train.py", "--help", False),
        ("-m train -m y", "train", "-m y", True),
    ],
)
def test_the_command_line(line: str, script: str, rest: str, is_module: bool) -> None:
    found = build_parser().parse_args(line.split())
    assert (found.script, found.arguments, found.is_module) == (script, rest.split(), is_module)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("", "required: script"),
        ("-m", "required: script"),
        ("--lr train.py", "--lr"),
        ("no.py", "no script 'no.py' in '"),
    ],
)
def test_a_wrong_command_line(line: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert error in capsys.readouterr().err


def test_parameters_of_modules_by_name_or_as_they_are() -> None:
    first, inner = nn.Linear(1, 1), nn.Linear(1, 1)
    model = nn.Sequential(first, nn.Sequential(inner, nn.ReLU()))
    for modules, expected in ((None, []), ([first], [first]), (r"0|1\.0", [first, inner]), ("1", [inner])):
        found = helpers.get_parameters_from_modules(modules, model, "cpu")
        assert found == {one for module in expected for one in module.parameters()}
    meta = helpers.get_parameters_from_modules([inner], model, "meta")
    assert {parameter.device.type for parameter in meta} == {"meta"}


def test_results_are_converted_to_float32() -> None:
    def forward(x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a tree."""
        return {"y": x.bfloat16()}

    wrapped = operations.ConvertOutputsToFp32(forward)
    assert wrapped(torch.ones(1))["y"].dtype == torch.float32
    assert (wrapped.model_forward, wrapped.__doc__) == (forward, forward.__doc__)
    assert operations.convert_outputs_to_fp32(forward)(torch.ones(1))["y"].dtype == torch.float32
