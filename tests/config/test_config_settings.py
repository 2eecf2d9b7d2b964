import dataclasses
import json
import os
from types import MappingProxyType
from typing import Any

import pytest

import accelfn as af
from accelfn.config import VARIABLES, Settings, TorchContextParallelConfig, Variable, read_settings
from accelfn.errors import ConfigurationError

# Variables that are read only if these are set as well.
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
CONTEXT: dict[type, dict[str, str]] = {
    af.config.DeepSpeedPlugin: {"ACCELERATE_USE_DEEPSPEED": "true"},
    af.FullyShardedDataParallelPlugin: {"ACCELERATE_USE_FSDP": "true"},
    af.config.MegatronLMPlugin: {"ACCELERATE_USE_MEGATRON_LM": "true"},
    af.ParallelismConfig: MESH,
    TorchContextParallelConfig: {**MESH, "PARALLELISM_CONFIG_CP_SIZE": "2"},
}


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
def test_a_variable_fills_a_field_and_what_is_not_understood_names_it(variable: Variable) -> None:
    assert variable.field in ("", *(field.name for field in dataclasses.fields(variable.record)))
    assert variable.names[0].startswith("ACCELFN_")
    context = CONTEXT.get(variable.record, {})
    if variable.field == "reshard_after_forward":
        context = {**context, "FSDP_VERSION": "2"}
    for name in variable.names:
        if not variable.accepts.startswith(("a text", "names")):
            with pytest.raises(ConfigurationError, match=rf"{name}(=@@| is set to '@@')"):
                read_settings({**context, name: "@@"})
    first, *later = variable.names
    if variable.accepts.startswith(
        "y/yes"
    ):  # the later spellings hold nonsense: if one were read, that would fail
        read_settings({**context, first: "no", **dict.fromkeys(later, "@@")})


def written(text: str, prefix: str = "ACCELERATE_") -> dict[str, str]:
    """Read variables as a shell would write them, each without its prefix."""
    return {f"{prefix}{name}": value for name, _, value in (part.partition("=") for part in text.split())}


SIMPLE: tuple[tuple[dict[str, str], dict[str, Any]], ...] = (
    ({"ACCELERATE_USE_CPU": "1", "ACCELFN_USE_CPU": "off"}, {"cpu": False}),
    ({"ACCELERATE_TORCH_DEVICE": "cuda:1"}, {"device": "cuda:1"}),
    ({"ACCELERATE_MIXED_PRECISION": "BF16"}, {"mixed_precision": "bf16"}),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {"gradient_accumulation_steps": 4}),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}, {"gradient_accumulation_steps": None}),
    ({"ACCELFN_DEBUG": "no", "ACCELFN_DEBUG_MODE": "true"}, {"debug": False}),
    ({"ACCELERATE_INIT_INCLUDE_BUFFERS": "no"}, {"init_include_buffers": False}),
    (written("USE_DEEPSPEED=true GRADIENT_CLIPPING=auto"), {"deepspeed_plugin": af.config.DeepSpeedPlugin()}),
    ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "nonsense"}, {"deepspeed_plugin": None}),
    (
        written(
            "USE_DEEPSPEED=true GRADIENT_CLIPPING=1.0 GRADIENT_ACCUMULATION_STEPS=2 DEEPSPEED_ZERO_STAGE=3 "
            "DEEPSPEED_CONFIG_FILE=none DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=nvme DEEPSPEED_ZERO3_INIT=no "
            "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH=/nvme DEEPSPEED_OFFLOAD_PARAM_DEVICE=cpu "
            "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=true DEEPSPEED_MOE_LAYER_CLS_NAMES=Block,Layer"
        ),
        {
            "gradient_accumulation_steps": 2,  # of the context, which the plugin's "auto" takes
            "deepspeed_plugin": af.config.DeepSpeedPlugin(
                zero_stage=3,
                offload_optimizer_device="nvme",
                offload_optimizer_nvme_path="/nvme",
                offload_param_device="cpu",
                zero3_init_flag=False,
                zero3_save_16bit_model=True,
                transformer_moe_cls_names=("Block", "Layer"),
                gradient_clipping=1.0,
            ),
        },
    ),
    (
        written("DYNAMO_BACKEND=INDUCTOR DYNAMO_USE_DYNAMIC=False"),
        {"dynamo_plugin": af.config.TorchDynamoPlugin(backend="inductor", dynamic=None)},
    ),
    (
        written("DYNAMO_BACKEND=INDUCTOR DYNAMO_USE_DYNAMIC=False", "ACCELFN_"),
        {"dynamo_plugin": af.config.TorchDynamoPlugin(backend="inductor", dynamic=False)},
    ),
    (
        written("USE_MEGATRON_LM=true")
        | written("TP_DEGREE=2 GRADIENT_CLIPPING=0.5 ATTENTION_BACKEND=unfused", "MEGATRON_LM_"),
        {
            "megatron_lm_plugin": af.config.MegatronLMPlugin(
                2, gradient_clipping=0.5, attention_backend="unfused"
            )
        },
    ),
    ({"MEGATRON_LM_TP_DEGREE": "nonsense"}, {"megatron_lm_plugin": None}),
    ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "nonsense"}, {"fsdp_plugin": None}),
    (
        MESH | written("CP_SIZE=2 CP_COMM_STRATEGY=alltoall", "PARALLELISM_CONFIG_"),
        {
            "parallelism_config": af.ParallelismConfig(
                cp_size=2, cp_handler=TorchContextParallelConfig("alltoall")
            )
        },
    ),
)


@pytest.mark.parametrize(("env", "expected"), SIMPLE)
def test_values(env: dict[str, str], expected: dict[str, Any]) -> None:
    assert read_settings(env) == Settings(**expected)


# What Accelerate's launcher writes, whichever version is chosen.
LAUNCHER = written("USE_FSDP=true") | written(
    "SHARDING_STRATEGY=FULL_SHARD RESHARD_AFTER_FORWARD=false OFFLOAD_PARAMS=false MIN_NUM_PARAMS=1e8 "
    "FORWARD_PREFETCH=false USE_ORIG_PARAMS=true SYNC_MODULE_STATES=true ACTIVATION_CHECKPOINTING=true "
    "AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP TRANSFORMER_CLS_TO_WRAP=Block,Layer STATE_DICT_TYPE=3 "
    "BACKWARD_PREFETCH=BACKWARD_PRE",
    "FSDP_",
)


def test_fsdp_reads_the_variables_of_its_version() -> None:
    both: dict[str, Any] = {
        "min_num_params": 100_000_000,
        "activation_checkpointing": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_cls_names_to_wrap": ("Block", "Layer"),
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    first = af.FullyShardedDataParallelPlugin(
        sharding_strategy="FULL_SHARD",
        use_orig_params=True,
        sync_module_states=True,
        forward_prefetch=False,
        backward_prefetch="BACKWARD_PRE",
        **both,
    )
    second = af.FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False, **both)
    assert read_settings({**LAUNCHER, "FSDP_VERSION": "1"}).fsdp_plugin == first
    assert read_settings({**LAUNCHER, "FSDP_VERSION": "2"}).fsdp_plugin == second


def test_values_that_clash_name_their_variables() -> None:
    env = {"ACCELERATE_USE_FSDP": "true", "ACCELFN_FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}
    with pytest.raises(ConfigurationError, match=r"ACCELFN_FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP.*min_num"):
        read_settings(env)


def deepspeed_env(config: dict[str, Any], variables: str) -> dict[str, str]:
    file = json.dumps({"zero_optimization": {}, **config})
    return written(f"USE_DEEPSPEED=true {variables}") | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": file}


FILE: dict[str, Any] = {
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "auto"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


STAGE = "zero_optimization."


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        ("GRADIENT_CLIPPING=1.0", "gradient_clipping is 0.5"),
        ("DEEPSPEED_ZERO_STAGE=2", f"{STAGE}stage is 3"),
        ("DEEPSPEED_OFFLOAD_PARAM_DEVICE=cpu", f"{STAGE}offload_param.device is left out"),
        ("DEEPSPEED_OFFLOAD_PARAM_NVME_PATH=/a", f"{STAGE}offload_param.nvme_path is left out"),
        ("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=no", f"{STAGE}stage3_gather_16bit_weights_on_model_save is True"),
    ],
)
def test_a_variable_that_contradicts_deepspeeds_configuration_names_both(variable: str, found: str) -> None:
    message = f"ACCELERATE_{variable} contradicts .* ACCELERATE_DEEPSPEED_CONFIG_FILE names, where {found}"
    with pytest.raises(ConfigurationError, match=message):
        read_settings(deepspeed_env(FILE, variable))


def test_a_variable_fills_what_the_configuration_leaves_open_or_repeats_it() -> None:
    variables = "GRADIENT_CLIPPING=0.5 DEEPSPEED_ZERO_STAGE=3 DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu"
    plugin = read_settings(
        deepspeed_env(FILE, f"{variables} DEEPSPEED_OFFLOAD_PARAM_DEVICE=none")
    ).deepspeed_plugin
    assert plugin is not None
    assert (plugin.stage, plugin.offload_optimizer_device) == (3, "cpu")


def test_the_precision_that_accelerates_launcher_always_writes_leaves_the_choice_to_the_file() -> None:
    def precision(config: dict[str, Any], variables: str, ours: str = "") -> str | None:
        return read_settings(deepspeed_env(config, variables) | written(ours, "ACCELFN_")).mixed_precision

    config = {"bf16": {"enabled": True}}
    assert precision(config, "MIXED_PRECISION=no") is None
    assert precision(config, "MIXED_PRECISION=fp16") == "fp16"
    assert precision(config, "", "MIXED_PRECISION=no") == precision({}, "MIXED_PRECISION=no") == "no"
