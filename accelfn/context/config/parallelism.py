"""How ranks are arranged in a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from accelfn.context.config.checks import (
    check_bools,
    check_ints,
    check_texts,
    settle,
    settle_choice,
    settle_names,
    settle_options,
    where,
)
from accelfn.context.config.enums import ContextParallelStrategy
from accelfn.errors import ConfigurationError, NotAvailableError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = (
    "DeepSpeedSequenceParallelConfig",
    "ExpertParallelConfig",
    "ParallelismConfig",
    "PipelineParallelConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
)

_MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
# By torch's names in lower case; with the stages that each rank has where nobody says.
_SCHEDULES: Mapping[str, int] = MappingProxyType(
    {
        "1f1b": 1,
        "gpipe": 1,
        "interleaved1f1b": 2,
        "loopedbfs": 2,
        "interleavedzerobubble": 2,
        "zbvzerobubble": 2,
        "dualpipev": 2,
    }
)
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True, slots=True)
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    Attributes:
        enable_async_tp: Whether communication overlaps with matrix products; not in this version. Default
            False.
        plan: How modules are split: "colwise", "rowwise", "embedding", "gather", "sequence", "heads" or
            "whole" by pattern, such as ``{"layers.*.attn.q": "colwise"}``, where ``*`` is one part of a
            module's name. ``None``: as the model's own ``tp_plan`` says. Default None.
        loss_parallel: Whether training leaves the logits split over the vocabulary, for a loss under torch's
            ``loss_parallel``. Default False.
    """

    enable_async_tp: bool = False
    _: KW_ONLY
    plan: Mapping[str, str] | None = None
    loss_parallel: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        check_bools(self, "enable_async_tp", "loss_parallel")
        settle_options(self, "plan", optional=True)
        words = tuple(cast("Mapping[str, object]", self.plan or {}).values())
        if not all(isinstance(word, str) for word in words):
            raise TypeError(
                f"{where(self, 'plan')} must have a style for each pattern, got {words!r}. "
                'Pass texts such as "colwise".'
            )
        if self.enable_async_tp:
            raise NotAvailableError(
                f"{where(self, 'enable_async_tp')} asks for overlapped tensor parallelism, which this "
                "version does not have, got True. Leave it out."
            )


@dataclass(frozen=True, slots=True)
class TorchContextParallelConfig:
    """Options of context parallelism.

    Attributes:
        cp_comm_strategy: How keys and values are exchanged: "allgather" or "alltoall". Default allgather.
    """

    cp_comm_strategy: ContextParallelStrategy | str = ContextParallelStrategy.ALLGATHER

    def __post_init__(self) -> None:
        """Normalise the field."""
        settle_choice(self, "cp_comm_strategy", ContextParallelStrategy)


@dataclass(frozen=True, slots=True)
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism.

    Attributes:
        sp_seq_length: Tokens in a sequence over all ranks; needed if the length is fixed. Default None.
        sp_seq_length_is_variable: Whether batches differ in length. Default True.
        sp_attn_implementation: "sdpa", "flash_attention_2", "flash_attention_3", or the name of a kernel on
            the hub that contains "/" and "flash-attn"; ``None`` keeps that of the model. Default None.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool = True
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        check_bools(self, "sp_seq_length_is_variable")
        check_ints(self, "sp_seq_length", minimum=1, optional=True)
        check_texts(self, "sp_attn_implementation", optional=True)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigurationError(
                f"{where(self, 'sp_seq_length')} is needed when the length is fixed, got None with "
                "sp_seq_length_is_variable=False. Pass the length, or let it vary."
            )
        name = self.sp_attn_implementation
        if name is not None and name not in _ATTENTION and not ("/" in name and "flash-attn" in name):
            raise ConfigurationError(
                f"{where(self, 'sp_attn_implementation')} cannot split the sequence with {name!r}. "
                f"Use one of {', '.join(_ATTENTION)} or a flash-attn kernel of the hub."
            )


@dataclass(frozen=True, slots=True)
class PipelineParallelConfig:
    """Options of pipeline parallelism.

    Attributes:
        num_microbatches: Pieces that a batch is cut into, of equally many rows; a batch whose rows it doesn't
            divide is cut into fewer. ``None``: as many as there are stages. Default None.
        schedule: In which order a stage works on them, by torch's name: "1f1b", "gpipe", and with several
            stages on each rank "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble" or
            "dualpipev". Default 1f1b.
        split: The first module of each stage after the first one, such as ``("layers.2",)``. Default ().
        stages_per_rank: Stages that each rank has. ``None``: 1 for "1f1b" and "gpipe", 2 for the others.
            Default None.
        last: Modules that are called after the blocks, where that isn't seen in the order in which they are
            registered or in the source of the model's ``forward``. Default ().
    """

    num_microbatches: int | None = None
    schedule: str = "1f1b"
    split: Sequence[str] = ()
    _: KW_ONLY
    stages_per_rank: int | None = None
    last: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        check_ints(self, "num_microbatches", "stages_per_rank", minimum=1, optional=True)
        check_texts(self, "schedule")
        schedule = self.schedule.lower()
        if schedule not in _SCHEDULES:
            raise ConfigurationError(
                f"{where(self, 'schedule')} must be one of {', '.join(_SCHEDULES)}, got {self.schedule!r}."
            )
        usual = _SCHEDULES[schedule]
        given = usual if self.stages_per_rank is None else self.stages_per_rank
        if given != usual and (usual == 1 or schedule in ("zbvzerobubble", "dualpipev")):
            raise ConfigurationError(
                f"{where(self, 'stages_per_rank')} must be {usual} with schedule={schedule!r}, got {given}. "
                "Leave it out, or use an interleaved schedule."
            )
        settle(self, schedule=schedule, stages_per_rank=given)
        settle_names(self, "split", "last")


@dataclass(frozen=True, slots=True)
class ExpertParallelConfig:
    """Options of expert parallelism.

    Attributes:
        experts: Pattern of the names of modules that hold experts, as for ``fnmatch``; ``None``: those that
            accelfn knows. Default None.
    """

    experts: str | None = None

    def __post_init__(self) -> None:
        """Check the field."""
        check_texts(self, "experts", optional=True)


@dataclass(frozen=True, slots=True)
class ParallelismConfig:
    """Sizes of the mesh axes; their product is the number of processes.

    Attributes:
        dp_replicate_size: Copies of the (sharded) model. Default 1.
        dp_shard_size: Ranks that share one copy by FSDP. Default 1.
        tp_size: Ranks that share each layer. Default 1.
        cp_size: Ranks that share each sequence, by ring attention. Excludes ``sp_size``. Default 1.
        sp_size: Ranks that share each sequence, by exchanging heads. Default 1.
        pp_size: Stages that the model is cut into. Default 1.
        ep_size: Ranks that experts are spread over; divides ``dp_shard_size``, of which it is a part.
            Default 1.
        cp_backend: "torch" is the only one. Default torch.
        sp_backend: "torch", or "deepspeed" where DeepSpeed is in use. Default torch.
        tp_handler: Options used if ``tp_size`` > 1; made if ``None`` then. Default None.
        cp_handler: Options used if ``cp_size`` > 1; made if ``None`` then. Default None.
        sp_handler: Options used if ``sp_size`` > 1 with DeepSpeed; made if ``None`` then. Default None.
        pp_handler: Options used if ``pp_size`` > 1; made if ``None`` then. Default None.
        ep_handler: Options used if ``ep_size`` > 1; made if ``None`` then. Default None.
        device_mesh: Torch's mesh over all ranks that already exists, with the dims and sizes of the axes of
            more than one rank, outermost first; torch's engines use its groups. Default None.
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    _: KW_ONLY
    sp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    cp_backend: str = "torch"
    sp_backend: str = "torch"
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_handler: PipelineParallelConfig | None = None
    ep_handler: ExpertParallelConfig | None = None
    device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        """Check the fields and make the options of the axes in use."""
        check_ints(self, *(f"{axis}_size" for axis in (*_MESH_ORDER, "ep")), minimum=1)
        for name, known in (("cp_backend", ("torch",)), ("sp_backend", ("torch", "deepspeed"))):
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"{where(self, name)} does not know {getattr(self, name)!r}. Use "
                    f"{' or '.join(map(repr, known))}."
                )
        for axis, kind, is_used in (
            ("tp", TorchTensorParallelConfig, self.tp_enabled),
            ("cp", TorchContextParallelConfig, self.cp_enabled),
            ("sp", DeepSpeedSequenceParallelConfig, self.sp_enabled and self.sp_backend == "deepspeed"),
            ("pp", PipelineParallelConfig, self.pp_enabled),
            ("ep", ExpertParallelConfig, self.ep_enabled),
        ):
            handler = getattr(self, f"{axis}_handler")
            if handler is None and is_used:
                settle(self, **{f"{axis}_handler": kind()})
            elif handler is not None and not isinstance(handler, kind):
                raise TypeError(
                    f"{where(self, axis + '_handler')} must be a {kind.__name__} or None, got {handler!r}. "
                    "Pass that record, or leave it out for its defaults."
                )
        _raise_all(self._contradictions())

    def _contradictions(self) -> list[str]:
        found: list[str] = []
        if self.cp_enabled and self.sp_enabled:
            found.append(
                f"it splits the sequence twice: got cp_size={self.cp_size}, sp_size={self.sp_size}. Set one "
                "of them to 1."
            )
        if self.dp_shard_size % self.ep_size:
            found.append(
                f"experts are spread over a part of dp_shard, so ep_size must divide it: got "
                f"ep_size={self.ep_size}, dp_shard_size={self.dp_shard_size}. Fitting: "
                f"{_listed(_divisors(self.dp_shard_size))}."
            )
        mesh = self.device_mesh
        dims = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        own = dict(zip(self.mesh_dim_names, self.mesh_shape, strict=True))
        if mesh is not None and [*dims.items()] != [*own.items()]:
            found.append(
                f"device_mesh has the dims {dims or 'of no name'}, and the sizes say {own or 'one rank'}. "
                "Make it by init_device_mesh(kind, config.mesh_shape, mesh_dim_names=config.mesh_dim_names), "
                "of a config that has no mesh yet."
            )
        return found

    def _size(self, axis: str) -> int:
        size: int = getattr(self, f"{axis}_size")
        return size

    def _enabled(self, *axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self._size(axis) > 1)

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether FSDP shards the model."""
        return self.dp_shard_size > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is cut into stages."""
        return self.pp_size > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether experts are spread over ranks."""
        return self.ep_size > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split by ring attention."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split by heads."""
        return self.sp_size > 1

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Axes of the mesh, outermost first; those of size 1 are left out."""
        return self._enabled(*_MESH_ORDER)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of :attr:`mesh_dim_names`."""
        return tuple(self._size(axis) for axis in self.mesh_dim_names)

    @property
    def needs_mesh(self) -> bool:
        """Whether torch needs a mesh; DeepSpeed's sequence parallelism makes its own groups."""
        return self.total_size > 1 and not (self.sp_enabled and self.sp_backend == "deepspeed")

    @property
    def dp_dim_names(self) -> tuple[str, ...]:
        """Axes along which ranks read different batches; together they are the axis "dp"."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> tuple[str, ...]:
        """Axes along which ranks read the same batch."""
        return self._enabled("tp", "cp", "sp", "pp")

    @property
    def dp_shard_cp_dim_names(self) -> tuple[str, ...]:
        """Axes over which FSDP shards; together they are the axis "dp_shard_cp"."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> tuple[str, ...]:
        """Axes over which a loss is averaged; together they are the axis "dp_cp"."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> tuple[str, ...]:
        """Axes of the mesh that FSDP2 is given: replicas first, then the joined axis of shards.

        Only axes that exist: the joined one is left out when neither dp_shard nor cp is in use.
        """
        shards = ("dp_shard_cp",) if self.dp_shard_cp_dim_names else ()
        return self._enabled("dp_replicate") + shards

    @property
    def total_size(self) -> int:
        """Number of ranks in the mesh."""
        return prod(self._size(axis) for axis in _MESH_ORDER)

    @property
    def data_parallel_size(self) -> int:
        """Number of different batches read at a time."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that read the same batch."""
        return self.tp_size * self.cp_size * self.sp_size * self.pp_size

    def check_size(self, num_processes: int) -> None:
        """Check that the sizes make up ``num_processes``. Pure.

        Raises:
            ConfigurationError: They don't; says which would.
        """
        _raise_all(self._misfits(num_processes))

    def validate(
        self, num_processes: int, *, fsdp_version: int | None = None, deepspeed: bool = False
    ) -> None:
        """Check the mesh against a world. Pure: nothing is built or changed.

        Args:
            num_processes: Ranks in the world.
            fsdp_version: Version of FSDP in use, ``None`` for none.
            deepspeed: Whether DeepSpeed is in use.

        Raises:
            ConfigurationError: The mesh does not fit the world or the engine: one error that lists all that
                is wrong.
        """
        if self.total_size == 1:
            return
        if self.sp_enabled and self.sp_backend == "deepspeed":
            _raise_all(self._misfits_of_deepspeed(num_processes, deepspeed))
            return
        found = self._misfits(num_processes)
        if fsdp_version == 1:
            found.append(
                f"a mesh needs FSDP2, got fsdp_version=1 with {self._sizes()}. "
                "Pass FullyShardedDataParallelPlugin(fsdp_version=2)."
            )
        if fsdp_version == 2 and not self._enabled("dp_shard", "cp", "sp"):
            found.append(
                f"FSDP2 has nothing to shard over: got {self._sizes()}. "
                "Set dp_shard_size above 1, or leave the FSDP plugin out."
            )
        _raise_all(found)

    def _misfits(self, num_processes: int) -> list[str]:
        if self.total_size == num_processes:
            return []
        fitting: list[str] = []
        for axis in _MESH_ORDER:
            size, rest = divmod(num_processes, self.total_size // self._size(axis))
            if not rest and size and not (axis == "dp_shard" and size % self.ep_size):
                fitting.append(f"{axis}_size={size}")
        # A change of dp is what most want; one of the others changes what each rank computes.
        data = [text for text in fitting if text.startswith("dp_")]
        advice = (
            f"Fitting would be {' or '.join(data or fitting)}" if fitting else "No single size mends that"
        )
        given = f"it covers {self.total_size} ranks ({self._sizes()}), but num_processes={num_processes}"
        return [f"{given}. {advice}; or start {self.total_size} processes."]

    def _misfits_of_deepspeed(self, num_processes: int, deepspeed: bool) -> list[str]:
        found: list[str] = []
        if not deepspeed:
            found.append(
                f"sp_backend='deepspeed' needs DeepSpeed: got sp_size={self.sp_size} without a "
                "DeepSpeedPlugin. Pass one, or take sp_backend='torch'."
            )
        # DeepSpeed derives the data-parallel size itself, so only divisibility is ours to check.
        if num_processes % self.sp_size:
            found.append(
                f"sp_size must divide the number of processes: got sp_size={self.sp_size}, "
                f"num_processes={num_processes}. Fitting: {_listed(_divisors(num_processes))}."
            )
        return found

    def _sizes(self) -> str:
        return ", ".join(f"{axis}_size={self._size(axis)}" for axis in _MESH_ORDER if self._size(axis) > 1)


def _raise_all(conflicts: Sequence[str]) -> None:
    if len(conflicts) == 1:
        raise ConfigurationError(f"ParallelismConfig does not fit: {conflicts[0]}")
    if conflicts:
        lines = "\n".join(f"  - {conflict}" for conflict in conflicts)
        raise ConfigurationError(f"ParallelismConfig does not fit, for {len(conflicts)} reasons:\n{lines}")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
