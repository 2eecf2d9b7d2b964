"""Plan how DeepSpeed trains a model: its complete configuration, without any ``"auto"`` left."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

from accelfn.config import DeepSpeedPlugin
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.facts import table_text

# A class, and its options by name.
CpuOptimizer = tuple[str, tuple[tuple[str, bool], ...]]

# DeepSpeed's optimizers for state in host memory, by the class that they replace.
_CPU_OPTIMIZERS: Mapping[str, CpuOptimizer] = MappingProxyType(
    {
        "AdamW": ("DeepSpeedCPUAdam", (("adamw_mode", True),)),
        "Adam": ("DeepSpeedCPUAdam", (("adamw_mode", False),)),
        "Adagrad": ("DeepSpeedCPUAdagrad", ()),
        "Lion": ("DeepSpeedCPULion", ()),
    }
)

OptimizerKind = Literal["none", "torch", "dummy"]
SchedulerKind = Literal["none", "torch", "dummy", "made"]


class DeepSpeedFacts(NamedTuple):
    """What the plan depends on besides the plugin.

    Attributes:
        world_size: Number of ranks.
        mixed_precision: Mode of the context: "no", "fp16" or "bf16".
        num_steps: Micro-batches per optimizer step.
        batch_sizes: Of the loaders that are prepared with the model, per rank.
        hidden_size: Of the model's ``config``; None if it names none.
        classes: Class names of the model's modules.
        optimizer: What is prepared with the model: an optimizer of torch's kind, a ``DummyOptim``, or none.
        optimizer_class: Name of the optimizer's class.
        lr: The optimizer's learning rate.
        weight_decay: The optimizer's weight decay.
        scheduler: A scheduler of torch's, a ``DummyScheduler`` without or with ("made") a function that makes
            one, or none.
        total_num_steps: Of the ``DummyScheduler``.
        warmup_num_steps: Of the ``DummyScheduler``.
        known_keys: Top-level keys that DeepSpeed knows, and maybe others: a key that is almost one of them is
            a misspelt one. Empty to check none.
    """

    world_size: int = 1
    mixed_precision: str = "no"
    num_steps: int = 1
    batch_sizes: tuple[int | None, ...] = ()
    hidden_size: int | None = None
    classes: frozenset[str] = frozenset()
    optimizer: OptimizerKind = "torch"
    optimizer_class: str = "AdamW"
    lr: float = 1e-3
    weight_decay: float = 0.0
    scheduler: SchedulerKind = "none"
    total_num_steps: int | None = None
    warmup_num_steps: int = 0
    known_keys: frozenset[str] = frozenset()


class DeepSpeedPlan(NamedTuple):
    """How DeepSpeed trains a model. A value; ``print(plan)`` shows it as a table.

    Attributes:
        stage: Of ZeRO.
        config: The configuration that DeepSpeed gets.
        num_steps: Micro-batches per optimizer step, which accelfn counts.
        max_norm: Largest gradient norm of each step; 0 for that of ``max_norm`` and ``clip_grad_norm_``.
        dtype: Of parameters in the forward pass, "bfloat16" or "float16"; None for the model's own.
        optimizer: What steps: the name of the user's class, or DeepSpeed's.
        cpu_optimizer: DeepSpeed's optimizer on the host, and its options; None to keep the user's.
        scheduler: What sets learning rates.
        leaf_classes: Modules of these classes are gathered as a whole.
    """

    stage: int
    config: Mapping[str, Any]
    num_steps: int
    max_norm: float
    dtype: Literal["bfloat16", "float16"] | None
    optimizer: str
    cpu_optimizer: CpuOptimizer | None
    scheduler: str
    leaf_classes: tuple[str, ...]

    def rows(self) -> dict[str, str]:
        """Return the lines of the table: text by title."""
        zero = cast("Mapping[str, Any]", self.config["zero_optimization"])
        sharded = ("nothing", "optimizer state", "optimizer state and gradients", "everything")[self.stage]
        batch = self.config["train_micro_batch_size_per_gpu"]
        rows = {
            "engine": f"DeepSpeed, ZeRO stage {self.stage}: shards {sharded}",
            "optimizer": self.optimizer if self.cpu_optimizer is None else self.cpu_optimizer[0],
            "scheduler": self.scheduler,
            "precision": f"{self.dtype}, float32 in the optimizer" if self.dtype else "the model's",
            "clipping": str(self.max_norm) if self.max_norm else "that of each step",
            "window": f"{self.num_steps} x {batch} rows on each rank, counted by accelfn",
        }
        for what in ("optimizer", "param"):
            device = cast("Mapping[str, Any]", zero.get(f"offload_{what}") or {}).get("device", "none")
            if device != "none":
                rows[f"{what} offload"] = f"to {device}"
        if self.leaf_classes:
            rows["gathered as a whole"] = ", ".join(self.leaf_classes)
        return rows

    def __str__(self) -> str:
        """Return the plan as a table."""
        return table_text(self.rows())


def plan_deepspeed(plugin: DeepSpeedPlugin, facts: DeepSpeedFacts) -> DeepSpeedPlan:
    """Fill DeepSpeed's configuration. Pure.

    accelfn counts the micro-batches of a window, divides losses, and scales them in float16; DeepSpeed
    shards, reduces, clips and steps.

    Args:
        plugin: The options.
        facts: What is prepared.

    Raises:
        ConfigurationError: The configuration contradicts the context or what is prepared; it has an unknown
            key, or an "auto" that nothing fills.
        NotAvailableError: It asks for something that only DeepSpeed's own loop offers.

    >>> plan = plan_deepspeed(DeepSpeedPlugin(zero_stage=3), DeepSpeedFacts(mixed_precision="bf16"))
    >>> print(plan)
    engine     DeepSpeed, ZeRO stage 3: shards everything
    optimizer  AdamW
    scheduler  none
    precision  bfloat16, float32 in the optimizer
    clipping   that of each step
    window     1 x 1 rows on each rank, counted by accelfn
    """
    given = plugin.config
    _check_keys(given or {}, facts)
    config = generated_config(plugin) if given is None else given
    zero: dict[str, Any] = {"stage": plugin.zero_stage, **config["zero_optimization"]}
    config["zero_optimization"] = zero
    stage = plugin.stage
    if stage < 2 and zero.get("overlap_comm"):
        zero["overlap_comm"] = False  # DeepSpeed overlaps only where it counts the micro-batches itself
    _settle_precision(config, stage, facts.mixed_precision)
    optimizer, scheduler = _check_optimizer(config, facts)
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config.setdefault(name, "auto")
    for name in ("train_batch_size", "communication_data_type"):
        if config.get(name) == "auto":
            del config[name]
    schedule: Any = config.get("scheduler")
    if schedule:
        config["scheduler"] = {**schedule, "params": schedule.get("params") or {}}  # DeepSpeed needs a dict
    unfilled: list[str] = []
    config = _filled(config, _known_values(plugin, facts), unfilled)
    if unfilled:
        raise ConfigurationError(
            f'DeepSpeed: nothing fills "auto" of {", ".join(sorted(unfilled))}. Write a value, or leave the '
            "key out for DeepSpeed's default."
        )
    max_norm = float(config.pop("gradient_clipping", 0.0))
    _check_batch(config, facts)
    # accelfn divides losses and says where a window closes.
    config.update(
        gradient_accumulation_steps=1,
        managed_gradient_accumulation=False,
        train_batch_size=config["train_micro_batch_size_per_gpu"] * facts.world_size,
        gradient_clipping=0.0,
    )
    config.setdefault("steps_per_print", 2**31)
    if facts.optimizer == "torch":
        config["zero_allow_untested_optimizer"] = True
    missing = sorted(set(plugin.transformer_moe_cls_names or ()) - facts.classes)
    if missing and facts.classes:
        raise ConfigurationError(
            f"DeepSpeedPlugin.transformer_moe_cls_names: the model has no module of class {missing[0]!r}. "
            f"Its classes are {', '.join(sorted(facts.classes))}."
        )
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(facts.mixed_precision) if stage else None
    return DeepSpeedPlan(
        stage=stage,
        config=config,
        num_steps=facts.num_steps,
        max_norm=max_norm,
        dtype=cast("Any", dtype),
        optimizer=optimizer,
        cpu_optimizer=_cpu_optimizer(config, facts),
        scheduler=scheduler,
        leaf_classes=tuple(plugin.transformer_moe_cls_names or ()) if stage == 3 else (),
    )


def generated_config(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """Return the configuration of a plugin that has none. Pure."""
    zero: dict[str, Any] = {"stage": plugin.zero_stage}
    for what in ("optimizer", "param"):
        device = str(getattr(plugin, f"offload_{what}_device"))
        if device != "none":
            zero[f"offload_{what}"] = {"device": device}
            if device == "nvme":
                zero[f"offload_{what}"]["nvme_path"] = getattr(plugin, f"offload_{what}_nvme_path")
    if plugin.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = plugin.zero3_save_16bit_model
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero,
    }


def _check_keys(config: Mapping[str, Any], facts: DeepSpeedFacts) -> None:
    for key in config:  # DeepSpeed checks those of its sections itself
        close = difflib.get_close_matches(key, facts.known_keys, n=1, cutoff=0.85)
        if close and key not in facts.known_keys:
            raise ConfigurationError(f"DeepSpeed's configuration has no key {key}. Did you mean {close[0]}?")
    if config.get("managed_gradient_accumulation") is True:
        raise NotAvailableError(
            "DeepSpeed: managed_gradient_accumulation=true counts micro-batches inside of DeepSpeed, but "
            "here accelfn counts them. Leave it out."
        )


def _settle_precision(config: dict[str, Any], stage: int, mode: str) -> None:
    """Set the sections of precision to that of the context.

    At stage 0 there are no sharded copies in float32: the model keeps its dtype, and computes under autocast.
    """
    for name in ("bf16", "fp16"):
        section: dict[str, Any] = dict(cast("Mapping[str, Any]", config.get(name) or {}))
        wanted = mode == name
        enabled = section.get("enabled", "auto")
        if enabled != "auto" and bool(enabled) != wanted:
            raise ConfigurationError(
                f"mixed_precision={mode!r} contradicts DeepSpeed's configuration, whose {name}.enabled is "
                f'{str(bool(enabled)).lower()}. Set one of the two, and leave the other "auto".'
            )
        kept = {key: value for key, value in section.items() if key not in _SCALER_KEYS}
        if wanted and stage:
            # accelfn scales losses, so DeepSpeed's own scale is 1.
            scale = {"loss_scale": 1.0, "auto_cast": False} if name == "fp16" else {}
            config[name] = {**kept, "enabled": True, **scale}
        else:
            config.pop(name, None)


# Of the section "fp16": options of the loss scale, which accelfn.context.options reads, and casts of inputs.
_SCALER_KEYS = frozenset(
    (
        *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"),
        *("min_loss_scale", "auto_cast", "enabled"),
    )
)


def _check_optimizer(config: Mapping[str, Any], facts: DeepSpeedFacts) -> tuple[str, str]:
    """Check what is prepared against the configuration; return what steps and what sets learning rates."""
    own, schedule = config.get("optimizer"), config.get("scheduler")
    if facts.optimizer == "none":
        return "none: the model isn't trained", "none"
    if own is not None and facts.optimizer != "dummy":
        raise ConfigurationError(
            f"DeepSpeed's configuration has an optimizer, and a {facts.optimizer_class} is prepared too. "
            "Pass DummyOptim(model.parameters(), lr=...) instead, or remove the section 'optimizer'."
        )
    if own is None and facts.optimizer == "dummy":
        raise ConfigurationError(
            "DummyOptim stands for the optimizer of DeepSpeed's configuration, which has none. Pass an "
            "optimizer of torch's kind, or add a section 'optimizer'."
        )
    if schedule is not None and facts.scheduler in ("torch", "made"):
        raise ConfigurationError(
            "DeepSpeed's configuration has a scheduler, and one is prepared too. Pass "
            "DummyScheduler(optimizer) instead, or remove the section 'scheduler'."
        )
    if schedule is None and facts.scheduler == "dummy":
        raise ConfigurationError(
            "DummyScheduler stands for the scheduler of DeepSpeed's configuration, which has none. Pass one "
            "of torch's, DummyScheduler(optimizer, lr_scheduler_callable=...), or add a section 'scheduler'."
        )
    if own is not None and facts.scheduler == "torch":
        raise ConfigurationError(
            "the scheduler is over another optimizer than that of DeepSpeed's configuration. Pass "
            "DummyScheduler(optimizer, lr_scheduler_callable=...), which makes it over the right one."
        )
    steps = facts.optimizer_class if own is None else f"DeepSpeed's {dict(own).get('type')}"
    if schedule is not None:
        return steps, f"DeepSpeed's {dict(schedule).get('type')}"
    return steps, {"none": "none", "torch": "yours", "made": "yours"}.get(facts.scheduler, "none")


def _known_values(plugin: DeepSpeedPlugin, facts: DeepSpeedFacts) -> dict[str, Any]:
    """Return the values of each "auto" by path; None where it isn't known."""
    sizes = [size for size in facts.batch_sizes if size is not None]
    zero: dict[str, Any] = {
        "stage": plugin.zero_stage,
        "stage3_gather_16bit_weights_on_model_save": plugin.zero3_save_16bit_model,
    }
    for what in ("optimizer", "param"):
        path = getattr(plugin, f"offload_{what}_nvme_path")
        zero[f"offload_{what}.device"] = str(getattr(plugin, f"offload_{what}_device"))
        zero[f"offload_{what}.nvme_path"] = None if path == "none" else path
    if facts.hidden_size is not None:
        square = facts.hidden_size**2
        zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"] = square, int(0.9 * square)
        zero["stage3_param_persistence_threshold"] = 10 * facts.hidden_size
    return {
        # DeepSpeed's measure of throughput alone.
        "train_micro_batch_size_per_gpu": (min if plugin.is_train_batch_min else max)(sizes, default=1),
        "gradient_accumulation_steps": facts.num_steps,
        "gradient_clipping": 0.0 if plugin.gradient_clipping == "auto" else plugin.gradient_clipping,
        **{f"zero_optimization.{name}": value for name, value in zero.items()},
        "optimizer.params.lr": facts.lr,
        "optimizer.params.weight_decay": facts.weight_decay,
        # One optimizer step is one scheduler step, on any number of ranks.
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": facts.lr,
        "scheduler.params.warmup_num_steps": max(1, facts.warmup_num_steps),  # DeepSpeed refuses 0
        "scheduler.params.total_num_steps": facts.total_num_steps,
    }


def _filled(
    section: Mapping[str, Any], values: Mapping[str, Any], unfilled: list[str], path: str = ""
) -> dict[str, Any]:
    """Return a copy of a section with values for each "auto"; add the paths without one to ``unfilled``."""
    filled: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            nested = cast("Mapping[str, Any]", value)
            filled[key] = _filled(nested, values, unfilled, f"{path}{key}.")
        elif value != "auto":
            filled[key] = value
        else:
            filled[key] = values.get(f"{path}{key}")
            unfilled += [f"{path}{key}"] if filled[key] is None else []
    return filled


def _check_batch(config: Mapping[str, Any], facts: DeepSpeedFacts) -> None:
    """Check the sizes that the configuration names against the world and the window."""
    if config["gradient_accumulation_steps"] != facts.num_steps:
        raise ConfigurationError(
            f"gradient_accumulation_steps={facts.num_steps} contradicts DeepSpeed's configuration, which has "
            f'{config["gradient_accumulation_steps"]}. Set one of the two, and leave the other "auto".'
        )
    micro, total = config["train_micro_batch_size_per_gpu"], config.get("train_batch_size")
    product = micro * facts.num_steps * facts.world_size
    if total is not None and total != product:
        raise ConfigurationError(
            f"DeepSpeed's configuration has train_batch_size={total}, but {micro} rows x {facts.num_steps} "
            f'micro-batches x {facts.world_size} ranks are {product}. Write "auto".'
        )
    size = next((size for size in facts.batch_sizes if size is not None and size != micro), None)
    if size is not None and micro not in facts.batch_sizes:
        raise ConfigurationError(
            f"DeepSpeed's configuration has train_micro_batch_size_per_gpu={micro}, but the loader's batches "
            f'have {size} rows on each rank. Write "auto".'
        )


def _cpu_optimizer(config: Mapping[str, Any], facts: DeepSpeedFacts) -> CpuOptimizer | None:
    section: Mapping[str, Any] = config["zero_optimization"].get("offload_optimizer") or {}
    if (
        section.get("device", "none") == "none"
        or facts.optimizer != "torch"
        or config.get("zero_force_ds_cpu_optimizer") is False
        or facts.optimizer_class.startswith("DeepSpeedCPU")
    ):
        return None
    if facts.optimizer_class not in _CPU_OPTIMIZERS:
        raise ConfigurationError(
            f"DeepSpeed steps offloaded state with its own optimizers for {', '.join(_CPU_OPTIMIZERS)}, and "
            f'a {facts.optimizer_class} is prepared. Set "zero_force_ds_cpu_optimizer": false in its '
            "configuration to step yours on the host, or use one of these."
        )
    return _CPU_OPTIMIZERS[facts.optimizer_class]
