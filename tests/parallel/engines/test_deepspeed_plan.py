"""DeepSpeed's configuration is filled by one pure function, which refuses what contradicts."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context
from accelfn.config import DeepSpeedPlugin, GradScalerKwargs
from accelfn.engines import DeepSpeedFacts, plan_deepspeed
from accelfn.errors import ConfigurationError, NotAvailableError

KNOWN = frozenset({"gradient_clipping", "optimizer", "scheduler"})
FACTS = DeepSpeedFacts(world_size=4, batch_sizes=(8, 16), num_steps=2, hidden_size=64, known_keys=KNOWN)


def plan(config: dict[str, Any] | None = None, facts: DeepSpeedFacts = FACTS, **fields: Any) -> Any:
    return plan_deepspeed(DeepSpeedPlugin(hf_ds_config=config, **fields), facts)


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **section}}


DUMMY = FACTS._replace(optimizer="dummy", lr=0.5, weight_decay=0.25, scheduler="dummy", total_num_steps=100)
ADAM = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}


def at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config[part]
    return config


def test_auto_is_filled() -> None:
    expected = {
        "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": 8 * 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization.stage": 2,
        "zero_optimization.reduce_bucket_size": 64 * 64,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
        "zero_optimization.stage3_param_persistence_threshold": 640,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "optimizer.params.lr": 0.5,
        "optimizer.params.weight_decay": 0.25,
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": 0.5,
        "scheduler.params.warmup_num_steps": 1,
        "scheduler.params.total_num_steps": 100,
    }
    section = "zero_optimization."
    config: dict[str, Any] = {
        **{name: "auto" for name in expected if "." not in name},
        "zero_optimization": {
            name.removeprefix(section): "auto" for name in expected if name.startswith(section)
        },
        "optimizer": ADAM,
        "scheduler": WARMUP,
    }
    found = plan(config, DUMMY).config
    assert {path: at(found, path) for path in expected} == expected
    assert at(plan({"zero_optimization": {}}).config, "zero_optimization.stage") == 2


@pytest.mark.parametrize(
    ("mode", "section", "filled"),
    [
        ("bf16", {"enabled": "auto"}, {"enabled": True}),
        (
            "fp16",
            {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
            {"enabled": True, "loss_scale": 1.0, "auto_cast": False},
        ),
    ],
)
def test_precision_is_filled(mode: str, section: dict[str, Any], filled: dict[str, Any]) -> None:
    found = plan({**zero(), mode: section}, FACTS._replace(mixed_precision=mode)).config[mode]
    assert {name: found[name] for name in filled} == filled


@given(
    st.integers(0, 3),
    st.sampled_from(["no", "bf16", "fp16"]),
    st.sampled_from(["none", "cpu"]),
    st.integers(1, 4),
    st.integers(1, 64),
    st.sampled_from(["auto", 0.0, 0.5]),
)
def test_a_generated_configuration_has_no_auto_left(
    stage: int, mode: str, device: str, steps: int, size: int, clipping: Any
) -> None:
    plugin = DeepSpeedPlugin(
        zero_stage=stage, offload_optimizer_device=device if stage else "none", gradient_clipping=clipping
    )
    found = plan_deepspeed(plugin, FACTS._replace(mixed_precision=mode, num_steps=steps, world_size=size))
    text = json.dumps(dict(found.config))
    assert '"auto"' not in text
    assert found.config["train_batch_size"] == found.config["train_micro_batch_size_per_gpu"] * size
    assert found.max_norm == (0.0 if clipping == "auto" else clipping)
    assert f"ZeRO stage {stage}" in str(found)


@pytest.mark.parametrize(
    ("config", "facts", "message"),
    [
        ({**zero(), "train_micro_batch_size_per_gpu": 4}, FACTS, r"=4, but the loader's batches have 8"),
        (
            {**zero(), "train_batch_size": 63},
            FACTS,
            r"train_batch_size=63, but 8 rows x 2 .* x 4 ranks are 64",
        ),
        ({**zero(), "gradient_accumulation_steps": 3}, FACTS, r"gradient_accumulation_steps=2 contradicts"),
        (
            {**zero(), "bf16": {"enabled": False}},
            FACTS._replace(mixed_precision="bf16"),
            "bf16.enabled is false",
        ),
        ({**zero(), "fp16": {"enabled": True}}, FACTS, "mixed_precision='no' contradicts"),
        ({**zero(), "optimizer": ADAM}, FACTS, "Pass DummyOptim"),
        (zero(), FACTS._replace(optimizer="dummy"), "which has none"),
        ({**zero(), "scheduler": WARMUP}, FACTS._replace(scheduler="torch"), "Pass DummyScheduler"),
        (zero(), FACTS._replace(scheduler="dummy"), "lr_scheduler_callable"),
        ({**zero(), "optimizer": ADAM}, DUMMY._replace(scheduler="torch"), "over the right one"),
        (
            zero(stage3_max_live_parameters="auto"),
            FACTS,
            'nothing fills "auto" of zero_optimization.stage3_max',
        ),
        (zero(reduce_bucket_size="auto"), FACTS._replace(hidden_size=None), "reduce_bucket_size"),
        ({**zero(), "gradient_cliping": 1.0}, FACTS, "Did you mean gradient_clipping"),
        (
            zero(offload_optimizer={"device": "cpu"}),
            FACTS._replace(optimizer_class="SGD"),
            "zero_force_ds_cpu_optimizer",
        ),
    ],
)
def test_contradictions_name_both_sides(config: dict[str, Any], facts: DeepSpeedFacts, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(config, facts)


def test_deepspeed_must_not_count_micro_batches() -> None:
    with pytest.raises(NotAvailableError, match="here accelfn counts them"):
        plan({**zero(), "managed_gradient_accumulation": True})


def test_classes_of_experts_must_exist() -> None:
    facts = FACTS._replace(classes=frozenset({"Linear", "Experts"}))
    assert plan(zero_stage=3, transformer_moe_cls_names="Experts", facts=facts).leaf_classes == ("Experts",)
    with pytest.raises(ConfigurationError, match="no module of class 'Expert'"):
        plan(zero_stage=3, transformer_moe_cls_names=["Expert"], facts=facts)


@pytest.mark.parametrize(
    "fields",
    [
        {"zero3_init_flag": True, "zero_stage": 2},
        {"offload_param_device": "cpu", "zero_stage": 2},
        {"offload_optimizer_device": "cpu", "zero_stage": 0},
        {"offload_optimizer_device": "nvme", "zero_stage": 3},
        {"offload_param_nvme_path": "/fast", "zero_stage": 3},
        {"enable_msamp": True},
        {"gradient_accumulation_steps": 0},
        {"hf_ds_config": {"bf16": {"enabled": True}}},
        {"hf_ds_config": "no such file"},
    ],
    ids=str,
)
def test_an_invalid_plugin_cannot_be_built(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        DeepSpeedPlugin(**fields)


def test_a_configuration_comes_in_any_form(tmp_path: Path) -> None:
    config = zero(stage=3)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config), encoding="utf-8")

    class HfDeepSpeedConfig:
        def __init__(self) -> None:
            self.config = config

    for one in (
        config,
        file,
        str(file),
        json.dumps(config),
        base64.urlsafe_b64encode(json.dumps(config).encode()).decode(),
        HfDeepSpeedConfig(),
    ):
        plugin = DeepSpeedPlugin(hf_ds_config=one)
        assert plugin.stage == 3
        assert plugin.config == config
    with pytest.raises(TypeError, match="a mapping, the path of a JSON file"):
        DeepSpeedPlugin(hf_ds_config=7)


def test_the_context_takes_over_what_only_the_configuration_says() -> None:
    config = {
        **zero(),
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50},
        "gradient_accumulation_steps": 4,
    }
    ctx = Context().replace(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    assert (ctx.mixed_precision, ctx.gradient_accumulation_steps) == ("fp16", 4)
    assert ctx.precision.scaler == GradScalerKwargs(init_scale=256.0, growth_interval=50)
    fixed = {**zero(), "fp16": {"enabled": True, "loss_scale": 128}}
    ctx = Context().replace(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=fixed))
    assert ctx.precision.scaler.init_scale == 128.0


@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": "bf16"},
        {"gradient_accumulation_steps": 2},
        {"fsdp_plugin": af.FullyShardedDataParallelPlugin()},
        {"parallelism_config": af.ParallelismConfig()},
        {"reduction": "canonical"},
    ],
    ids=str,
)
def test_a_context_names_what_contradicts_the_configuration(options: dict[str, Any]) -> None:
    config = {**zero(), "fp16": {"enabled": True}, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigurationError, match=r"DeepSpeed|deepspeed_plugin"):
        Context().replace(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), **options)


def test_several_plugins_have_names() -> None:
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    ctx = Context().replace(deepspeed_plugin=plugins)
    assert ctx.distributed_type == "DEEPSPEED"
    assert ctx.strategy.deepspeed == plugins["student"]
    other = ctx.replace(deepspeed_plugin=plugins["teacher"])
    assert other.strategy.deepspeed_plugins == plugins
    accelerator = af.Accelerator(context=ctx)
    accelerator.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin == plugins["teacher"]
    with pytest.raises(ConfigurationError, match="Choose among: student, teacher"):
        accelerator.select_deepspeed_plugin("pupil")
    with pytest.raises(TypeError, match="deepspeed_plugin must be"):
        Context().replace(deepspeed_plugin={"student": 3})  # pyright: ignore[reportArgumentType]


def test_the_dummies_stand_for_what_prepare_makes() -> None:
    import torch

    optimizer = af.engines.DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.5)
    assert optimizer.defaults["lr"] == 0.5
    with pytest.raises(ConfigurationError, match="Use the optimizer that prepare returns"):
        optimizer.step()


def test_what_deepspeed_would_refuse_is_set_as_it_must_be() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    zero = {"stage": 1, "overlap_comm": True, "_comment": "fast"}
    plugin = DeepSpeedPlugin(
        hf_ds_config={"_comment": "mine", "zero_optimization": zero, "scheduler": schedule}
    )
    facts = DeepSpeedFacts(scheduler="dummy", known_keys=KNOWN)
    config = plan_deepspeed(plugin, facts).config
    assert config["zero_optimization"] == {"stage": 1, "overlap_comm": False}
    assert config["scheduler"]["params"]["warmup_num_steps"] == 1
