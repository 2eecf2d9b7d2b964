# torch leaves DataLoader partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import multiprocessing
import os
import pickle
import signal
from types import FrameType
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accelfn import Context
from accelfn.data import microbatches, prepare_data_loader
from accelfn.data.workers import (
    Hold,
    SignalHolder,
    StartWorker,
    begin_reading,
    explain_dead_workers,
    held_signals,
)
from accelfn.testing import run_ranks


class BrokenQueue:
    """Gives what it was told to give, or raises it."""

    def __init__(self, queue: Any, given: Any) -> None:
        self._queue = queue
        self._given = given

    def get(self, timeout: float) -> Any:
        del timeout
        if isinstance(self._given, Exception):
            raise self._given
        return self._given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class BrokenLoader(DataLoader[Any]):
    """Has lost the connection to its workers; they are still there when it looks for them."""

    given: Any

    def __iter__(self) -> Any:
        iterator: Any = super().__iter__()
        iterator._data_queue = BrokenQueue(iterator._data_queue, self.given)
        return iterator


def listed(samples: list[torch.Tensor]) -> list[int]:
    return [int(one) for one in samples]


def broken(given: Any) -> BrokenLoader:
    data: Any = torch.arange(8)
    loader = BrokenLoader(data, batch_size=2, num_workers=1, collate_fn=listed)
    loader.given = given
    return loader


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        ConnectionRefusedError(111, "Connection refused"),
        FileNotFoundError(2, "No such file or directory"),
        EOFError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_connection_that_broke_off_is_a_worker_that_died(error: Exception) -> None:
    loader = prepare_data_loader(Context(), broken(error))
    with pytest.raises(RuntimeError, match="a DataLoader worker of rank 0 exited unexpectedly") as caught:
        list(loader)
    assert type(error).__name__ in str(caught.value)
    assert caught.value.__cause__ is error


def test_another_error_of_the_queue_stays_what_it_is() -> None:
    for error in (PermissionError(13, "Permission denied"), RuntimeError("unable to mmap")):
        with pytest.raises(type(error)) as caught:
            list(prepare_data_loader(Context(), broken(error)))
        assert caught.value is error


def test_what_a_dataset_raises_of_connections_is_its_own_affair() -> None:
    class Remote(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise ConnectionResetError("the bucket is gone")

    with pytest.raises(ConnectionResetError, match="the bucket is gone"):
        list(prepare_data_loader(Context(), DataLoader(Remote())))
    # As it comes from a worker, for whose end torch would wait for seconds.
    sent = None
    try:
        Remote()[0]
    except ConnectionResetError:
        sent = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(ConnectionResetError, match="Caught ConnectionResetError in DataLoader worker"):
        list(prepare_data_loader(Context(), broken((0, sent))))


def test_an_error_that_quotes_that_of_another_rank_is_left_alone() -> None:
    class QuotingError(RuntimeError):
        pass

    with pytest.raises(QuotingError), explain_dead_workers(0):
        raise QuotingError("DataLoader worker (pid 5) is killed by signal: Killed.")


# Torch may wait for seconds for the end of a worker that is gone.
def test_a_worker_that_is_killed_is_named_on_every_rank() -> None:
    class Dies(Dataset[int]):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> int:
            if get_worker_info() is not None and self.rank == 1 and index == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    def run(ctx: Context) -> str:
        loader = prepare_data_loader(ctx, DataLoader(Dies(ctx.rank), batch_size=2, num_workers=1))
        with pytest.raises(RuntimeError) as caught:
            list(microbatches(ctx, loader))
        return str(caught.value)

    other, own = run_ranks(run, 2, "processes")
    # The signal may come while the rank does something else, and then says by itself what it is of.
    assert "DataLoader worker" in own
    assert "rank 1 failed" in other
    assert "DataLoader worker" in other


FORKING = multiprocessing.get_context("fork")


class Holder(SignalHolder):
    def __init__(self) -> None:
        self.hold = Hold()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del number, frame

    def holds(self) -> tuple[Hold, ...]:
        return (self.hold,)


@pytest.fixture
def holder() -> Any:
    """Hold SIGTERM off from workers."""
    holding = Holder()
    before = signal.signal(signal.SIGTERM, holding)
    yield holding
    signal.signal(signal.SIGTERM, before)


class Handlers(Dataset[int]):
    """Says whether SIGTERM has a handler of Python's where it is read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(callable(signal.getsignal(signal.SIGTERM)))


def read(**options: Any) -> list[int]:
    loader = prepare_data_loader(Context(), DataLoader(Handlers(), num_workers=1, **options))
    return [int(one) for one in loader]


def test_where_nobody_holds_signals_workers_are_torchs() -> None:
    assert held_signals() == ()
    assert read() == [0] * 8


def test_where_somebody_does_workers_stay(holder: Holder) -> None:
    assert [one.number for one in held_signals()] == [signal.SIGTERM]
    assert held_signals()[0].holds == (holder.hold,)
    assert read() == [1] * 8


def set_default(worker_id: int) -> None:
    del worker_id
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_the_users_own_beginning_comes_after(holder: Holder) -> None:
    del holder
    assert read(worker_init_fn=set_default) == [0] * 8


def test_the_users_loader_looks_as_before() -> None:
    mine = DataLoader(Handlers(), num_workers=1, worker_init_fn=set_default)
    loader: Any = prepare_data_loader(Context(), mine, "already_sharded")
    next(iter(loader))
    assert mine.worker_init_fn is set_default
    with pytest.raises(ValueError, match="prefetch_factor"):
        begin_reading(Broken(mine))
    assert mine.worker_init_fn is set_default


class Broken:
    """Can't begin."""

    num_workers = 1
    multiprocessing_context = None

    def __init__(self, loader: Any) -> None:
        vars(self)["loader"] = loader

    def __iter__(self) -> Any:
        raise ValueError("prefetch_factor")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)


def work(begin: StartWorker, orders: Any) -> None:
    """Be a worker that says when it has handled a signal."""
    begin(0)
    orders.send("ready")
    while True:
        orders.send(orders.recv())


class Blocked(Dataset[int]):
    """Says how many signals are blocked where it is read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_no_signal_stays_blocked(holder: Holder) -> None:
    del holder
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert [int(one) for one in begin_reading(DataLoader(Blocked(), num_workers=1))] == [len(before)] * 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_worker_leaves_by_a_signal_as_soon_as_none_is_held(holder: Holder) -> None:
    ours, theirs = FORKING.Pipe()
    worker = FORKING.Process(target=work, args=(StartWorker(None), theirs), daemon=True)
    worker.start()
    try:
        assert ours.recv() == "ready"
        worker.terminate()
        ours.send("still there")
        assert ours.poll(20)
        assert ours.recv() == "still there"
        holder.hold.is_on.value = 0
        worker.terminate()
        worker.join(20)
        assert worker.exitcode == 0
    finally:
        worker.kill()


def test_what_is_shared_stays_out_of_a_pickle(holder: Holder) -> None:
    del holder
    copy = pickle.loads(pickle.dumps(StartWorker(set_default)))
    assert vars(copy) == {"_then": set_default, "_held": ()}
