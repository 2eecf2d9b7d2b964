from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from accelfn.context.config import (
    DeepSpeedSequenceParallelConfig,
    ExpertParallelConfig,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accelfn.errors import ConfigurationError, NotAvailableError

SIZES = st.sampled_from([1, 2, 3, 4])


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, st.sampled_from(["torch", "deepspeed"]))
def test_laws_of_the_mesh(
    replicate: int, shard: int, cp: int, sp: int, tp: int, pp: int, backend: str
) -> None:
    assume(cp == 1 or sp == 1)
    config = ParallelismConfig(
        dp_replicate_size=replicate,
        dp_shard_size=shard,
        cp_size=cp,
        sp_size=sp,
        tp_size=tp,
        pp_size=pp,
        sp_backend=backend,
    )
    assert prod(config.mesh_shape) == config.total_size
    assert config.total_size == config.data_parallel_size * config.non_data_parallel_size
    assert set(config.mesh_dim_names) == {*config.dp_dim_names, *config.non_dp_dim_names}
    assert all(size > 1 for size in config.mesh_shape)
    joined = {name for name in config.fsdp_dim_names if name != "dp_shard_cp"}
    joined |= set(config.dp_shard_cp_dim_names) if "dp_shard_cp" in config.fsdp_dim_names else set()
    assert joined == set(config.dp_cp_dim_names)
    assert config.needs_mesh == (config.total_size > 1 and (sp == 1 or backend == "torch"))
    assert replace(config) == config


def test_an_example_in_full() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2, tp_size=2)
    assert config.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp")
    assert config.mesh_shape == (2, 2, 2, 2)
    assert config.dp_dim_names == ("dp_replicate", "dp_shard")
    assert config.dp_shard_cp_dim_names == ("dp_shard", "cp")
    assert config.dp_cp_dim_names == ("dp_replicate", "dp_shard", "cp")
    assert config.non_dp_dim_names == ("tp", "cp")
    assert replace(config, pp_size=2).mesh_dim_names[0] == "pp"
    assert config.fsdp_dim_names == ("dp_replicate", "dp_shard_cp")
    config.validate(16, fsdp_version=2)


def test_options_are_made_for_the_axes_in_use() -> None:
    assert ParallelismConfig().tp_handler is None
    assert ParallelismConfig(tp_size=2).tp_handler == TorchTensorParallelConfig()
    assert ParallelismConfig(cp_size=2).cp_handler == TorchContextParallelConfig(cp_comm_strategy="allgather")
    assert ParallelismConfig(sp_size=2).sp_handler is None
    by_deepspeed = ParallelismConfig(sp_size=2, sp_backend="deepspeed")
    assert by_deepspeed.sp_handler == DeepSpeedSequenceParallelConfig()
    stages = ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(split="layers.2, layers.4"))
    assert stages.pp_handler == PipelineParallelConfig(schedule="1F1B", split=["layers.2", "layers.4"])
    assert ParallelismConfig(pp_size=2).pp_handler == PipelineParallelConfig()
    assert PipelineParallelConfig(last="norm, head") == PipelineParallelConfig(last=("norm", "head"))
    assert ParallelismConfig(dp_shard_size=4, ep_size=2).ep_handler == ExpertParallelConfig()
    assert replace(ParallelismConfig(tp_size=2), tp_size=1).tp_enabled is False


INVALID: tuple[tuple[type, dict[str, Any], type[Exception], str], ...] = (
    (ParallelismConfig, {"tp_size": 0}, ConfigurationError, "tp_size must be at least 1, got 0"),
    (ParallelismConfig, {"tp_size": 2.0}, TypeError, "tp_size must be an int"),
    (ParallelismConfig, {"cp_size": 2, "sp_size": 2}, ConfigurationError, "splits the sequence twice"),
    (ParallelismConfig, {"ep_size": 2}, ConfigurationError, "ep_size=2, dp_shard_size=1. Fitting: 1"),
    (ParallelismConfig, {"ep_size": 4, "dp_shard_size": 6}, ConfigurationError, "Fitting: 1, 2, 3, 6"),
    (ParallelismConfig, {"cp_size": 2, "sp_size": 2, "ep_size": 2}, ConfigurationError, "for 2 reasons"),
    (ParallelismConfig, {"pp_handler": "1f1b"}, TypeError, "must be a PipelineParallelConfig or None"),
    (PipelineParallelConfig, {"schedule": "zigzag"}, ConfigurationError, "1f1b, gpipe, interleaved1f1b"),
    (PipelineParallelConfig, {"num_microbatches": 0}, ConfigurationError, "at least 1"),
    (PipelineParallelConfig, {"split": 2}, TypeError, "an iterable of str"),
    (PipelineParallelConfig, {"last": 2}, TypeError, "an iterable of str"),
    (ExpertParallelConfig, {"experts": 3}, TypeError, "experts"),
    (TorchTensorParallelConfig, {"plan": ["q"]}, TypeError, "a mapping or None"),
    (ParallelismConfig, {"cp_backend": "ring"}, ConfigurationError, "Use 'torch'"),
    (ParallelismConfig, {"sp_backend": "ring"}, ConfigurationError, "Use 'torch' or 'deepspeed'"),
    (ParallelismConfig, {"cp_handler": 3}, TypeError, "must be a TorchContextParallelConfig or None"),
    (TorchContextParallelConfig, {"cp_comm_strategy": "ring"}, ConfigurationError, "allgather, alltoall"),
    (TorchTensorParallelConfig, {"enable_async_tp": True}, NotAvailableError, "Leave it out"),
    (DeepSpeedSequenceParallelConfig, {"sp_seq_length_is_variable": False}, ConfigurationError, "is needed"),
    (DeepSpeedSequenceParallelConfig, {"sp_attn_implementation": "eager"}, ConfigurationError, "'eager'"),
)


@pytest.mark.parametrize(("kind", "values", "error", "message"), INVALID)
def test_an_invalid_config_cannot_be_built(
    kind: type, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**values)


def test_kernels_of_the_hub_are_accepted() -> None:
    name = "kernels-community/flash-attn3"
    assert DeepSpeedSequenceParallelConfig(sp_attn_implementation=name).sp_attn_implementation == name


FITS: tuple[tuple[dict[str, Any], int, dict[str, Any]], ...] = (
    ({}, 7, {"fsdp_version": 1}),
    ({"dp_replicate_size": 4}, 4, {}),
    ({"tp_size": 4}, 4, {}),
    ({"dp_shard_size": 4}, 4, {"fsdp_version": 2}),
    ({"cp_size": 2}, 2, {}),
    ({"tp_size": 2, "dp_replicate_size": 2}, 4, {}),
    ({"pp_size": 2, "dp_shard_size": 4, "ep_size": 2}, 8, {"fsdp_version": 2}),
    ({"sp_size": 2}, 2, {"fsdp_version": 2}),
    ({"sp_size": 2, "sp_backend": "deepspeed"}, 6, {"deepspeed": True}),
)
CLASHES: tuple[tuple[dict[str, Any], int, dict[str, Any], str], ...] = (
    ({"tp_size": 4}, 8, {}, "covers 4 ranks .*num_processes=8. Fitting would be dp_replicate_size=2 or dp_s"),
    ({"dp_shard_size": 2, "tp_size": 2}, 6, {}, "Fitting would be dp_shard_size=3; or start 4 processes"),
    ({"dp_shard_size": 4, "ep_size": 4, "tp_size": 2}, 4, {}, "Fitting would be tp_size=1; or"),
    ({"pp_size": 3, "tp_size": 3}, 8, {}, "No single size mends that; or start 9 processes"),
    (
        {"dp_shard_size": 2},
        4,
        {"fsdp_version": 1},
        "2 reasons:(?s:.*)covers 2 ranks(?s:.*)a mesh needs FSDP2",
    ),
    ({"tp_size": 2}, 2, {"fsdp_version": 2}, "nothing to shard over"),
    ({"sp_size": 2, "sp_backend": "deepspeed"}, 2, {}, "needs DeepSpeed"),
    ({"sp_size": 2, "sp_backend": "deepspeed"}, 3, {}, "2 reasons:(?s:.*)needs DeepSp(?s:.*)Fitting: 1, 3"),
)


@pytest.mark.parametrize(("sizes", "num_processes", "options"), FITS)
def test_a_mesh_that_fits(sizes: dict[str, Any], num_processes: int, options: dict[str, Any]) -> None:
    ParallelismConfig(**sizes).validate(num_processes, **options)


@pytest.mark.parametrize(("sizes", "num_processes", "options", "message"), CLASHES)
def test_a_mesh_that_does_not_fit(
    sizes: dict[str, Any], num_processes: int, options: dict[str, Any], message: str
) -> None:
    config = ParallelismConfig(**sizes)
    with pytest.raises(ConfigurationError, match=message):
        config.validate(num_processes, **options)
