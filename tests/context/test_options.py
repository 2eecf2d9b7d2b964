"""From what is asked to the fields of a context: precedence, contradictions, what isn't there yet."""

import dataclasses
import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import Context, ContextOptions, configure, init_context
from accelfn.context.config import (
    AORecipeKwargs,
    AutocastKwargs,
    CanonicalReduction,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    Guard,
    GuardMode,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    Settings,
    TorchDynamoPlugin,
)
from accelfn.context.config.handlers import sort_handlers
from accelfn.context.options import merge_settings, settle_window
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks


def applied(**options: Any) -> Context:
    return configure(Context(), ContextOptions(**options))


# --- the list of options -------------------------------------------------------------------------


def test_init_context_takes_exactly_the_options_and_a_group() -> None:
    parameters = inspect.signature(init_context).parameters
    assert [(name, item.kind) for name, item in parameters.items()] == [
        ("group", inspect.Parameter.KEYWORD_ONLY),
        ("options", inspect.Parameter.VAR_KEYWORD),
    ]
    listed = (inspect.getdoc(init_context) or "").partition("Keyword Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", listed, re.MULTILINE) == list(ContextOptions.__annotations__)


def test_an_option_that_is_none_says_nothing() -> None:
    nothing = dict.fromkeys(ContextOptions.__annotations__)
    assert applied(**nothing) == Context().replace(**cast("Any", nothing)) == Context()
    assert init_context(**cast("Any", {**nothing, "cpu": True})) == init_context(cpu=True)


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"unknown option\(s\) mixed_precison, steps\. The options of a context are device_pl"
    ):
        applied(mixed_precison="bf16", steps=4)
    with pytest.raises(TypeError, match="mixed_precison"):
        Context().replace(mixed_precison="bf16")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        *(
            (name, "no", "True or False")
            for name in ("device_placement", "step_scheduler_with_optimizer", "cpu")
        ),
        ("debug", 1, "True or False"),
        ("dataloader_config", {"split_batches": True}, "a DataLoaderConfiguration"),
        ("project_config", "out", "a ProjectConfiguration"),
        ("gradient_accumulation_plugin", 4, "a GradientAccumulationPlugin"),
        ("dynamo_plugin", "INDUCTOR", "a TorchDynamoPlugin"),
        ("parallelism_config", 2, "a ParallelismConfig"),
        ("guard", True, "a Guard or a str"),
        ("reduction", 12, "a CanonicalReduction or a str"),
        ("rng_types", "generator", "a list or a tuple"),
    ],
)
def test_an_option_of_another_type_is_refused(name: str, value: object, kind: str) -> None:
    with pytest.raises(
        TypeError, match=f"{name} must be {kind}: got {value!r} of type {type(value).__name__}"
    ):
        applied(**{name: value})


def test_every_field_can_be_asked_for(tmp_path: Path) -> None:
    loading = DataLoaderConfiguration(split_batches=True)
    autocast, scaler = AutocastKwargs(cache_enabled=False), GradScalerKwargs(init_scale=8.0)
    ddp = DistributedDataParallelKwargs(static_graph=True)
    ctx = applied(
        device_placement=False,
        mixed_precision="fp16",
        gradient_accumulation_steps=3,
        dataloader_config=loading,
        rng_types=["torch", RNGType.GENERATOR],
        project_dir=tmp_path,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[autocast, scaler, ddp],
        debug=True,
    )
    assert not ctx.device_placement
    assert (ctx.precision.mode, ctx.precision.autocast, ctx.precision.scaler) == ("fp16", autocast, scaler)
    assert ctx.accumulation == GradientAccumulationPlugin(num_steps=3)
    assert ctx.loading == loading
    assert ctx.rng_types == ("torch", "generator")
    assert ctx.project.project_dir == str(tmp_path)
    assert not ctx.step_scheduler_with_optimizer
    assert ctx.strategy.ddp == ddp
    assert ctx.debug


# --- accumulation, project, random states --------------------------------------------------------


def test_accumulation_by_number_or_by_plugin() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    assert applied(gradient_accumulation_plugin=plugin).accumulation == plugin
    # 1 is the number that Accelerate's constructor has by default.
    assert applied(gradient_accumulation_plugin=plugin, gradient_accumulation_steps=1).accumulation == plugin
    assert applied(gradient_accumulation_plugin=plugin, gradient_accumulation_steps=4).accumulation == plugin
    with pytest.raises(ConfigurationError, match=r"gradient_accumulation_steps=2 contradicts .* num_steps=4"):
        applied(gradient_accumulation_plugin=plugin, gradient_accumulation_steps=2)


def test_the_project_record_wins_where_it_names_a_directory(tmp_path: Path) -> None:
    named = ProjectConfiguration(project_dir="record", total_limit=3)
    assert applied(project_config=named, project_dir=tmp_path).project == named
    unnamed = ProjectConfiguration(total_limit=3)
    project = applied(project_config=unnamed, project_dir=tmp_path).project
    assert (project.project_dir, project.total_limit) == (str(tmp_path), 3)
    assert project.logging_dir == str(tmp_path)


def test_a_logging_directory_of_its_own_stays() -> None:
    project = applied(project_config=ProjectConfiguration(logging_dir="logs"), project_dir="out").project
    assert (project.project_dir, project.logging_dir) == ("out", "logs")
    ctx = applied(project_config=ProjectConfiguration(project_dir="a", logging_dir="logs"))
    assert ctx.replace(project_dir="b").project.logging_dir == "logs"
    assert applied(project_dir="a").replace(project_dir="b").project.logging_dir == "b"


def test_random_states_are_named_in_a_list() -> None:
    assert applied(rng_types=None).rng_types == ("generator",)
    assert applied(rng_types=[]).rng_types == ()
    with pytest.raises(ConfigurationError, match=r"rng_types takes torch, .*generator: got 'numpy'"):
        applied(rng_types=["numpy"])


# --- handlers ------------------------------------------------------------------------------------

HANDLERS: tuple[tuple[str, KwargsHandler], ...] = (
    ("autocast", AutocastKwargs()),
    ("ddp", DistributedDataParallelKwargs()),
    ("scaler", GradScalerKwargs()),
    ("process_group", InitProcessGroupKwargs()),
    ("profile", ProfileKwargs()),
    ("fp8_recipe", AORecipeKwargs()),
)


def test_handlers_find_their_places_in_any_order() -> None:
    expected = dict(HANDLERS)
    assert sort_handlers([handler for _, handler in HANDLERS]) == expected
    assert sort_handlers([handler for _, handler in reversed(HANDLERS)]) == expected
    assert sort_handlers(None) == sort_handlers(()) == {}


def test_two_records_for_one_place_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="two records for one thing: FP8RecipeKwargs and AORecipeKwargs"
    ):
        sort_handlers([FP8RecipeKwargs(backend="TE"), AORecipeKwargs()])


@pytest.mark.parametrize("wrong", [GradientAccumulationPlugin(), {"enabled": True}, "autocast"])
def test_something_else_among_the_handlers_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"kwargs_handlers takes .* got {type(wrong).__name__}"):
        sort_handlers([wrong])


def test_a_single_handler_is_not_a_list() -> None:
    wrong: Any = AutocastKwargs()
    with pytest.raises(TypeError, match="takes a list of records: got a single AutocastKwargs"):
        sort_handlers(wrong)


def test_how_to_compile_and_to_profile_is_kept() -> None:
    plugin = TorchDynamoPlugin(backend="EAGER", fullgraph=True)
    assert applied(dynamo_backend="eager").strategy.dynamo == TorchDynamoPlugin(backend="EAGER")
    ctx = applied(dynamo_plugin=plugin, kwargs_handlers=[ProfileKwargs(with_flops=True)])
    assert ctx.strategy.dynamo == plugin
    assert ctx.profiling == ProfileKwargs(with_flops=True)
    variant = ctx.replace(mixed_precision="bf16", kwargs_handlers=[DistributedDataParallelKwargs(dim=1)])
    assert (variant.strategy.dynamo, variant.profiling) == (plugin, ctx.profiling)
    assert variant.replace(dynamo_backend="no").strategy.dynamo == TorchDynamoPlugin()


def test_compiling_is_asked_for_once() -> None:
    with pytest.raises(ConfigurationError, match="dynamo_backend and dynamo_plugin both set the backend"):
        applied(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="EAGER"))


# --- the guard ------------------------------------------------------------------------------------

OWN = Guard(mode="sampled", timeout=timedelta(seconds=7), watchdog=True, call_sites=False)
UNSAID = dataclasses.replace(OWN, mode=None)


def guarded(guard: Guard = OWN) -> Context:
    return Context(guard=guard)


def test_a_guard_is_taken_as_it_is_and_a_mode_changes_only_the_mode() -> None:
    assert guarded().replace().guard == OWN
    assert guarded().replace(guard=Guard()).guard == Guard(mode="sampled")
    assert guarded().replace(guard="off").guard == dataclasses.replace(OWN, mode="off")
    assert guarded().replace(guard=GuardMode.FULL).guard == dataclasses.replace(OWN, mode="full")
    assert guarded().replace(guard=None, debug=None).guard == OWN


def test_a_guard_that_names_no_mode_leaves_it_as_it_is() -> None:
    for mode in GuardMode:
        ctx = guarded(Guard(mode=mode)).replace(guard=UNSAID)
        assert ctx.guard == dataclasses.replace(OWN, mode=mode)
        assert ctx.guard.mode is mode
    assert Context().guard.mode is Context(guard=UNSAID).guard.mode is GuardMode.SAMPLED
    assert applied(guard=UNSAID).guard.mode is GuardMode.SAMPLED


def test_debug_is_the_full_mode_and_nothing_else() -> None:
    assert not Context().debug
    assert guarded().replace(debug=True).guard == dataclasses.replace(OWN, mode="full")
    assert guarded().replace(debug=True).debug
    assert guarded().replace(debug=True).replace(debug=False).guard == OWN
    off = guarded().replace(guard="off")
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
        ({"guard": Guard(mode="full"), "debug": True}, Settings(), "full"),
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
    merged = merge_settings(ContextOptions(**options), settings)
    assert configure(Context(), merged).guard.mode == mode


def test_the_timeout_of_the_process_group_is_the_guards_too() -> None:
    short, long = timedelta(seconds=9), timedelta(hours=2)
    for asked in (None, "off"):
        guard = init_context(
            cpu=True, guard=asked, kwargs_handlers=[InitProcessGroupKwargs(timeout=short)]
        ).guard
        assert guard == Guard(mode=asked or "sampled", timeout=short)
    guard = init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=long)]).guard
    assert (guard.timeout_s, guard.long_timeout_s) == (7200.0, 7200.0)
    # A record of the guard says how long by itself.
    assert (
        init_context(cpu=True, guard=OWN, kwargs_handlers=[InitProcessGroupKwargs(timeout=long)]).guard == OWN
    )
    assert init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs()]).guard == Context().guard


# --- reduction ---------------------------------------------------------------------------------


def test_a_reduction_is_a_word_or_a_record() -> None:
    assert applied().reduction is applied(reduction="mean").reduction is None
    exact = applied(reduction="canonical")
    assert exact.reduction == CanonicalReduction()
    assert exact.replace(mixed_precision="bf16").reduction == CanonicalReduction()
    assert exact.replace(reduction="mean").reduction is None
    assert applied(reduction=CanonicalReduction(seed=3)).reduction == CanonicalReduction(seed=3)
    with pytest.raises(ConfigurationError, match="'sum'"):
        applied(reduction="sum")


@given(st.integers(1, 60), st.integers(1, 12))
def test_a_window_holds_the_ranks_share_of_the_microbatches_or_there_is_none(
    microbatches: int, size: int
) -> None:
    reduction = CanonicalReduction(num_microbatches=microbatches)
    if microbatches % size:
        with pytest.raises(ConfigurationError, match=f"got num_microbatches={microbatches} and {size} ranks"):
            settle_window(GradientAccumulationPlugin(), reduction, size)
    else:
        settled = settle_window(GradientAccumulationPlugin(), reduction, size)
        assert settled.num_steps * size == microbatches
        assert settle_window(settled, reduction, size) == settled
    plugin = GradientAccumulationPlugin(num_steps=microbatches)
    assert settle_window(plugin, CanonicalReduction(), size) == settle_window(plugin, None, size) == plugin


def test_the_window_follows_the_shards_and_goes_with_them() -> None:
    def steps(ctx: Context) -> list[int]:
        other = ctx.replace(reduction=CanonicalReduction(num_microbatches=24))
        plain = ctx.replace(reduction="canonical")
        asked = ctx.replace(reduction="mean", gradient_accumulation_steps=5)
        return [
            one.gradient_accumulation_steps
            for one in (ctx, ctx.replace(mixed_precision="bf16"), other, plain, asked)
        ]

    reduction = CanonicalReduction(num_microbatches=12)
    assert run_ranks(steps, 4, reduction=reduction) == [[3, 3, 6, 1, 5]] * 4
    assert applied(reduction=reduction).gradient_accumulation_steps == 12
    assert init_context(cpu=True, reduction=reduction).gradient_accumulation_steps == 12
    with pytest.raises(ConfigurationError, match=r"=12 and 5 ranks\. .* use 1, 2, 3, 4, 6, 12 r"):
        run_ranks(steps, 5, reduction=reduction)
    with pytest.raises(ConfigurationError, match=r"steps=4 contradicts num_microbatches=12, .* of 6 on 2 r"):
        run_ranks(steps, 2, reduction=reduction, gradient_accumulation_steps=4)
    with pytest.raises(ConfigurationError, match="steps=7 contradicts num_microbatches=12"):
        applied(reduction=reduction).replace(gradient_accumulation_steps=7)


@pytest.mark.parametrize("options", [{"comm_hook": "bf16"}, {"gradient_as_bucket_view": True}])
def test_what_is_asked_of_another_engine_contradicts_exact_mode(options: dict[str, Any]) -> None:
    handlers = [DistributedDataParallelKwargs(**options)]
    with pytest.raises(
        ConfigurationError, match=f"without DistributedDataParallel, so {next(iter(options))}="
    ):
        applied(reduction="canonical", kwargs_handlers=handlers)
    with pytest.raises(ConfigurationError, match="Leave one of the two out"):
        applied(kwargs_handlers=handlers).replace(reduction="canonical")


def test_the_environment_may_ask_for_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELFN_REDUCTION", "canonical")
    monkeypatch.setenv("ACCELFN_GRADIENT_ACCUMULATION_STEPS", "4")
    ctx = init_context(cpu=True)
    assert (ctx.reduction, ctx.gradient_accumulation_steps) == (CanonicalReduction(), 4)
    assert init_context(cpu=True, reduction="mean").reduction is None
    # An argument that says the window wins over the variable.
    reduction = CanonicalReduction(num_microbatches=3)
    assert init_context(cpu=True, reduction=reduction).gradient_accumulation_steps == 3


# --- precedence ----------------------------------------------------------------------------------


def test_settings_fill_only_what_is_left_open() -> None:
    settings = Settings(
        cpu=True,
        debug=True,
        mixed_precision="bf16",
        gradient_accumulation_steps=4,
        fsdp_plugin=FullyShardedDataParallelPlugin(),
        dynamo_plugin=TorchDynamoPlugin(backend="EAGER"),
    )
    nothing = ContextOptions()
    filled = merge_settings(nothing, settings)
    assert nothing == {}
    assert filled == ContextOptions(
        cpu=True,
        debug=True,
        mixed_precision="bf16",
        gradient_accumulation_steps=4,
        fsdp_plugin=settings.fsdp_plugin,
        dynamo_plugin=settings.dynamo_plugin,
    )
    explicit = ContextOptions(
        cpu=False,
        debug=False,
        mixed_precision="no",
        gradient_accumulation_steps=1,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        dynamo_backend="no",
    )
    assert merge_settings(explicit, settings) == explicit


def test_a_plugin_for_accumulation_beats_the_environment() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2)
    merged = merge_settings(
        ContextOptions(gradient_accumulation_plugin=plugin), Settings(gradient_accumulation_steps=4)
    )
    assert configure(Context(), merged).accumulation == plugin


def test_arguments_then_our_variables_then_those_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[str, int, bool]:
        ctx = init_context()
        return ctx.mixed_precision, ctx.gradient_accumulation_steps, ctx.debug

    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert found() == ("no", 1, False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    assert found() == ("bf16", 4, True)
    monkeypatch.setenv("ACCELFN_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELFN_GRADIENT_ACCUMULATION_STEPS", "2")
    monkeypatch.setenv("ACCELFN_DEBUG_MODE", "0")
    assert found() == ("fp16", 2, False)
    ctx = init_context(mixed_precision="no", gradient_accumulation_steps=1, debug=True)
    assert (ctx.mixed_precision, ctx.gradient_accumulation_steps, ctx.debug) == ("no", 1, True)


def test_variables_of_deepspeed_are_the_default_of_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    ctx = init_context(cpu=True)
    assert ctx.strategy.deepspeed == DeepSpeedPlugin(zero_stage=3)
    assert (ctx.gradient_accumulation_steps, ctx.mixed_precision) == (2, "fp16")
    assert init_context(cpu=True, gradient_accumulation_steps=3).gradient_accumulation_steps == 3
    passed = DeepSpeedPlugin(hf_ds_config=config)
    for plugin in (passed, {"student": passed, "teacher": DeepSpeedPlugin()}):
        ctx = init_context(cpu=True, deepspeed_plugin=plugin)
        assert ctx.strategy.deepspeed == passed
        assert (ctx.gradient_accumulation_steps, ctx.mixed_precision) == (4, "bf16")
    with pytest.raises(ConfigurationError, match="deepspeed_plugin and fsdp_plugin"):
        init_context(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


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
        init_context(cpu=True)


def test_an_explicit_cpu_beats_a_device_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELFN_TORCH_DEVICE", "cuda:0")
    assert init_context(cpu=True).device.type == "cpu"
    monkeypatch.setenv("ACCELFN_USE_CPU", "1")
    with pytest.raises(ConfigurationError, match="cuda:0"):
        init_context()  # the two variables contradict each other
