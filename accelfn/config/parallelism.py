"""Configuration of the device mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import prod
from types import MappingProxyType

from torch.distributed.device_mesh import DeviceMesh

from accelfn.config.checks import POSITIVE, Record, settle, settle_fields, where, wrong_type
from accelfn.config.enums import ContextParallelStrategy
from accelfn.errors import ConfigurationError, NotAvailableError

AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
# Torch's names in lower case, with the default number of stages per rank.
_SCHEDULES: Mapping[str, int] = MappingProxyType(
    {
        "1f1b": 1,
        "gpipe": 1,
        "interleaved1f1b": 2,
        "loopedbfs": 2,
    }
)


@dataclass(frozen=True, slots=True)
class TorchTensorParallelConfig(Record):
    """Options of tensor parallelism.

    Attributes:
        enable_async_tp: Whether communication overlaps with matrix products; not supported yet. Default
            False.
        plan: How to split modules: "colwise", "rowwise", "embedding", "gather", "sequence", "heads" or
            "whole" by pattern, such as ``{"layers.*.attn.q": "colwise"}``, where ``*`` matches one component
            of a module's name. ``None``: the model's ``tp_plan``. Default None.
        loss_parallel: Whether the logits stay split over the vocabulary in training, for a loss under torch's
            ``loss_parallel``. Default False.
    """

    enable_async_tp: bool = False
    _: KW_ONLY
    plan: Mapping[str, str] | None = None
    loss_parallel: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        settle_fields(self)
        if self.enable_async_tp:
            raise NotAvailableError(
                f"{where(self, 'enable_async_tp')} asks for overlapped tensor parallelism, which this "
                "version does not have, got True. Leave it out."
            )


@dataclass(frozen=True, slots=True)
class TorchContextParallelConfig(Record):
    """Options of context parallelism.

    Attributes:
        cp_comm_strategy: How keys and values are exchanged: "allgather" or "alltoall". Default allgather.
    """

    cp_comm_strategy: ContextParallelStrategy | str = ContextParallelStrategy.ALLGATHER


@dataclass(frozen=True, slots=True)
class PipelineParallelConfig:
    """Options of pipeline parallelism.

    Attributes:
        num_microbatches: Number of microbatches per batch, of equal size; fewer if it doesn't divide the
            rows. ``None``: the number of stages. Default None.
        schedule: Torch's name of the schedule: "1f1b", "gpipe", and with several stages per rank
            "interleaved1f1b" or "loopedbfs". Default 1f1b.
        split: The first module of each stage after the first, such as ``("layers.2",)``. Default ().
        stages_per_rank: Number of stages per rank. ``None``: 1 for "1f1b" and "gpipe", 2 for the others.
            Default None.
        last: Modules that are called after the blocks, if neither the order of registration nor the source of
            the model's ``forward`` shows that. Default ().
    """

    num_microbatches: int | None = field(default=None, metadata=POSITIVE)
    schedule: str = "1f1b"
    split: Sequence[str] = ()
    _: KW_ONLY
    stages_per_rank: int | None = field(default=None, metadata=POSITIVE)
    last: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        settle_fields(self)
        schedule = self.schedule.lower()
        if schedule not in _SCHEDULES:
            raise ConfigurationError(
                f"{where(self, 'schedule')} must be one of {', '.join(_SCHEDULES)}, got {self.schedule!r}."
            )
        usual = _SCHEDULES[schedule]
        given = usual if self.stages_per_rank is None else self.stages_per_rank
        if given != usual == 1:
            raise ConfigurationError(
                f"{where(self, 'stages_per_rank')} must be 1 with schedule={schedule!r}, got {given}. "
                "Leave it out, or use an interleaved schedule."
            )
        settle(self, schedule=schedule, stages_per_rank=given)


@dataclass(frozen=True, slots=True)
class ExpertParallelConfig(Record):
    """Options of expert parallelism.

    Attributes:
        experts: ``fnmatch`` pattern of the names of modules with experts; ``None``: the types that accelfn
            knows. Default None.
    """

    experts: str | None = None


@dataclass(frozen=True, slots=True)
class ParallelismConfig(Record):
    """Sizes of the mesh axes; their product is the number of processes.

    Attributes:
        dp_replicate_size: Copies of the (sharded) model. Default 1.
        dp_shard_size: Ranks that one copy is sharded over by FSDP. Default 1.
        tp_size: Ranks that each layer is split over. Default 1.
        cp_size: Ranks that each sequence is split over by ring attention. Excludes ``sp_size``. Default 1.
        sp_size: Ranks that each sequence is split over by exchanging heads. Default 1.
        pp_size: Number of pipeline stages. Default 1.
        ep_size: Ranks that experts are distributed over, a part of ``dp_shard_size``, which it divides.
            Default 1.
        cp_backend: Only "torch". Default torch.
        sp_backend: Only "torch". Default torch.
        tp_handler: Options if ``tp_size`` > 1; ``None``: the defaults. Default None.
        cp_handler: Options if ``cp_size`` > 1; ``None``: the defaults. Default None.
        pp_handler: Options if ``pp_size`` > 1; ``None``: the defaults. Default None.
        ep_handler: Options if ``ep_size`` > 1; ``None``: the defaults. Default None.
        device_mesh: An existing torch mesh over all ranks, with the dims and sizes of the axes of more than
            one rank, outermost first; torch's engines use its groups. Default None.
    """

    dp_replicate_size: int = field(default=1, metadata=POSITIVE)
    dp_shard_size: int = field(default=1, metadata=POSITIVE)
    tp_size: int = field(default=1, metadata=POSITIVE)
    cp_size: int = field(default=1, metadata=POSITIVE)
    _: KW_ONLY
    sp_size: int = field(default=1, metadata=POSITIVE)
    pp_size: int = field(default=1, metadata=POSITIVE)
    ep_size: int = field(default=1, metadata=POSITIVE)
    cp_backend: str = "torch"
    sp_backend: str = "torch"
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    pp_handler: PipelineParallelConfig | None = None
    ep_handler: ExpertParallelConfig | None = None
    device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        """Check the fields and make the options of the axes in use."""
        settle_fields(self)
        for name in ("cp_backend", "sp_backend"):
            if getattr(self, name) != "torch":
                raise NotAvailableError(
                    f"{where(self, name)} asks for {getattr(self, name)!r}, which is not supported yet. "
                    "Use 'torch'."
                )
        for axis, kind in (
            ("tp", TorchTensorParallelConfig),
            ("cp", TorchContextParallelConfig),
            ("pp", PipelineParallelConfig),
            ("ep", ExpertParallelConfig),
        ):
            handler = getattr(self, f"{axis}_handler")
            if handler is None and self._size(axis) > 1:
                settle(self, **{f"{axis}_handler": kind()})
            elif handler is not None and not isinstance(handler, kind):
                raise wrong_type(self, f"{axis}_handler", f"a {kind.__name__} or None")
        if self.cp_enabled and self.sp_enabled:
            raise self._misfit(
                f"it splits the sequence twice: got cp_size={self.cp_size}, sp_size={self.sp_size}. Set one "
                "of them to 1."
            )
        if self.dp_shard_size % self.ep_size:
            raise self._misfit(
                f"experts are spread over a part of dp_shard, so ep_size must divide it: got "
                f"ep_size={self.ep_size}, dp_shard_size={self.dp_shard_size}."
            )
        mesh = self.device_mesh
        dims = () if mesh is None else tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        own = tuple(zip(self.mesh_dim_names, self.mesh_shape, strict=True))
        if mesh is not None and dims != own:
            raise self._misfit(
                f"device_mesh has the dims {dict(dims) or 'of no name'}, and the sizes say "
                f"{dict(own) or 'one rank'}. "
                "Make it by init_device_mesh(kind, config.mesh_shape, mesh_dim_names=config.mesh_dim_names), "
                "of a config that has no mesh yet."
            )

    def _misfit(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"ParallelismConfig does not fit: {why}")

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
        return self._enabled(*AXES)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of :attr:`mesh_dim_names`."""
        return tuple(self._size(axis) for axis in self.mesh_dim_names)

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
        return prod(self._size(axis) for axis in AXES)

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
        if self.total_size == num_processes:
            return
        fitting: list[str] = []
        for axis in AXES:
            size, rest = divmod(num_processes, self.total_size // self._size(axis))
            if not rest and size and not (axis == "dp_shard" and size % self.ep_size):
                fitting.append(f"{axis}_size={size}")
        # A change of dp is what most want; one of the others changes what each rank computes.
        data = [text for text in fitting if text.startswith("dp_")]
        advice = (
            f"Fitting would be {' or '.join(data or fitting)}" if fitting else "No single size mends that"
        )
        sizes = ", ".join(f"{axis}_size={self._size(axis)}" for axis in self.mesh_dim_names)
        raise self._misfit(
            f"it covers {self.total_size} ranks ({sizes}), but num_processes={num_processes}. {advice}; "
            f"or start {self.total_size} processes."
        )
