"""Loggers that know their rank, and bars that are shown once."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import accelfn as af
from accelfn import Context, get_logger, tqdm
from accelfn.errors import ConfigurationError, EnvironmentPlanError, MissingExtraError
from accelfn.testing import run_ranks

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, logger = Kept(), logging.getLogger("accelfn-test")
    logger.addHandler(handler)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **LAUNCHED})


def test_a_message_comes_once_or_from_every_rank(kept: Kept) -> None:
    def run(ctx: Context) -> None:
        logger = get_logger("accelfn-test", "INFO", ctx=ctx)
        logger.info("once")
        logger.debug("never")
        logger.info("all of %d", 3, main_process_only=False)

    run_ranks(run, 3)
    assert sorted(kept.texts) == sorted(["[RANK 0] once", *(f"[RANK {rank}] all of 3" for rank in range(3))])


@pytest.mark.parametrize("level", ["INFO", "WARNING"])  # ranks whose level is higher wait too
def test_in_order_they_come_in_order(kept: Kept, level: str) -> None:
    def run(ctx: Context) -> None:
        logger = get_logger("accelfn-test", level, ctx=ctx)
        for number in range(3):
            logger.info("turn %d", number, in_order=True)
        af.wait_for_everyone(ctx)

    run_ranks(run, 4)
    said = [f"[RANK {rank}] turn {number}" for number in range(3) for rank in range(4)]
    assert kept.texts == (said if level == "INFO" else [])


def test_in_order_needs_a_context_only_where_there_are_several_ranks(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_logger("accelfn-test").warning("alone", in_order=True)
    assert kept.texts == ["[RANK 0] alone"]
    monkeypatch.setattr(os, "environ", {**os.environ, **LAUNCHED})
    with pytest.raises(
        ConfigurationError, match=r"in_order=True needs a context .* 2 ranks.*get_logger\(name, ctx=ctx\)"
    ):
        get_logger("accelfn-test").warning("two", in_order=True)


@pytest.mark.usefixtures("_launched")
def test_without_a_context_the_rank_is_that_of_the_launcher(kept: Kept) -> None:
    logger = get_logger("accelfn-test")
    logger.warning("for the main process")
    logger.warning("for all", main_process_only=False)
    assert kept.texts == ["[RANK 1] for all"]


def test_arguments_of_a_context_override_the_launcher(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # and no rank
    get_logger("accelfn-test", ctx=Context()).warning("mine")
    assert kept.texts == ["[RANK 0] mine"]
    with pytest.raises(EnvironmentPlanError):
        get_logger("accelfn-test")


@pytest.mark.parametrize("method", ["debug", "info", "warning", "error", "critical"])
def test_a_record_names_the_line_of_the_caller(kept: Kept, method: str) -> None:
    logger = get_logger("accelfn-test", "DEBUG")
    getattr(logger, method)("here")
    logger.log(logging.ERROR, "here")
    logger.warning_once("here")
    try:
        raise ValueError("x")
    except ValueError:
        logger.exception("here")
    assert {record.funcName for record in kept.records} == {"test_a_record_names_the_line_of_the_caller"}
    assert len(kept.records) == 4
    assert kept.records[-1].exc_info is not None


def test_a_helper_names_its_callers_line_by_stacklevel(kept: Kept) -> None:
    logger = get_logger("accelfn-test", "DEBUG")

    def helper(stacklevel: int) -> None:
        logger.info("x", stacklevel=stacklevel)
        logger.warning_once("once", stacklevel=stacklevel)

    helper(1)
    helper(2)
    here = "test_a_helper_names_its_callers_line_by_stacklevel"
    assert [record.funcName for record in kept.records] == ["helper", "helper", here, here]


def test_a_warning_is_logged_once_per_arguments(kept: Kept) -> None:
    logger = get_logger("accelfn-test")
    for number in (1, 1, 2):
        logger.warning_once("number %d", number, extra={"unhashable": []})
    get_logger("accelfn-test").warning_once("number %d", 1)  # another logger remembers for itself
    assert kept.texts == ["[RANK 0] number 1", "[RANK 0] number 2", "[RANK 0] number 1"]


def test_the_level_is_the_loggers_own(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    root, logger = logging.getLogger(), logging.getLogger("accelfn-test")
    before = root.level
    for variables, given, level in (
        ({}, "debug", logging.DEBUG),
        ({}, None, logging.DEBUG),
        ({"ACCELERATE_LOG_LEVEL": "error"}, None, logging.ERROR),
        ({"ACCELFN_LOG_LEVEL": "info"}, None, logging.INFO),
        ({}, logging.CRITICAL, logging.CRITICAL),
        ({"ACCELFN_LOG_LEVEL": "warn"}, None, logging.WARNING),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        get_logger("accelfn-test", given)
        assert (logger.level, root.level) == (level, before)
    with pytest.raises(ConfigurationError, match=r"unknown level 'LOUD'. Use one of DEBUG"):
        get_logger("accelfn-test", "LOUD")
    monkeypatch.setenv("ACCELFN_LOG_LEVEL", "10")
    with pytest.raises(ConfigurationError, match=r"level '10' \(from the variable ACCELFN_LOG_LEVEL\)"):
        get_logger("accelfn-test")


# --- progress ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bar_is_shown_on_the_main_process_and_the_loop_is_the_same(capfd: Any) -> None:
    pytest.importorskip("tqdm")

    def run(ctx: Context) -> tuple[list[int], bool]:
        bar: Any = tqdm(range(3), ctx=ctx, desc=f"rank{ctx.rank}")
        is_hidden = bool(bar.disable)  # which a bar is too when it has ended
        return list(bar), is_hidden

    assert run_ranks(run, 2) == [([0, 1, 2], False), ([0, 1, 2], True)]
    shown = capfd.readouterr().err
    assert "rank0" in shown
    assert "rank1" not in shown


@pytest.mark.slow
@pytest.mark.usefixtures("_launched")
def test_arguments_are_those_of_tqdm_and_without_a_context_the_launcher_decides() -> None:
    pytest.importorskip("tqdm")
    file = io.StringIO()
    bar: Any = tqdm(range(2), "training", 5, main_process_only=False, file=file)
    assert (bar.total, bar.disable) == (5, False)
    bar.close()
    assert "training" in file.getvalue()
    with tqdm(total=5, disable=False) as hidden:
        assert hidden.disable  # asked not to be disabled, but not the main process
        hidden.update(2)
        hidden.set_postfix(loss=0.5)


def test_the_old_form_is_an_error() -> None:
    for old in (True, False):
        with pytest.raises(TypeError, match=f"main_process_only={old} by name"):
            tqdm(old)  # pyright: ignore[reportArgumentType]


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelfn\[progress\]'"):
        tqdm(range(3))
