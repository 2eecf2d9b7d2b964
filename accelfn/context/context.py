"""The Context: one frozen value that says who this process is and how it was configured."""

from __future__ import annotations

import atexit
import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self, Unpack

from accelfn.context.collectives import Collectives
from accelfn.context.config import (
    CanonicalReduction,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    Guard,
    GuardMode,
    ProfileKwargs,
    ProjectConfiguration,
)
from accelfn.context.config.handlers import sort_handlers
from accelfn.context.device import Precision, check_precision, read_hardware
from accelfn.context.failure import announce_end, publish
from accelfn.context.mesh import AXES, Mesh, MeshPlan, build_mesh, plan_mesh
from accelfn.context.options import (
    ContextOptions,
    Strategy,
    apply_options,
    refuse_inexact_axes,
    settle_parallelism,
    settle_window,
)
from accelfn.context.world import World
from accelfn.errors import ConfigurationError, NotAvailableError


def _no_axes() -> dict[tuple[str, ...], Context]:
    return {}  # not dict[...], which torch.compile can't call


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Who this process is, how it reaches the others and how it was configured.

    Frozen: nothing in the library changes it. Two things that it leads to do change, and all variants of a
    context share them: the log of what this rank has called across ranks (``collectives.call_log``, with the
    messages that ranks leave for each other), and the save that goes on in the background
    (``world.background``). Nothing else holds state: what training changes is the user's own objects, and
    the records that functions take and return.

    Made by :func:`accelfn.init_context`, or directly in a test: ``Context()`` is one process on the CPU. Also
    a context manager, which calls :func:`accelfn.close_context` at its end.

    Attributes:
        world: This rank among the others.
        collectives: How tensors reach other ranks.
        precision: Mixed precision.
        accumulation: Gradient accumulation.
        loading: How loaders are shared out.
        project: Where outputs go.
        strategy: What ``prepare_model`` does.
        device_placement: Whether models and batches are moved to ``device``.
        step_scheduler_with_optimizer: Whether a scheduler moves only when its optimizer does.
        rng_types: Random states that a loader synchronises at the start of an epoch.
        guard: How ranks are kept in agreement, and how long they wait for each other.
        reduction: Exact mode, where gradients are summed in a fixed order; None for their mean.
        profiling: What :func:`accelfn.profile` watches and writes.
        log_with: Experiment trackers that the run asks for: names, trackers and classes of these.
        tag: Name of the operations that are called through this context, see :meth:`tagged`.
        mesh: How the ranks are arranged; None where each is a copy of its own (axis ``"dp_replicate"``).
    """

    world: World = field(default_factory=World)
    collectives: Collectives = field(default_factory=Collectives)
    precision: Precision = field(default_factory=Precision)
    accumulation: GradientAccumulationPlugin = field(default_factory=GradientAccumulationPlugin)
    loading: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    strategy: Strategy = field(default_factory=Strategy)
    device_placement: bool = True
    step_scheduler_with_optimizer: bool = True
    rng_types: tuple[str, ...] = ("generator",)
    guard: Guard = field(default_factory=Guard)
    reduction: CanonicalReduction | None = None
    profiling: ProfileKwargs = field(default_factory=ProfileKwargs)
    log_with: tuple[Any, ...] = ()
    tag: str = ""
    mesh: Mesh | None = field(default=None, compare=False)
    # What along() has given before. Empty in each variant, whose options may differ.
    _along: dict[tuple[str, ...], Context] = field(
        default_factory=_no_axes, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Settle what the guard leaves open: ``guard.mode`` of a context is always a ``GuardMode``."""
        if self.guard.mode is None:
            object.__setattr__(self, "guard", dataclasses.replace(self.guard, mode=GuardMode.SAMPLED))

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return self: it never changes, and nobody can copy a world."""
        return self

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Context], tuple[dict[str, Any]]]:
        """Pickle without the world: what is loaded is one process on the CPU, with the same options.

        Of ``log_with`` it has the names: a tracker may hold an open file.
        """
        left_behind = ("world", "collectives", "log_with", "mesh", "_along")
        names = [one.name for one in dataclasses.fields(self) if one.name not in left_behind]
        trackers = tuple(one for one in self.log_with if isinstance(one, str))
        return _alone, ({**{name: getattr(self, name) for name in names}, "log_with": trackers},)

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
        """Kind of world, in Accelerate's words: NO, FSDP, MULTI_CPU, MULTI_GPU, MULTI_XPU, ...

        Raises:
            NotAvailableError: Accelerate has no word for this device.
        """
        if self.world.size == 1:
            return DistributedType.NO
        if self.strategy.fsdp is not None:
            return DistributedType.FSDP
        kind = self.world.device.type
        name = "MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"
        if name not in DistributedType:
            raise NotAvailableError(
                f"Accelerate has no word for several ranks on {kind!r}; ask ctx.device and ctx.num_processes."
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
        """Return the context of the ranks along ``axes``: those that differ from this one in nothing else.

        Every function of the library works along it, and its ranks are numbered from 0. It is the same object
        each time; where the axes cover the world it is this context itself, and where they have one rank it
        is a context of one. An error along one axis leaves the others usable. Along an axis every other one
        has a single rank: name both at once, and don't go along one after the other.

        What is given knows its own ranks only: along any axis that they don't differ in, it is a context of
        one, as ``ctx.along("tp").along("dp_shard")``. To go along another axis, begin at the whole context.

        Ranks: local; operations need every rank along ``axes``, and no other.

        Args:
            *axes: Names of axes of the mesh; joined ones (``"dp"``, ``"shard"``, ``"loss"``, ``"seq"``) count
                as what they join.

        Raises:
            ConfigurationError: No axis has that name.

        >>> Context().along("tp").num_processes
        1
        """
        plan = self._plan()
        wanted = plan.parts(*axes)
        if wanted == plan.parts(*AXES):
            return self
        if wanted not in self._along:
            world, collectives = World(device=self.device), Collectives()
            if self.mesh is not None:
                world, collectives = self.mesh.part(wanted)
            mesh = None if self.mesh is None else self.mesh.restrict(wanted)
            self._along[wanted] = dataclasses.replace(self, world=world, collectives=collectives, mesh=mesh)
        return self._along[wanted]

    def coordinate(self, *axes: str) -> int:
        """Return this rank's place along ``axes``, from 0.

        Raises:
            ConfigurationError: No axis has that name.

        >>> Context().coordinate("tp")
        0
        """
        return self._plan().coordinate(self.rank, *axes)

    def axis_size(self, *axes: str) -> int:
        """Return the number of ranks along ``axes``.

        Raises:
            ConfigurationError: No axis has that name.

        >>> Context().axis_size("dp_replicate", "tp")
        1
        """
        return self._plan().size(*axes)

    def _plan(self) -> MeshPlan:
        return plan_mesh(None, self.num_processes) if self.mesh is None else self.mesh.plan

    def tagged(self, tag: str) -> Context:
        """Return a variant of this context whose operations carry a name.

        What has another name doesn't meet. Operations to which each rank brings data of its own are also told
        apart by the line that they are called from, where a rank calls several of the same form. Those that
        stand on different lines and are meant to meet get one name instead::

            if ctx.is_main_process:
                scores = af.gather(ctx.tagged("scores"), score(batch))
            else:
                scores = af.gather(ctx.tagged("scores"), nothing)

        Ranks: local; operations need the same name on every rank.

        >>> Context().tagged("data").tag
        'data'
        """
        # The variant must not take down what the original still uses.
        world = dataclasses.replace(self.world, made=type(self.world.made)())
        return dataclasses.replace(self, world=world, tag=tag)

    def replace(self, **options: Unpack[ContextOptions]) -> Context:
        """Return a variant of this context that shares its process group.

        Ranks: local; the variant is used like any context.

        Args:
            **options: Keyword arguments of :func:`accelfn.init_context` that don't concern the world: not
                ``cpu``, and no ``InitProcessGroupKwargs``.

        Raises:
            ConfigurationError: An option concerns the world, or is not valid.
            NotAvailableError: An option asks for what is not supported yet.
            TypeError: An unknown option, or one of the wrong type.

        >>> Context().replace(mixed_precision="bf16").mixed_precision
        'bf16'
        """
        changed = configure(self, options)
        cpu = options.get("cpu")
        if cpu is not None and cpu != (self.device.type == "cpu"):
            raise ConfigurationError(
                f"Context.replace can't move from {self.device.type!r} to another device: got "
                f"cpu={cpu!r}. Make a new context with init_context."
            )
        if "process_group" in sort_handlers(options.get("kwargs_handlers")):
            raise ConfigurationError(
                "Context.replace keeps the process group, so InitProcessGroupKwargs would have no effect. "
                "Pass it to init_context."
            )
        if changed.strategy.parallelism != self.strategy.parallelism:
            raise ConfigurationError(
                "Context.replace keeps the mesh, and this changes it. Pass parallelism_config and "
                "fsdp_plugin to init_context."
            )
        # The variant must not take down what the original still uses.
        return dataclasses.replace(
            changed, world=dataclasses.replace(self.world, made=type(self.world.made)())
        )

    def __enter__(self) -> Self:
        """Return the context itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the context; an exception is reported to the other ranks first."""
        if error is not None and self.world.made.opened:
            publish(self.collectives.board, self.collectives.call_log, self.rank, error)
        try:
            close_context(self)
        except Exception:
            if error is None:  # otherwise what the block raised says more
                raise


def configure(ctx: Context, options: ContextOptions) -> Context:
    """Return ``ctx`` with ``options`` applied to it. Pure, but for a look at what the device can compute."""
    made = with_window(apply_options(ctx, options), ctx.world.size, ctx.strategy)
    if made.precision.mode != ctx.precision.mode:
        facts = next((item for item in read_hardware().devices if item.type == ctx.device.type), None)
        if facts is not None:
            check_precision(made.precision, facts)
    return made


def with_window(ctx: Context, size: int, before: Strategy | None = None) -> Context:
    """Return ``ctx`` with what its options mean on ``size`` ranks: accumulation window and mesh. Pure.

    Args:
        ctx: With options that were not settled yet.
        size: Number of ranks.
        before: The strategy that was settled already, for these ranks or for a mesh that they are a part of.

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
    """Return ``ctx`` with the mesh that its strategy asks for, if it asks for one.

    Ranks: every rank of ``ctx``.

    Raises:
        Exception: As :func:`accelfn.context.mesh.build_mesh`.
    """
    parallelism = ctx.strategy.parallelism
    if parallelism is None:
        return ctx
    plan = plan_mesh(parallelism, ctx.num_processes)
    return dataclasses.replace(ctx, mesh=build_mesh(ctx, plan, parallelism.device_mesh))


def _alone(options: dict[str, Any]) -> Context:
    return Context(**options)


def check_context(function: str, given: object) -> None:
    """Refuse what was passed instead of the context, as by those who forget it.

    Raises:
        TypeError: ``given`` isn't a :class:`Context`.
    """
    if isinstance(given, Context):
        return
    holds_one = isinstance(getattr(given, "context", None), Context)
    remedy = "accelerator.context" if holds_one else "what accelfn.init_context() returns"
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    raise TypeError(
        f"{function}: the first argument is the Context, got {kind}. Write {function}(ctx, ...), "
        f"where ctx is {remedy}."
    )


def close_context(ctx: Context) -> None:
    """Undo exactly what ``init_context`` did for ``ctx``: no more, and twice does no harm.

    A process group that was there before, or that belongs to the caller, stays. A variant from
    ``ctx.replace`` has nothing to undo. Ranks that still wait for this one are notified of its end. A save
    that runs in the background is awaited.

    Ranks: every rank of ``ctx``.

    Raises:
        Exception: The background save's error, unless ``result()`` already raised it; the context is closed
            all the same.
    """
    check_context("close_context", ctx)
    try:
        ctx.world.background.settle()
    finally:
        close(ctx)


_LET_GO_S = 0.02
# Ranks that wait in an operation look at the board several times in that time.
_HOST_S = 1.5


def close(ctx: Context) -> None:
    """Undo what ``init_context`` did for ``ctx``; see :func:`accelfn.close_context`.

    Ranks: every rank of ``ctx``.
    """
    made = ctx.world.made
    if made.opened:
        if ctx.mesh is not None and not ctx.collectives.call_log.closed:
            ctx.mesh.leave(tell=True)
        _leave(ctx)
    if made.opened and ctx.world.keeper is not None:
        ctx.world.keeper.let_go()
    # Another group may be the default one by now, if this context was closed before: it isn't ours to
    # destroy.
    group = ctx.world.group_ref
    if not made.group or group is None or group() is None or group() is not _default_group():
        return
    dist.destroy_process_group()
    if group() is not None:
        # A wrapped model still holds it, and with it threads that may be about to release a last tensor,
        # for which they need the interpreter: one left waiting when that ends aborts the process.
        time.sleep(_LET_GO_S)
    if made.excepthooks is not None and sys.excepthook is made.excepthooks[1]:
        sys.excepthook = made.excepthooks[0]
    if made.previous_device is not None:
        torch.accelerator.set_device_index(made.previous_device)


def _leave(ctx: Context) -> None:
    """Announce that this rank takes part in no further operation, and release what that needed."""
    made, board, call_log = ctx.world.made, ctx.collectives.board, ctx.collectives.call_log
    if call_log.closed:
        return
    call_log.closed = True
    if made.end_watch is not None:
        made.end_watch()
    if made.at_exit is not None:
        atexit.unregister(made.at_exit)
    if ctx.world.size > 1:
        announce_end(board, call_log, ctx.rank)
        board.post(f"gone/{ctx.rank}", "yes")
        if made.hosts_store:  # others may still have to read what this rank has posted
            end = time.monotonic() + _HOST_S
            waiting = set(range(ctx.world.size))
            while waiting and time.monotonic() < end:
                waiting = {rank for rank in waiting if not board.read(f"gone/{rank}")}
                time.sleep(_LET_GO_S if waiting else 0.0)
    board.close()


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
