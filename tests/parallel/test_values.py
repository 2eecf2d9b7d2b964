"""Models without memory are prepared, take rank 0's values or those of files, and aren't used before."""

# torch leaves backward and manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.errors import ConfigurationError, MismatchError, RemoteRankError
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.parallel import shard_models as lm
from tests.parallel import tensor_models as tm

PLUGIN = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
UNFILLED = r"embed\.weight, positions\.weight, .* never got values\. Load them first"


class Model(tm.GPT):
    """A model with tied embeddings, a buffer in its state dict, and one that no file has."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("shift", torch.arange(tm.VOCABULARY) / 10, persistent=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(ids, positions) * self.scale + self.shift


def on_meta() -> Any:
    with af.init_empty_weights():
        return Model()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**lm.whole(model), **dict(model.named_buffers())}


def is_equal(model: nn.Module, expected: nn.Module) -> bool:
    found = tensors(model)
    return all(torch.equal(found[name], one) for name, one in tensors(expected).items())


def check(ctx: Context, folder: Path) -> None:
    # Rank 0 has loaded the model; the others, as transformers has it, have computed what no file has.
    model: Any = Model() if ctx.rank == 0 else on_meta()
    if ctx.rank:
        model.scale = torch.empty_like(model.scale, device="meta")
    model = af.prepare_model(ctx, model)
    assert is_equal(model, Model())
    assert model.head.weight is model.embed.weight
    af.save_state(ctx, folder / "state", {"model": model})
    ids, _ = tm.make_batch(seed=1)

    # Nobody has loaded it: each rank reads its parts.
    model = af.prepare_model(ctx, on_meta())
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=UNFILLED):
            model(ids)
    af.load_state(ctx, folder / "state", {"model": model})
    assert is_equal(model, Model())
    model(ids)

    # A part that is left out is named.
    model = af.prepare_model(ctx, on_meta())
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name != "norm.bias":
                one.zero_()
    with pytest.raises(ConfigurationError, match=r"forward: norm\.bias came from the meta device"):
        model(ids)
    # And nobody saves what was never there over files that are good.
    for save in (
        lambda: af.save_model(ctx, model, folder / "weights"),
        lambda: af.save_state(ctx, folder / "state", {"model": model}),
        lambda: af.get_state_dict(ctx, model),
    ):
        with pytest.raises((ConfigurationError, RemoteRankError), match=r"norm\.bias came from the meta"):
            save()
    # The first rank has what all begin with.
    with pytest.raises(ConfigurationError, match=r"embed\.weight is on the meta device on rank 0, but has v"):
        af.prepare_model(ctx, on_meta() if ctx.rank == 0 else Model())
    check_replicas(ctx, folder)


def check_replicas(ctx: Context, folder: Path) -> None:
    """Each rank holds all of a model, and reads it."""
    if ctx.is_main_process:
        af.save_model(Context(), Model(), folder / "replicas")
    af.wait_for_everyone(ctx)
    model = on_meta()
    model = af.prepare_model(ctx, model, plan=af.plan_model(ctx, model, engine="ddp"))
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=UNFILLED):
            model(tm.make_batch(seed=1)[0])
    af.load_model(model, folder / "replicas")
    assert model.head.weight is model.embed.weight
    assert is_equal(getattr(model, "module", model), Model())
    # What no file has isn't there because replicas send it to each other.
    with torch.device("meta"):
        model = Model()
    model = af.prepare_model(ctx, model, plan=af.plan_model(ctx, model, engine="ddp"))
    af.load_model(model, folder / "replicas")
    with pytest.raises(ConfigurationError, match=r"forward: shift came from the meta device and never got"):
        model(tm.make_batch(seed=1)[0])
    model = af.prepare_model(ctx, on_meta(), evaluation_mode=True)
    if af.plan_model(ctx, model).engine == "ddp":
        with pytest.raises(ConfigurationError, match=r"prepare_model: embed\.weight, .* never got values"):
            af.prepare_model(ctx, model)
    # A rank that has loaded it doesn't fill the others.
    model = on_meta() if ctx.rank else Model()
    with pytest.raises(MismatchError, match="prepare_model of tensors on the meta device"):
        af.prepare_model(ctx, model, plan=af.plan_model(ctx, model, engine="ddp"))


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_take_their_parts_of_what_rank_0_or_a_file_holds(tp: int, tmp_path: Path) -> None:
    handler = af.config.TorchTensorParallelConfig(plan=tm.PLAN) if tp > 1 else None
    config = ParallelismConfig(dp_shard_size=2, tp_size=tp, tp_handler=handler)
    run_ranks(
        lambda ctx: check(ctx, tmp_path),
        2 * tp,
        "processes",
        fsdp_plugin=PLUGIN,
        parallelism_config=config,
        timeout_s=120,
    )


def test_replicas_that_are_threads_read_what_a_file_holds(tmp_path: Path) -> None:
    run_ranks(lambda ctx: check_replicas(ctx, tmp_path), 2)


def test_one_rank_gives_memory_too_and_keeps_ties(tmp_path: Path) -> None:
    af.save_model(Context(), Model(), tmp_path)
    model = af.prepare_model(Context(), on_meta())
    with pytest.raises(ConfigurationError, match=UNFILLED):
        model(tm.make_batch(seed=1)[0])
    af.load_model(model, tmp_path)
    assert model.head.weight is model.embed.weight
    assert is_equal(model, Model())


class Counted(TorchDispatchMode):
    """Counts the elements of the tensors that get memory inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func) and not result.is_meta:
            self.elements += local_of(result).numel()
        return result


def check_parts(ctx: Context, folder: Path) -> None:
    ids, _ = tm.make_batch(seed=1)
    model = on_meta()
    with Counted() as counted:
        model = af.prepare_model(ctx, model)
    assert counted.elements < 0.8 * sum(one.numel() for one in Model().parameters())
    for _ in range(2):
        with pytest.raises((ConfigurationError, RemoteRankError), match=r"came from the meta device and nev"):
            af.training.forward(ctx, model, ids)
    af.load_model(model, folder)
    assert torch.allclose(af.training.forward(ctx, model, ids), Model()(ids), atol=1e-5)
    # Values of rank 0; buffers of another device come along.
    model = af.prepare_model(ctx, Model() if ctx.rank == 0 else on_meta())
    assert torch.allclose(af.training.forward(ctx, model, ids), Model()(ids), atol=1e-5)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_rank_gets_memory_for_its_part_alone(axis: str, tmp_path: Path) -> None:
    af.save_model(Context(), Model(), tmp_path)
    handler = af.config.TorchTensorParallelConfig(plan=tm.PLAN)
    tp, pp = ParallelismConfig(tp_size=2, tp_handler=handler), ParallelismConfig(pp_size=2)
    config = tp if axis == "tp" else pp
    run_ranks(lambda ctx: check_parts(ctx, tmp_path), 2, "processes", parallelism_config=config)
