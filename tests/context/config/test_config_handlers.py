import dataclasses
import inspect
from datetime import timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context.config import (
    AORecipeKwargs,
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    ProfileKwargs,
    TERecipeKwargs,
    TorchDynamoPlugin,
)
from accelfn.errors import ConfigurationError

TABLE: tuple[tuple[type[KwargsHandler], dict[str, Any]], ...] = (
    (AutocastKwargs, {"enabled": True, "cache_enabled": None}),
    (
        DistributedDataParallelKwargs,
        {
            "dim": 0,
            "broadcast_buffers": True,
            "bucket_cap_mb": 25,
            "find_unused_parameters": False,
            "check_reduction": False,
            "gradient_as_bucket_view": False,
            "static_graph": False,
            "comm_hook": "no",
            "comm_wrapper": "no",
            "comm_state_option": {},
        },
    ),
    (
        GradScalerKwargs,
        {
            "init_scale": 65536.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "enabled": True,
        },
    ),
    (InitProcessGroupKwargs, {"backend": None, "init_method": None, "timeout": None}),
    (
        ProfileKwargs,
        {
            "activities": None,
            "schedule_option": None,
            "on_trace_ready": None,
            "record_shapes": False,
            "profile_memory": False,
            "with_stack": False,
            "with_flops": False,
            "with_modules": False,
            "output_trace_dir": None,
        },
    ),
    (
        TorchDynamoPlugin,
        {
            "backend": "NO",
            "mode": "default",
            "fullgraph": False,
            "dynamic": None,
            "options": None,
            "disable": False,
            "use_regional_compilation": False,
        },
    ),
    (
        GradientAccumulationPlugin,
        {"num_steps": 1, "adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False},
    ),
    (
        TERecipeKwargs,
        {
            "use_autocast_during_eval": False,
            "margin": 0,
            "interval": 1,
            "fp8_format": "HYBRID",
            "amax_history_len": 1024,
            "amax_compute_algo": "most_recent",
            "override_linear_precision": (False, False, False),
            "use_mxfp8_block_scaling": False,
        },
    ),
    (
        AORecipeKwargs,
        {
            "config": None,
            "module_filter_func": None,
            "pad_inner_dim": True,
            "enable_fsdp_float8_all_gather": True,
        },
    ),
    (MSAMPRecipeKwargs, {"opt_level": "O2"}),
)


@pytest.mark.parametrize(("kind", "defaults"), TABLE)
def test_defaults(kind: type[KwargsHandler], defaults: dict[str, Any]) -> None:
    assert kind().to_dict() == defaults
    assert kind().to_kwargs() == {}


CHANGED = (
    AutocastKwargs(enabled=False, cache_enabled=True),
    DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=10),
    GradScalerKwargs(init_scale=2.0, growth_interval=5),
    InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=9)),
    ProfileKwargs(activities=["CPU", "cuda"], schedule_option={"wait": 0, "warmup": 0, "active": 1}),
    TorchDynamoPlugin(backend="aot_eager", fullgraph=True, dynamic=False),
    TorchDynamoPlugin(backend=DynamoBackend.INDUCTOR, mode="max-autotune"),
    GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False),
    TERecipeKwargs(fp8_format="e4m3", margin=2, override_linear_precision=(False, False, True)),
    AORecipeKwargs(pad_inner_dim=False),
    MSAMPRecipeKwargs(opt_level="o1"),
    FP8RecipeKwargs(backend="te", fp8_format="E4M3"),
)


@pytest.mark.parametrize("record", CHANGED, ids=lambda record: type(record).__name__)
def test_kwargs_rebuild_the_record(record: KwargsHandler) -> None:
    kwargs = record.to_kwargs()
    assert kwargs
    assert type(record)(**kwargs) == record


@given(
    st.builds(
        GradScalerKwargs,
        init_scale=st.floats(1.0, 1e6) | st.just(65536.0),
        growth_factor=st.floats(1.5, 4.0) | st.just(2.0),
        backoff_factor=st.floats(0.1, 0.9) | st.just(0.5),
        growth_interval=st.integers(1, 3000),
        enabled=st.booleans(),
    )
)
def test_kwargs_are_exactly_what_differs(record: GradScalerKwargs) -> None:
    default = GradScalerKwargs()
    kwargs = record.to_kwargs()
    assert GradScalerKwargs(**kwargs) == record
    assert all(value != getattr(default, name) for name, value in kwargs.items())


def test_fields_of_ours_are_not_passed_on() -> None:
    hook = DistributedDataParallelKwargs(
        comm_hook="power_sgd", comm_state_option={"start": 1}, static_graph=True
    )
    assert hook.to_kwargs() == {"static_graph": True}
    assert hook.comm_hook is DDPCommunicationHookType.POWER_SGD
    regional = TorchDynamoPlugin(backend="INDUCTOR", use_regional_compilation=True)
    assert regional.to_kwargs() == {"backend": "inductor"}


def test_kwargs_are_arguments_of_the_torch_objects() -> None:
    import torch

    ddp = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    names = {item.name for item in dataclasses.fields(DistributedDataParallelKwargs) if not item.metadata}
    assert names <= set(ddp)
    autocast = inspect.signature(torch.autocast).parameters
    assert {item.name for item in dataclasses.fields(AutocastKwargs)} <= set(autocast)
    compiled = inspect.signature(cast("Any", torch).compile).parameters
    names = {item.name for item in dataclasses.fields(TorchDynamoPlugin) if not item.metadata}
    assert names <= set(compiled)
    scaler = inspect.signature(torch.amp.GradScaler).parameters
    assert {item.name for item in dataclasses.fields(GradScalerKwargs)} <= set(scaler)


def test_to_dict_is_a_copy_of_plain_dicts() -> None:
    record = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"a": {"b": 1}})
    copied = record.to_dict()["comm_state_option"]
    assert type(copied) is dict
    copied["a"]["b"] = 2
    assert record.comm_state_option == {"a": {"b": 1}}


def test_a_record_does_not_follow_the_dict_it_was_given() -> None:
    given_options = {"a": 1}
    record = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=given_options)
    given_options["a"] = 2
    assert record.comm_state_option == {"a": 1}


def test_handlers_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "7")
    assert TorchDynamoPlugin().to_kwargs() == {}
    assert TERecipeKwargs().margin == 0


INVALID: tuple[tuple[type[KwargsHandler], dict[str, Any], type[Exception], str], ...] = (
    (AutocastKwargs, {"enabled": None}, TypeError, "AutocastKwargs.enabled must be True or False, got None"),
    (DistributedDataParallelKwargs, {"bucket_cap_mb": 0}, ConfigurationError, "at least 1, got 0"),
    (
        DistributedDataParallelKwargs,
        {"comm_hook": "zip"},
        ConfigurationError,
        "comm_hook does not know 'zip'",
    ),
    (DistributedDataParallelKwargs, {"comm_wrapper": "fp16"}, ConfigurationError, "without a comm_hook"),
    (
        DistributedDataParallelKwargs,
        {"comm_hook": "fp16", "comm_wrapper": "power_sgd"},
        ConfigurationError,
        "Use one of no, fp16, bf16",
    ),
    (
        DistributedDataParallelKwargs,
        {"comm_state_option": {"a": 1}},
        ConfigurationError,
        "belongs to the hooks",
    ),
    (DistributedDataParallelKwargs, {"comm_state_option": [1]}, TypeError, "must be a mapping"),
    (DistributedDataParallelKwargs, {"comm_state_option": {1: 1}}, TypeError, "must have text keys"),
    (GradScalerKwargs, {"init_scale": 0.0}, ConfigurationError, "greater than 0.0, got 0.0"),
    (GradScalerKwargs, {"growth_factor": 1.0}, ConfigurationError, "greater than 1.0, got 1.0"),
    (GradScalerKwargs, {"backoff_factor": 1.0}, ConfigurationError, "less than 1.0, got 1.0"),
    (GradScalerKwargs, {"init_scale": float("nan")}, ConfigurationError, "got nan"),
    (GradScalerKwargs, {"growth_interval": 2.5}, TypeError, "must be an int, got 2.5"),
    (InitProcessGroupKwargs, {"timeout": 600}, TypeError, r"datetime.timedelta .* got 600"),
    (InitProcessGroupKwargs, {"timeout": timedelta(0)}, ConfigurationError, "longer than zero"),
    (InitProcessGroupKwargs, {"backend": " "}, ConfigurationError, "must not be empty"),
    (ProfileKwargs, {"activities": "cpu"}, TypeError, "must be a list of names"),
    (ProfileKwargs, {"activities": ["tpu"]}, ConfigurationError, "does not know 'tpu'"),
    (ProfileKwargs, {"schedule_option": {"wait": 1}}, ConfigurationError, "must have wait, warmup, active"),
    (
        ProfileKwargs,
        {"schedule_option": {"wait": 1, "warmup": 1, "active": 1, "repat": 1}},
        ConfigurationError,
        r"remove \['repat'\]",
    ),
    (
        ProfileKwargs,
        {"schedule_option": {"wait": -1, "warmup": 1, "active": 1}},
        ConfigurationError,
        r"\['wait'\] must be at least 0",
    ),
    (ProfileKwargs, {"on_trace_ready": 3}, TypeError, "callable or None"),
    (TorchDynamoPlugin, {"backend": "magic"}, ConfigurationError, "does not know 'magic'"),
    (TorchDynamoPlugin, {"mode": "fast"}, ConfigurationError, "does not know 'fast'"),
    (
        TorchDynamoPlugin,
        {"mode": "max-autotune", "options": {"a": 1}},
        ConfigurationError,
        "exclude each other",
    ),
    (GradientAccumulationPlugin, {"num_steps": 0}, ConfigurationError, "at least 1, got 0"),
    (GradientAccumulationPlugin, {"num_steps": True}, TypeError, "must be an int, got True"),
    (TERecipeKwargs, {"fp8_format": "E3M4"}, ConfigurationError, "Use one of HYBRID, E4M3, E5M2"),
    (TERecipeKwargs, {"amax_compute_algo": "mean"}, ConfigurationError, "Use one of max, most_recent"),
    (TERecipeKwargs, {"override_linear_precision": (True,)}, TypeError, "a tuple of three bools"),
    (
        TERecipeKwargs,
        {"use_mxfp8_block_scaling": True, "amax_history_len": 16},
        ConfigurationError,
        "keeps no history",
    ),
    (AORecipeKwargs, {"module_filter_func": "first"}, TypeError, "callable or None"),
    (MSAMPRecipeKwargs, {"opt_level": "O3"}, ConfigurationError, "Use one of O1, O2"),
    (FP8RecipeKwargs, {"backend": "cutlass"}, ConfigurationError, "Use one of TE, AO, MSAMP"),
)


@pytest.mark.parametrize(("kind", "values", "error", "message"), INVALID)
def test_an_invalid_handler_cannot_be_built(
    kind: type[KwargsHandler], values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**values)


def test_a_recipe_of_an_engine_is_a_part_of_the_open_one() -> None:
    recipe = FP8RecipeKwargs(margin=3, opt_level="O1", pad_inner_dim=False)
    assert recipe.for_backend("te") == TERecipeKwargs(margin=3)
    assert recipe.for_backend("ao") == AORecipeKwargs(pad_inner_dim=False)
    assert recipe.for_backend("msamp") == MSAMPRecipeKwargs(opt_level="O1")
    assert FP8RecipeKwargs(backend="AO").for_backend() == AORecipeKwargs()
    with pytest.raises(ConfigurationError, match="names no backend"):
        recipe.for_backend()
    with pytest.raises(ConfigurationError, match="is for the backend AO, asked for TE"):
        FP8RecipeKwargs(backend="AO").for_backend("TE")


def test_the_open_recipe_has_the_defaults_of_the_engines() -> None:
    for engine in (TERecipeKwargs(), MSAMPRecipeKwargs()):
        assert all(getattr(FP8RecipeKwargs(), name) == value for name, value in engine.to_dict().items())
