"""How ranks are arranged in a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import TYPE_CHECKING, cast

from accelfn.context.config.checks import (
    check_bools,
    check_ints,
    check_texts,
    settle,
    settle_choice,
    settle_options,
    where,
)
from accelfn.context.config.enums import ContextParallelStrategy
from accelfn.errors import ConfigurationError, NotAvailableError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = (
    "DeepSpeedSequenceParallelConfig",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
)

_MESH_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
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
class ParallelismConfig:
    """Sizes of the mesh axes; their product is the number of processes.

    Attributes:
        dp_replicate_size: Copies of the (sharded) model. Default 1.
        dp_shard_size: Ranks that share one copy by FSDP. Default 1.
        tp_size: Ranks that share each layer. Default 1.
        cp_size: Ranks that share each sequence, through torch. Excludes ``sp_size``. Default 1.
        sp_size: Ranks that share each sequence, through DeepSpeed. Default 1.
        cp_backend: "torch" is the only one. Default torch.
        sp_backend: "deepspeed" is the only one. Default deepspeed.
        tp_handler: Options used if ``tp_size`` > 1; made if ``None`` then. Default None.
        cp_handler: Options used if ``cp_size`` > 1; made if ``None`` then. Default None.
        sp_handler: Options used if ``sp_size`` > 1; made if ``None`` then. Default None.
        device_mesh: A mesh that already exists, used instead of making one. Default None.
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    _: KW_ONLY
    sp_size: int = 1
    cp_backend: str = "torch"
    sp_backend: str = "deepspeed"
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        """Check the fields and make the options of the axes in use."""
        check_ints(self, *(f"{axis}_size" for axis in _MESH_ORDER), minimum=1)
        for name, only in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) != only:
                raise ConfigurationError(
                    f"{where(self, name)} does not know {getattr(self, name)!r}. Use {only!r}, the only one."
                )
        for axis, kind in (
            ("tp", TorchTensorParallelConfig),
            ("cp", TorchContextParallelConfig),
            ("sp", DeepSpeedSequenceParallelConfig),
        ):
            handler = getattr(self, f"{axis}_handler")
            if handler is None and self._size(axis) > 1:
                settle(self, **{f"{axis}_handler": kind()})
            elif handler is not None and not isinstance(handler, kind):
                raise TypeError(
                    f"{where(self, axis + '_handler')} must be a {kind.__name__} or None, got {handler!r}. "
                    "Pass that record, or leave it out for its defaults."
                )
        if self.cp_enabled and self.sp_enabled:
            raise ConfigurationError(
                f"ParallelismConfig splits the sequence twice: got cp_size={self.cp_size}, "
                f"sp_size={self.sp_size}. Set one of them to 1."
            )
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise ConfigurationError(
                "ParallelismConfig replicates a model that is split by tensor or context without "
                f"sharding it: got tp_size={self.tp_size}, cp_size={self.cp_size}, "
                f"dp_replicate_size={self.dp_replicate_size}, dp_shard_size=1. "
                "Move some of dp_replicate_size to dp_shard_size."
            )

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
    def tp_enabled(self) -> bool:
        """Whether layers are split."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split by torch."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split by DeepSpeed."""
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
        return self.total_size > 1 and not self.sp_enabled

    @property
    def dp_dim_names(self) -> tuple[str, ...]:
        """Axes along which ranks read different batches; together they are the axis "dp"."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> tuple[str, ...]:
        """Axes along which ranks read the same batch."""
        return self._enabled("tp", "cp", "sp")

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
        return self.tp_size * self.cp_size * self.sp_size

    def validate(
        self,
        num_processes: int,
        *,
        fsdp_version: int | None = None,
        deepspeed: bool = False,
        allow_cp_standalone: bool = False,
    ) -> None:
        """Check the mesh against a world. Pure: nothing is built or changed.

        Args:
            num_processes: Ranks in the world.
            fsdp_version: Version of FSDP in use, ``None`` for none.
            deepspeed: Whether DeepSpeed is in use.
            allow_cp_standalone: Whether context parallelism may run without FSDP2, for callers that shard
                and reduce gradients themselves.

        Raises:
            ConfigurationError: The mesh does not fit the world or the engine.
        """
        sizes = ", ".join(f"{axis}_size={self._size(axis)}" for axis in _MESH_ORDER)
        if self.total_size == 1:
            return
        if self.sp_enabled:
            if not deepspeed:
                raise ConfigurationError(
                    f"ParallelismConfig.sp_size needs DeepSpeed: got sp_size={self.sp_size} without a "
                    "DeepSpeedPlugin. Pass one, or use cp_size with FSDP2."
                )
            # DeepSpeed derives the data-parallel size itself, so only divisibility is ours to check.
            if num_processes % self.sp_size:
                raise ConfigurationError(
                    f"ParallelismConfig.sp_size must divide the number of processes: got "
                    f"sp_size={self.sp_size}, num_processes={num_processes}. "
                    f"Start a multiple of {self.sp_size} processes."
                )
            return
        if self.total_size != num_processes:
            raise ConfigurationError(
                f"ParallelismConfig covers {self.total_size} ranks ({sizes}), but "
                f"num_processes={num_processes}. "
                "Make the product of the sizes equal to the number of processes."
            )
        if self.cp_enabled and fsdp_version != 2 and not allow_cp_standalone:
            raise ConfigurationError(
                f"ParallelismConfig.cp_size needs FSDP2: got cp_size={self.cp_size} with "
                f"fsdp_version={fsdp_version}. Pass FullyShardedDataParallelPlugin(fsdp_version=2)."
            )
        if fsdp_version == 1:
            raise ConfigurationError(
                f"A mesh needs FSDP2, got fsdp_version=1 with {sizes}. "
                "Pass FullyShardedDataParallelPlugin(fsdp_version=2)."
            )
        if fsdp_version == 2 and not self.dp_shard_cp_dim_names:
            raise ConfigurationError(
                f"FSDP2 has nothing to shard over: got {sizes}. "
                "Set dp_shard_size above 1, or leave the FSDP plugin out."
            )
