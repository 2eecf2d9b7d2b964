"""Options for objects that accelfn builds on the user's behalf: torch's, and those of other engines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from os import PathLike
from types import MappingProxyType
from typing import Any, TypedDict, cast, get_args, get_type_hints

import torch

from accelfn.config.checks import (
    POSITIVE,
    FrozenOptions,
    Record,
    as_choice,
    in_range,
    settle,
    settle_fields,
    unchecked,
    where,
    wrong_type,
)
from accelfn.config.enums import (
    DDPCommunicationHookType,
    DynamoBackend,
    DynamoMode,
    FP8AmaxAlgorithm,
    FP8Backend,
    FP8Format,
    FP8OptLevel,
    ProfileActivity,
)
from accelfn.errors import ConfigurationError, NotAvailableError

# Marks a field that accelfn itself reads and that the customised torch object does not know.
NOT_PASSED_ON: Mapping[str, bool] = MappingProxyType({"passed_on": False})

_NO_HOOK = DDPCommunicationHookType.NO
_POWER_SGD = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)


@dataclass(frozen=True, slots=True, kw_only=True)
class KwargsHandler(Record):
    """Base of the records that turn into keyword arguments of something else.

    A handler never looks at the environment. Every field has a default.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, as a deep copy with plain dicts for options."""
        return {item.name: copy.deepcopy(_plain(getattr(self, item.name))) for item in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the default of the class and are meant for the other side.

        For a handler ``h`` without fields of our own, ``type(h)(**h.to_kwargs()) == h``.
        """
        default = type(self)()
        return {
            item.name: _plain(getattr(self, item.name))
            for item in fields(self)
            if item.metadata.get("passed_on", True)
            and getattr(self, item.name) != getattr(default, item.name)
        }


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, FrozenOptions) else value


@dataclass(frozen=True, slots=True)
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``.

    Attributes:
        enabled: Whether autocast is on inside the block. Default True.
        cache_enabled: Whether casts of weights are cached; ``None`` leaves it to torch. Default None.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass(frozen=True, slots=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel``.

    Attributes:
        dim: Dim along which inputs would be split over devices of one process. Default 0.
        broadcast_buffers: Whether rank 0 sends its buffers before a forward if they have changed, with shards
            too. Default True.
        bucket_cap_mb: Size of a gradient bucket, in MiB; may be a fraction. Default 25.
        find_unused_parameters: Accepted, without effect: parameters without a gradient count as zeros in the
            mean in any case, without torch's search for them after each forward. Default False.
        check_reduction: Accepted by torch, without effect there. Default False.
        gradient_as_bucket_view: Whether gradients are views into the buckets, which saves one copy of
            them. Default False.
        static_graph: Promise that every iteration uses the same parameters. Default False.
        comm_hook: Compression of gradients on the wire: no, fp16, bf16, power_sgd or batched_power_sgd.
            Default no.
        comm_wrapper: no, fp16 or bf16: casts what ``comm_hook`` sends. Needs a hook. Default no.
        comm_state_option: Options of torch's ``PowerSGDState``; for the two PowerSGD hooks only. Default
            empty.

    The three ``comm_*`` fields are not part of ``to_kwargs()``: they make a hook, not the wrapper.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = field(default=25, metadata=in_range(2**-20))
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = field(default=_NO_HOOK, metadata=NOT_PASSED_ON)
    comm_wrapper: DDPCommunicationHookType | str = field(default=_NO_HOOK, metadata=NOT_PASSED_ON)
    comm_state_option: Mapping[str, Any] = field(default_factory=FrozenOptions, metadata=NOT_PASSED_ON)

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_fields(self)
        wrappers = (_NO_HOOK, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
        as_choice(where(self, "comm_wrapper"), self.comm_wrapper, DDPCommunicationHookType, allowed=wrappers)
        if self.comm_wrapper != _NO_HOOK and self.comm_hook == _NO_HOOK:
            raise ConfigurationError(
                f"{where(self, 'comm_wrapper')} wraps a hook, got {self.comm_wrapper!s} without a comm_hook. "
                "Choose a comm_hook, or leave comm_wrapper out."
            )
        if self.comm_state_option and self.comm_hook not in _POWER_SGD:
            raise ConfigurationError(
                f"{where(self, 'comm_state_option')} belongs to the hooks power_sgd and batched_power_sgd, "
                f"got {dict(self.comm_state_option)!r} with comm_hook={self.comm_hook!s}. "
                "Choose one of them, or leave comm_state_option out."
            )


@dataclass(frozen=True, slots=True)
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scaler of fp16 training.

    Attributes:
        init_scale: First scale, greater than 0. Default 65536.0.
        growth_factor: Multiplies the scale after ``growth_interval`` good steps, greater than 1. Default 2.0.
        backoff_factor: Multiplies the scale after an overflow, between 0 and 1. Default 0.5.
        growth_interval: Steps in a row without overflow before the scale grows. Default 2000.
        enabled: False trains in fp16 without scaling. Default True.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = field(default=2000, metadata=POSITIVE)
    enabled: bool = True

    def __post_init__(self) -> None:
        """Check the fields."""
        settle_fields(self)
        if not (self.init_scale > 0 and self.growth_factor > 1 and 0 < self.backoff_factor < 1):
            raise ConfigurationError(
                "GradScalerKwargs: init_scale must be above 0, growth_factor above 1 and backoff_factor "
                f"between 0 and 1, got {self.init_scale}, {self.growth_factor} and {self.backoff_factor}."
            )


@dataclass(frozen=True, slots=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of ``torch.distributed.init_process_group``; without effect on a group that exists.

    Attributes:
        backend: Name of a backend ("nccl", "gloo", "cuda:nccl,cpu:gloo"), or ``None`` to choose by device.
            Default None. (A default of "nccl" could not be told from a request for nccl.)
        init_method: Address where ranks meet, or ``None`` for the environment. Default None.
        timeout: How long a collective of torch's may wait, as a ``datetime.timedelta``; accelfn's own wait
            as long too, unless a ``Guard`` says otherwise. ``None`` is the guard's timeout. Default None.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass(frozen=True, slots=True)
class ProfileKwargs(KwargsHandler):
    """Options of a profiled block.

    Attributes:
        activities: What to watch: "cpu", "cuda", "xpu", "hpu", "mtia"; ``None`` for all that exist.
            Default None.
        schedule_option: Arguments of ``torch.profiler.schedule`` in steps: wait, warmup, active, and if
            wanted repeat, skip_first, skip_first_wait. ``None`` records the whole block. Default None.
        on_trace_ready: Called with the profiler when a trace is complete. Default None.
        record_shapes: Whether shapes of operator inputs are recorded. Default False.
        profile_memory: Whether allocations are tracked. Default False.
        with_stack: Whether source lines are recorded. Default False.
        with_flops: Whether floating point operations are estimated. Default False.
        with_modules: Whether the module hierarchy is recorded. Default False.
        output_trace_dir: Directory for one Chrome trace per rank; ``None`` writes nothing. Default None.
    """

    activities: Iterable[ProfileActivity | str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_fields(self)
        activities = unchecked(self, "activities")
        if isinstance(activities, str):
            raise wrong_type(self, "activities", "a list of names such as ['cpu', 'cuda'], or None")
        if activities is not None:
            place, names = where(self, "activities"), cast("Iterable[object]", activities)
            settle(self, activities=tuple(as_choice(place, name, ProfileActivity) for name in names))

    def build(self) -> torch.profiler.profile:
        """Return torch's profiler with these options, to be used as a context manager.

        Raises:
            NotAvailableError: An activity can't be watched here.
        """
        profiler = torch.profiler
        known = {str(item.name).lower(): item for item in profiler.supported_activities()}
        activities = None if self.activities is None else [str(name) for name in self.activities]
        absent = [name for name in activities or () if name not in known]
        if absent:
            raise NotAvailableError(
                f"{where(self, 'activities')} asks for {', '.join(absent)}, which can't be watched here. "
                f"Choose among {', '.join(sorted(known))}, or leave activities out for all of these."
            )
        options = self.schedule_option
        make_schedule = cast("Callable[..., Callable[[int], Any]]", vars(profiler)["schedule"])
        return profiler.profile(
            activities=None if activities is None else [known[name] for name in activities],
            schedule=None if options is None else make_schedule(**options),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass(frozen=True, slots=True)
class TorchDynamoPlugin(KwargsHandler):
    """How models are compiled.

    Attributes:
        backend: A ``DynamoBackend`` or its name in any case; "no" compiles nothing. Default NO.
        mode: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs. Default default.
        fullgraph: Whether a graph break is an error. Default False.
        dynamic: True traces with sizes as symbols, False compiles per shape, ``None`` lets torch decide.
            Default None.
        options: Options of the backend, instead of a ``mode``. Default None.
        disable: Whether ``torch.compile`` does nothing, for a test. Default False.
        use_regional_compilation: Whether repeated blocks are compiled one by one instead of the whole
            model; not an argument of ``torch.compile``, so not part of ``to_kwargs()``. Default False.
    """

    backend: DynamoBackend | str = DynamoBackend.NO
    mode: DynamoMode | str = DynamoMode.DEFAULT
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = field(default=False, metadata=NOT_PASSED_ON)

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_fields(self)
        if self.options is not None and self.mode != DynamoMode.DEFAULT:
            raise ConfigurationError(
                f"{where(self, 'mode')} and options exclude each other, got mode={self.mode!s} and "
                f"options={dict(self.options)!r}. torch.compile takes one of the two: leave the other out."
            )

    def to_kwargs(self) -> dict[str, Any]:
        """Return what differs from the default, with the backend and mode in torch's spelling."""
        # A slots dataclass is a second class object, which super() without arguments does not know.
        kwargs = KwargsHandler.to_kwargs(self)
        for name in ("backend", "mode"):
            if name in kwargs:
                kwargs[name] = str(kwargs[name]).lower()
        return kwargs


@dataclass(frozen=True, slots=True)
class TERecipeKwargs(KwargsHandler):
    """Recipe for transformer-engine.

    Attributes:
        use_autocast_during_eval: Whether 8-bit products are used in evaluation too. Default False.
        margin: Exponent taken off the scaling factors. Default 0.
        interval: Steps between two computations of the scaling factors. Default 1.
        fp8_format: HYBRID, E4M3 or E5M2. Default HYBRID.
        amax_history_len: Steps of largest values that are kept. Default 1024.
        amax_compute_algo: "max" or "most_recent". Default most_recent.
        override_linear_precision: For forward, input gradient and weight gradient: whether the product
            runs in high precision. Default (False, False, False).
        use_mxfp8_block_scaling: Whether blocks of 32 values have a scale each (newest hardware only). Default
            False.
    """

    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = field(default=1, metadata=POSITIVE)
    fp8_format: FP8Format | str = FP8Format.HYBRID
    amax_history_len: int = field(default=1024, metadata=POSITIVE)
    amax_compute_algo: FP8AmaxAlgorithm | str = FP8AmaxAlgorithm.MOST_RECENT
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False


@dataclass(frozen=True, slots=True)
class AORecipeKwargs(KwargsHandler):
    """Recipe for torchao.

    Attributes:
        config: A ``torchao.float8.Float8LinearConfig``, or ``None`` for the two flags below. Default None.
        module_filter_func: Called with a module and its qualified name, says whether it is converted. Default
            None.
        pad_inner_dim: Whether inner sizes are padded to a multiple of 16. Default True.
        enable_fsdp_float8_all_gather: Whether FSDP2 gathers weights in 8 bits. Default True.
    """

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    pad_inner_dim: bool = True
    enable_fsdp_float8_all_gather: bool = True


@dataclass(frozen=True, slots=True)
class MSAMPRecipeKwargs(KwargsHandler):
    """Recipe for MS-AMP.

    Attributes:
        opt_level: "O1" (gradients and their reduction in 8 bits) or "O2" (optimizer state too). Default O2.
    """

    opt_level: FP8OptLevel | str = FP8OptLevel.O2


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8RecipeKwargs(KwargsHandler):
    """One recipe that leaves the engine open.

    Attributes:
        backend: "TE", "AO" or "MSAMP" in any case; ``None`` takes the engine that is installed. Default None.
        opt_level: See :class:`MSAMPRecipeKwargs`. Default O2.
        use_autocast_during_eval: See :class:`TERecipeKwargs`, as for the next seven. Default False.
        margin: Default 0.
        interval: Default 1.
        fp8_format: Default HYBRID.
        amax_history_len: Default 1024.
        amax_compute_algo: Default most_recent.
        override_linear_precision: Default (False, False, False).
        use_mxfp8_block_scaling: Default False.
        pad_inner_dim: See :class:`AORecipeKwargs`. Default True.
        enable_fsdp_float8_all_gather: See :class:`AORecipeKwargs`. Default True.
    """

    # Descriptions of the peer disagree on E4M3 or HYBRID, and on a history of 1 or 1024. HYBRID because
    # gradients need the range of E5M2, 1024 so that one quiet step does not undo the scale.
    backend: FP8Backend | str | None = None
    opt_level: FP8OptLevel | str = FP8OptLevel.O2
    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = field(default=1, metadata=POSITIVE)
    fp8_format: FP8Format | str = FP8Format.HYBRID
    amax_history_len: int = field(default=1024, metadata=POSITIVE)
    amax_compute_algo: FP8AmaxAlgorithm | str = FP8AmaxAlgorithm.MOST_RECENT
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False
    pad_inner_dim: bool = True
    enable_fsdp_float8_all_gather: bool = True


class Handlers(TypedDict, total=False):
    """The records of ``kwargs_handlers``, each in its place."""

    autocast: AutocastKwargs
    ddp: DistributedDataParallelKwargs
    scaler: GradScalerKwargs
    process_group: InitProcessGroupKwargs
    profile: ProfileKwargs
    fp8_recipe: FP8RecipeKwargs | TERecipeKwargs | AORecipeKwargs | MSAMPRecipeKwargs


def sort_handlers(handlers: Sequence[KwargsHandler] | None) -> Handlers:
    """Put each record of ``kwargs_handlers`` in its place.

    Raises:
        TypeError: Something else is in the list, or a record that has an argument of its own.
        ConfigurationError: Two records for one place.
    """
    places = {
        kind: name for name, hint in get_type_hints(Handlers).items() for kind in get_args(hint) or (hint,)
    }
    if isinstance(handlers, KwargsHandler):
        raise TypeError(f"kwargs_handlers takes a list of records: got a single {type(handlers).__name__}.")
    found: dict[str, KwargsHandler] = {}
    for handler in handlers or ():
        place = next((name for kind, name in places.items() if isinstance(handler, kind)), None)
        if place is None:
            known = ", ".join(kind.__name__ for kind in places)
            raise TypeError(
                f"kwargs_handlers takes records of these types: {known}; got {type(handler).__name__}. "
                "A plugin has an argument of its own."
            )
        if place in found:
            raise ConfigurationError(
                f"kwargs_handlers holds two records for one thing: {type(found[place]).__name__} and "
                f"{type(handler).__name__}. Pass one."
            )
        found[place] = handler
    return Handlers(**found)  # pyright: ignore[reportArgumentType] -- each place was checked against its types
