import dataclasses
import os
from types import MappingProxyType
from typing import Any

import pytest

from accelfn.context import config
from accelfn.context.config import (
    VARIABLES,
    AORecipeKwargs,
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    Settings,
    TERecipeKwargs,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    Variable,
    read_settings,
)
from accelfn.errors import ConfigurationError

# Variables that are read only if these are set as well.
CONTEXT: dict[str, dict[str, str]] = {
    "FullyShardedDataParallelPlugin": {"ACCELERATE_USE_FSDP": "true"},
    "DeepSpeedPlugin": {"ACCELERATE_USE_DEEPSPEED": "true"},
    "MegatronLMPlugin": {"ACCELERATE_USE_MEGATRON_LM": "true"},
    "ParallelismConfig": {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
    "TorchContextParallelConfig": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_CP_SIZE": "2",
    },
    "DeepSpeedSequenceParallelConfig": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_SIZE": "2",
    },
}
SAMPLES = (
    *("1", "2", "none", "max", "O1", "TE", "cpu", "torch", "deepspeed", "full", "block", "allgather", "mean"),
    *("cuda", "auto", "HYBRID", "INDUCTOR", "default", "no", "INFO", "NO_WRAP", "a/flash-attn"),
)
FREE_TEXT = ("a text that is not empty", "names separated by commas")


def spelled(variable: Variable) -> str:
    return variable.names[-1]


def test_an_empty_environment_says_nothing() -> None:
    assert read_settings({}) == Settings()
    assert read_settings({"ACCELERATE_MIXED_PRECISION": " ", "ACCELERATE_USE_CPU": ""}) == Settings()


def test_reading_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    before = dict(os.environ)
    env = MappingProxyType({"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})
    assert read_settings(env) == read_settings(env)
    assert not read_settings(env).cpu
    assert dict(os.environ) == before


@pytest.mark.parametrize("variable", VARIABLES, ids=spelled)
def test_the_table_names_real_fields(variable: Variable) -> None:
    record = getattr(config, variable.record)
    assert variable.field in ("", *(field.name for field in dataclasses.fields(record)))
    ours = [name for name in variable.names if name.startswith("ACCELFN_")]
    theirs = [name for name in variable.names if name not in ours]
    assert variable.names == (*ours, *theirs)
    assert ours
    assert len(theirs) == (variable.field not in ("guard", "reduction"))  # the peer has nothing like them
    for name in theirs:
        assert ours[-1].endswith(name.removeprefix("ACCELERATE_"))
    hash(variable)


@pytest.mark.parametrize(
    "variable", [item for item in VARIABLES if not item.form.accepts.startswith(FREE_TEXT)], ids=spelled
)
def test_a_value_that_is_not_understood_names_the_variable(variable: Variable) -> None:
    context = CONTEXT.get(variable.record, {})
    if variable.field == "reshard_after_forward":
        context = {**context, "FSDP_VERSION": "2"}
    for name in variable.names:
        with pytest.raises(ConfigurationError, match=rf"{name} is set to '@@'") as caught:
            read_settings({**context, name: "@@"})
        assert variable.form.accepts in str(caught.value)


@pytest.mark.parametrize("variable", [item for item in VARIABLES if item.field != ""], ids=spelled)
def test_the_first_spelling_wins(variable: Variable) -> None:
    # The later spellings hold nonsense: if one were read, reading would fail.
    sample = next(text for text in SAMPLES if understood(variable, text))
    context = dict(CONTEXT.get(variable.record, {}))
    for place, name in enumerate(variable.names):
        later = dict.fromkeys(variable.names[place + 1 :], "@@")
        for other in variable.names:
            context.pop(other, None)
        read_settings({**context, name: sample, **later})


def understood(variable: Variable, text: str) -> bool:
    if variable.field == "sp_attn_implementation":
        return text == "a/flash-attn"
    try:
        variable.form.parse("X", text)
    except ConfigurationError:
        return False
    return True


SIMPLE: tuple[tuple[dict[str, str], dict[str, Any]], ...] = (
    ({"ACCELERATE_USE_CPU": "1"}, {"cpu": True}),
    ({"ACCELERATE_USE_CPU": "1", "ACCELFN_USE_CPU": "off"}, {"cpu": False}),
    ({"ACCELERATE_TORCH_DEVICE": "cuda:1"}, {"device": "cuda:1"}),
    ({"ACCELERATE_MIXED_PRECISION": "BF16"}, {"mixed_precision": "bf16"}),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {"gradient_accumulation_steps": 4}),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}, {"gradient_accumulation_steps": None}),
    ({"ACCELERATE_DEBUG_MODE": "true"}, {"debug": True}),
    ({"ACCELFN_DEBUG_MODE": "true", "ACCELERATE_DEBUG_MODE": "no"}, {"debug": True}),
    ({"ACCELFN_DEBUG": "no", "ACCELFN_DEBUG_MODE": "true"}, {"debug": False}),
    ({"ACCELFN_GUARD": "OFF"}, {"guard": "off"}),
    ({"ACCELFN_REDUCTION": "Canonical"}, {"reduction": "canonical"}),
    ({"ACCELERATE_BYPASS_DEVICE_MAP": "true"}, {"bypass_device_map": True}),
    ({"ACCELERATE_ALLOW_CP_STANDALONE": "true"}, {"allow_cp_standalone": True}),
    ({"ACCELERATE_CPU_AFFINITY": "1"}, {"cpu_affinity": True}),
    ({"ACCELERATE_DOWNCAST_BF16": "yes"}, {"downcast_bf16": True}),
    ({"ACCELERATE_INIT_INCLUDE_BUFFERS": "no"}, {"init_include_buffers": False}),
    ({"ACCELERATE_LOG_LEVEL": "debug"}, {"log_level": "DEBUG"}),
    (
        {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False"},
        {"dynamo_plugin": TorchDynamoPlugin(backend="inductor", dynamic=None)},
    ),
    (
        {"ACCELFN_DYNAMO_BACKEND": "INDUCTOR", "ACCELFN_DYNAMO_USE_DYNAMIC": "False"},
        {"dynamo_plugin": TorchDynamoPlugin(backend="inductor", dynamic=False)},
    ),
    ({"ACCELERATE_USE_FSDP": "1"}, {"fsdp_plugin": FullyShardedDataParallelPlugin()}),
    (
        {"ACCELERATE_USE_FSDP": "1", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
        {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)},
    ),
    ({"FSDP_VERSION": "2"}, {"fsdp_plugin": None}),
    ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "nonsense"}, {"fsdp_plugin": None}),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, {"deepspeed_plugin": DeepSpeedPlugin()}),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {"megatron_lm_plugin": MegatronLMPlugin()}),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, {"parallelism_config": ParallelismConfig()}),
    (
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_GRADIENT_CLIPPING": "0.5",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
            "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A,B",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
        },
        {
            "gradient_accumulation_steps": 2,
            "deepspeed_plugin": DeepSpeedPlugin(
                zero_stage=3,
                gradient_clipping=0.5,
                gradient_accumulation_steps=2,
                transformer_moe_cls_names=["A", "B"],
            ),
        },
    ),
    (
        {
            "ACCELERATE_USE_DEEPSPEED": "1",
            "ACCELERATE_FP8_BACKEND": "msamp",
            "ACCELERATE_FP8_OPT_LEVEL": "O2",
        },
        {
            "deepspeed_plugin": DeepSpeedPlugin(enable_msamp=True, msamp_opt_level="O2"),
            "fp8_recipe": MSAMPRecipeKwargs(opt_level="O2"),
        },
    ),
    (
        {
            "ACCELERATE_USE_MEGATRON_LM": "true",
            "MEGATRON_LM_TP_DEGREE": "2",
            "MEGATRON_LM_ATTENTION_BACKEND": "True",
            "MEGATRON_LM_SEQUENCE_PARALLELISM": "true",
        },
        {"megatron_lm_plugin": MegatronLMPlugin(tp_degree=2, sequence_parallelism=True)},
    ),
    (
        {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_CP_SIZE": "2",
            "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "false",
        },
        {
            "parallelism_config": ParallelismConfig(
                cp_size=2, cp_handler=TorchContextParallelConfig(cp_comm_strategy="alltoall")
            )
        },
    ),
    (
        {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_SP_SIZE": "4",
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "1024",
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "False",
            "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "None",
        },
        {
            "parallelism_config": ParallelismConfig(
                sp_size=4,
                sp_handler=DeepSpeedSequenceParallelConfig(
                    sp_seq_length=1024, sp_seq_length_is_variable=False
                ),
            )
        },
    ),
    (
        {
            "ACCELERATE_FP8_BACKEND": "TE",
            "ACCELERATE_FP8_MARGIN": "2",
            "ACCELERATE_FP8_OVERRIDE_DGRAD": "true",
        },
        {"fp8_recipe": TERecipeKwargs(margin=2, override_linear_precision=(False, True, False))},
    ),
    (
        {"ACCELERATE_FP8_BACKEND": "AO", "ACCELERATE_FP8_PAD_INNER_DIM": "false"},
        {"fp8_recipe": AORecipeKwargs(pad_inner_dim=False)},
    ),
    ({"ACCELERATE_FP8_FORMAT": "e4m3"}, {"fp8_recipe": FP8RecipeKwargs(fp8_format="E4M3")}),
    ({"ACCELERATE_FP8_OVERRIDE_FPROP": "0"}, {"fp8_recipe": FP8RecipeKwargs()}),
)


@pytest.mark.parametrize(("env", "expected"), SIMPLE)
def test_values(env: dict[str, str], expected: dict[str, Any]) -> None:
    assert read_settings(env) == Settings(**expected)


# What Accelerate's launcher writes, whichever version is chosen.
LAUNCHER: dict[str, str] = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Layer",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def test_fsdp_reads_the_variables_of_its_version() -> None:
    both: dict[str, Any] = {
        "min_num_params": 100_000_000,
        "activation_checkpointing": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_cls_names_to_wrap": ("Block", "Layer"),
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    first = FullyShardedDataParallelPlugin(
        use_orig_params=True, sync_module_states=True, backward_prefetch="BACKWARD_PRE", **both
    )
    second = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False, **both)
    assert read_settings({**LAUNCHER, "FSDP_VERSION": "1"}).fsdp_plugin == first
    assert read_settings({**LAUNCHER, "FSDP_VERSION": "2"}).fsdp_plugin == second


def test_values_that_clash_name_their_variables() -> None:
    env = {"ACCELERATE_USE_FSDP": "true", "ACCELFN_FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}
    with pytest.raises(
        ConfigurationError, match=r"ACCELFN_FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP.*min_num_params"
    ):
        read_settings(env)


def test_a_deepspeed_file_answers_alone_for_its_fields() -> None:
    env = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero_stage,mixed_precision",
    }
    with pytest.raises(
        ConfigurationError, match=r"ACCELERATE_CONFIG_DS_FIELDS names zero_stage, mixed_precision"
    ):
        read_settings(env)
    del env["ACCELERATE_CONFIG_DS_FIELDS"]
    assert read_settings(env).deepspeed_plugin == DeepSpeedPlugin(hf_ds_config="ds.json")
