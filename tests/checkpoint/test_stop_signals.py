# torch leaves DataLoader partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accelfn import Context, preemption
from accelfn.checkpoint import EXIT_PREEMPTED, STOP_SIGNALS, PreemptionGuard
from accelfn.data import microbatches, prepare_data_loader
from accelfn.data.workers import begin_reading
from accelfn.testing import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Handle SIGINT as in a terminal; background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --- should_stop ---------------------------------------------------------------------------------


@given(
    st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=5),  # the step of each rank's request
    st.booleans(),
)
def test_all_ranks_stop_where_the_first_was_asked(requests: list[int | None], debug: bool) -> None:
    def work(ctx: Context) -> int | None:
        with preemption(ctx) as guard:
            assert guard.signals == ()
            for step in range(6):
                if step == requests[ctx.rank]:
                    guard.request_stop()
                if guard.should_stop():
                    return step
        return None

    expected = min((step for step in requests if step is not None), default=None)
    assert run_ranks(work, len(requests), debug=debug) == [expected] * len(requests)


def test_a_known_request_needs_no_communication() -> None:
    def work(ctx: Context) -> list[bool]:
        with preemption(ctx) as guard:
            guard.request_stop()
            return [guard.should_stop() for _ in range(ctx.rank + 1)]

    assert run_ranks(work, 3) == [[True], [True] * 2, [True] * 3]


def test_the_time_limit_of_one_rank_stops_all() -> None:
    def work(ctx: Context) -> list[bool]:
        times = iter([100.0, 109.0, 110.0 if ctx.rank else 109.5])
        guard = PreemptionGuard(ctx, 10.0, lambda: next(times))
        return [guard.should_stop(), guard.should_stop()]

    assert run_ranks(work, 3) == [[False, True]] * 3


def test_the_time_limit_starts_with_the_block() -> None:
    for limit, stops in ((timedelta(microseconds=1), True), (1e-6, True), (timedelta(days=1), False)):
        with preemption(Context(), (), time_limit=limit) as guard:
            time.sleep(1e-4)
            assert guard.should_stop() == stops


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (((signal.SIGKILL,),), {}, ValueError, "a process can't handle the signal"),
        (((0,),), {}, ValueError, "SIGTERM, SIGUSR1, SIGINT"),
        ((signal.SIGTERM,), {}, TypeError, "signals must be a tuple of signals"),
        (("SIGTERM",), {}, TypeError, "got 'SIGTERM'"),
        ((["SIGTERM"],), {}, TypeError, "must be a tuple of signals"),
        ((), {"time_limit": 0}, ValueError, "more than 0 seconds, got 0"),
        ((), {"time_limit": float("nan")}, ValueError, "got nan"),
        ((), {"time_limit": timedelta(-1)}, ValueError, "time_limit"),
        ((), {"time_limit": "1h"}, TypeError, "seconds or a timedelta, got '1h'"),
        ((), {"time_limit": True}, TypeError, "seconds or a timedelta"),
    ],
)
def test_invalid_arguments_are_refused_before_a_handler_is_set(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = handlers()
    with pytest.raises(error, match=message), preemption(Context(), *arguments, **options):
        pass
    assert handlers() == before


# --- handlers, in the main thread, where tests run -----------------------------------------------


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_only_recorded(number: signal.Signals) -> None:
    with preemption(Context()) as guard:
        assert guard.signals == STOP_SIGNALS
        assert not guard.should_stop()
        signal.raise_signal(number)
        assert guard.should_stop()
    assert guard.should_stop()  # a signal during the last step isn't lost


def test_a_second_interrupt_raises() -> None:
    with preemption(Context()) as guard:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with preemption(Context()):  # one in an inner block counts
            signal.raise_signal(signal.SIGINT)
        assert guard.should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_before_are_restored_and_only_those_that_were_replaced(user_handler: list[int]) -> None:
    before = handlers()
    for error in (None, RuntimeError, SystemExit, KeyboardInterrupt):
        with pytest.raises(error) if error is not None else nullcontext(), preemption(Context()):
            signal.raise_signal(signal.SIGUSR1)
            if error is not None:
                raise error
        assert handlers() == before
    assert user_handler == []  # not called in the block
    with preemption(Context(), [signal.SIGHUP]) as guard:
        assert handlers() == before
        signal.raise_signal(signal.SIGUSR1)
        assert user_handler == [signal.SIGUSR1]
        assert not guard.should_stop()
        signal.raise_signal(signal.SIGHUP)
        assert guard.should_stop()


def test_an_ignored_interrupt_remains_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with preemption(Context()) as guard:
        assert signal.SIGINT not in guard.signals
        signal.raise_signal(signal.SIGINT)
        assert not guard.should_stop()


def test_a_handler_set_in_the_block_is_kept() -> None:
    with preemption(Context()):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_signal_reaches_all_blocks_and_a_call_one_and_blocks_end_in_any_order() -> None:
    before = handlers()
    first, second = ExitStack(), ExitStack()
    outer = first.enter_context(preemption(Context()))
    inner = second.enter_context(preemption(Context()))
    inner.request_stop()
    assert (inner.should_stop(), outer.should_stop()) == (True, False)
    first.close()
    signal.raise_signal(signal.SIGTERM)
    assert (inner.should_stop(), outer.should_stop()) == (True, True)
    second.close()
    assert handlers() == before


@pytest.fixture
def user_handler() -> Any:
    """Handle SIGUSR1 as a program may, and list the signals received."""
    received: list[int] = []

    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGUSR1, before)


# --- real processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_one_process_stops_both_at_the_same_step(number: signal.Signals) -> None:
    def work(ctx: Context) -> tuple[int, object]:
        step = 0
        with pytest.raises(SystemExit) as caught, preemption(ctx) as guard:  # noqa: PT012 -- a whole loop
            for step in range(9):
                if (ctx.rank, step) == (1, 4):
                    os.kill(os.getpid(), number)
                if guard.should_stop():
                    guard.exit()
        return step, caught.value.code

    assert run_ranks(work, 2, "processes") == [(4, EXIT_PREEMPTED)] * 2
    assert EXIT_PREEMPTED == os.EX_TEMPFAIL == 75


NUMBERS: Any = range(400)  # more than any prefetch, so that workers must continue


def signal_group(number: int) -> None:
    """Send a signal to this process group from outside, as a launcher does."""
    command = ["kill", f"-{int(number)}", "--", f"-{os.getpgrp()}"]
    subprocess.run(command, check=True, start_new_session=True, timeout=30)


def train_with_workers(ctx: Context, number: int, sharding: Any) -> tuple[int, int, int]:
    os.setpgrp()
    loader = prepare_data_loader(ctx, DataLoader(NUMBERS, batch_size=2, num_workers=2), sharding)
    workers: set[int | None] = set()
    step = survived = 0
    with preemption(ctx) as guard:
        for step, (_, _) in enumerate(microbatches(ctx, loader)):
            if step == 3:
                workers = {child.pid for child in multiprocessing.active_children()}
                if ctx.rank == 0:
                    signal_group(number)
            # Workers have read many batches since the signal.
            if step >= 40 and guard.should_stop():
                survived = len(workers & {child.pid for child in multiprocessing.active_children()})
                break
    return step, survived, len(multiprocessing.active_children())


@pytest.mark.parametrize(
    ("number", "sharding"),
    [(signal.SIGTERM, "global"), (signal.SIGINT, "already_sharded"), (signal.SIGUSR1, "global")],
)
def test_workers_survive_a_signal_to_the_process_group(number: signal.Signals, sharding: str) -> None:
    results = run_ranks(lambda ctx: train_with_workers(ctx, number, sharding), 2, "processes")
    assert results == [(40, 2, 0)] * 2


# A spawned worker is a new interpreter, which is importing torch when it receives the signal.
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_starting_worker_survives_a_signal_to_the_process_group(method: str) -> None:
    def work(ctx: Context) -> list[int]:
        os.setpgrp()
        options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": method}
        with preemption(ctx) as guard:
            batches = begin_reading(DataLoader(NUMBERS, **options))
            signal_group(signal.SIGTERM)
            assert guard.should_stop()
            first = [int(next(batches)), int(next(batches))]
            signal_group(signal.SIGTERM)  # no signal remains blocked
            return [*first, *(int(batch) for batch in batches)][:100]

    assert run_ranks(work, 1, "processes") == [list(range(100))]


def test_workers_can_be_terminated_after_the_block() -> None:
    def work(ctx: Context) -> int | None:
        with preemption(ctx):
            loader = DataLoader(NUMBERS, num_workers=1, persistent_workers=True)
            batches = iter(prepare_data_loader(ctx, loader))
            next(batches)
        (worker,) = multiprocessing.active_children()
        worker.terminate()
        worker.join(20)
        return worker.exitcode

    assert run_ranks(work, 1, "processes") == [0]


@pytest.mark.slow  # starts a launcher and two interpreters that import torch
def test_a_terminated_launcher_lets_all_ranks_stop(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, pathlib\n"
        "import accelfn as af\n"
        "with af.init_context(cpu=True) as ctx, af.preemption(ctx) as guard:\n"
        "    here = pathlib.Path(os.environ['RANK'])\n"
        "    step = 0\n"
        "    while True:\n"
        "        step += 1\n"
        "        if guard.should_stop():\n"
        "            here.with_suffix('.end').write_text(str(step))\n"
        "            guard.exit()\n"
        "        here.write_text('running')\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "accelfn", "launch", "--num_processes", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert launcher.poll() is None, "the launch ended by itself"
            assert time.monotonic() < deadline, "the processes did not start"
            time.sleep(0.02)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=25) == 75  # before torchrun would kill them
    finally:
        launcher.kill()
        launcher.wait()
    first, second = ((tmp_path / f"{rank}.end").read_text() for rank in "01")
    assert first == second
