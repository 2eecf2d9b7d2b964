"""Methods that wait for a part of accelfn say which one, and questions with a true answer have it."""

import inspect
from typing import Any

import pytest

from accelfn import Accelerator, Context
from accelfn.accelerator.later import Unavailable
from accelfn.errors import NotAvailableError
from accelfn.testing import run_ranks

NAMES = [name for name in vars(Unavailable) if not name.startswith("_")]
ANSWERS = {
    "fp8_backend": None,
}


def use(name: str) -> Any:
    """Read a property, or call a method with None for what it needs."""
    value: Any = inspect.getattr_static(Accelerator, name)
    found = getattr(Accelerator(context=Context()), name)
    if isinstance(value, property):
        return found
    needed = [one for one in inspect.signature(found).parameters.values() if one.default is one.empty]
    return found(*(None for one in needed if one.kind is one.POSITIONAL_OR_KEYWORD))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_answers_or_says_what_it_waits_for(name: str) -> None:
    assert name not in vars(Accelerator)  # a part that is there takes its methods from LaterParts
    if name in ANSWERS:
        assert use(name) == ANSWERS[name]
        return
    with pytest.raises(NotAvailableError, match=rf"^Accelerator\.{name} needs .*\. Until then ") as caught:
        use(name)
    assert isinstance(caught.value, RuntimeError)  # what programs written for Accelerate catch


def test_what_can_be_said_without_the_part_is_said_on_each_rank() -> None:
    def run(ctx: Context) -> tuple[bool, int]:
        accelerator = Accelerator(context=ctx)
        found = accelerator.should_save_model, accelerator.save_iteration
        accelerator.end_training()
        return found

    assert run_ranks(run, 2) == [(True, 0), (False, 0)]
