# torch leaves DataLoader partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import gc
import multiprocessing
import os
import signal
from contextlib import nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accelfn import Context
from accelfn.data import microbatches, prepare_data_loader
from accelfn.data.workers import Hold, SignalHolder, StartWorker, held_signals
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
    begun: list[Any]

    def __iter__(self) -> Any:
        iterator: Any = super().__iter__()
        iterator._data_queue = BrokenQueue(iterator._data_queue, self.given)
        self.begun.append(iterator)
        return iterator


def listed(samples: list[torch.Tensor]) -> list[int]:
    return [int(one) for one in samples]


def broken(given: Any) -> BrokenLoader:
    data: Any = torch.arange(8)
    loader = BrokenLoader(data, batch_size=2, num_workers=1, collate_fn=listed)
    loader.given, loader.begun = given, []
    return loader


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        FileNotFoundError(2, "No such file or directory"),
        EOFError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_connection_that_broke_off_is_a_worker_that_died(error: Exception) -> None:
    with pytest.raises(RuntimeError, match="a DataLoader worker of rank 0 exited unexpectedly") as caught:
        list(prepare_data_loader(Context(), broken(error)))
    assert type(error).__name__ in str(caught.value)
    assert caught.value.__cause__ is error


def test_another_error_of_the_queue_stays_what_it_is() -> None:
    for error in (PermissionError(13, "Permission denied"), RuntimeError("unable to mmap")):
        loader = broken(error)
        with pytest.raises(type(error)) as caught:
            list(prepare_data_loader(Context(), loader))
        assert caught.value is error
        # The error keeps the iterator, for whose workers a collection of garbage would wait for seconds.
        loader.begun[0]._shutdown_workers()


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


def test_where_somebody_does_workers_stay_and_the_users_own_beginning_comes_after(holder: Holder) -> None:
    assert held_signals() == ((signal.SIGTERM, (holder.hold,)),)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert read() == [1] * 8
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert read(worker_init_fn=set_default) == [0] * 8


def set_default(worker_id: int) -> None:
    del worker_id
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_the_users_loader_looks_as_before_also_where_it_can_not_begin() -> None:
    class Broken(DataLoader[Any]):
        def __iter__(self) -> Any:
            raise ValueError("prefetch_factor")

    for kind in (DataLoader[Any], Broken):
        mine = kind(Handlers(), num_workers=1, worker_init_fn=set_default)
        loader: Any = prepare_data_loader(Context(), mine, "already_sharded")
        with pytest.raises(ValueError, match="prefetch_factor") if kind is Broken else nullcontext():
            next(iter(loader))
        assert mine.worker_init_fn is set_default


def work(begin: StartWorker, orders: Any) -> None:
    """Be a worker that says when it has handled a signal."""
    begin(0)
    orders.send("ready")
    while True:
        orders.send(orders.recv())


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


class KillsOthers:
    """Garbage of a rank that no other process survives to collect, as a process group is."""

    def __init__(self) -> None:
        self.itself, self.made_in = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.made_in:
            os._exit(3)


class Collects(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.tensor(index)


def test_a_worker_does_not_collect_the_garbage_of_its_rank() -> None:
    gc.disable()
    try:
        KillsOthers()
        loader = prepare_data_loader(Context(), DataLoader(Collects(), num_workers=1))
        assert [int(batch) for batch in loader] == [0, 1, 2, 3]
        assert not gc.isenabled()
    finally:
        gc.enable()
