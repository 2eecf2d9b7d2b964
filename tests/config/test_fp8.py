"""Which engine computes 8-bit products, with which recipe, on which device."""

import importlib.util
from typing import Any

import pytest

import accelfn as af
from accelfn.config import FP8_PACKAGES, choose_fp8, list_fp8_packages, read_settings
from accelfn.context import Context, DeviceFacts, check_fp8, check_precision
from accelfn.errors import ConfigurationError, MissingExtraError

ALL = frozenset(package.module for package in FP8_PACKAGES.values())


@pytest.mark.parametrize(
    ("recipe", "installed", "backend", "why"),
    [
        (None, ALL, "AO", "the first of"),
        (None, {"msamp", "transformer_engine"}, "TE", "the first of"),
        (af.config.FP8RecipeKwargs(), {"msamp"}, "MSAMP", "the first of"),
        (af.config.FP8RecipeKwargs(backend="msamp"), ALL, "MSAMP", "backend='MSAMP'"),
        (af.config.AORecipeKwargs(pad_inner_dim=False), ALL, "AO", "AORecipeKwargs"),
        (af.config.TERecipeKwargs(), ALL, "TE", "TERecipeKwargs"),
        (af.config.MSAMPRecipeKwargs(), ALL, "MSAMP", "MSAMPRecipeKwargs"),
    ],
)
def test_the_engine_is_the_one_that_was_asked_for_or_the_first_installed(
    recipe: Any, installed: set[str], backend: str, why: str
) -> None:
    choice = choose_fp8(recipe, installed)
    assert str(choice.backend) == backend
    assert why in choice.why
    assert isinstance(choice.recipe, FP8_PACKAGES[choice.backend].recipe)
    if isinstance(recipe, FP8_PACKAGES[choice.backend].recipe):
        assert choice.recipe is recipe


@pytest.mark.parametrize(
    ("recipe", "installed", "error", "message"),
    [
        (None, (), MissingExtraError, "none is installed. Install torchao: pip install 'accelfn"),
        (
            af.config.AORecipeKwargs(),
            ("msamp",),
            MissingExtraError,
            r"AORecipe.*, needs torchao.*\[torchao\]",
        ),
        (
            af.config.FP8RecipeKwargs(backend="te"),
            ("torchao",),
            MissingExtraError,
            "backend='TE'.*transformer-",
        ),
        (
            af.config.FP8RecipeKwargs(backend="AO", margin=2),
            ALL,
            ConfigurationError,
            "margin=2 is an option of TE",
        ),
        (
            af.config.FP8RecipeKwargs(backend="TE", opt_level="O1"),
            ALL,
            ConfigurationError,
            "opt_level=.* of MSAMP",
        ),
    ],
)
def test_what_is_lacking_is_named(recipe: Any, installed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_fp8(recipe, installed)


def test_a_recipe_without_an_engine_gives_its_options_to_the_one_that_is_chosen() -> None:
    choice = choose_fp8(af.config.FP8RecipeKwargs(backend="te", margin=2, fp8_format="e4m3"), ALL)
    assert choice.recipe == af.config.TERecipeKwargs(margin=2, fp8_format="E4M3")


def test_installed_packages_are_found_without_importing_them() -> None:
    assert ("torchao" in list_fp8_packages()) is (importlib.util.find_spec("torchao") is not None)


CPU = DeviceFacts(type="cpu")
OLD = DeviceFacts(type="cuda")
NEW = DeviceFacts(type="cuda", precisions=frozenset(("fp16", "bf16", "fp8")))


class EmulatedConfig:
    emulate = True


def test_a_device_without_8_bit_products_is_refused_and_the_cpu_emulates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("accelfn.context.device.list_fp8_packages", lambda: ALL)
    ao, te = choose_fp8(None, ALL), choose_fp8(af.config.TERecipeKwargs(), ALL)
    assert check_fp8(ao, CPU)
    assert not check_fp8(ao, NEW)
    assert not check_fp8(te, NEW)
    for choice in (ao, te):
        with pytest.raises(ConfigurationError, match=r"'cuda' doesn't have; it supports: no, bf16, fp16\."):
            check_fp8(choice, OLD)
    assert check_fp8(choose_fp8(af.config.AORecipeKwargs(config=EmulatedConfig()), ALL), OLD)
    with pytest.raises(ConfigurationError, match=r"capability 8\.9"):
        check_precision(af.context.Precision(mode="fp8", fp8_recipe=af.config.AORecipeKwargs()), OLD)


FP8 = {"ACCELFN_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "fp8"}


def test_variables_make_a_recipe() -> None:
    env = {
        "ACCELERATE_FP8_BACKEND": "te",  # Accelerate's launcher writes it so, and refuses it afterwards
        "ACCELERATE_FP8_FORMAT": "E4M3",
        "ACCELFN_FP8_AMAX_HISTORY_LEN": "16",
        "ACCELERATE_FP8_OVERRIDE_WGRAD": "true",
    }
    expected = af.config.FP8RecipeKwargs(
        backend="TE", fp8_format="E4M3", amax_history_len=16, override_linear_precision=(False, False, True)
    )
    assert read_settings(env).fp8_recipe == expected
    assert read_settings({}).fp8_recipe is None
    with pytest.raises(ConfigurationError, match=r"ACCELFN_FP8_BACKEND=t2 .*FP8RecipeKwargs"):
        read_settings({"ACCELFN_FP8_BACKEND": "t2"})


@pytest.mark.slow
def test_variables_reach_a_context_in_fp8_unless_a_recipe_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**FP8, "ACCELFN_FP8_PAD_INNER_DIM": "false"}.items():
        monkeypatch.setenv(name, value)

    def recipe_of(**options: Any) -> object:
        with af.init_context(**options) as ctx:
            return ctx.precision.fp8_recipe

    assert recipe_of() == af.config.FP8RecipeKwargs(pad_inner_dim=False)
    assert recipe_of(kwargs_handlers=[af.config.AORecipeKwargs()]) == af.config.AORecipeKwargs()
    assert recipe_of(mixed_precision="bf16") is None


def test_a_context_without_the_engine_fails_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    with pytest.raises(MissingExtraError, match="none is installed"):
        Context().replace(mixed_precision="fp8")
