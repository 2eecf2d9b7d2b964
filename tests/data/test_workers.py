# torch leaves DataLoader partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import os
import signal
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accelfn import Context
from accelfn.data import microbatches, prepare_data_loader
from accelfn.data.workers import naming_dead_workers
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

    with pytest.raises(QuotingError), naming_dead_workers(0):
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
