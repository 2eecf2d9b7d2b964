"""Ranks started from code: what they get, what comes back, and that none is left behind."""

import functools
import linecache
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
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
from tests.launch.processes import environment, free_port, is_alive, wait_for

# A rank loads torch: in seconds, each. A function that isn't one of a module needs cloudpickle.
loads_torch = pytest.mark.slow


@pytest.fixture
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)


# --- what comes back -----------------------------------------------------------------------------


def describe(ctx: af.Context, factor: float) -> dict[str, Any]:
    return {
        "place": (ctx.rank, ctx.local_rank, ctx.num_processes, ctx.world.num_nodes),
        "total": af.reduce(ctx, torch.tensor([10.0]) * (ctx.rank + 1) * factor),
        "settings": (ctx.mixed_precision, os.environ.get("OF_THE_RANKS"), sys.argv),
        "pid": os.getpid(),
        "mark": hasattr(sys, "touched_by_the_parent"),
    }


@loads_torch
def test_each_rank_has_its_context_and_what_it_returns_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELFN_MIXED_PRECISION", "fp16")  # an option wins
    before = dict(os.environ)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)  # forking beside threads would be unsafe; this isn't forking
    thread.start()
    try:
        results = af.launch_processes(
            describe, 2, (2.0,), environment={"OF_THE_RANKS": "seen"}, timeout_s=300, mixed_precision="bf16"
        )
    finally:
        stop.set()
        thread.join()
    assert [one["place"] for one in results] == [(0, 0, 2, 1), (1, 1, 2, 1)]
    assert all(torch.equal(one["total"], torch.tensor([60.0])) for one in results)
    assert [one["settings"] for one in results] == [("bf16", "seen", sys.argv)] * 2
    assert len({one["pid"] for one in results} | {os.getpid()}) == 3
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()
    assert not any(is_alive(one["pid"]) for one in results)


def own_world(_: object = None) -> tuple[Any, ...]:
    with af.init_context() as ctx:
        af.wait_for_everyone(ctx)
        place = (ctx.rank, ctx.local_rank, ctx.world.node_rank, ctx.num_processes)
        return (*place, ctx.mixed_precision, str(ctx.device), hasattr(sys, "touched_by_the_parent"))


@loads_torch
def test_ranks_of_a_notebook_inherit_nothing_such_as_an_initialised_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A fork would take the mark along, as it takes CUDA's state, which no forked process can use.
    monkeypatch.setattr(sys, "touched_by_the_parent", True, raising=False)
    before = dict(os.environ)
    assert af.notebook_launcher(own_world, (None,), 1, mixed_precision="bf16") == [
        (0, 0, 0, 1, "bf16", "cpu", False)
    ]
    assert dict(os.environ) == before
    monkeypatch.setenv("ACCELFN_TORCH_DEVICE", "cuda:1")  # which the other doesn't read
    monkeypatch.setenv("ACCELFN_MIXED_PRECISION", "bf16")
    places = [(rank, rank, 0, 2, "no", "cpu", False) for rank in (0, 1)]
    assert af.launch.debug_launcher(own_world, (None,)) == places


# --- what goes wrong -----------------------------------------------------------------------------


@loads_torch
def test_an_exception_of_a_rank_comes_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    name = "/tmp/ipykernel_7/1234.py"
    source = (
        "def boom(ctx):\n    import os, pathlib, time\n    import accelfn as af\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(ctx.rank)).write_text(str(os.getpid()))\n"
        "    af.wait_for_everyone(ctx)\n    if ctx.rank == 0:\n        time.sleep(90)\n"
        "    raise KeyError('the loss is a teapot')  # of the cell\n"
    )
    lines: list[str] = [*source.splitlines(keepends=True)]
    linecache.cache[name] = (len(source), None, lines, name)  # as IPython does
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), space)
    try:
        with pytest.raises(KeyError, match="the loss is a teapot") as caught:
            af.launch_processes(space["boom"], 2, timeout_s=300)
    finally:
        del linecache.cache[name]
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert f'File "{name}", line 8, in boom\n    raise KeyError(' in cause.text
    assert "# of the cell" in cause.text
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__[0].startswith("raised on rank 1 of 2 (fresh processes)")
    wait_for(lambda: not any(is_alive(int((tmp_path / str(rank)).read_text())) for rank in (0, 1)))


def fail_with_an_open_context() -> None:
    ctx = af.init_context()
    if ctx.rank == 0:
        raise LookupError("no such column")
    af.wait_for_everyone(ctx)


@loads_torch
def test_the_first_failed_rank_is_reported() -> None:
    with pytest.raises(LookupError, match="no such column") as caught:
        af.launch.debug_launcher(fail_with_an_open_context)
    if sys.version_info >= (3, 11):
        assert "also failed: rank 1 RemoteRankError" in caught.value.__notes__[0]


def is_killed(ctx: af.Context) -> None:
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    af.wait_for_everyone(ctx)


def leaves(ctx: af.Context) -> None:
    if ctx.rank == 1:
        sys.exit(0)
    for _ in range(2):  # its connection is lost, which isn't what went wrong
        cast("Any", torch.distributed).all_reduce(torch.ones(1))


def waits(ctx: af.Context) -> None:
    if ctx.rank == 0:
        threading.Event().wait()


def gives_a_lock(_: af.Context) -> object:
    return threading.Lock()


def gives_its_context(ctx: af.Context) -> object:
    return [ctx]


@loads_torch
@pytest.mark.parametrize(
    ("fn", "size", "kind", "message"),
    [
        (is_killed, 2, MissingRankError, "rank 1 was killed by SIGKILL before it returned"),
        (leaves, 2, DistributedError, r"rank 1 called sys.exit\(0\)"),
        # On a busy machine rank 1 takes some of the time to start.
        (waits, 2, CollectiveTimeoutError, r"rank 0 did not finish in time(.|\n)*=25(.|\n)*in waits"),
        (gives_a_lock, 1, TypeError, "rank 0 returned lock, which can't be sent back"),
        (gives_its_context, 1, TypeError, "rank 0 returned list, which can't be sent back: its Context is"),
    ],
)
def test_what_becomes_of_ranks_is_an_error(
    fn: Callable[..., Any], size: int, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        af.launch_processes(fn, size, timeout_s=25 if fn is waits else 300)


# --- what is refused before the start ------------------------------------------------------------


def at_the_top_of_a_module(*_: Any) -> None: ...


class HoldsContext:
    """As a prepared loader does."""

    def __init__(self, ctx: af.Context) -> None:
        """Hold it."""
        self.ctx = ctx


def hold(thing: Any, how: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a function, and arguments, of which one holds a thing."""

    def closure(*_: Any) -> Any:
        return thing.device

    if how == "closure":
        return closure, ()
    if how == "partial":
        return functools.partial(at_the_top_of_a_module, thing), ()
    return at_the_top_of_a_module, (thing if how == "argument" else [{"it": HoldsContext(thing)}],)


@pytest.mark.parametrize("make", [af.Context, af.Accelerator], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "how", ["argument", "inside", "partial", pytest.param("closure", marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("_starts_nothing")
def test_a_context_of_this_process_is_not_sent(make: Any, how: str) -> None:
    if how == "closure":
        pytest.importorskip("cloudpickle")
    thing = make()
    fn, args = hold(thing, how)
    name = type(thing).__name__
    with pytest.raises(TypeError, match=f"can't be sent.*its {name} is bound to this process") as caught:
        af.launch_processes(fn, 1, args)
    assert "Create it inside the function" in str(caught.value)
    if make is af.Accelerator:
        thing.close()


@pytest.mark.usefixtures("_starts_nothing")
def test_without_cloudpickle_only_functions_of_modules_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelfn\[notebook\]'"):
        af.launch_processes(lambda _: None, 1)
    with pytest.raises(TypeError, match="its Context is bound to this process"):
        af.launch_processes(at_the_top_of_a_module, 1, (af.Context(),))
    of_the_notebook = SimpleNamespace(train=None)
    exec("def train(ctx): return 1", of_the_notebook.__dict__)
    of_the_notebook.train.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "train", of_the_notebook.train, raising=False)
    with pytest.raises(MissingExtraError, match="train is defined in a notebook"):
        af.launch_processes(of_the_notebook.train, 1)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        *(
            (
                {"num_processes": given},
                ValueError,
                f"num_processes must be an integer, 1 or more, got {given!r}",
            )
            for given in ("2", True, 0)
        ),
        (
            {"args": "ab"},
            TypeError,
            r"args must be a tuple .* got str. For a single argument use args=\(x,\)",
        ),
        ({"function": "train"}, TypeError, "the first argument must be a function, got 'train'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("launcher", [af.launch_processes, af.notebook_launcher, af.launch.debug_launcher])
@pytest.mark.usefixtures("_starts_nothing")
def test_invalid_calls_are_refused(launcher: Any, change: Any, kind: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"function": at_the_top_of_a_module, "num_processes": 1, **change}
    with pytest.raises(kind, match=f"{launcher.__name__}: {message}"):
        launcher(given.pop("function"), **given)


@pytest.mark.parametrize(
    ("launcher", "change", "kind", "message"),
    [
        (af.launch_processes, {"num_processes": None}, ValueError, "num_processes must be an integer"),
        (af.launch_processes, {"environment": {"A": 1}}, TypeError, "must map strings to strings, got"),
        (af.launch_processes, {"timeout_s": 0}, ValueError, "must be a positive number of seconds, got 0"),
        (af.launch_processes, {"timeout_s": float("nan")}, ValueError, "number of seconds, got nan"),
        (af.notebook_launcher, {"mixed_precision": "bf15"}, ValueError, "must be one of no, .*got 'bf15'"),
        (
            af.notebook_launcher,
            {"node_rank": 2, "num_nodes": 2},
            ValueError,
            "must be 0 to 1 .*, got 2",
        ),
        (
            af.notebook_launcher,
            {"max_restarts": -1},
            ValueError,
            "an integer, 0 or more, got -1",
        ),
        (af.notebook_launcher, {"monitor_interval": 0}, ValueError, "must be a number greater than 0, got 0"),
        (af.notebook_launcher, {"use_port": "http"}, ValueError, "invalid literal for int"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.usefixtures("_starts_nothing")
def test_invalid_options_are_refused(
    launcher: Any, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        launcher(at_the_top_of_a_module, **{"num_processes": 1, **change})


@pytest.mark.usefixtures("_starts_nothing")
def test_what_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(ConfigurationError, match="num_processes is required"):
        af.notebook_launcher(at_the_top_of_a_module)
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        with pytest.raises(ConfigurationError, match=f"can't use port {port} of 127.0.0.1"):
            af.notebook_launcher(at_the_top_of_a_module, (), 2, use_port=port)


# --- nothing is left behind ----------------------------------------------------------------------

SCRIPT = """
import faulthandler, os, pathlib, signal, sys, time
import accelfn as af

faulthandler.register(signal.SIGUSR1, file=open("stack", "w"))

def fn(ctx):
    with pathlib.Path(sys.argv[1], os.environ["RANK"]).open("w") as file:
        file.write(str(os.getpid()) + (f" {os.getppid()}" if CALL_AGENT else ""))
    time.sleep(90)

if CALL_AGENT:
    af.notebook_launcher(fn, (None,), 2, rdzv_conf={"timeout": 60})
else:
    af.launch_processes(fn, 2)  # a script needs no guard: ranks do not run it again
"""


@loads_torch
@pytest.mark.parametrize(
    ("with_agent", "number"), [(False, signal.SIGINT), (False, signal.SIGKILL), (True, signal.SIGKILL)]
)
def test_a_launcher_that_ends_leaves_nothing_behind(
    with_agent: bool, number: signal.Signals, tmp_path: Path
) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "script.py").write_text(f"CALL_AGENT = {with_agent}\n{SCRIPT}")
    folders = tmp_path / "temporary"
    folders.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "script.py", str(tmp_path)],
        cwd=tmp_path,
        env=environment(TMPDIR=str(folders)),
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / "0", tmp_path / "1"]

    def have_begun() -> bool:
        assert launcher.poll() is None
        return all(file.exists() and file.read_text() for file in files)

    try:
        wait_for(have_begun)
        launcher.send_signal(number)
        assert launcher.wait(30) != 0
    except subprocess.TimeoutExpired:
        launcher.send_signal(signal.SIGUSR1)
        time.sleep(1)
        pytest.fail(f"The launcher goes on:\n{(tmp_path / 'stack').read_text()}")
    finally:
        launcher.kill()
        launcher.wait()
    # Of the ranks, and of the agent between.
    pids = {int(pid) for file in files for pid in file.read_text().split()}
    wait_for(lambda: not any(map(is_alive, pids)) and not [*folders.glob("accelfn-launch-*")])


# --- torch's agent: nodes and restarts -----------------------------------------------------------


def fail_once(folder: str) -> tuple[int, str | None]:
    with af.init_context() as ctx:
        print("hello", flush=True)
        marker = Path(folder, "tried")
        first = not marker.exists()
        af.wait_for_everyone(ctx)
        if first and ctx.rank == ctx.num_processes - 1:
            marker.touch()
            raise RuntimeError("the first time")
        af.wait_for_everyone(ctx)
        return ctx.rank, os.environ.get("TORCHELASTIC_RESTART_COUNT")


@loads_torch
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
        af.notebook_launcher(fail_once, (str(tmp_path),), 1, rdzv_conf={"timeout": 30})
    assert isinstance(caught.value.__cause__, RemoteTraceback)


@loads_torch
def test_two_nodes_meet() -> None:
    results: dict[int, Any] = {}
    port = free_port()

    def run_node(node: int) -> None:
        results[node] = af.notebook_launcher(own_world, (), 1, use_port=port, num_nodes=2, node_rank=node)

    nodes = [threading.Thread(target=run_node, args=(node,)) for node in (0, 1)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(100)
    assert [results[node][0][:4] for node in (0, 1)] == [(0, 0, 0, 2), (1, 0, 1, 2)]


@loads_torch
def test_nodes_without_a_rendezvous_are_an_error() -> None:
    soon = {"timeout": 2, "read_timeout": 2}
    with pytest.raises(DistributedError, match=r"node 1 of 2 could not start its ranks .*at 127.0.0.1:1\)"):
        af.notebook_launcher(own_world, (), 1, use_port=1, num_nodes=2, node_rank=1, rdzv_conf=soon)


# --- TPU -----------------------------------------------------------------------------------------


def read(x: int) -> tuple[int, str]:
    return x, os.environ["ACCELFN_MIXED_PRECISION"]


def test_a_tpu_is_left_to_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(MissingExtraError, match="needs torch_xla"):
        af.notebook_launcher(read, (0,), 8)

    def launch(fn: Any, args: tuple[Any, ...] = (), start_method: str = "") -> None:
        assert start_method == "spawn"
        kept = dict(os.environ)
        for index in range(2):  # a stand-in: the ranks are calls, one after the other
            try:
                fn(index, *args)
            finally:
                os.environ.clear()
                os.environ.update(kept)

    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(launch=launch))
    assert af.notebook_launcher(read, (5,), 8, "bf16") == [(5, "bf16"), (5, "bf16")]
    # A context asks more of it than this stand-in has.
    with pytest.raises(MissingExtraError, match=r"torch_xla\.distributed\.xla_backend can't be imported"):
        af.notebook_launcher(own_world, (0,))
