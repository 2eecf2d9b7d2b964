"""What the documents that accelfn answers to name: each thing as documented, and where it is here.

``python -m tests.accelerator.asked_names`` prints the tables of docs/pages/names.md.
"""

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import accelfn

__all__ = ("ASKED", "NO_DEFAULT", "AskedName", "Kind", "parameters_of", "tables")

Kind = Literal["argument", "method", "property", "attribute", "class", "function", "command", "variable"]

NO_DEFAULT = inspect.Parameter.empty

_TITLES: dict[Kind, str] = {
    "argument": "Arguments of the constructor",
    "method": "Methods",
    "property": "Properties",
    "attribute": "Attributes that stand in running text",
    "class": "Handlers, configuration and other classes",
    "function": "Functions",
    "command": "Commands",
    "variable": "Variables of the environment",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedName:
    """One thing that the documents name.

    Args:
        kind: What it is.
        documented: How it is documented: a name, with parameters or a default where there are some.
        here: The same here, where it differs.
        home: What has it: a name at the root of accelfn, a module, or the command line.
        part: The part of accelfn that it waits for.
        missing: What the check finds wrong with it today.
        note: Remark for readers.
    """

    kind: Kind
    documented: str
    here: str = ""
    home: str = "Accelerator"
    part: str = ""
    missing: str = ""
    note: str = ""

    @property
    def written_here(self) -> str:
        """How it is written here."""
        return self.here or self.documented

    @property
    def name(self) -> str:
        """Its name here, without parameters."""
        return self.written_here.partition("(")[0].partition("=")[0]


def parameters_of(form: str) -> tuple[tuple[str, Any], ...]:
    """Give names and defaults of the parameters in ``name(...)``, or of the argument ``name=default``."""
    inside = form.partition("(")[2].removesuffix(")") if "(" in form else form
    (function,) = ast.parse(f"def _({inside}): ...").body
    assert isinstance(function, ast.FunctionDef)
    said = function.args
    without = len(said.args) - len(said.defaults)
    defaults = [NO_DEFAULT] * without + [ast.literal_eval(one) for one in said.defaults]
    found: list[tuple[str, Any]] = [
        (one.arg, default) for one, default in zip(said.args, defaults, strict=True)
    ]
    if said.vararg is not None:
        found.append((f"*{said.vararg.arg}", NO_DEFAULT))
    for one, default in zip(said.kwonlyargs, said.kw_defaults, strict=True):
        found.append((one.arg, NO_DEFAULT if default is None else ast.literal_eval(default)))
    if said.kwarg is not None:
        found.append((f"**{said.kwarg.arg}", NO_DEFAULT))
    return tuple(found)


def _rows(kind: Kind, *documented: str, home: str = "Accelerator", part: str = "") -> tuple[AskedName, ...]:
    """Rows without remark."""
    return tuple(AskedName(kind=kind, documented=one, home=home, part=part) for one in documented)


_IN_THE_OLDER = "in the older reference alone; Accelerate has it in `dataloader_config` now"
_ARGUMENTS = (
    AskedName(kind="argument", documented="device_placement=True"),
    AskedName(
        kind="argument",
        documented="split_batches=False",
        here="split_batches=None",
        note="`None` is False, or what `dataloader_config` says",
    ),
    AskedName(
        kind="argument", documented="mixed_precision=None", note='`"fp8"` is refused: not in this version'
    ),
    AskedName(
        kind="argument",
        documented="gradient_accumulation_steps=1",
        here="gradient_accumulation_steps=None",
        note="`None` is 1, or what the variable says; a number that is passed beats the variable",
    ),
    *_rows("argument", "cpu=False", "dataloader_config=None"),
    *_rows("argument", "deepspeed_plugin=None", part="DeepSpeed"),
    *_rows("argument", "fsdp_plugin=None"),
    *_rows("argument", "megatron_lm_plugin=None", part="Megatron-LM"),
    *_rows("argument", "rng_types=None"),
    *_rows("argument", "log_with=None"),
    *_rows("argument", "project_dir=None", "project_config=None", "gradient_accumulation_plugin=None"),
    *_rows("argument", "step_scheduler_with_optimizer=True", "kwargs_handlers=None"),
    AskedName(kind="argument", documented="dynamo_backend=None"),
    AskedName(kind="argument", documented="dynamo_plugin=None"),
    *_rows("argument", "parallelism_config=None"),
    AskedName(
        kind="argument",
        documented="dispatch_batches=None",
        note=_IN_THE_OLDER,
    ),
    AskedName(
        kind="argument",
        documented="even_batches=True",
        here="even_batches=None",
        note=_IN_THE_OLDER,
    ),
    AskedName(
        kind="argument",
        documented="use_seedable_sampler=False",
        here="use_seedable_sampler=None",
        note=_IN_THE_OLDER,
    ),
)

_METHODS = (
    *_rows(
        "method",
        "prepare(*args, device_placement=None)",
        "prepare_model(model, device_placement=None, evaluation_mode=False)",
        "prepare_optimizer(optimizer, device_placement=None)",
        "prepare_data_loader(data_loader, device_placement=None, slice_fn_for_dispatch=None)",
        "prepare_scheduler(scheduler)",
        "unwrap_model(model, keep_fp32_wrapper=True)",
        "accumulate(*models)",
    ),
    AskedName(
        kind="method",
        documented="no_sync(*models)",
        note="documented with one model, with several, and shown with none",
    ),
    AskedName(kind="method", documented="trigger_sync_in_backward(model)"),
    AskedName(kind="method", documented="backward(loss, **kwargs)"),
    AskedName(
        kind="method",
        documented="autocast(autocast_handler=None, cache_enabled=None)",
        note="one document has `autocast_handler`, another `cache_enabled`",
    ),
    *_rows(
        "method",
        "clip_grad_norm_(parameters, max_norm, norm_type=2)",
        "clip_grad_value_(parameters, clip_value)",
        "unscale_gradients(optimizer=None)",
        "join_uneven_inputs(joinables, even_batches=None)",
        "skip_first_batches(dataloader, num_batches=0)",
    ),
    AskedName(kind="method", documented="lomo_backward(loss, learning_rate)"),
    AskedName(
        kind="method",
        documented="gather(tensor)",
        note="on every rank; one document says on the main process alone, which Accelerate doesn't do either",
    ),
    AskedName(kind="method", documented="gather_for_metrics(input_data, use_gather_object=False)"),
    AskedName(
        kind="method",
        documented="reduce(tensor, reduction='sum', scale=1.0)",
        note="one document says `'mean'` for the default, which Accelerate doesn't do either",
    ),
    *_rows(
        "method",
        "pad_across_processes(tensor, dim=0, pad_index=0, pad_first=False)",
        "wait_for_everyone()",
        "main_process_first()",
        "local_main_process_first()",
    ),
    AskedName(
        kind="method",
        documented="split_between_processes(inputs, apply_padding=False)",
        note="for a `with` statement; one document shows a plain call, which Accelerate doesn't have either",
    ),
    AskedName(kind="method", documented="on_main_process(function=None)"),
    AskedName(kind="method", documented="on_local_main_process(function=None)"),
    *_rows("method", "on_last_process(function)"),
    AskedName(
        kind="method",
        documented="on_process(function=None, process_index=None)",
        here="on_process(function=None, process_index=0)",
        note="without an index, the main process; with Accelerate, no process",
    ),
    AskedName(
        kind="method",
        documented="on_local_process(function=None, local_process_index=None)",
        here="on_local_process(function=None, local_process_index=0)",
        note="without an index, the local main process; with Accelerate, no process",
    ),
    AskedName(
        kind="method",
        documented="print(*args, **kwargs)",
        note="once per machine; one document says on the main process alone",
    ),
    *_rows("method", "set_trigger()"),
    AskedName(
        kind="method",
        documented="check_trigger()",
        note="one example calls it `check_breakpoint`, a name that Accelerate doesn't have either",
    ),
    AskedName(
        kind="method",
        documented="free_memory()",
        here="free_memory(*objects)",
        note="Accelerate takes objects too",
    ),
    AskedName(
        kind="method",
        documented="clear()",
        here="clear(*objects)",
        note="another name of `free_memory`",
    ),
    *_rows("method", "verify_device_map(model)"),
    *_rows("method", "save_model(model, save_directory, max_shard_size='10GB', safe_serialization=True)"),
    *_rows(
        "method",
        "save(obj, f, safe_serialization=False)",
        "get_state_dict(model, unwrap=True)",
    ),
    AskedName(
        kind="method",
        documented="save_state(output_dir=None, safe_serialization=True, **save_model_func_kwargs)",
        note="`asynchronous`, `step`, `metric`, `keep` and `allow_drift` are keywords; others are refused",
    ),
    AskedName(
        kind="method",
        documented="load_state(input_dir=None, **load_model_func_kwargs)",
        note="`strict`, `random_state`, `partial` and `map_location` are keywords; others are refused",
    ),
    AskedName(
        kind="method",
        documented="register_for_checkpointing(*objects)",
        note="a keyword is a name: `register_for_checkpointing(ema=ema)`",
    ),
    AskedName(
        kind="method",
        documented="register_save_state_pre_hook(hook)",
        note="called as `hook(models, weights, output_dir)`; `_models` itself stays private",
    ),
    AskedName(
        kind="method",
        documented="register_load_state_pre_hook(hook)",
        note="called as `hook(models, input_dir)`",
    ),
    *_rows("method", "get_tracker(name, unwrap=False)"),
)

_PROPERTIES = (
    AskedName(
        kind="property",
        documented="state",
        note="the `Context`; documented as a `PartialState` and as an `AcceleratorState`",
    ),
    *_rows(
        "property",
        "device",
        "distributed_type",
        "num_processes",
        "process_index",
        "local_process_index",
        "is_main_process",
        "is_local_main_process",
        "use_distributed",
        "mixed_precision",
        "sync_gradients",
        "optimizer_step_was_skipped",
        "should_save_model",
    ),
    AskedName(kind="property", documented="is_fsdp2", note="False, as FSDP is not in this version"),
    AskedName(kind="property", documented="fp8_backend", note="`None`, as fp8 is not in this version"),
    *_rows(
        "property",
        "data_parallel_rank",
        "tensor_parallel_rank",
        "context_parallel_rank",
        "pipeline_parallel_rank",
    ),
)

_ATTRIBUTES = (
    AskedName(kind="attribute", documented="device_placement"),
    *_rows("attribute", "project_dir"),
    AskedName(kind="attribute", documented="step"),
    AskedName(kind="attribute", documented="trackers", note="those that act on this rank"),
)

_DDP = (
    "DistributedDataParallelKwargs(dim=0, broadcast_buffers=True, bucket_cap_mb=25, "
    "find_unused_parameters=False, check_reduction=False, gradient_as_bucket_view=False, static_graph=False)"
)
_FP8 = (
    "FP8RecipeKwargs(backend={}, opt_level='O2', margin=0, interval=1, fp8_format={}, amax_history_len={}, "
    "amax_compute_algo='most_recent', override_linear_precision=(False, False, False))"
)
_REFUSED = "can be built; a context refuses it in this version"
_CLASSES = (
    AskedName(
        kind="class",
        documented="DataLoaderConfiguration(split_batches=False, dispatch_batches=None, even_batches=True, "
        "use_seedable_sampler=False, data_seed=None, non_blocking=False, use_stateful_dataloader=False)",
        home="accelfn",
    ),
    AskedName(
        kind="class",
        documented="ProjectConfiguration(project_dir=None, logging_dir=None, "
        "automatic_checkpoint_naming=False, total_limit=None, iteration=0, save_on_each_node=False)",
        home="accelfn",
    ),
    AskedName(
        kind="class",
        documented="GradientAccumulationPlugin(num_steps=None, adjust_scheduler=True, "
        "sync_with_dataloader=True, sync_each_batch=False)",
        here="GradientAccumulationPlugin(num_steps=1, adjust_scheduler=True, "
        "sync_with_dataloader=True, sync_each_batch=False)",
        home="accelfn",
    ),
    AskedName(
        kind="class",
        documented="TorchDynamoPlugin(backend='NO', mode='default', fullgraph=False, dynamic=None, "
        "options=None, disable=False, use_regional_compilation=False)",
        home="accelfn",
    ),
    AskedName(
        kind="class",
        documented="ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)",
        home="accelfn",
    ),
    *(
        AskedName(kind="class", documented=f"{name}()", home="accelfn", note=_REFUSED)
        for name in ("DeepSpeedPlugin", "MegatronLMPlugin")
    ),
    *_rows("class", "FullyShardedDataParallelPlugin()", home="accelfn"),
    *_rows("class", "KwargsHandler()", "AutocastKwargs(enabled=True, cache_enabled=None)", home="accelfn"),
    *_rows("class", _DDP, home="accelfn"),
    AskedName(
        kind="class",
        documented="GradScalerKwargs(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, "
        "growth_interval=2000, enabled=True)",
        home="accelfn",
        note="an example spells `backoff_filter`, which Accelerate doesn't take either",
    ),
    AskedName(
        kind="class",
        documented="InitProcessGroupKwargs(backend='nccl', init_method=None, timeout='1800 s')",
        here="InitProcessGroupKwargs(backend=None, init_method=None, timeout=None)",
        home="accelfn",
        note="`None` chooses by device, and waits as long as the `Guard` says",
    ),
    AskedName(
        kind="class",
        documented=_FP8.format("'MSAMP'", "'E4M3'", 1),
        here=_FP8.format(None, "'HYBRID'", 1024),
        home="accelfn",
        note="the document's text and its signature disagree; its `optimization_level` is `opt_level`; "
        "fp8 itself is refused in this version",
    ),
    AskedName(kind="method", documented="to_kwargs()", home="KwargsHandler"),
    AskedName(kind="class", documented="DistributedType", home="accelfn"),
    *_rows("class", "DynamoBackend", "LoggerType", "PrecisionType", "RNGType", home="accelfn"),
    AskedName(
        kind="class", documented="PartialState", here="Context", home="accelfn", note="passed, not shared"
    ),
    AskedName(
        kind="class", documented="AcceleratorState", here="Context", home="accelfn", note="passed, not shared"
    ),
    *_rows("class", "GeneralTracker", home="accelfn"),
)

_FUNCTIONS = (
    AskedName(
        kind="function",
        documented="gather_object(object)",
        here="gather_object(ctx, obj)",
        home="accelfn",
        note="always a list; what is no list counts as a list of one",
    ),
    AskedName(
        kind="function",
        documented="slice_tensors(data, slice)",
        here="slice_tensors(tree, s)",
        home="accelfn",
    ),
    AskedName(
        kind="function",
        documented="load_checkpoint_and_dispatch"
        "(model, checkpoint, device_map=None, no_split_module_classes=None)",
        here="load_checkpoint_and_dispatch"
        "(model, checkpoint, device_map=None, max_memory=None, no_split_module_classes=None)",
        home="accelfn",
        note="`max_memory` stands between in Accelerate too; the document passes the others by name",
    ),
    *_rows(
        "function",
        "init_empty_weights()",
        "load_checkpoint_in_model",
        home="accelfn",
    ),
)

_COMMANDS = (
    AskedName(
        kind="command",
        documented="accelerate launch script.py --argument",
        here="accelfn launch script.py --argument",
        home="command line",
    ),
    AskedName(
        kind="command",
        documented="accelerate launch --mixed_precision bf16 script.py",
        here="accelfn launch --mixed_precision bf16 script.py",
        home="command line",
    ),
    AskedName(
        kind="command",
        documented="accelerate launch --config_file file.yaml script.py",
        here="accelfn launch --config_file file.yaml script.py",
        home="command line",
    ),
    *(
        AskedName(
            kind="command",
            documented=f"accelerate {rest}",
            here=f"accelfn {rest}",
            home="command line",
        )
        for rest in ("config", "test", "test --config_file file.yaml")
    ),
)

_VARIABLES = _rows(
    "variable",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    home="environment",
)

ASKED = (
    *_ARGUMENTS,
    *_METHODS,
    *_PROPERTIES,
    *_ATTRIBUTES,
    *_CLASSES,
    *_FUNCTIONS,
    *_COMMANDS,
    *_VARIABLES,
)


def tables(asked: Sequence[AskedName] = ASKED) -> str:
    """Write the tables of the page, one for each kind."""
    lines: list[str] = []
    for kind, title in _TITLES.items():
        lines += [f"## {title}", "", "| As documented | Here | Remark |", "| --- | --- | --- |"]
        for one in asked:
            if one.kind == kind:
                lines.append(f"| `{_owned(one, one.documented)}` | {_where(one)} | {one.note} |")
        lines.append("")
    return "\n".join(lines)


def _owned(one: AskedName, form: str) -> str:
    return f"{one.home}.{form}" if one.kind == "method" and one.home != "Accelerator" else form


def _where(one: AskedName) -> str:
    if one.part:
        return f"not yet: waits for {one.part}"
    if one.missing.startswith("refused: "):
        return f"not yet: {one.missing.removeprefix('refused: ')}"
    if one.missing in (f"no {one.kind}", f"no argument {one.name}"):
        return "not yet"
    if one.missing:
        return f"there, but {one.missing}"
    if one.here:
        return f"`{one.here}`"
    if one.kind == "method" and one.home == "Accelerator" and one.name in accelfn.__all__:
        return "there, and as a function"
    return f"there, in `{one.home}`" if one.home.startswith("accelfn.") else "there"


if __name__ == "__main__":
    print(tables(), end="")
