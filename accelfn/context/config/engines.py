"""Options of engines that accelfn doesn't run yet: DeepSpeed, Megatron-LM, and those of fp8.

The records can be built and compared, so that a program that names them can be read; a context refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, get_args, get_type_hints

from accelfn.context.config.checks import POSITIVE, FrozenOptions, Record, in_range, settle
from accelfn.context.config.enums import FP8AmaxAlgorithm, FP8Backend, FP8Format, FP8OptLevel, OffloadDevice
from accelfn.context.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from accelfn.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class DeepSpeedPlugin(Record):
    """How DeepSpeed shards and offloads.

    Attributes:
        hf_ds_config: A DeepSpeed configuration: a mapping, or the path of a file. Default None.
        gradient_accumulation_steps: Micro-batches per step, at least 1, or "auto". Default auto.
        gradient_clipping: Largest gradient norm; 0 for no clipping, or "auto". Default auto.
        zero_stage: What is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and
            parameters. Default 2.
        is_train_batch_min: Whether the smallest of several loaders gives the batch size. Default True.
        offload_optimizer_device: Where optimizer state is kept: none, cpu or nvme. Default none.
        offload_param_device: Where parameters are kept: none, cpu or nvme. Default none.
        offload_optimizer_nvme_path: Directory on the disk, for nvme. Default "none".
        offload_param_nvme_path: Directory on the disk, for nvme. Default "none".
        zero3_init_flag: Whether models are created sharded, at stage 3. Default None: yes.
        zero3_save_16bit_model: Whether stage 3 can gather a 16-bit model to save it. Default False.
        transformer_moe_cls_names: Class names of expert layers, as an iterable or with commas. Default None.
        enable_msamp: Whether MS-AMP is used. Default False.
        msamp_opt_level: "O1" or "O2". Default O1.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str = "auto"
    gradient_clipping: float | str = "auto"
    zero_stage: int = field(default=2, metadata=in_range(0, 3))
    is_train_batch_min: bool = True
    offload_optimizer_device: OffloadDevice | str = OffloadDevice.NONE
    offload_param_device: OffloadDevice | str = OffloadDevice.NONE
    offload_optimizer_nvme_path: str = "none"
    offload_param_nvme_path: str = "none"
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool = False
    transformer_moe_cls_names: Iterable[str] | None = None
    enable_msamp: bool = False
    msamp_opt_level: FP8OptLevel | str = FP8OptLevel.O1


@dataclass(frozen=True, slots=True, init=False)
class MegatronLMPlugin:
    """How Megatron-LM splits and trains a model.

    Attributes:
        options: What was passed, by name.
    """

    options: FrozenOptions

    def __init__(self, tp_degree: int = 1, pp_degree: int = 1, **options: Any) -> None:
        """Keep the options, unchecked.

        Args:
            tp_degree: Ranks that share each layer.
            pp_degree: Pipeline stages.
            **options: Further ones, as Megatron-LM has them.
        """
        settle(self, options=FrozenOptions({"tp_degree": tp_degree, "pp_degree": pp_degree, **options}))


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
