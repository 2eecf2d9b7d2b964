from dataclasses import replace
from typing import Any

import pytest

from accelfn.config import FullyShardedDataParallelPlugin as Plugin
from accelfn.config import ShardingStrategy, StateDictType
from accelfn.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given_values", "strategy", "reshards"),
    [
        ({}, None, True),
        ({"sharding_strategy": 2}, "SHARD_GRAD_OP", False),
        ({"sharding_strategy": "3"}, "NO_SHARD", False),
        ({"sharding_strategy": "hybrid_shard"}, "HYBRID_SHARD", True),
        ({"reshard_after_forward": False}, None, False),
        ({"reshard_after_forward": "HYBRID_SHARD_ZERO2"}, "HYBRID_SHARD_ZERO2", False),
        ({"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": True}, "HYBRID_SHARD", True),
        ({"fsdp_version": 2}, None, True),
        ({"fsdp_version": 2, "sharding_strategy": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP", False),
        ({"fsdp_version": 2, "reshard_after_forward": False}, None, False),
    ],
)
def test_strategies(given_values: dict[str, Any], strategy: str | None, reshards: bool) -> None:
    plugin = Plugin(**given_values)
    assert (plugin.sharding_strategy, plugin.reshards) == (strategy, reshards)
    assert replace(replace(plugin, fsdp_version=1)) == replace(plugin, fsdp_version=1)


def test_enums_and_policies_of_torch_are_understood() -> None:
    import torch
    from torch.distributed import fsdp

    plugin = Plugin(
        sharding_strategy=fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2,  # pyright: ignore[reportPrivateUsage, reportArgumentType]
        state_dict_type=fsdp.StateDictType.SHARDED_STATE_DICT,  # pyright: ignore[reportArgumentType]
        mixed_precision_policy=fsdp.MixedPrecision(),
        cpu_offload=fsdp.CPUOffload(offload_params=True),
    )
    assert plugin.sharding_strategy is ShardingStrategy.HYBRID_SHARD_ZERO2
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.offloads_params
    assert Plugin(fsdp_version=2, cpu_offload=fsdp.CPUOffloadPolicy()).offloads_params
    assert not Plugin(fsdp_version=2, cpu_offload=fsdp.OffloadPolicy()).offloads_params
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": "float32", "output_dtype": "fp16"}
    named = {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp16"}
    assert Plugin(fsdp_version=2, mixed_precision_policy=policy).mixed_precision_policy == named
    assert Plugin(mixed_precision_policy="BF16").mixed_precision_policy == "bf16"


def test_wrapping() -> None:
    assert Plugin(auto_wrap_policy="no_wrap").auto_wrap_policy == "NO_WRAP"
    assert Plugin(auto_wrap_policy=print).auto_wrap_policy is print
    assert Plugin(transformer_cls_names_to_wrap="A, B").transformer_cls_names_to_wrap == ("A", "B")


INVALID: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"fsdp_version": 3}, ConfigurationError, "at least 1 and at most 2, got 3"),
    ({"sharding_strategy": "ALL"}, ConfigurationError, "sharding_strategy does not know 'ALL'"),
    ({"sharding_strategy": 1.5}, TypeError, "must be a ShardingStrategy or a str, got 1.5"),
    ({"sharding_strategy": "NO_SHARD", "reshard_after_forward": True}, ConfigurationError, "contradict"),
    ({"sharding_strategy": 1, "reshard_after_forward": "SHARD_GRAD_OP"}, ConfigurationError, "contradict"),
    ({"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD"}, ConfigurationError, "dp_replicate_size"),
    ({"fsdp_version": 2, "forward_prefetch": True}, ConfigurationError, "belongs to FSDP version 1"),
    ({"fsdp_version": 2, "param_init_fn": print}, ConfigurationError, "belongs to FSDP version 1"),
    ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, ConfigurationError, "at least 1 for SIZE_BASED_WRAP"),
    ({"auto_wrap_policy": 3}, TypeError, "auto_wrap_policy must be"),
    ({"mixed_precision_policy": "int8"}, ConfigurationError, "Use one of fp8, fp16, bf16, fp32"),
    ({"mixed_precision_policy": {"param_dtype": "bf16"}}, ConfigurationError, "exactly .* buffer_dtype"),
    ({"mixed_precision_policy": 3}, TypeError, "a mapping or a policy of torch"),
    ({"cpu_offload": "yes"}, TypeError, "cpu_offload must be True, False"),
    ({"transformer_cls_names_to_wrap": [1]}, TypeError, "iterable of str"),
)


@pytest.mark.parametrize(("given_values", "error", "message"), INVALID)
def test_an_invalid_plugin_cannot_be_built(
    given_values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Plugin(**given_values)
