# torch leaves DataLoader partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from accelfn import Context, preemption, wait_for_everyone
from accelfn.checkpoint import EXIT_PREEMPTED, STOP_SIGNALS, PreemptionGuard
from accelfn.data import microbatches, prepare_data_loader
from accelfn.data.workers import begin_reading
from accelfn.errors import MismatchError
from accelfn.testing import run_ranks

ROOT = Path(__file__).parents[2]
Handler = Callable[[int, FrameType | None], Any]


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


def test_processes_agree() -> None:
    def work(ctx: Context) -> list[bool]:
        with preemption(ctx) as guard:
            before = guard.should_stop()
            if ctx.rank == 1:
                guard.request_stop()
            return [before, guard.should_stop(), guard.should_stop()]

    assert run_ranks(work, 2, "processes") == [[False, True, True]] * 2


def test_a_known_request_needs_no_communication() -> None:
    def work(ctx: Context) -> list[bool]:
        with preemption(ctx) as guard:
            guard.request_stop()
            return [guard.should_stop() for _ in range(ctx.rank + 1)]

    assert run_ranks(work, 3) == [[True], [True] * 2, [True] * 3]


def test_a_rank_in_another_operation_is_a_mismatch() -> None:
    def work(ctx: Context) -> None:
        with preemption(ctx) as guard:
            if ctx.rank == 0:
                guard.should_stop()
            else:
                wait_for_everyone(ctx)

    with pytest.raises(MismatchError, match="should_stop"):
        run_ranks(work, 2)


def test_the_time_limit_of_one_rank_stops_all() -> None:
    def work(ctx: Context) -> list[bool]:
        times = iter([100.0, 109.0, 110.0 if ctx.rank else 109.5])
        guard = PreemptionGuard(ctx, 10.0, lambda: next(times))
        return [guard.should_stop(), guard.should_stop()]

    assert run_ranks(work, 3) == [[False, True]] * 3


@pytest.mark.parametrize("limit", [timedelta(microseconds=1), 1e-6])
def test_the_time_limit_starts_with_the_block(limit: timedelta | float) -> None:
    with preemption(Context(), (), time_limit=limit) as guard:
        end = time.monotonic() + 1e-5
        while time.monotonic() < end:
            pass
        assert guard.should_stop()
    with preemption(Context(), (), time_limit=timedelta(days=1)) as guard:
        assert not guard.should_stop()


def test_all_ranks_exit_with_the_documented_status() -> None:
    def work(ctx: Context) -> object:
        with preemption(ctx) as guard, pytest.raises(SystemExit) as caught:
            guard.exit()
        return caught.value.code

    assert run_ranks(work, 3) == [75] * 3
    assert EXIT_PREEMPTED == os.EX_TEMPFAIL == 75


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
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(error, match=message), preemption(Context(), *arguments, **options):
        pass
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


# --- handlers, in the main thread, where tests run -----------------------------------------------


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
        signal.raise_signal(signal.SIGINT)
        assert guard.should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_previous_handlers_are_restored(user_handler: list[int]) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    for error in (None, RuntimeError, SystemExit, KeyboardInterrupt):
        try:
            with preemption(Context()):
                signal.raise_signal(signal.SIGUSR1)
                if error is not None:
                    raise error
        except (RuntimeError, SystemExit, KeyboardInterrupt):
            pass
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert user_handler == []  # not called in the block
    signal.raise_signal(signal.SIGUSR1)
    assert user_handler == [signal.SIGUSR1]


def test_only_the_given_signals_are_handled(user_handler: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with preemption(Context(), [signal.SIGHUP]) as guard:
        assert signal.getsignal(signal.SIGTERM) is before
        signal.raise_signal(signal.SIGUSR1)
        assert not guard.should_stop()
        signal.raise_signal(signal.SIGHUP)
        assert guard.should_stop()
    assert user_handler == [signal.SIGUSR1]


def test_an_ignored_interrupt_remains_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with preemption(Context()) as guard:
            assert signal.SIGINT not in guard.signals
            signal.raise_signal(signal.SIGINT)
            assert not guard.should_stop()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_set_in_the_block_is_kept(user_handler: list[int]) -> None:
    mine = signal.getsignal(signal.SIGUSR1)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with preemption(Context()):
            signal.signal(signal.SIGTERM, mine)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert user_handler == []


def test_a_signal_reaches_all_blocks_and_a_call_one() -> None:
    with preemption(Context()) as outer:
        with preemption(Context()) as inner:
            inner.request_stop()
            assert (inner.should_stop(), outer.should_stop()) == (True, False)
        with preemption(Context()) as inner:
            signal.raise_signal(signal.SIGTERM)
            assert (inner.should_stop(), outer.should_stop()) == (True, True)


def test_an_interrupt_in_an_inner_block_counts_in_the_outer() -> None:
    with pytest.raises(KeyboardInterrupt), preemption(Context()):  # noqa: PT012 -- as above
        with preemption(Context()):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_blocks_may_end_in_any_order() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    first, second = ExitStack(), ExitStack()
    earlier = first.enter_context(preemption(Context()))
    later = second.enter_context(preemption(Context()))
    first.close()
    signal.raise_signal(signal.SIGTERM)
    assert later.should_stop()
    assert earlier.should_stop()
    second.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.fixture
def user_handler() -> Any:
    """Handle SIGUSR1 as a program may, and list the signals received."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)

    before = signal.signal(signal.SIGUSR1, handle)
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


class Numbers(Dataset[int]):
    """A dataset that is longer than any prefetch, so that workers must continue."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        return index


def signal_group(number: int) -> None:
    """Send a signal to this process group from outside, as a launcher does."""
    command = ["kill", f"-{int(number)}", "--", f"-{os.getpgrp()}"]
    subprocess.run(command, check=True, start_new_session=True, timeout=30)


def train_with_workers(ctx: Context, number: int, sharding: Any, options: dict[str, Any]) -> dict[str, Any]:
    os.setpgrp()
    loader = prepare_data_loader(ctx, DataLoader(Numbers(), batch_size=2, **options), sharding)
    first: list[int] = []
    result: dict[str, Any] = {}
    with preemption(ctx) as guard:
        for step, (_, _) in enumerate(microbatches(ctx, loader)):
            if step == 3:
                first = sorted(child.pid or 0 for child in multiprocessing.active_children())
                if ctx.rank == 0:
                    signal_group(number)
            # Workers have read many batches since the signal.
            if step >= 40 and guard.should_stop():
                now = sorted(child.pid or 0 for child in multiprocessing.active_children())
                result = {"step": step, "same": first == now, "workers": len(now)}
                break
    result["left"] = len(multiprocessing.active_children())
    return result


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("sharding", ["global", "already_sharded"])
def test_workers_survive_a_signal_to_the_process_group(number: signal.Signals, sharding: str) -> None:
    options = {"num_workers": 2}
    results = run_ranks(lambda ctx: train_with_workers(ctx, number, sharding, options), 2, "processes")
    assert results == [{"step": 40, "same": True, "workers": 2, "left": 0}] * 2


# A spawned worker is a new interpreter, which is importing torch when it receives the signal.
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_starting_worker_survives_a_signal_to_the_process_group(method: str) -> None:
    def work(ctx: Context) -> list[int]:
        os.setpgrp()
        options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": method}
        with preemption(ctx) as guard:
            batches = begin_reading(DataLoader(Numbers(), **options))
            signal_group(signal.SIGTERM)
            assert guard.should_stop()
            first = [int(next(batches)), int(next(batches))]
            signal_group(signal.SIGTERM)  # no signal remains blocked
            return [*first, *(int(batch) for batch in batches)][:100]

    assert run_ranks(work, 1, "processes") == [list(range(100))]


def test_workers_can_be_terminated_after_the_block() -> None:
    def work(ctx: Context) -> list[int | None]:
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
        with preemption(ctx):
            loader = prepare_data_loader(ctx, DataLoader(Numbers(), **options))
            batches = iter(loader)
            next(batches)
        (worker,) = multiprocessing.active_children()
        worker.terminate()
        worker.join(20)
        try:
            return [worker.exitcode]
        finally:
            worker.kill()

    assert run_ranks(work, 1, "processes") == [[0]]


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
