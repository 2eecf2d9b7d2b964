"""Where a program runs: the mesh of ranks, what a rank is, and the options of the context."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accelfn.testing.programs.draft import Draft
from accelfn.testing.programs.grammar import Feature, Program, Rule, feature, together

MAX_RANKS = 4
# Which options of the FSDP plugin the feature "fsdp" stands for.
_FSDP: Mapping[str, str] = MappingProxyType(
    {
        "": "",
        "recompute": ", activation_checkpointing=True",
        "offload": ", cpu_offload=True",
        "whole": ", reshard_after_forward=False",
        "one_unit": ', auto_wrap_policy="NO_WRAP"',
    }
)
_DDP: Mapping[str, str] = MappingProxyType(
    {
        "find_unused": "find_unused_parameters=True",
        "bucket_view": "gradient_as_bucket_view=True",
        "static": "static_graph=True",
        "buckets": "bucket_cap_mb=0.001",
    }
)


def layouts(
    *, tensor_plan: Mapping[str, str] | None, sequence: Mapping[str, int] | None
) -> tuple[Feature, ...]:
    """Return the features of the layout.

    Args:
        tensor_plan: Of the model's layers, for ranks along ``tp``; None: there is no such axis.
        sequence: Dimension of the sequence in each tensor of a batch, for ranks along ``cp`` and ``sp``;
            None: there are no such axes.
    """

    @feature("dp", (1, 2, 3, 4), is_axis=True)
    def dp(p: Program, draft: Draft) -> None:
        """Write the replicas, each with its own data."""
        _axis(draft, "dp_replicate_size", p["dp"])

    @feature("shard", (1, 2), is_axis=True)
    def shard(p: Program, draft: Draft) -> None:
        """Write the ranks that share parameters by FSDP, each with its own data."""
        _axis(draft, "dp_shard_size", p["shard"])
        if p["shard"] > 1:
            plugin = f"af.FullyShardedDataParallelPlugin(fsdp_version=2{_FSDP[p['fsdp']]})"
            draft.mesh["fsdp_plugin"] = plugin

    @feature("tp", (1, 2) if tensor_plan else (1,), is_axis=True, is_neutral=True)
    def tp(p: Program, draft: Draft) -> None:
        """Write the ranks that share layers."""
        _axis(draft, "tp_size", p["tp"])
        if p["tp"] > 1:
            draft.words.setdefault("tensor_plan", repr(dict(tensor_plan or {})))
            plan = "af.config.TorchTensorParallelConfig(plan={{tensor_plan}})"
            draft.names.setdefault("axes", []).append(f"tp_handler={plan}")

    def in_sequences(name: str) -> Feature:
        @feature(name, (1, 2) if sequence else (1,), is_axis=True, is_neutral=True)
        def axis(p: Program, draft: Draft) -> None:
            """Write the ranks that share sequences."""
            _axis(draft, f"{name}_size", p[name])
            if p[name] > 1:
                draft.options["dataloader_config"] = f"af.DataLoaderConfiguration(sequence={sequence!r})"

        return axis

    @feature("pp", (1, 2), is_axis=True, is_neutral=True)
    def pp(p: Program, draft: Draft) -> None:
        """Write the ranks that have a stage of the model each."""
        _axis(draft, "pp_size", p["pp"])

    return dp, shard, tp, in_sequences("cp"), in_sequences("sp"), pp, _world, _fsdp, _ddp, _precision, _exact


def _axis(draft: Draft, name: str, size: int) -> None:
    axes = draft.names.setdefault("axes", [])
    if size > 1:
        axes.append(f"{name}={size}")


@feature("world", ("processes", "memory"), is_layout=True, is_neutral=True)
def _world(p: Program, draft: Draft) -> None:
    """What a rank is; an argument of ``run_ranks``."""


@feature("fsdp", tuple(_FSDP), is_neutral=True)
def _fsdp(p: Program, draft: Draft) -> None:
    """Options of FSDP; ``shard`` writes them."""


@feature("ddp", ("", *_DDP), is_neutral=True)
def _ddp(p: Program, draft: Draft) -> None:
    if p["ddp"]:
        handler = f"af.config.DistributedDataParallelKwargs({_DDP[p['ddp']]})"
        draft.options["kwargs_handlers"] = f"[{handler}]"


@feature("precision", ("no", "bf16"))
def _precision(p: Program, draft: Draft) -> None:
    if p["precision"] != "no":
        draft.options["mixed_precision"] = repr(p["precision"])


@feature("exact", (False, True), is_neutral=True)
def _exact(p: Program, draft: Draft) -> None:
    """Exact mode, which has the same bits at any number of ranks."""
    if p["exact"]:
        number = p["accumulation"] * p["dp"]
        draft.options["reduction"] = f"af.config.CanonicalReduction(num_microbatches={number})"
        draft.options.pop("gradient_accumulation_steps", None)


def is_replicated(p: Program) -> bool:
    """Return whether each rank has all of the model, and its own data."""
    return p.num_ranks == p["dp"]


RULES: tuple[Rule, ...] = (
    Rule(f"there are at most {MAX_RANKS} ranks", lambda p: p.num_ranks > MAX_RANKS),
    Rule("ranks share a sequence along one axis", together("cp", "sp")),
    Rule("ranks in memory have replicas", lambda p: p["world"] == "memory" and p["dp"] == 1),
    Rule("ranks in memory are of one kind", together("world=memory", "shard tp cp sp pp workers ddp")),
    Rule("options of DDP are for replicas", together("ddp", "shard tp pp exact")),
    Rule("one rank has no replicas", together("ddp !dp !cp !sp")),
    Rule("a static graph is of replicas with data of their own", together("ddp=static !dp")),
    Rule("options of FSDP are for shards", together("fsdp !shard")),
    Rule("exact mode is for replicas", together("exact", "shard tp cp sp pp dp=1")),
    Rule(
        "ranks that share a sequence have losses with weights",
        lambda p: p["cp"] * p["sp"] > 1 and not p["weighted"],
        mend="weighted=True",
    ),
)


def world_arguments(p: Program) -> str:
    """Return the arguments of ``run_ranks`` for the world of a program, as source."""
    draft = p.draft()
    made = dict(draft.mesh)
    if not is_replicated(p):
        made["parallelism_config"] = "af.ParallelismConfig({{axes}})"
    return _arguments(draft, made)


def context_arguments(p: Program) -> str:
    """Return the arguments of ``ctx.replace`` for a program, as source."""
    draft = p.draft()
    return _arguments(draft, draft.options)


def _arguments(draft: Draft, made: Mapping[str, Any]) -> str:
    return draft.text(", ".join(f"{name}={value}" for name, value in made.items())).strip()
