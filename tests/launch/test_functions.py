"""Ranks started from code: what they get, what comes back, and that none is left behind."""

import functools
import linecache
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import accelfn as af
from accelfn.errors import (
    CollectiveTimeoutError,
    ConfigurationError,
    DistributedError,
    MissingExtraError,
    MissingRankError,
    RemoteTraceback,
)
from accelfn.launch.function_ranks import read_outcome, write_job, write_report

ROOT = Path(__file__).parents[2]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pids: list[int]) -> bool:
    until = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


# --- launch_processes ----------------------------------------------------------------------------


def test_each_rank_has_its_context_and_what_it_returns_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELFN_MIXED_PRECISION", "fp16")  # an option wins
    offset = torch.tensor([10.0])  # the function is a closure

    def fn(ctx: af.Context, factor: float) -> dict[str, Any]:
        total = af.reduce(ctx, offset * (ctx.rank + 1) * factor)
        return {
            "place": (ctx.rank, ctx.local_rank, ctx.num_processes, ctx.world.num_nodes),
            "total": total,
            "precision": ctx.mixed_precision,
            "variable": os.environ.get("OF_THE_RANKS"),
            "argv": sys.argv,
            "pid": os.getpid(),
        }

    before = dict(os.environ)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)  # forking beside threads would be unsafe; this isn't forking
    thread.start()
    try:
        results = af.launch_processes(
            fn, 2, (2.0,), environment={"OF_THE_RANKS": "seen"}, timeout_s=60, mixed_precision="bf16"
        )
    finally:
        stop.set()
        thread.join()
    assert [one["place"] for one in results] == [(0, 0, 2, 1), (1, 1, 2, 1)]
    assert all(torch.equal(one["total"], torch.tensor([60.0])) for one in results)
    assert [one["precision"] for one in results] == ["bf16", "bf16"]
    assert [one["variable"] for one in results] == ["seen", "seen"]
    assert [one["argv"] for one in results] == [sys.argv, sys.argv]
    assert len({one["pid"] for one in results} | {os.getpid()}) == 3
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()
    assert wait_until_gone([one["pid"] for one in results])


def test_an_exception_of_a_rank_comes_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    def fn(ctx: af.Context) -> None:
        (tmp_path / str(ctx.rank)).write_text(str(os.getpid()))
        af.wait_for_everyone(ctx)
        if ctx.rank == 1:
            raise KeyError("the loss is a teapot")
        time.sleep(90)

    with pytest.raises(KeyError, match="the loss is a teapot") as caught:
        af.launch_processes(fn, 2, timeout_s=60)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert 'raise KeyError("the loss is a teapot")' in cause.text
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__[0].startswith("raised on rank 1 of 2 (fresh processes)")
    assert wait_until_gone([int((tmp_path / str(rank)).read_text()) for rank in (0, 1)])


def test_a_rank_that_is_killed_is_named() -> None:
    def fn(ctx: af.Context) -> None:
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        af.wait_for_everyone(ctx)

    with pytest.raises(MissingRankError, match="rank 1 was killed by SIGKILL before it returned"):
        af.launch_processes(fn, 2, timeout_s=60)


@pytest.mark.slow
def test_ranks_that_do_not_finish_are_stopped_with_their_stacks(tmp_path: Path) -> None:
    def fn(ctx: af.Context) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        if ctx.rank == 1:
            return
        wait_for_godot = threading.Event()
        wait_for_godot.wait()

    with pytest.raises(CollectiveTimeoutError, match="ranks 0, 2 did not finish in time") as caught:
        af.launch_processes(fn, 3, timeout_s=25)  # on a busy machine rank 1 takes some of it to start
    assert "in fn" in str(caught.value)
    assert "Increase timeout_s=25" in str(caught.value)
    assert wait_until_gone([int((tmp_path / "pid").read_text())])


def test_unpicklable_values_are_refused_in_both_directions() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"can't be sent to fresh processes: .*lock.*inside the function"):
        af.launch_processes(lambda ctx: lock.locked(), 1)

    def give_lock(_: af.Context) -> object:
        return threading.Lock()

    with pytest.raises(TypeError, match="rank 0 returned lock, which can't be sent back"):
        af.launch_processes(give_lock, 1, timeout_s=60)


def test_leaving_the_process_is_an_error_and_not_the_launchers_own_end() -> None:
    with pytest.raises(DistributedError, match=r"rank 0 called sys.exit\(3\)"):
        af.launch_processes(lambda ctx: sys.exit(3), 1, timeout_s=60)

    all_reduce = cast("Any", torch.distributed).all_reduce

    def leave(ctx: af.Context) -> None:
        if ctx.rank == 1:
            sys.exit(0)
        for _ in range(2):  # its connection is lost, which isn't what went wrong
            all_reduce(torch.ones(1))

    with pytest.raises(DistributedError, match=r"rank 1 called sys.exit\(0\)"):
        af.launch_processes(leave, 2, timeout_s=60)


def at_the_top_of_a_module(ctx: af.Context) -> int:
    return ctx.rank


def test_without_cloudpickle_a_function_of_a_module_is_sent_and_another_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert af.launch_processes(at_the_top_of_a_module, 1, timeout_s=60) == [0]
    with pytest.raises(MissingExtraError, match=r"pip install 'accelfn\[notebook\]'"):
        af.launch_processes(lambda ctx: ctx.rank, 1)
    of_the_notebook = SimpleNamespace(train=None)
    exec("def train(ctx): return 1", of_the_notebook.__dict__)
    of_the_notebook.train.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "train", of_the_notebook.train, raising=False)
    with pytest.raises(MissingExtraError, match="train is defined in a notebook"):
        write_job(tmp_path, "launch_processes", of_the_notebook.train, (), {}, {})


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        *(
            ({"num_processes": given}, TypeError, "num_processes must be an integer, 1 or more, got ")
            for given in ("2", 2.0, 1.5, True)
        ),
        ({"num_processes": -1}, ValueError, "num_processes must be at least 1, got -1"),
        (
            {"args": "ab"},
            TypeError,
            r"args must be a tuple .* got str. For a single argument use args=\(x,\)",
        ),
        ({"args": 3}, TypeError, "args must be a tuple or list .* got int"),
        ({"args": torch.zeros(2)}, TypeError, "args must be a tuple or list .* got Tensor"),
        ({"fn": "train"}, TypeError, "the first argument must be a function, got 'train'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("launcher", [af.launch_processes, af.notebook_launcher, af.debug_launcher])
def test_invalid_calls_are_refused_before_the_start(
    launcher: Any,
    change: dict[str, Any],
    kind: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    given: dict[str, Any] = {"fn": at_the_top_of_a_module, "num_processes": 1, "args": (), **change}
    with pytest.raises(kind, match=f"{launcher.__name__}: {message}"):
        launcher(given["fn"], num_processes=given["num_processes"], args=given["args"])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"num_processes": None}, TypeError, "num_processes must be an integer"),
        ({"environment": {"FOO": 1}}, TypeError, "environment must map strings to strings, got"),
        (
            {"mixed_precison": "no"},
            TypeError,
            "unknown argument 'mixed_precison'. Did you mean mixed_precision?",
        ),
        ({"timeout_s": 0}, ValueError, "timeout_s must be a positive number of seconds, got 0"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be a positive number of seconds, got nan"),
    ],
    ids=str,
)
def test_invalid_arguments_of_launch_processes(
    change: dict[str, Any], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    launch: Any = af.launch_processes
    with pytest.raises(kind, match=message):
        launch(at_the_top_of_a_module, **{"num_processes": 1, **change})


class HoldsContext:
    """As a prepared loader does."""

    def __init__(self, ctx: af.Context) -> None:
        """Hold it."""
        self.ctx = ctx


def ways_to_hold(thing: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    def closure(*_: Any) -> Any:
        return thing.device

    def default(*_: Any, it: Any = thing) -> Any:
        return it.device

    space: dict[str, Any] = {"thing": thing, "__name__": "__main__"}  # as of a notebook
    exec("def as_global(*_): return thing.device", space)
    return {
        "closure": (closure, ()),
        "default": (default, ()),
        "global": (space["as_global"], ()),
        "argument": (at_the_top_of_a_module, (thing,)),
        "inside": (at_the_top_of_a_module, ([{"it": HoldsContext(thing)}],)),
        "partial": (functools.partial(at_the_top_of_a_module, thing), ()),
        "lambda in a list": (at_the_top_of_a_module, ([lambda: thing],)),
    }


HOLDERS = ("closure", "default", "global", "argument", "inside", "partial", "lambda in a list")


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("make", [af.Context, af.Accelerator], ids=lambda make: make.__name__)
def test_a_context_of_this_process_is_not_sent(make: Any, holder: str, tmp_path: Path) -> None:
    thing = make()
    fn, args = ways_to_hold(thing)[holder]
    name = type(thing).__name__
    with pytest.raises(TypeError, match=f"can't be sent.*its {name} is bound to this process") as caught:
        write_job(tmp_path, "launch_processes", fn, args, {}, {})
    assert "Create it inside the function" in str(caught.value)
    where = {"closure": "because of 'thing'", "global": "because of 'thing'", "argument": "argument 0"}
    assert where.get(holder, "") in str(caught.value)
    if make is af.Accelerator:
        thing.close()


def test_without_cloudpickle_a_context_is_not_sent_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match="because of argument 0: its Context is bound to this process"):
        write_job(tmp_path, "launch_processes", at_the_top_of_a_module, (af.Context(),), {}, {})


def test_a_context_does_not_come_back_and_still_pickles_for_workers_of_a_loader(tmp_path: Path) -> None:
    assert write_report(tmp_path, 1, 0, 3, None) is None
    error = write_report(tmp_path, 1, 0, [af.Context()], None)
    assert isinstance(error, TypeError)
    assert "rank 1 returned list, which can't be sent back: its Context is bound" in str(error)
    assert pickle.loads(pickle.dumps(af.Context())).num_processes == 1


def test_the_lines_of_a_notebooks_cell_are_in_the_traceback() -> None:
    name = "/tmp/ipykernel_7/1234.py"
    source = "def boom(ctx):\n    rate = 0\n    return 1 / rate  # of the cell\n"
    lines: list[str] = [*source.splitlines(keepends=True)]
    linecache.cache[name] = (len(source), None, lines, name)  # as IPython does
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), space)
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            af.launch_processes(space["boom"], 1, timeout_s=60)
    finally:
        del linecache.cache[name]
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert f'File "{name}", line 3, in boom\n    return 1 / rate  # of the cell' in cause.text


def test_an_interrupt_without_a_text_has_no_dangling_colon(tmp_path: Path) -> None:
    write_report(tmp_path, 1, 0, None, KeyboardInterrupt())
    outcome = read_outcome(tmp_path, 1)
    assert outcome is not None
    assert str(outcome.error) == "rank 1 raised KeyboardInterrupt"


def test_two_launches_in_a_row_and_one_inside_another_warn_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import accelfn as af\n"
        "def inner(ctx, x): return ctx.rank + x\n"
        "def outer(ctx): return af.launch_processes(inner, 2, (ctx.rank,), timeout_s=90)\n"
    )
    (tmp_path / "script.py").write_text(
        "import accelfn as af, own\n"
        "print(af.launch_processes(own.inner, 1, (5,), timeout_s=90))\n"
        "print(af.launch_processes(own.outer, 1, timeout_s=90))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[5]\n[[0, 1]]\n"), done.stderr
    assert done.stderr == ""


SCRIPT = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in a shell's background
import accelfn as af

def fn(ctx):
    pathlib.Path(sys.argv[1], str(ctx.rank)).write_text(str(os.getpid()))
    time.sleep(90)

af.launch_processes(fn, 2)  # a script needs no guard: ranks do not run it again
"""


ELASTIC = (
    SCRIPT.replace("launch_processes(fn, 2)", "notebook_launcher(fn, (None,), 2, rdzv_conf={'timeout': 60})")
    .replace("str(ctx.rank)", "os.environ['RANK']")
    .replace("str(os.getpid())", "f'{os.getpid()} {os.getppid()}'")
)


@pytest.mark.parametrize(
    ("source", "number"),
    [
        *((SCRIPT, number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)),
        *((ELASTIC, number) for number in (signal.SIGTERM, signal.SIGKILL)),
    ],
    ids=["SIGINT", "SIGTERM", "SIGKILL", "SIGTERM with an agent", "SIGKILL with an agent"],
)
def test_a_launcher_that_ends_leaves_nothing_behind(
    tmp_path: Path, source: str, number: signal.Signals
) -> None:
    (tmp_path / "script.py").write_text(source)
    folders = tmp_path / "temporary"
    folders.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "script.py", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folders)},
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / "0", tmp_path / "1"]
    try:
        until = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files):
            assert launcher.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        launcher.send_signal(number)
        assert launcher.wait(30) != 0
    finally:
        launcher.kill()
        launcher.wait()
    # Of the ranks, and of the agent between.
    assert wait_until_gone(sorted({int(pid) for file in files for pid in file.read_text().split()}))
    until = time.monotonic() + 20
    while left := list(folders.glob("accelfn-launch-*")):
        assert time.monotonic() < until, left
        time.sleep(0.05)


# --- notebook_launcher and debug_launcher --------------------------------------------------------


def describe(value: object) -> tuple[Any, ...]:
    with af.init_context() as ctx:
        place = (ctx.rank, ctx.local_rank, ctx.num_processes, ctx.is_local_main_process)
        return (*place, ctx.mixed_precision, str(ctx.device), value)


def parents_mark(_: object) -> bool:
    return hasattr(sys, "touched_by_the_parent")


def test_ranks_of_a_notebook_inherit_nothing_such_as_an_initialised_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A fork would take the mark along, as it takes CUDA's state, which no forked process can use.
    monkeypatch.setattr(sys, "touched_by_the_parent", True, raising=False)
    assert parents_mark(None)
    assert af.notebook_launcher(parents_mark, (None,), 2) == [False, False]


def test_notebook_launcher_gives_the_precision_it_was_asked_for() -> None:
    before = dict(os.environ)
    assert af.notebook_launcher(describe, ("x",), 2, mixed_precision="bf16") == [
        (0, 0, 2, True, "bf16", "cpu", "x"),
        (1, 1, 2, False, "bf16", "cpu", "x"),
    ]
    assert dict(os.environ) == before


def test_debug_launcher_uses_the_cpu_and_numbers_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELFN_TORCH_DEVICE", "cuda:1")
    monkeypatch.setenv("ACCELFN_MIXED_PRECISION", "bf16")
    assert af.debug_launcher(describe, (None,)) == [
        (0, 0, 2, True, "no", "cpu", None),
        (1, 1, 2, False, "no", "cpu", None),
    ]


def fail_with_an_open_context() -> None:
    ctx = af.init_context()
    if ctx.rank == 0:
        raise LookupError("no such column")
    af.wait_for_everyone(ctx)


def test_the_first_failed_rank_is_reported() -> None:
    with pytest.raises(LookupError, match="no such column") as caught:
        af.debug_launcher(fail_with_an_open_context)
    if sys.version_info >= (3, 11):
        assert "also failed: rank 1 RemoteRankError" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "bf15"}, "mixed_precision must be one of no, .*got 'bf15'"),
        ({"node_rank": 2, "num_nodes": 2}, "node_rank must be less than num_nodes=2, got 2"),
        ({"max_restarts": -1}, "max_restarts must be at least 0, got -1"),
        ({"monitor_interval": 0}, "monitor_interval must be a positive number of seconds, got 0"),
        ({"use_port": "http"}, "invalid literal for int"),
        ({"num_processes": 0}, "num_processes must be at least 1, got 0"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_before_anything_starts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        af.notebook_launcher(describe, (0,), **arguments)


def test_the_number_of_processes_is_that_of_the_accelerators_or_must_be_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(ConfigurationError, match="num_processes is required"):
        af.notebook_launcher(describe, (0,))
    with pytest.raises(ValueError, match="num_processes must be at least 1, got 0"):
        af.debug_launcher(describe, (0,), 0)
    with pytest.raises(ValueError, match="num_processes must be at least 1, got 0"):
        af.launch_processes(at_the_top_of_a_module, 0)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        with pytest.raises(ConfigurationError, match=f"can't use port {port} of 127.0.0.1"):
            af.notebook_launcher(describe, (0,), 2, use_port=port)


def fail_once(folder: str) -> tuple[int, str | None]:
    with af.init_context() as ctx:
        print("hello", flush=True)
        marker = Path(folder, "tried")
        first = not marker.exists()
        af.wait_for_everyone(ctx)
        if first and ctx.rank == 1:
            marker.touch()
            raise RuntimeError("the first time")
        af.wait_for_everyone(ctx)
        return ctx.rank, os.environ.get("TORCHELASTIC_RESTART_COUNT")


@pytest.mark.slow
def test_ranks_are_started_again_and_their_lines_have_the_prefix(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    results = af.notebook_launcher(
        fail_once, (str(tmp_path),), 2, max_restarts=1, log_line_prefix_template="[rank ${rank}]: "
    )
    assert results == [(0, "1"), (1, "1")]
    assert "[rank 1]: hello" in capfd.readouterr().out
    assert dict(os.environ) == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    (tmp_path / "tried").unlink()
    with pytest.raises(RuntimeError, match="the first time") as caught:
        af.notebook_launcher(fail_once, (str(tmp_path),), 2, rdzv_conf={"timeout": 30})
    assert isinstance(caught.value.__cause__, RemoteTraceback)


def place() -> tuple[int, int, int, int]:
    with af.init_context() as ctx:
        af.wait_for_everyone(ctx)
        return ctx.rank, ctx.local_rank, ctx.world.node_rank, ctx.num_processes


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes_meet(backend: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results: dict[int, Any] = {}

    def run_node(node: int) -> None:
        results[node] = af.notebook_launcher(
            place, (), 1, use_port=port, num_nodes=2, node_rank=node, rdzv_backend=backend, rdzv_id="two"
        )

    nodes = [threading.Thread(target=run_node, args=(node,)) for node in (0, 1)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(100)
    ranks = sorted(rank for (rank,) in results.values())
    assert ranks == [(0, 0, 0, 2), (1, 0, 1, 2)]
    if backend == "static":
        assert results[0] == [(0, 0, 0, 2)]


@pytest.mark.slow
def test_nodes_without_a_rendezvous_are_an_error() -> None:
    with pytest.raises(DistributedError, match=r"node 1 of 2 could not start its ranks .*at 127.0.0.1:1\)"):
        af.notebook_launcher(
            place, (), 1, use_port=1, num_nodes=2, node_rank=1, rdzv_conf={"timeout": 2, "read_timeout": 2}
        )


# --- TPU -----------------------------------------------------------------------------------------


def test_a_tpu_takes_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(MissingExtraError, match="needs torch_xla"):
        af.notebook_launcher(describe, (0,), 8)


def test_a_tpu_is_left_to_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def launch(fn: Any, args: tuple[Any, ...] = (), start_method: str = "spawn") -> None:
        calls.append(start_method)
        kept = dict(os.environ)
        for index in range(2):  # a stand-in: the ranks are calls, one after the other
            try:
                fn(index, *args)
            finally:
                os.environ.clear()
                os.environ.update(kept)

    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(launch=launch))

    def read(x: int) -> tuple[int, str]:
        return x, os.environ["ACCELFN_MIXED_PRECISION"]

    assert af.notebook_launcher(read, (5,), 8, "bf16") == [(5, "bf16"), (5, "bf16")]
    assert calls == ["spawn"]
    # A context asks more of it than this stand-in has.
    with pytest.raises(MissingExtraError, match=r"torch_xla\.distributed\.xla_backend can't be imported"):
        af.notebook_launcher(describe, (0,))
