# torch leaves DataLoader partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import multiprocessing
import pickle
import signal
from types import FrameType
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from accelfn import Context
from accelfn.data import prepare_data_loader
from accelfn.data.workers import Hold, SignalHolder, StartWorker, begin_reading, held_signals

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
