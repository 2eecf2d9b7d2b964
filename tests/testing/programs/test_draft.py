"""The text of a program: slots, blocks with headers, and words."""

import pytest

from accelfn.testing.programs import Draft

SKELETON = """
def train():
    <<begin>>
    <<loop
    for {{head}}:
        <<work>>
    loop>>
"""


def test_lines_stand_where_their_slot_is() -> None:
    draft = Draft()
    draft.words["head"] = "batch in loader"
    draft.add("begin", "first()")
    draft.add("begin", "second()")
    draft.add("work", "if batch:\n    step(batch)")
    assert draft.text(SKELETON).splitlines() == [
        "def train():",
        "    first()",
        "    second()",
        "    for batch in loader:",
        "        if batch:",
        "            step(batch)",
    ]


def test_headers_indent_their_block_in_the_order_in_which_they_were_put() -> None:
    draft = Draft()
    draft.words |= {"head": "x in y", "kind": "fast"}
    draft.wrap("loop", "with outer():")
    draft.wrap("loop", "with {{kind}}():")
    draft.add("work", "pass")
    assert draft.text(SKELETON).splitlines()[1:] == [
        "    with outer():",
        "        with fast():",
        "            for x in y:",
        "                pass",
    ]


def test_a_block_without_lines_goes_with_its_headers() -> None:
    draft = Draft()
    draft.wrap("closing", "if ready:")
    assert draft.text("begin()\n<<closing\n<<step>>\nclosing>>\nend()") == "begin()\nend()\n"


def test_words_may_have_words_and_be_lists_of_names() -> None:
    draft = Draft()
    draft.words |= {"call": "prepare({{objects}})"}
    draft.names["objects"] = ["model", "optimizer"]
    assert draft.text("{{call}}") == "prepare(model, optimizer)\n"


def test_a_word_that_nobody_wrote_is_an_error() -> None:
    with pytest.raises(KeyError, match="unknown"):
        Draft().text("{{unknown}}")
