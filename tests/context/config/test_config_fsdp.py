import enum
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context.config import FullyShardedDataParallelPlugin as Plugin
from accelfn.context.config import ShardingStrategy, StateDictType
from accelfn.errors import ConfigurationError

COMMON: dict[str, Any] = {
    "mixed_precision_policy": None,
    "auto_wrap_policy": None,
    "transformer_cls_names_to_wrap": None,
    "min_num_params": 0,
    "cpu_offload": False,
    "ignored_modules": None,
    "state_dict_config": None,
    "optim_state_dict_config": None,
    "limit_all_gathers": True,
    "param_init_fn": None,
    "activation_checkpointing": False,
    "cpu_ram_efficient_loading": False,
    "backward_prefetch": None,
}
VERSION_1: dict[str, Any] = {
    "fsdp_version": 1,
    "sharding_strategy": "FULL_SHARD",
    "reshard_after_forward": None,
    "state_dict_type": "FULL_STATE_DICT",
    "use_orig_params": False,
    "sync_module_states": False,
    "forward_prefetch": False,
}
VERSION_2: dict[str, Any] = {
    "fsdp_version": 2,
    "sharding_strategy": None,
    "reshard_after_forward": True,
    "state_dict_type": "SHARDED_STATE_DICT",
    "use_orig_params": None,
    "sync_module_states": None,
    "forward_prefetch": None,
}


def values(plugin: Plugin) -> dict[str, Any]:
    return {field.name: getattr(plugin, field.name) for field in fields(plugin)}


def test_defaults_depend_on_the_version() -> None:
    assert values(Plugin()) == COMMON | VERSION_1
    assert values(Plugin(fsdp_version=2)) == COMMON | VERSION_2


def test_the_version_can_be_replaced_there_and_back() -> None:
    assert replace(Plugin(), fsdp_version=2, state_dict_type=None) == Plugin(fsdp_version=2)
    assert replace(Plugin(fsdp_version=2), fsdp_version=1, state_dict_type=None) == Plugin()


@given(st.booleans(), st.booleans(), st.sampled_from(["FULL_STATE_DICT", "SHARDED_STATE_DICT"]))
def test_switching_versions_keeps_what_both_have(reshard: bool, ram: bool, layout: str) -> None:
    plugin = Plugin(
        fsdp_version=2, reshard_after_forward=reshard, cpu_ram_efficient_loading=ram, state_dict_type=layout
    )
    assert replace(replace(plugin, fsdp_version=1), fsdp_version=2) == plugin


@pytest.mark.parametrize(
    ("given_values", "strategy"),
    [
        ({"sharding_strategy": 2}, "SHARD_GRAD_OP"),
        ({"sharding_strategy": "3"}, "NO_SHARD"),
        ({"sharding_strategy": "hybrid_shard"}, "HYBRID_SHARD"),
        ({"reshard_after_forward": False}, "SHARD_GRAD_OP"),
        ({"reshard_after_forward": "HYBRID_SHARD_ZERO2"}, "HYBRID_SHARD_ZERO2"),
        ({"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": True}, "HYBRID_SHARD"),
    ],
)
def test_strategies_of_version_1(given_values: dict[str, Any], strategy: str) -> None:
    assert Plugin(**given_values).sharding_strategy is ShardingStrategy(strategy)


@pytest.mark.parametrize(
    ("given_values", "reshard"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, True),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, False),
        ({"reshard_after_forward": False}, False),
    ],
)
def test_resharding_of_version_2(given_values: dict[str, Any], reshard: bool) -> None:
    plugin = Plugin(fsdp_version=2, **given_values)
    assert plugin.reshard_after_forward is reshard
    assert plugin.sharding_strategy is None


def test_enums_of_torch_are_understood() -> None:
    from torch.distributed import fsdp

    plugin = Plugin(
        sharding_strategy=fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2,  # pyright: ignore[reportPrivateUsage, reportArgumentType]
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,  # pyright: ignore[reportArgumentType]
        state_dict_type=fsdp.StateDictType.SHARDED_STATE_DICT,  # pyright: ignore[reportArgumentType]
        mixed_precision_policy=fsdp.MixedPrecision(),
        cpu_offload=fsdp.CPUOffload(offload_params=True),
    )
    assert plugin.sharding_strategy is ShardingStrategy.HYBRID_SHARD_ZERO2
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.offloads_params
    second = Plugin(
        fsdp_version=2,
        mixed_precision_policy=fsdp.MixedPrecisionPolicy(),
        cpu_offload=fsdp.CPUOffloadPolicy(),
    )
    assert second.offloads_params
    assert not Plugin(fsdp_version=2, cpu_offload=fsdp.OffloadPolicy()).offloads_params
    assert not Plugin().offloads_params


def test_dtypes_are_names_however_they_are_given() -> None:
    import torch

    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": "float32", "output_dtype": "fp16"}
    plugin = Plugin(fsdp_version=2, mixed_precision_policy=policy)
    assert plugin.mixed_precision_policy == {
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "output_dtype": "fp16",
    }
    assert Plugin(mixed_precision_policy="BF16").mixed_precision_policy == "bf16"


def test_wrapping() -> None:
    assert Plugin(auto_wrap_policy="no_wrap").auto_wrap_policy == "NO_WRAP"
    assert Plugin(auto_wrap_policy="transformer_based_wrap").auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    assert Plugin(auto_wrap_policy=print).auto_wrap_policy is print
    assert Plugin(transformer_cls_names_to_wrap="A, B").transformer_cls_names_to_wrap == ("A", "B")


def test_efficient_loading_sends_the_weights() -> None:
    assert Plugin(cpu_ram_efficient_loading=True).sync_module_states is True
    assert replace(Plugin(), cpu_ram_efficient_loading=True).sync_module_states is True


class Other(enum.Enum):
    FULL_SHARD_TWICE = 1


INVALID: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"fsdp_version": 3}, ConfigurationError, "from 1 to 2, got 3"),
    ({"sharding_strategy": "ALL"}, ConfigurationError, "sharding_strategy does not know 'ALL'"),
    ({"sharding_strategy": 6}, ConfigurationError, "does not know 6"),
    ({"sharding_strategy": Other.FULL_SHARD_TWICE}, ConfigurationError, "does not know"),
    ({"sharding_strategy": 1.5}, TypeError, "must be a ShardingStrategy or a str, got 1.5"),
    ({"sharding_strategy": "NO_SHARD", "reshard_after_forward": True}, ConfigurationError, "contradict"),
    (
        {"fsdp_version": 2, "sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
        ConfigurationError,
        "contradict .* Pass reshard_after_forward only",
    ),
    ({"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD"}, ConfigurationError, "dp_replicate_size"),
    ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, ConfigurationError, "does not exist"),
    ({"fsdp_version": 2, "forward_prefetch": True}, ConfigurationError, "belongs to FSDP version 1"),
    (
        {"fsdp_version": 2, "backward_prefetch": "BACKWARD_PRE"},
        ConfigurationError,
        "belongs to FSDP version 1",
    ),
    ({"fsdp_version": 2, "sync_module_states": True}, ConfigurationError, "belongs to FSDP version 1"),
    ({"fsdp_version": 2, "param_init_fn": print}, ConfigurationError, "belongs to FSDP version 1"),
    ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, ConfigurationError, "at least 1 for SIZE_BASED_WRAP"),
    ({"auto_wrap_policy": "BIG_WRAP"}, ConfigurationError, "does not know 'BIG_WRAP'"),
    ({"auto_wrap_policy": 3}, TypeError, "auto_wrap_policy must be"),
    ({"ignored_modules": "("}, ConfigurationError, "not a regular expression"),
    ({"ignored_modules": 3}, TypeError, "iterable of modules"),
    ({"mixed_precision_policy": "int8"}, ConfigurationError, "Use one of fp8, fp16, bf16, fp32"),
    ({"mixed_precision_policy": {"param_dtype": "bf16"}}, ConfigurationError, "exactly .* buffer_dtype"),
    (
        {"mixed_precision_policy": {"param_dtype": "int8", "reduce_dtype": "bf16", "buffer_dtype": "bf16"}},
        ConfigurationError,
        "dtype 'int8'",
    ),
    ({"mixed_precision_policy": 3}, ConfigurationError, "must be a torch MixedPrecision"),
    ({"cpu_offload": "yes"}, ConfigurationError, "cpu_offload must be True, False"),
    ({"min_num_params": -1}, ConfigurationError, "at least 0"),
    ({"transformer_cls_names_to_wrap": [1]}, TypeError, "iterable of str"),
    ({"transformer_cls_names_to_wrap": 1}, TypeError, "iterable of str"),
)


@pytest.mark.parametrize(("given_values", "error", "message"), INVALID)
def test_an_invalid_plugin_cannot_be_built(
    given_values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Plugin(**given_values)
