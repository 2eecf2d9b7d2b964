"""What becomes of two ranks that disagree: plain torch, Accelerate and accelfn, call by call.

Each cell is a world of two real processes on
loopback over gloo, forked from this one, which has imported torch. They find each other as under torchrun,
through a store that is no rank's own; but nothing watches them, so what a rank learns it learns by itself.
Needs ``accelfn[bench]`` and a platform that can fork.

A cell says what became of the ranks that the case judges: both, or only rank 0 where rank 1 is the fault.

- works: the ranks differ lawfully, and each got the right result.
- unnoticed: the ranks disagree, and each got what it asked for, as if nothing were wrong.
- wrong numbers: a call returned something else than what was asked for, or returned where nothing is right.
- named error: of ``accelfn.errors``. Times run from entering the call that raised; where rank 1 breaks down
  it does so 200 ms after rank 0 has entered.
- error: any other exception.
- hangs until the timeout: such an exception, after the timeout of the process group and not before.
- hangs: nothing came of it, nor of the other rank, for three seconds longer than the timeout.
- process aborts: ended by a signal that nobody sent.
"""

import contextlib
import functools
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist

from tests.bench.contenders import CONTENDERS, SIZE, Calls, Contender
from tests.bench.timing import show_table


class Missing:
    """Stands for the result where none is right."""


@dataclass(frozen=True, slots=True)
class Me:
    """A rank and where it reports."""

    rank: int
    report: Path

    def say(self, event: str, **facts: object) -> None:
        # Opened each time: what is written stays when the process is killed.
        with self.report.open("a") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")

    def attempt(self, call: Callable[[], Any], expected: object = Missing) -> None:
        """Enter a collective and report what comes of it; its error goes on."""
        self.say("entered")
        start = time.monotonic()
        try:
            found = call()
        except StopIteration:
            raise
        except BaseException as error:
            self.say("raised", **facts_of(error), s=time.monotonic() - start)
            raise
        values = numbers(found)
        self.say("right" if values == expected else "wrong", found=repr(values)[:200])


@dataclass(frozen=True, slots=True)
class Case:
    """One way to disagree."""

    name: str
    run: Callable[[Me, Calls], None]
    judged: tuple[int, ...] = (0, 1)
    legal: bool = False
    timeout_s: float = 5.0
    linger_s: float = 0.0  # between the exception of rank 1 and the end of its process


def numbers(tree: Any) -> Any:
    """Return a tree as lists of numbers, so that neither a dtype nor a container decides what is right."""
    if isinstance(tree, torch.Tensor):
        return cast("Any", tree).tolist()
    if isinstance(tree, dict):
        return {key: numbers(part) for key, part in cast("dict[str, Any]", tree).items()}
    if isinstance(tree, (list, tuple)):
        return [numbers(part) for part in cast("Sequence[Any]", tree)]
    return tree


def gathers(trees: tuple[Any, Any], *expected: object) -> Callable[[Me, Calls], None]:
    """Let each rank gather a tree; ``expected`` is one result for both ranks, or one for each."""

    def run(me: Me, calls: Calls) -> None:
        me.attempt(lambda: calls.gather(trees[me.rank]), expected[me.rank % len(expected)])

    return run


def other_operation(me: Me, calls: Calls) -> None:
    own = torch.tensor([1.0 + me.rank])
    if me.rank:
        me.attempt(lambda: calls.reduce(own, "sum"))
    else:
        me.attempt(lambda: calls.gather(own))


def other_reduction(me: Me, calls: Calls) -> None:
    own = torch.tensor([1.0 + 4.0 * me.rank, 8.0])
    reduction = calls.other_reduction if me.rank else "sum"
    expected = {"sum": [6.0, 16.0], "mean": [3.0, 8.0], "max": [5.0, 8.0]}
    me.attempt(lambda: calls.reduce(own, reduction), expected[reduction])


def swapped(me: Me, calls: Calls) -> None:
    # Two lines of a program, as they would stand there: a call has no other name.
    steps = (
        lambda: me.attempt(lambda: calls.gather(torch.tensor([10.0 + me.rank])), [10.0, 11.0]),
        lambda: me.attempt(lambda: calls.gather(torch.tensor([20.0 + me.rank])), [20.0, 21.0]),
    )
    for step in reversed(steps) if me.rank else steps:
        step()


def skipped(me: Me, calls: Calls) -> None:
    if me.rank == 0:
        me.attempt(lambda: calls.gather(torch.tensor([10.0])))
    me.attempt(lambda: calls.gather(torch.tensor([20.0 + me.rank])), [20.0, 21.0])


def one_fewer(me: Me, calls: Calls) -> None:
    me.attempt(lambda: calls.gather(torch.tensor([10.0 + me.rank])), [10.0, 11.0])
    if me.rank == 0:
        me.attempt(lambda: calls.gather(torch.tensor([20.0])))


def instead(fault: Callable[[], object]) -> Callable[[Me, Calls], None]:
    """Let rank 1 do something else than gather."""

    def run(me: Me, calls: Calls) -> None:
        if me.rank:
            time.sleep(0.2)  # rank 0 is to wait in its call by then
            fault()
        me.attempt(lambda: calls.gather(torch.tensor([1.0])))

    return run


def fail() -> NoReturn:
    raise OSError("the disk is full")


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


def fewer_batches(me: Me, calls: Calls, *, train: bool) -> None:
    """Run a loop over 4 batches on rank 0 and 3 on rank 1, and meet behind it, as programs do."""
    batches = [torch.tensor([10.0 * me.rank + number]) for number in range(4 - me.rank)]
    rows = (calls.train_on_each if train else calls.gather_each)(batches)
    with contextlib.suppress(StopIteration):
        for number in range(5):
            gathered, averaged = [float(number), 10.0 + number], [5.0 + number]
            expected = averaged if train else gathered
            me.attempt(lambda: next(rows), expected if number < 3 else Missing)
    me.attempt(calls.wait, None)


def cases() -> list[Case]:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    both, six = [1.0, 2.0, 3.0, 4.0], torch.arange(6.0)
    mapping = {"a": one, "b": two}
    turned = {"b": two + 10, "a": one + 10}
    return [
        Case("another shape", gathers((one, torch.cat([two, two])), [*both, 3.0, 4.0])),
        Case("as many elements in another shape", gathers((six.view(2, 3), six.view(3, 2) + 10), Missing)),
        Case("another dtype", gathers((one, two.int()), both)),
        Case("float16 for bfloat16", gathers((one.bfloat16(), two.half()), both)),
        Case("a key is missing", gathers((mapping, {"a": two}), Missing, {"a": both})),
        Case(
            "keys in another order (lawful)",
            gathers((mapping, turned), {"a": [1.0, 2.0, 11.0, 12.0], "b": [3.0, 4.0, 13.0, 14.0]}),
            legal=True,
        ),
        Case("a tuple for a list", gathers(([one], (two,)), [both])),
        Case("None for a tensor", gathers((mapping, {"a": one, "b": None}), Missing)),
        Case("reduce for gather", other_operation),
        Case("another reduction", other_reduction),
        Case("two calls swapped", swapped),
        Case("a call skipped", skipped),
        Case("one call fewer, then the end", one_fewer, judged=(0,)),
        Case("a rank raises, and lingers for 3 s", instead(fail), judged=(0,), linger_s=3.0),
        Case("a rank calls sys.exit", instead(lambda: sys.exit(3)), judged=(0,)),
        Case("a rank calls os._exit", instead(lambda: os._exit(7)), judged=(0,)),
        Case("a rank is killed (SIGKILL)", instead(lambda: signal_self(signal.SIGKILL)), judged=(0,)),
        Case(
            "a rank is stopped (SIGSTOP); timeout 2 s",
            instead(lambda: signal_self(signal.SIGSTOP)),
            judged=(0,),
            timeout_s=2.0,
        ),
        Case("a batch fewer, gather for each", functools.partial(fewer_batches, train=False)),
        Case("a batch fewer, a DDP step for each", functools.partial(fewer_batches, train=True)),
    ]


def facts_of(error: BaseException) -> dict[str, object]:
    kind = type(error)
    return {
        "error": kind.__name__,
        "named": kind.__module__ == "accelfn.errors",
    }


def be_rank(me: Me, contender: Contender, case: Case) -> NoReturn:
    """Be one rank: the whole life of a forked child."""
    torch.set_num_threads(1)
    code = 1
    try:
        with contender(case.timeout_s) as calls:
            assert numbers(calls.gather({"warm": torch.tensor([me.rank])})) == {"warm": [0, 1]}
            me.say("ready")
            case.run(me, calls)
        me.say("left")
        code = 0
    except SystemExit as error:
        code = cast("int", error.code)
    except Exception as error:  # noqa: BLE001 -- whatever ends a rank is what is measured
        me.say("left", **facts_of(error))
        if me.rank:
            time.sleep(case.linger_s)
    finally:
        # Without finalization, in which a forked interpreter now and then aborts, and a fresh one was not
        # seen to.
        os._exit(code)


def fork() -> int:
    sys.stdout.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of forking beside other threads; the child starts no torch thread pool.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def start_rank(rank: int, folder: Path, contender: Contender, case: Case) -> int:
    pid = fork()
    if pid:
        return pid
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    be_rank(Me(rank, folder / f"report{rank}"), contender, case)


def start_store() -> tuple[int, int]:
    """Host the store in a process of its own, as torchrun's agent does, and give its id and the port."""
    receiver, sender = os.pipe()
    parent = os.getpid()
    pid = fork()
    if not pid:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage] -- documented, but not exported
        os.write(sender, str(store.port).encode())
        while os.getppid() == parent:  # the parent kills it, and if that is gone it goes too
            time.sleep(1)
        os._exit(0)
    os.close(sender)
    port = int(os.read(receiver, 16))
    os.close(receiver)
    return pid, port


class Outcome(NamedTuple):
    """What one rank reported, and how its process ended."""

    events: tuple[dict[str, Any], ...]
    code: int | None  # as waitstatus_to_exitcode gives it; None: it was still there at the limit

    def find(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in kinds]


def lines_of(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.exists() else []


def run_world(contender: Contender, case: Case) -> list[Outcome]:
    """Run one case in two new processes, and leave none behind."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        folder = Path(name)
        reports = [folder / f"report{rank}" for rank in range(SIZE)]
        host, port = start_store()  # a new one for each world: gloo would find the addresses of the last one
        os.environ["MASTER_PORT"] = str(port)
        pids = [start_rank(rank, folder, contender, case) for rank in range(SIZE)]
        codes: dict[int, int] = {}
        said, deadline = -1, 0.0
        try:
            while len(codes) < SIZE:
                so_far = sum(report.stat().st_size for report in reports if report.exists())
                if so_far != said:
                    said, deadline = so_far, time.monotonic() + case.timeout_s + 3.0
                if time.monotonic() > deadline:
                    break
                for pid in pids:
                    if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                        codes[pid] = os.waitstatus_to_exitcode(ended[1])
                time.sleep(0.01)
        finally:
            for pid in (*pids, host):
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        outcomes: list[Outcome] = []
        for rank, pid in enumerate(pids):
            events = tuple(json.loads(line) for line in lines_of(reports[rank]))
            outcomes.append(Outcome(events, codes.get(pid)))
    return outcomes


class Verdict(NamedTuple):
    """On one rank, in fixed words."""

    words: str
    error: str = ""  # the class of a named error
    s: float | None = None

    def text(self, where: str = "") -> str:
        took = "" if self.s is None else f" in {self.s * 1e3:.{0 if self.s > 0.01 else 1}f} ms"
        error = f" ({self.error})" if self.error else ""
        return f"{self.words}{where}{took}{error}"


def judge(case: Case, outcome: Outcome) -> Verdict:
    if not outcome.find("ready"):
        return Verdict("did not start")
    parts = ["wrong numbers"] if outcome.find("wrong") else []
    verdict = Verdict("")
    errors = [event for event in outcome.find("raised", "left") if "error" in event]
    if errors:
        event = errors[0]
        s = event.get("s")
        if event["named"]:
            parts.append("named error")
            verdict = Verdict("", error=event["error"], s=s)
        elif s is not None and s > 0.9 * case.timeout_s:
            parts.append("hangs until the timeout")
        else:
            parts.append("error")
            verdict = Verdict("", s=s)
    if outcome.code is None:
        parts.append("hangs")
    elif outcome.code < 0:
        parts.append(f"process aborts ({signal.Signals(-outcome.code).name})")
    return verdict._replace(words=", then ".join(parts) or ("works" if case.legal else "unnoticed"))


def show(case: Case, outcomes: Sequence[Outcome]) -> str:
    """Return the text of a cell."""
    verdicts = [judge(case, outcomes[rank]) for rank in case.judged]
    if len({verdict.words for verdict in verdicts}) > 1:
        return "; ".join(
            f"rank {rank}: {verdict.text()}" for rank, verdict in zip(case.judged, verdicts, strict=True)
        )
    errors = ", ".join(sorted({verdict.error for verdict in verdicts}))
    times = [verdict.s for verdict in verdicts if verdict.s is not None]
    together = verdicts[0]._replace(error=errors, s=max(times, default=None))
    where = "" if together.words == "works" else " on every rank" if len(verdicts) > 1 else " on rank 0"
    return together.text(where)


def main() -> None:
    for name in ("accelerate", "torch._dynamo"):  # the forked ranks have them then; DDP asks for the second
        importlib.import_module(name)

    os.environ |= {
        "WORLD_SIZE": str(SIZE),
        "LOCAL_WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "campaign",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    contenders = dict(CONTENDERS)
    rows = [
        [case.name, *(show(case, run_world(one, case)) for one in contenders.values())] for case in cases()
    ]
    show_table("campaign", ("case", *contenders), rows)


if __name__ == "__main__":
    main()
