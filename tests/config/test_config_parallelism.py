from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from accelfn.config import (
    ExpertParallelConfig,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accelfn.errors import ConfigurationError, NotAvailableError

SIZES = st.sampled_from([1, 2, 3, 4])


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)
def test_laws_of_the_mesh(replicate: int, shard: int, cp: int, sp: int, tp: int, pp: int) -> None:
    assume(cp == 1 or sp == 1)
    config = ParallelismConfig(replicate, shard, tp, cp, sp_size=sp, pp_size=pp)
    assert prod(config.mesh_shape) == config.total_size
    assert config.total_size == config.data_parallel_size * config.non_data_parallel_size
    assert set(config.mesh_dim_names) == {*config.dp_dim_names, *config.non_dp_dim_names}
    assert all(size > 1 for size in config.mesh_shape)
    joined = {name for name in config.fsdp_dim_names if name != "dp_shard_cp"}
    joined |= set(config.dp_shard_cp_dim_names) if "dp_shard_cp" in config.fsdp_dim_names else set()
    assert joined == set(config.dp_cp_dim_names)
    assert replace(config) == config
    config.check_size(config.total_size)


def test_options_are_made_for_the_axes_in_use() -> None:
    assert ParallelismConfig().tp_handler is None
    assert ParallelismConfig(tp_size=2).tp_handler == TorchTensorParallelConfig()
    assert ParallelismConfig(cp_size=2).cp_handler == TorchContextParallelConfig(cp_comm_strategy="allgather")
    stages = ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(split="layers.2, layers.4"))
    assert stages.pp_handler == PipelineParallelConfig(schedule="1F1B", split=["layers.2", "layers.4"])
    assert ParallelismConfig(dp_shard_size=4, ep_size=2).ep_handler == ExpertParallelConfig()
    assert replace(ParallelismConfig(tp_size=2), tp_size=1).tp_enabled is False


INVALID: tuple[tuple[type, dict[str, Any], type[Exception], str], ...] = (
    (ParallelismConfig, {"tp_size": 0}, ConfigurationError, "tp_size must be at least 1, got 0"),
    (ParallelismConfig, {"tp_size": 2.0}, TypeError, "tp_size must be an int"),
    (ParallelismConfig, {"cp_size": 2, "sp_size": 2}, ConfigurationError, "splits the sequence twice"),
    (ParallelismConfig, {"ep_size": 4, "dp_shard_size": 6}, ConfigurationError, "must divide it: got ep_"),
    (ParallelismConfig, {"pp_handler": "1f1b"}, TypeError, "must be a PipelineParallelConfig or None"),
    (ParallelismConfig, {"sp_backend": "deepspeed"}, NotAvailableError, "Use 'torch'"),
    (PipelineParallelConfig, {"schedule": "zigzag"}, ConfigurationError, "1f1b, gpipe, interleaved1f1b"),
    (PipelineParallelConfig, {"stages_per_rank": 2}, ConfigurationError, "must be 1 with schedule='1f1b'"),
    (TorchTensorParallelConfig, {"plan": ["q"]}, TypeError, "a mapping or None"),
    (TorchContextParallelConfig, {"cp_comm_strategy": "ring"}, ConfigurationError, "allgather, alltoall"),
    (TorchTensorParallelConfig, {"enable_async_tp": True}, NotAvailableError, "Leave it out"),
)


@pytest.mark.parametrize(("kind", "values", "error", "message"), INVALID)
def test_an_invalid_config_cannot_be_built(
    kind: type, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**values)


@pytest.mark.parametrize(
    ("sizes", "num_processes", "message"),
    [
        ({"tp_size": 4}, 8, "covers 4 ranks .*num_processes=8. Fitting would be dp_replicate_size=2 or dp_s"),
        ({"dp_shard_size": 2, "tp_size": 2}, 6, "Fitting would be dp_shard_size=3; or start 4 processes"),
        ({"dp_shard_size": 4, "ep_size": 4, "tp_size": 2}, 4, "Fitting would be tp_size=1; or"),
        ({"pp_size": 3, "tp_size": 3}, 8, "No single size mends that; or start 9 processes"),
    ],
)
def test_a_mesh_that_does_not_fit(sizes: dict[str, Any], num_processes: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParallelismConfig(**sizes).check_size(num_processes)
