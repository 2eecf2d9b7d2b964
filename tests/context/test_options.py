"""From what is asked to the fields of a context: precedence, contradictions, what isn't there yet."""

import dataclasses
import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

import accelfn as af
from accelfn.config import Guard, GuardMode, Settings
from accelfn.context import Context, configure
from accelfn.context.options import merge_settings
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks


def applied(**options: Any) -> Context:
    return configure(Context(), af.context.ContextOptions(**options))


# --- the list of options -------------------------------------------------------------------------


def test_init_context_takes_exactly_the_options_and_a_group() -> None:
    parameters = inspect.signature(af.init_context).parameters
    assert [(name, item.kind) for name, item in parameters.items()] == [
        ("group", inspect.Parameter.KEYWORD_ONLY),
        ("options", inspect.Parameter.VAR_KEYWORD),
    ]
    listed = (inspect.getdoc(af.init_context) or "").partition("Keyword Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", listed, re.MULTILINE) == list(
        af.context.ContextOptions.__annotations__
    )


def test_an_option_that_is_none_says_nothing() -> None:
    nothing = dict.fromkeys(af.context.ContextOptions.__annotations__)
    assert applied(**nothing) == Context().replace(**cast("Any", nothing)) == Context()
    assert af.init_context(**cast("Any", {**nothing, "cpu": True})) == af.init_context(cpu=True)


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(
        TypeError,
        match=r"unknown option\(s\) mixed_precison, steps\. Did you mean 'mixed_precision'\? The opt",
    ):
        applied(mixed_precison="bf16", steps=4)
    for name, meant in (("bfloat16", "bf16"), ("float16", "fp16")):
        with pytest.raises(ConfigurationError, match=rf"got '{name}'\. Did you mean '{meant}'\?"):
            applied(mixed_precision=name)
    with pytest.raises(TypeError, match="mixed_precison"):
        Context().replace(mixed_precison="bf16")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("cpu", "no", "True or False"),
        ("debug", 1, "True or False"),
        ("dataloader_config", {"split_batches": True}, "a DataLoaderConfiguration"),
        ("guard", True, "a Guard or a str"),
        ("reduction", 12, "a CanonicalReduction or a str"),
        ("rng_types", "generator", "a list or a tuple"),
    ],
)
def test_an_option_of_another_type_is_refused(name: str, value: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be {kind}: got {value!r} of type "):
        applied(**{name: value})


def test_every_field_can_be_asked_for(tmp_path: Path) -> None:
    autocast, scaler = (
        af.config.AutocastKwargs(cache_enabled=False),
        af.config.GradScalerKwargs(init_scale=8.0),
    )
    ddp = af.config.DistributedDataParallelKwargs(static_graph=True)
    loading = af.DataLoaderConfiguration(split_batches=True)
    options: dict[str, Any] = {
        "device_placement": False,
        "step_scheduler_with_optimizer": False,
        "debug": True,
    }
    ctx = applied(
        mixed_precision="fp16",
        gradient_accumulation_steps=3,
        dataloader_config=loading,
        rng_types=["torch", af.config.RNGType.GENERATOR],
        project_dir=tmp_path,
        kwargs_handlers=[ddp, scaler, autocast],
        **options,
    )
    assert {name: getattr(ctx, name) for name in options} == options
    assert (ctx.precision.mode, ctx.precision.autocast, ctx.precision.scaler) == ("fp16", autocast, scaler)
    assert ctx.accumulation == af.GradientAccumulationPlugin(num_steps=3)
    assert (ctx.loading, ctx.strategy.ddp) == (loading, ddp)
    assert ctx.rng_types == ("torch", "generator")
    assert ctx.project.project_dir == str(tmp_path)


# --- accumulation, project, random states --------------------------------------------------------


def test_accumulation_by_number_or_by_plugin() -> None:
    plugin = af.GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    for number in (None, 1, 4):  # 1 is the number that Accelerate's constructor has by default
        ctx = applied(gradient_accumulation_plugin=plugin, gradient_accumulation_steps=number)
        assert ctx.accumulation == plugin
    with pytest.raises(ConfigurationError, match=r"gradient_accumulation_steps=2 contradicts .* num_steps=4"):
        applied(gradient_accumulation_plugin=plugin, gradient_accumulation_steps=2)


def test_the_project_record_wins_where_it_names_a_directory(tmp_path: Path) -> None:
    named = af.config.ProjectConfiguration(project_dir="record", total_limit=3)
    assert applied(project_config=named, project_dir=tmp_path).project == named
    project = applied(
        project_config=af.config.ProjectConfiguration(total_limit=3), project_dir=tmp_path
    ).project
    assert (project.project_dir, project.total_limit) == (str(tmp_path), 3)
    assert project.logging_dir == str(tmp_path)
    ctx = applied(project_config=af.config.ProjectConfiguration(logging_dir="logs"), project_dir="out")
    assert (ctx.project.project_dir, ctx.replace(project_dir="b").project.logging_dir) == ("out", "logs")
    assert applied(project_dir="a").replace(project_dir="b").project.logging_dir == "b"


def test_random_states_are_named_in_a_list() -> None:
    assert applied(rng_types=None).rng_types == ("generator",)
    assert applied(rng_types=[]).rng_types == ()
    with pytest.raises(ConfigurationError, match=r"rng_types takes torch, .*generator: got 'numpy'"):
        applied(rng_types=["numpy"])


# --- handlers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handlers", "error", "message"),
    [
        (
            [af.config.FP8RecipeKwargs(backend="TE"), af.config.AORecipeKwargs()],
            ConfigurationError,
            "two records for one thing: FP8RecipeKwargs and AORecipeKwargs",
        ),
        ([af.GradientAccumulationPlugin()], TypeError, "takes .* got GradientAccumulationPlugin"),
        ([{"enabled": True}], TypeError, "kwargs_handlers takes .* got dict"),
        (af.config.AutocastKwargs(), TypeError, "takes a list of records: got a single AutocastKwargs"),
    ],
)
def test_what_is_no_list_of_records_is_refused(handlers: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        applied(kwargs_handlers=handlers)


def test_how_to_compile_and_to_profile_is_kept() -> None:
    plugin = af.config.TorchDynamoPlugin(backend="EAGER", fullgraph=True)
    assert applied(dynamo_backend="eager").strategy.dynamo == af.config.TorchDynamoPlugin(backend="EAGER")
    ctx = applied(dynamo_plugin=plugin, kwargs_handlers=[af.config.ProfileKwargs(with_flops=True)])
    assert (ctx.strategy.dynamo, ctx.profiling) == (plugin, af.config.ProfileKwargs(with_flops=True))
    variant = ctx.replace(
        mixed_precision="bf16", kwargs_handlers=[af.config.DistributedDataParallelKwargs(dim=1)]
    )
    assert (variant.strategy.dynamo, variant.profiling) == (plugin, ctx.profiling)
    assert variant.replace(dynamo_backend="no").strategy.dynamo == af.config.TorchDynamoPlugin()
    with pytest.raises(ConfigurationError, match="dynamo_backend and dynamo_plugin both set the backend"):
        applied(dynamo_backend="eager", dynamo_plugin=plugin)


# --- the guard ------------------------------------------------------------------------------------

OWN = af.Guard(mode="sampled", timeout=timedelta(seconds=7), watchdog=True, call_sites=False)
UNSAID = dataclasses.replace(OWN, mode=None)


def guarded(guard: Guard = OWN) -> Context:
    return Context(guard=guard)


def test_a_guard_is_taken_as_it_is_and_a_mode_changes_only_the_mode() -> None:
    assert guarded().replace().guard == OWN
    assert guarded().replace(guard=af.Guard()).guard == af.Guard(mode="sampled")
    assert guarded().replace(guard="off").guard == dataclasses.replace(OWN, mode="off")
    assert guarded().replace(guard=GuardMode.FULL).guard == dataclasses.replace(OWN, mode="full")
    assert guarded().replace(guard=None, debug=None).guard == OWN


def test_a_guard_that_names_no_mode_leaves_it_as_it_is() -> None:
    for mode in GuardMode:
        assert guarded(af.Guard(mode=mode)).replace(guard=UNSAID).guard == dataclasses.replace(OWN, mode=mode)
    assert Context().guard.mode is Context(guard=UNSAID).guard.mode is GuardMode.SAMPLED
    assert applied(guard=UNSAID).guard.mode is GuardMode.SAMPLED


def test_debug_is_the_full_mode_and_nothing_else() -> None:
    full, off = guarded().replace(debug=True), guarded().replace(guard="off")
    assert (full.guard, full.debug, Context().debug) == (dataclasses.replace(OWN, mode="full"), True, False)
    assert full.replace(debug=False).guard == OWN
    assert off.replace(debug=False).guard == off.guard


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"guard": "off", "debug": True}, "debug=True means .* mode is full, but guard is 'off'"),
        ({"guard": OWN, "debug": True}, "debug=True means .* guard is 'sampled'"),
        ({"guard": "full", "debug": False}, "debug=False means .* not full, but guard is 'full'"),
        ({"guard": "strict"}, "'strict'"),
    ],
)
def test_debug_and_guard_may_not_contradict_each_other(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        applied(**options)


@pytest.mark.parametrize(
    ("options", "settings", "mode"),
    [
        ({"guard": "full", "debug": True}, Settings(), "full"),
        ({"guard": af.Guard(mode="full"), "debug": True}, Settings(), "full"),
        ({"guard": "off", "debug": False}, Settings(), "off"),
        ({"guard": UNSAID, "debug": True}, Settings(), "full"),
        ({}, Settings(guard="off"), "off"),
        ({}, Settings(debug=True, guard="off"), "full"),
        ({"guard": "sampled"}, Settings(debug=True, guard="off"), "sampled"),
        ({"guard": OWN}, Settings(guard="off"), "sampled"),
        ({"guard": OWN}, Settings(debug=True), "sampled"),
        ({"guard": UNSAID}, Settings(), "sampled"),
        ({"guard": UNSAID}, Settings(guard="off"), "off"),
        ({"guard": UNSAID}, Settings(debug=True, guard="off"), "full"),
        ({"guard": UNSAID, "debug": False}, Settings(debug=True), "sampled"),
        ({"debug": True}, Settings(guard="off"), "full"),
        ({"debug": False}, Settings(debug=True), "sampled"),
        ({"debug": False}, Settings(guard="full"), "sampled"),
        ({"debug": None, "guard": None}, Settings(guard="full"), "full"),
    ],
)
def test_variables_choose_the_mode_where_no_argument_does(
    options: dict[str, Any], settings: Settings, mode: str
) -> None:
    merged = merge_settings(af.context.ContextOptions(**options), settings)
    assert configure(Context(), merged).guard.mode == mode


def test_the_timeout_of_the_process_group_is_the_guards_too() -> None:
    def guard_of(timeout: timedelta | None, **options: Any) -> af.Guard:
        given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        handler = af.config.InitProcessGroupKwargs(**given)
        return af.init_context(cpu=True, kwargs_handlers=[handler], **options).guard

    short, long = timedelta(seconds=9), timedelta(hours=2)
    assert guard_of(short) == af.Guard(mode="sampled", timeout=short)
    assert guard_of(short, guard="off") == af.Guard(mode="off", timeout=short)
    assert (guard_of(long).timeout_s, guard_of(long).long_timeout_s) == (7200.0, 7200.0)
    assert guard_of(long, guard=OWN) == OWN  # a record of the guard says how long by itself
    assert guard_of(None) == Context().guard


# --- reduction ---------------------------------------------------------------------------------


def test_a_reduction_is_a_word_or_a_record() -> None:
    assert applied().reduction is applied(reduction="mean").reduction is None
    exact = applied(reduction="canonical")
    assert (
        exact.reduction == exact.replace(mixed_precision="bf16").reduction == af.config.CanonicalReduction()
    )
    assert exact.replace(reduction="mean").reduction is None
    assert applied(reduction=af.config.CanonicalReduction(seed=3)).reduction == af.config.CanonicalReduction(
        seed=3
    )
    with pytest.raises(ConfigurationError, match="'sum'"):
        applied(reduction="sum")


def test_the_window_follows_the_shards_and_goes_with_them() -> None:
    def steps(ctx: Context) -> list[int]:
        other = ctx.replace(reduction=af.config.CanonicalReduction(num_microbatches=24))
        plain = ctx.replace(reduction="canonical")
        asked = ctx.replace(reduction="mean", gradient_accumulation_steps=5)
        variants = (ctx, ctx.replace(mixed_precision="bf16"), other, plain, asked)
        return [variant.gradient_accumulation_steps for variant in variants]

    reduction = af.config.CanonicalReduction(num_microbatches=12)
    assert run_ranks(steps, 4, reduction=reduction) == [[3, 3, 6, 1, 5]] * 4
    assert applied(reduction=reduction).gradient_accumulation_steps == 12
    assert af.init_context(cpu=True, reduction=reduction).gradient_accumulation_steps == 12
    with pytest.raises(ConfigurationError, match=r"=12 and 5 ranks\. .* use 1, 2, 3, 4, 6, 12 r"):
        run_ranks(steps, 5, reduction=reduction)
    with pytest.raises(ConfigurationError, match=r"steps=4 contradicts num_microbatches=12, .* of 6 on 2 r"):
        run_ranks(steps, 2, reduction=reduction, gradient_accumulation_steps=4)
    with pytest.raises(ConfigurationError, match="steps=7 contradicts num_microbatches=12"):
        applied(reduction=reduction).replace(gradient_accumulation_steps=7)


@pytest.mark.parametrize("options", [{"comm_hook": "bf16"}, {"gradient_as_bucket_view": True}])
def test_what_is_asked_of_another_engine_contradicts_exact_mode(options: dict[str, Any]) -> None:
    handlers = [af.config.DistributedDataParallelKwargs(**options)]
    with pytest.raises(ConfigurationError, match="without DistributedDataParallel, so " + "".join(options)):
        applied(reduction="canonical", kwargs_handlers=handlers)
    with pytest.raises(ConfigurationError, match="Leave one of the two out"):
        applied(kwargs_handlers=handlers).replace(reduction="canonical")


def test_the_environment_may_ask_for_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELFN_REDUCTION", "canonical")
    monkeypatch.setenv("ACCELFN_GRADIENT_ACCUMULATION_STEPS", "4")
    ctx = af.init_context(cpu=True)
    assert (ctx.reduction, ctx.gradient_accumulation_steps) == (af.config.CanonicalReduction(), 4)
    assert af.init_context(cpu=True, reduction="mean").reduction is None
    # An argument that says the window wins over the variable.
    reduction = af.config.CanonicalReduction(num_microbatches=3)
    assert af.init_context(cpu=True, reduction=reduction).gradient_accumulation_steps == 3


# --- precedence ----------------------------------------------------------------------------------


def test_arguments_then_our_variables_then_those_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**options: Any) -> tuple[str, int, bool]:
        ctx = af.init_context(**options)
        return ctx.mixed_precision, ctx.gradient_accumulation_steps, ctx.debug

    names = ("MIXED_PRECISION", "GRADIENT_ACCUMULATION_STEPS", "DEBUG_MODE")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert found() == ("no", 1, False)
    for prefix, values in (("ACCELERATE", ("bf16", "4", "1")), ("ACCELFN", ("fp16", "2", "0"))):
        for name, value in zip(names, values, strict=True):
            monkeypatch.setenv(f"{prefix}_{name}", value)
        assert found() == (values[0], int(values[1]), values[2] == "1")
    plugin = af.GradientAccumulationPlugin(num_steps=3)
    assert found(gradient_accumulation_plugin=plugin) == ("fp16", 3, False)
    assert found(mixed_precision="no", gradient_accumulation_steps=1, debug=True) == ("no", 1, True)


def test_variables_of_deepspeed_are_the_default_of_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    named = {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "3", "MIXED_PRECISION": "fp16"}
    for name, value in {**named, "GRADIENT_ACCUMULATION_STEPS": "2"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    ctx = af.init_context(cpu=True)
    assert ctx.strategy.deepspeed == af.config.DeepSpeedPlugin(zero_stage=3)
    assert (ctx.gradient_accumulation_steps, ctx.mixed_precision) == (2, "fp16")
    assert af.init_context(cpu=True, gradient_accumulation_steps=3).gradient_accumulation_steps == 3
    passed = af.config.DeepSpeedPlugin(hf_ds_config=config)
    for plugin in (passed, {"student": passed, "teacher": af.config.DeepSpeedPlugin()}):
        ctx = af.init_context(cpu=True, deepspeed_plugin=plugin)
        assert ctx.strategy.deepspeed == passed
        assert (ctx.gradient_accumulation_steps, ctx.mixed_precision) == (4, "bf16")
    with pytest.raises(ConfigurationError, match="deepspeed_plugin and fsdp_plugin"):
        af.init_context(cpu=True, fsdp_plugin=af.FullyShardedDataParallelPlugin(fsdp_version=2))


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        ({"ACCELERATE_CPU_AFFINITY": "1"}, NotAvailableError, "ACCELERATE_CPU_AFFINITY is set"),
        ({"ACCELFN_DOWNCAST_BF16": "1"}, NotAvailableError, "ACCELERATE_DOWNCAST_BF16 is set"),
        ({"ACCELFN_MIXED_PRECISION": "fp12"}, ConfigurationError, "ACCELFN_MIXED_PRECISION"),
        ({"WORLD_SIZE": "2"}, ConfigurationError, "sets WORLD_SIZE but not RANK"),
    ],
)
def test_what_variables_ask_for_is_had_or_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], error: type[Exception], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=re.escape(message)):
        af.init_context(cpu=True)


def test_an_explicit_cpu_beats_a_device_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELFN_TORCH_DEVICE", "cuda:0")
    assert af.init_context(cpu=True).device.type == "cpu"
    monkeypatch.setenv("ACCELFN_USE_CPU", "1")
    with pytest.raises(ConfigurationError, match="cuda:0"):
        af.init_context()  # the two variables contradict each other
