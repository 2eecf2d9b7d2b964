"""Programs as values: read, print, rules, reference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.testing.programs import Draft, Feature, Grammar, Program, Rule, feature, together


@feature("dp", (1, 2, 3), is_axis=True)
def dp(program: Program, draft: Draft) -> None:
    """Write the number of ranks."""
    draft.words["dp"] = str(program["dp"])


@feature("shard", (1, 2), is_axis=True)
def shard(program: Program, draft: Draft) -> None:
    """Write nothing."""


@feature("clip", (False, True))
def clip(program: Program, draft: Draft) -> None:
    """Write the clipping."""
    if program["clip"]:
        draft.add("close", "clip({{dp}})")


@feature("block", ("linear", "conv"))
def block(program: Program, draft: Draft) -> None:
    """Write nothing."""


@feature("other", ("linear", "conv"), counts_as="block")
def other(program: Program, draft: Draft) -> None:
    """Write nothing."""


@feature("order", ("", "late"), is_neutral=True)
def order(program: Program, draft: Draft) -> None:
    """Write nothing."""


@feature("api", ("loop", "shim"), same={"shim": "loop"})
def api(program: Program, draft: Draft) -> None:
    """Write nothing."""


GRAMMAR = Grammar(
    skeleton="<<close>>\nstep()",
    features=(dp, shard, clip, block, other, order, api),
    rules=(Rule("a late order has no clipping", together("clip order=late")),),
)


@given(st.data())
def test_a_program_reads_what_it_prints(data: st.DataObject) -> None:
    values = {one.name: data.draw(st.sampled_from(one.values)) for one in GRAMMAR.features}
    program = GRAMMAR.any_program(values)
    assert all(program[name] == value for name, value in values.items())
    if GRAMMAR.broken_rule(program) is None:
        assert GRAMMAR.program(str(program)) == program


def test_the_plainest_program_has_no_name_and_its_values() -> None:
    program = GRAMMAR.program()
    assert (str(program), program.num_ranks, program["clip"]) == ("", 1, False)
    assert program.source() == "step()\n"


def test_features_write_the_source() -> None:
    assert GRAMMAR.program("dp=2 clip").source() == "clip(2)\nstep()\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clop", "there is no feature 'clop'. Choose among dp, shard"),
        ("dp=7", r"the feature dp can't be '7'. Choose among 1, 2, 3"),
        ("order", "the feature order can't be 'True'"),
        ("dp=2 clip dp=3", "the feature dp is named twice"),
        ("clip order=late", "the program 'clip order=late' can't be: a late order has no clipping"),
    ],
)
def test_what_is_no_program_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRAMMAR.program(text)


def test_the_reference_is_of_one_process_without_what_changes_no_number() -> None:
    program = GRAMMAR.any_program({"shard": 2, "order": "late", "api": "shim", "block": "conv"})
    assert str(program.reference()) == "dp=2 block=conv"


def test_a_feature_that_counts_as_another_is_covered_by_its_name() -> None:
    program = GRAMMAR.program("block=conv other=conv clip")
    assert program.covered() == {("block", "conv"), ("clip", True)}
    assert list(program.pairs()) == [program.covered()]


@pytest.mark.parametrize(
    ("choices", "has"),
    [
        ([("dp", 2)], True),
        ([("dp", 3)], True),
        ([("clip", True)], True),
        ([("block", "conv")], False),
        ([("shard", 2)], False),
    ],
)
def test_a_larger_size_has_whatever_a_smaller_one_has(choices: list[tuple[str, object]], has: bool) -> None:
    assert GRAMMAR.program("dp=3 clip").has(choices) == has


@pytest.mark.parametrize(
    ("every", "some", "text", "broken"),
    [
        ("clip", "", "clip", True),
        ("clip", "", "dp=2", False),
        ("!clip dp=2|3", "", "dp=3", True),
        ("dp", "clip block=conv", "dp=2", False),
        ("dp", "clip block=conv", "dp=2 block=conv", True),
    ],
)
def test_features_together_break_a_rule(every: str, some: str, text: str, broken: bool) -> None:
    assert together(every, some)(GRAMMAR.program(text)) == broken


@pytest.mark.parametrize("values", [(), (1, 1)])
def test_a_feature_has_different_values(values: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Feature size: values must be different, and at least one"):
        Feature(name="size", values=values, write=dp.write)
