"""Accelerate's records: positional arguments, None, and changes before they are used."""

import dataclasses
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.compat import records
from accelfn.compat.records import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    KwargsHandler,
    MutableRecord,
    ParallelismConfig,
    ProjectConfiguration,
    freeze,
)
from accelfn.errors import ConfigurationError

RECORDS = [one for one in vars(records).values() if isinstance(one, type) and issubclass(one, MutableRecord)]
RECORDS.remove(MutableRecord)


@pytest.mark.slow
def test_fields_and_their_order_are_the_peers(peer: Any) -> None:
    for record in RECORDS:
        theirs = [field.name for field in dataclasses.fields(getattr(peer.utils, record.__name__))]
        own = [field.name for field in dataclasses.fields(record.record)]
        assert set(theirs) <= {*own, *record.ignored}
        if record.__name__ != "MegatronLMPlugin":  # of 80 fields, which nobody passes by position
            assert [*dataclasses.asdict(record())][: len(theirs)] == theirs


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_is_a_dataclass(record: type[MutableRecord]) -> None:
    own = record()
    assert dataclasses.is_dataclass(own)
    assert dataclasses.asdict(own).keys() == vars(own).keys()
    assert dataclasses.replace(own) == own


def test_a_record_is_replaced_and_can_be_inherited_from() -> None:
    config = dataclasses.replace(DataLoaderConfiguration(data_seed=5), split_batches=True)
    assert (config.data_seed, config.split_batches) == (5, True)
    assert {field.name for field in dataclasses.fields(config)} >= {"data_seed", "split_batches"}

    @dataclasses.dataclass
    class Mine(DataLoaderConfiguration):
        pass

    mine: Any = Mine
    assert dataclasses.asdict(mine(data_seed=3))["data_seed"] == 3


@pytest.mark.parametrize("version", [1, 2])
def test_a_policy_of_one_dtype_stays_unless_it_is_overridden(version: int) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    third = "output_dtype" if version == 2 else "buffer_dtype"
    for name, override, dtype in (
        ("fp8", False, torch.bfloat16),
        ("fp16", False, torch.bfloat16),
        (torch.float16, True, torch.float16),
    ):
        plugin.set_mixed_precision(name, override=override)
        policy = plugin.mixed_precision_policy
        assert {policy.param_dtype, policy.reduce_dtype, getattr(policy, third)} == {dtype}
    assert plugin.freeze().mixed_precision_policy is plugin.mixed_precision_policy
    with pytest.raises(ConfigurationError, match="set_mixed_precision doesn't know 'no'"):
        FullyShardedDataParallelPlugin(fsdp_version=version).set_mixed_precision("no")


def test_none_is_the_default_and_fields_can_be_set_afterwards() -> None:
    config = DataLoaderConfiguration(True, None, even_batches=None)
    assert (config.split_batches, config.even_batches) == (True, True)
    config.data_seed = 5
    config.non_blocking = None
    assert config.freeze() == af.DataLoaderConfiguration(split_batches=True, data_seed=5)
    assert config != DataLoaderConfiguration(True, data_seed=5)


def test_what_cant_be_a_record() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        DataLoaderConfiguration(nothing=1)
    with pytest.raises(TypeError, match="multiple values for argument 'split_batches'"):
        DataLoaderConfiguration(True, split_batches=True)
    with pytest.raises(TypeError, match="takes from 1 to 7 positional arguments but 8"):
        ProjectConfiguration(*"1234567")
    config = DataLoaderConfiguration()
    config.split_batches = "often"  # refused when the record is used
    with pytest.raises(TypeError, match="split_batches"):
        config.freeze()


def test_records_inside_collections_are_frozen() -> None:
    handlers = [DistributedDataParallelKwargs(bucket_cap_mb=3), af.config.AutocastKwargs()]
    assert freeze(handlers) == [
        af.config.DistributedDataParallelKwargs(bucket_cap_mb=3),
        af.config.AutocastKwargs(),
    ]
    mesh = ParallelismConfig(tp_size=2, cp_handler=records.TorchContextParallelConfig("alltoall"))
    assert freeze({"a": mesh})["a"].cp_handler == af.config.TorchContextParallelConfig("alltoall")
    sizes = (mesh.tp_enabled, mesh.cp_enabled, mesh.total_size, mesh.non_data_parallel_size)
    assert sizes == (True, False, 2, 2)


def test_a_handler_of_the_programs_own_may_be_a_plain_dataclass() -> None:
    @dataclasses.dataclass
    class Mine(KwargsHandler):
        depth: int = 1
        name: str = "x"

    assert Mine(depth=2).to_kwargs() == {"depth": 2}


def test_a_record_goes_to_torch_without_its_defaults() -> None:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="fp16")
    assert handler.to_kwargs() == {"find_unused_parameters": True}


def test_a_project_has_its_logs_in_its_directory() -> None:
    assert ProjectConfiguration("runs").logging_dir == "runs"
    config = ProjectConfiguration(logging_dir="logs")
    config.set_directories("runs")
    assert (config.project_dir, config.logging_dir) == ("runs", "logs")


def test_records_say_what_they_hold() -> None:
    assert repr(records.AutocastKwargs(False)) == "AutocastKwargs(enabled=False, cache_enabled=None)"
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = records.AutocastKwargs().colour
    with pytest.raises(TypeError, match="unhashable"):
        hash(records.AutocastKwargs())


def test_a_plugin_of_deepspeed_has_a_configuration_that_is_filled_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin: Any = DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=2, gradient_clipping=0.5)
    assert (plugin.hf_ds_config.get_value("zero_optimization.stage"), plugin.freeze().accumulation) == (1, 2)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 3
    assert plugin.freeze().config["train_micro_batch_size_per_gpu"] == 3
    given = {"_comment": "mine", "zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2}
    plugin = DeepSpeedPlugin(hf_ds_config={**given, "train_batch_size": 16, "bf16": {"enabled": "auto"}})
    plugin.set_mixed_precision("bf16")
    frozen = plugin.frozen_for(None)
    assert (plugin.zero_stage, frozen.mixed_precision, frozen.accumulation) == (3, "bf16", 2)
    assert "_comment" not in frozen.config
    alone = plugin.frozen_for(1)  # a Trainer counts by itself
    assert (alone.accumulation, alone.config["train_batch_size"]) == (None, "auto")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    assert DeepSpeedPlugin().hf_ds_config.get_value("zero_optimization.stage") == 1
