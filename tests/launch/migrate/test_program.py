"""Places of nodes in a source, and diffs."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.launch.migrate.program import Edit, Program, apply_edits, diff

NEWLINES = ("\n", "\r\n", "\r")
LINES = st.lists(
    st.sampled_from(
        (
            "",
            "x = 'ä', y",
            "if ü:\n    f('''a\n b''')  # é",
            "z = f(a, (b),  # \U0001f600\n  )",
            "q = (\n'\x0c')",
            "x = 1\t; y = 'é'",
        )
    )
)


@given(LINES, st.sampled_from(NEWLINES))
def test_nodes_are_where_the_tree_says(lines: list[str], newline: str) -> None:
    source = newline.join(line.replace("\n", newline) for line in (*lines, "end"))
    program = Program(source)
    for node in program.nodes:
        if isinstance(node, ast.expr) and not isinstance(node, ast.Tuple):
            found = ast.parse(f"({program.text(node)})", mode="eval").body
            assert ast.dump(found) == ast.dump(node).replace("ctx=Store()", "ctx=Load()")
    for statement in (node for node in program.nodes if isinstance(node, ast.stmt)):
        assert any(one is statement for one in program.block(statement))
        assert program.line_start(program.start(statement)) <= program.start(statement)


@pytest.mark.parametrize(
    ("call", "before", "after"),
    [
        ("f(a)", "f(<a)", "f(a>)"),
        ("f((a))", "f(<(a))", "f((a)>)"),
        ("f( # (\n  a , # )\n)", "f( # (\n  <a , # )\n)", "f( # (\n  a> , # )\n)"),
        ("f(a, *b)", "f(<a, *b)", "f(a, *b>)"),
        ("f(x=(1))", "f(<x=(1))", "f(x=(1)>)"),
        ("(f)\\\n (a)", "(f)\\\n (<a)", "(f)\\\n (a>)"),
        ("f()", "f(<)", ""),
    ],
)
def test_places_around_the_arguments_of_a_call(call: str, before: str, after: str) -> None:
    program = Program(call)
    node = next(node for node in program.nodes if isinstance(node, ast.Call))
    start = program.before_arguments(node)
    assert apply_edits(call, [Edit(start, start, "<")]) == before
    if after:
        end = program.after_argument(node, [*node.args, *node.keywords][-1])
        assert apply_edits(call, [Edit(end, end, ">")]) == after


@given(st.text(alphabet="ab\n\r\x0c", max_size=30), st.text(alphabet="ab\n\r\x0c", max_size=30))
def test_a_diff_is_empty_where_nothing_changes_and_ends_its_lines(before: str, after: str) -> None:
    text = diff("a.py", before, after)
    assert (text == "") == (before == after)
    assert text == "" or text.endswith("\n")
    assert text.count("\\ No newline") <= 2
