"""The Context: one frozen value that identifies this process and holds its configuration."""

from __future__ import annotations

import atexit
import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field
from datetime import timedelta
from functools import wraps
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import ParamSpec, Self, Unpack

from accelfn.config import (
    Config,
    DistributedType,
    GuardMode,
)
from accelfn.config.handlers import sort_handlers
from accelfn.context.collectives import Collectives, disconnected
from accelfn.context.device import check_precision, read_hardware
from accelfn.context.failure import announce_end, publish
from accelfn.context.mesh import AXES, Mesh, MeshPlan, build_mesh, plan_mesh
from accelfn.context.options import (
    ContextOptions,
    Strategy,
    apply_options,
    mesh_of_megatron,
    refuse_inexact_axes,
    settle_parallelism,
    settle_window,
)
from accelfn.context.world import Owned, World
from accelfn.devices import device_type
from accelfn.errors import ConfigurationError, NotAvailableError

P = ParamSpec("P")
R = TypeVar("R")


def _no_axes() -> dict[tuple[str, ...], Context]:
    return {}  # not dict[...], which torch.compile can't call


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(Config):
    """The identity of this process, its connections to other ranks, and its configuration.

    Frozen: nothing in the library changes its fields. What changes behind them, variants of a context share:

    - ``collectives.call_log``: the operations of this rank, the passes over data and the backward pass that
      run, and the loaders that were prepared; ``collectives.board``: messages between ranks;
    - ``world.background``: the save in the background, and the snapshots of an elastic run;
    - the connections, which :func:`accelfn.close_context` ends: the process group, the one beside it
      (``world.group_owner``), and those of the mesh, which also keeps torch's meshes once they are asked for.

    A context itself keeps what :meth:`along` has returned. Of the process, ``init_context`` sets with several
    ranks the current device, torch's process group with its ``sys.excepthook``, and an exit handler. There is
    no other hidden state: training changes the user's own objects, and functions take and return records.

    Created by :func:`accelfn.init_context`, or directly in a test: ``Context()`` is one process on the CPU.
    Also a context manager, which calls :func:`accelfn.close_context` at its end.

    Its configuration, such as ``precision`` and ``guard``, is the fields of :class:`accelfn.context.Config`.

    Attributes:
        world: This rank, and the number of ranks and nodes.
        collectives: Communication with the other ranks.
        tag: Name of the operations that are called through this context, see :meth:`tagged`.
        mesh: Arrangement of the ranks; None for data parallelism alone (axis ``"dp_replicate"``).
    """

    world: World = field(default_factory=World)
    collectives: Collectives = field(default_factory=Collectives)
    tag: str = ""
    mesh: Mesh | None = field(default=None, compare=False)
    # Cache of along(). Not copied to variants, whose options may differ.
    _along: dict[tuple[str, ...], Context] = field(
        default_factory=_no_axes, init=False, compare=False, repr=False
    )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return self: it never changes, and a world can't be copied."""
        return self

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Context], tuple[dict[str, Any]]]:
        """Pickle the options and the rank: unpickling gives a context on the CPU, which can't communicate.

        Only the names in ``log_with`` are kept, since a tracker may hold an open file.
        """
        excluded = ("collectives", "log_with", "_along")
        names = [item.name for item in dataclasses.fields(self) if item.name not in excluded]
        trackers = tuple(tracker for tracker in self.log_with if isinstance(tracker, str))
        return _from_options, ({**{name: getattr(self, name) for name in names}, "log_with": trackers},)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.world.device

    @property
    def rank(self) -> int:
        """Global rank of this process, from 0."""
        return self.world.rank

    @property
    def num_processes(self) -> int:
        """Number of ranks in the world."""
        return self.world.size

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return self.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the world."""
        return self.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its node."""
        return self.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the world."""
        return self.world.rank == self.world.size - 1

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of world, by Accelerate's names: NO, FSDP, MULTI_CPU, MULTI_GPU, MULTI_XPU, XLA, ...

        Raises:
            NotAvailableError: Accelerate has no name for this device.
        """
        engine = self.strategy.engine
        if engine is not None:
            return DistributedType.DEEPSPEED if engine == "DeepSpeed" else DistributedType.MEGATRON_LM
        kind = self.world.device.type
        if kind == "xla":
            return DistributedType.XLA
        if self.world.size == 1:
            return DistributedType.NO
        if self.strategy.fsdp is not None:
            return DistributedType.FSDP
        name = device_type(kind).world
        if name is None:
            raise NotAvailableError(
                f"Accelerate has no name for several ranks on {kind!r}: use ctx.device and ctx.num_processes."
            )
        return DistributedType(name)

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        return self.precision.mode

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accumulation.num_steps

    @property
    def debug(self) -> bool:
        """Whether every operation across ranks is checked, in worlds of any size."""
        return self.guard.mode == GuardMode.FULL

    def along(self, *axes: str) -> Context:
        """Return the context of the ranks along ``axes``: those whose other coordinates equal this rank's.

        Every function of the library works along it, and its ranks are numbered from 0. Repeated calls return
        the same object; if the axes cover the world that is this context itself, and if they have one rank
        it is a context of one. An error along one axis leaves the other axes usable.

        The result contains only its own ranks: along any other axis it is a context of one, such as
        ``ctx.along("tp").along("dp_shard")``. Name several axes in one call, and start from the context of
        the whole world.

        Ranks: local; operations need every rank along ``axes``, and no other.

        Args:
            *axes: Names of axes of the mesh; joined axes (``"dp"``, ``"shard"``, ``"loss"``, ``"seq"``) stand
                for the axes that they join.

        Raises:
            ConfigurationError: No axis has that name.

        >>> Context().along("tp").num_processes
        1
        """
        plan = self.mesh_plan
        wanted = plan.parts(*axes)
        if wanted == plan.parts(*AXES):
            return self
        if wanted not in self._along:
            world, collectives, mesh = World(device=self.device), Collectives(), None
            if self.mesh is not None:
                world, collectives, mesh = self.mesh.along(wanted)
            self._along[wanted] = dataclasses.replace(self, world=world, collectives=collectives, mesh=mesh)
        return self._along[wanted]

    def coordinate(self, *axes: str) -> int:
        """Return this rank's coordinate along ``axes``, from 0.

        Raises:
            ConfigurationError: No axis has that name.

        >>> Context().coordinate("tp")
        0
        """
        return self.mesh_plan.coordinate(self.rank, *axes)

    def axis_size(self, *axes: str) -> int:
        """Return the number of ranks along ``axes``.

        Raises:
            ConfigurationError: No axis has that name.

        >>> Context().axis_size("dp_replicate", "tp")
        1
        """
        return self.mesh_plan.size(*axes)

    @property
    def mesh_plan(self) -> MeshPlan:
        """The plan of the mesh: pure data parallelism without one."""
        return plan_mesh(None, self.num_processes) if self.mesh is None else self.mesh.plan

    def tagged(self, tag: str) -> Context:
        """Return a variant of this context whose operations carry a name.

        Operations with different names are a mismatch. By default, operations in which each rank contributes
        data are also distinguished by the line that calls them, if a rank calls several of the same form. Use
        one name for calls on different lines that belong together::

            if ctx.is_main_process:
                scores = af.gather(ctx.tagged("scores"), score(batch))
            else:
                scores = af.gather(ctx.tagged("scores"), nothing)

        Ranks: local; operations need the same name on every rank.

        >>> Context().tagged("data").tag
        'data'
        """
        return dataclasses.replace(self._variant(), tag=tag)

    def _variant(self) -> Self:
        # Closing a variant must not close what the original still uses.
        return dataclasses.replace(self, world=dataclasses.replace(self.world, owned=Owned()))

    def replace(self, **options: Unpack[ContextOptions]) -> Context:
        """Return a variant of this context that shares its process group.

        Ranks: local; the variant is used like any context.

        Args:
            **options: Keyword arguments of :func:`accelfn.init_context` that don't concern the world: not
                ``cpu``, and no ``InitProcessGroupKwargs``.

        Raises:
            ConfigurationError: An option concerns the world, or isn't valid.
            NotAvailableError: An option isn't supported yet.
            TypeError: An option is unknown or of the wrong type.

        >>> Context().replace(mixed_precision="bf16").mixed_precision
        'bf16'
        """
        changed = configure(self, options)
        cpu = options.get("cpu")
        if cpu is not None and cpu != (self.device.type == "cpu"):
            raise ConfigurationError(
                f"Context.replace can't move from {self.device.type!r} to another device: got "
                f"cpu={cpu!r}. Create a new context with init_context."
            )
        if "process_group" in sort_handlers(options.get("kwargs_handlers")):
            raise ConfigurationError(
                "Context.replace keeps the process group, so InitProcessGroupKwargs would have no effect. "
                "Pass it to init_context."
            )
        if changed.strategy.parallelism != self.strategy.parallelism:
            raise ConfigurationError(
                "Context.replace keeps the mesh, and these options change it. Pass parallelism_config and "
                "fsdp_plugin to init_context."
            )
        return changed._variant()

    def __enter__(self) -> Self:
        """Return the context itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the context, after reporting an exception to the other ranks."""
        if error is not None and self.world.owned.opened:
            publish(self.collectives.board, self.collectives.call_log, self.rank, error)
        try:
            close_context(self)
        except Exception:
            if error is None:  # otherwise the block's exception is raised
                raise


def configure(ctx: Context, options: ContextOptions) -> Context:
    """Return ``ctx`` with ``options`` applied, after checking the device's capabilities."""
    configured = with_window(apply_options(ctx, options), ctx.world.size, ctx.strategy)
    if configured.precision.mode != ctx.precision.mode:
        hardware = read_hardware(ctx.device.type)
        facts = next((item for item in hardware.devices if item.type == ctx.device.type), None)
        if facts is not None:
            check_precision(configured.precision, facts)
    return configured


def with_window(ctx: Context, size: int, before: Strategy | None = None) -> Context:
    """Return ``ctx`` with its accumulation window and mesh sizes resolved for ``size`` ranks. Pure.

    Args:
        ctx: With unresolved options.
        size: Number of ranks.
        before: The resolved strategy of the context that ``ctx`` is a variant of.

    Raises:
        ConfigurationError: As :func:`accelfn.context.options.settle_window` and
            :func:`accelfn.context.options.settle_parallelism`; or exact mode doesn't fit the mesh.
    """
    strategy = ctx.strategy
    settled = strategy.parallelism
    if before is None or (settled, strategy.fsdp) != (before.parallelism, before.fsdp):
        settled = settle_parallelism(settled, strategy.fsdp, size)
    if ctx.reduction is not None:
        plan = ctx.mesh.plan if ctx.mesh is not None else plan_mesh(settled, size)
        refuse_inexact_axes(plan.active())
    return dataclasses.replace(
        ctx,
        accumulation=settle_window(ctx.accumulation, ctx.reduction, size),
        strategy=dataclasses.replace(strategy, parallelism=settled),
    )


def with_mesh(ctx: Context) -> Context:
    """Return ``ctx`` with the mesh of its strategy, if it has one.

    Ranks: every rank of ``ctx``.

    Raises:
        Exception: As :func:`accelfn.context.mesh.build_mesh`.
    """
    parallelism = ctx.strategy.parallelism or mesh_of_megatron(ctx.strategy.megatron, ctx.num_processes)
    if parallelism is None:
        return ctx
    plan = plan_mesh(parallelism, ctx.num_processes)
    timeout = timedelta(seconds=ctx.guard.timeout_s)
    mesh = build_mesh(ctx.world, ctx.collectives, plan, parallelism.device_mesh, timeout=timeout)
    return dataclasses.replace(ctx, mesh=mesh)


def _refuse_change(ctx: Context, name: str, value: object = None) -> NoReturn:
    raise FrozenInstanceError(
        f"a Context never changes, and its {name} can't be set. Make another one, such as "
        'ctx.replace(mixed_precision="bf16"), which takes the options of init_context.'
    )


# Those of a frozen dataclass fail for names that aren't fields.
Context.__setattr__ = Context.__delattr__ = _refuse_change


def _from_options(options: dict[str, Any]) -> Context:
    return Context(**options, collectives=disconnected(options["world"].size))


def takes_context(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function say what its first argument must be, whatever else is missing.

    Calling it raises a TypeError that names the function if the first argument isn't a :class:`Context`.
    """

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(args[0] if args else kwargs.get("ctx"), Context):
            raise _forgotten(function.__name__, *args)
        return function(*args, **kwargs)

    return checked


def _forgotten(function: str, *given: object) -> TypeError:
    """Return the error for a call whose first argument isn't a context."""
    has_context = isinstance(getattr(given[0], "context", None), Context) if given else False
    remedy = "accelerator.context" if has_context else "what accelfn.init_context() returns"
    kind = type(given[0]).__name__ if given else "nothing"
    return TypeError(
        f"{function}: the first argument must be the Context, got {kind}. Write {function}(ctx, ...), "
        f"where ctx is {remedy}."
    )


@takes_context
def close_context(ctx: Context) -> None:
    """Undo exactly what ``init_context`` did for ``ctx``. Closing twice has no effect.

    A process group that existed before, or that the caller passed, stays. A variant from ``ctx.replace`` has
    nothing to undo. Ranks that still wait for this one are notified of its end. A save in the background is
    awaited.

    Ranks: every rank of ``ctx``.

    Raises:
        Exception: The background save's error, unless ``result()`` already raised it; the context is closed
            nevertheless.
    """
    try:
        ctx.world.background.settle()
    finally:
        close(ctx)


_RELEASE_S = 0.02
# Long enough for ranks that wait in an operation to read the board several times.
_HOST_S = 1.5


def close(ctx: Context) -> None:
    """Undo what ``init_context`` did for ``ctx``, without waiting for a save in the background.

    Ranks: every rank of ``ctx``.
    """
    owned = ctx.world.owned
    if owned.opened:
        if ctx.mesh is not None and not ctx.collectives.call_log.closed:
            ctx.mesh.leave(announce=True)
        _leave(ctx)
        if ctx.world.group_owner is not None:
            ctx.world.group_owner.release()
    # If this context was closed before, the default group may be another one, which isn't ours to destroy.
    group = ctx.world.group_ref
    default_group = dist.group.WORLD if dist.is_initialized() else None
    if not owned.group or group is None or group() is None or group() is not default_group:
        return
    dist.destroy_process_group()
    if group() is not None:
        # A wrapped model still holds the group. Its threads may be about to release a last tensor, for which
        # they need the interpreter: a thread that still waits when the interpreter ends aborts the process.
        time.sleep(_RELEASE_S)
    if owned.excepthooks is not None and sys.excepthook is owned.excepthooks[1]:
        sys.excepthook = owned.excepthooks[0]
    if owned.previous_device is not None:
        torch.accelerator.set_device_index(owned.previous_device)


def _leave(ctx: Context) -> None:
    """Announce that this rank takes part in no further operation, and close its connections."""
    owned, board, call_log = ctx.world.owned, ctx.collectives.board, ctx.collectives.call_log
    if call_log.closed:
        return
    call_log.closed = True
    call_log.unwatch()
    if owned.at_exit is not None:
        atexit.unregister(owned.at_exit)
    if ctx.world.size > 1:
        announce_end(board, call_log, ctx.rank)
        board.post(f"gone/{ctx.rank}", "yes")
        if owned.hosts_store:  # other ranks may still need to read this rank's messages
            end = time.monotonic() + _HOST_S
            waiting = set(range(ctx.world.size))
            while waiting and time.monotonic() < end:
                waiting = {rank for rank in waiting if not board.read(f"gone/{rank}")}
                time.sleep(_RELEASE_S if waiting else 0.0)
    board.close()
