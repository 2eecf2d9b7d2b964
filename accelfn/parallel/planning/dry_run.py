"""Simulate a forward and backward pass on ranks that don't exist: saved activations and traffic.

A copy of the model, of tensors without memory, is spread over ranks by the functions that spread a real one.
It runs once, and collectives are counted instead of performed. Of many equal blocks three run: the first, one
that stands for those between, and the last.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils import _pytree

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts
from accelfn.parallel.plan import ModelPlan
from accelfn.parallel.planning.costs import Segment
from accelfn.parallel.planning.recorder import FusedAttention, Recorder
from accelfn.parallel.planning.repeats import find_repeats
from accelfn.parallel.pointers import named, retie
from accelfn.parallel.strategies.attention import apply_attention
from accelfn.parallel.strategies.fp8 import apply_fp8
from accelfn.parallel.strategies.fsdp_plan import ShardPlan
from accelfn.parallel.strategies.pipeline_plan import outer_blocks
from accelfn.parallel.strategies.precision import MixedPrecisionForward
from accelfn.parallel.strategies.tensor import apply_tensor
from accelfn.tree import map_tensors

if TYPE_CHECKING:
    import torch.distributed as dist


def dry_run(
    ctx: Context,
    model: nn.Module,
    facts: ModelFacts,
    plan: ModelPlan,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Any] | None,
    *,
    split: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> tuple[Segment, ...]:
    """Return the cost of the forward and backward pass of a batch, on ranks that have all blocks. Pure.

    Ranks: local.

    Args:
        ctx: The mesh, the device and the precision.
        model: Not prepared yet; not changed. Simulated in train mode.
        facts: Of the model.
        plan: Of the model without a pipeline.
        batch: Argument of the loss function, with tensors of any device; only shapes and dtypes count.
        loss_fn: Called with the model and the batch, returns a tree of tensors; those with a gradient are
            differentiated. None to call the model with the batch.
        split: Names of further modules whose calls begin segments, as those of blocks do.
        dtype: That an engine converts the model to; None for that of the plan.

    Raises:
        ConfigurationError: The computation depends on values, or experts are spread over ranks.
        Exception: Raised by the loss function or the model.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    if plan.experts is not None:
        raise ConfigurationError(
            "a plan with a batch: the rows that reach a rank's experts depend on values, and so does the "
            "memory of a batch. Leave batch out where ep_size is above 1."
        )
    blocks = outer_blocks(facts)
    starts = [*dict.fromkeys((*blocks, *split))]
    simulate = partial(_simulate, ctx, model, plan, batch, loss_fn, dtype, starts)
    if repeats := find_repeats(model, blocks):
        try:
            found = {segment.name: segment for segment in simulate(repeats)}
        # The model may need what all of its blocks do; if it fails with them too, that is raised below.
        except Exception:  # noqa: BLE001
            found = {}
        if [*found] == ["", *starts]:
            return tuple(replace(found[repeats.get(name, name)], name=name) for name in found)
    try:
        return tuple(simulate({}))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(
            f"a plan with a batch: the computation of {type(model).__name__} or loss_fn depends on values of "
            f"tensors ({error}), which a plan doesn't have. Leave batch out, or pass a loss_fn that "
            "calls the model without that."
        ) from error


def _simulate(
    ctx: Context,
    model: nn.Module,
    plan: ModelPlan,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Any] | None,
    dtype: torch.dtype | None,
    starts: Sequence[str],
    repeats: Mapping[str, str],
) -> Sequence[Segment]:
    """Run both passes of a copy of a model, where blocks that another stands for return its output."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder = Recorder()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.enable_grad())
        twin = _copy(model, plan.shard, dtype, ctx.device)
        if (tensor := plan.tensor) is not None:
            mesh, _ = stack.enter_context(_absent_ranks("tp", tensor.size, recorder))
            before = named(twin)
            apply_tensor(twin, tensor, mesh)
            retie(before, twin)
        if (attention := plan.attention) is not None:
            _, group = stack.enter_context(_absent_ranks(attention.axis, attention.size, recorder))
            apply_attention(twin, attention, group, ring=recorder.attend_in_ring)
        if plan.fp8 is not None:
            apply_fp8(twin, plan.fp8)
        if dtype is None:
            _set_precision(ctx, twin, plan.shard)
        _skip(twin, repeats)
        recorder.watch(twin, starts, plan.recomputed)
        fake_batch = _without_memory(batch, ctx.device)
        with recorder, FusedAttention():
            with recorder.forward_pass():
                result = _call(twin, fake_batch) if loss_fn is None else loss_fn(twin, fake_batch)
            _differentiate(result)
    return recorder.segments


def _skip(model: nn.Module, repeats: Mapping[str, str]) -> None:
    """Make blocks return the output of another one."""
    outputs: dict[str, Any] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs[name] = output

    def again(name: str, *args: Any, **kwargs: Any) -> Any:
        return map_tensors(lambda tensor: tensor.view_as(tensor), outputs[name])  # each has its own gradient

    for name in {*repeats.values()}:
        model.get_submodule(name).register_forward_hook(partial(keep, name))
    for name, other in repeats.items():
        model.get_submodule(name).forward = partial(again, other)


def _without_memory(batch: Any, device: torch.device) -> Any:
    """Return a batch of fake tensors; a tensor in several places stays one tensor."""
    fakes: dict[int, torch.Tensor] = {}

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
        return fakes[id(tensor)]

    return map_tensors(make, batch)


def _call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: by keyword, by place, or as its one argument."""
    if isinstance(batch, Mapping):
        return model(**cast("Mapping[str, Any]", batch))
    if isinstance(batch, (list, tuple)):
        return model(*cast("Sequence[Any]", batch))
    return model(batch)


def _differentiate(result: Any) -> None:
    """Run the backward pass of all tensors of a tree that require gradients."""
    leaves: list[Any] = _pytree.tree_leaves(result)
    roots = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _copy(
    model: nn.Module, shard: ShardPlan | None, to_dtype: torch.dtype | None, device: torch.device
) -> nn.Module:
    """Return a copy of a model with fake tensors, in the dtypes in which it computes. Keeps ties and strides.

    Runs inside of the fake mode.
    """
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dtype, is_parameter = tensor.dtype, isinstance(tensor, nn.Parameter)
        if dtype.is_floating_point:
            gathered = shard.param_dtype if shard is not None and name not in shard.ignored else None
            dtype = to_dtype or (gathered if is_parameter else None) or dtype
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
        memo[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(model, memo).train()


def _set_precision(ctx: Context, model: nn.Module, shard: ShardPlan | None) -> None:
    """Compute under autocast, with the casts of FSDP, or both."""
    if ctx.precision.mode != "no" and (shard is None or shard.autocasts):
        model.forward = MixedPrecisionForward(model.forward, ctx.precision, ctx.device.type)
    if shard is None:
        return

    def cast_to(dtype: torch.dtype, tree: Any) -> Any:
        return map_tensors(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)

    if shard.cast_inputs and (param_dtype := shard.param_dtype) is not None:
        for name in shard.units:
            model.get_submodule(name).register_forward_pre_hook(
                lambda module, args, kwargs: cast_to(param_dtype, (args, kwargs)), with_kwargs=True
            )
    if (output_dtype := shard.output_dtype) is not None:
        model.register_forward_hook(lambda module, args, output: cast_to(output_dtype, output))


@contextmanager
def _absent_ranks(
    axis: str, size: int, recorder: Recorder
) -> Generator[tuple[Any, dist.ProcessGroup], None, None]:
    """Yield the mesh and the group of ranks that don't exist; collectives between them are recorded.

    Torch identifies a group by its name. The mesh must differ from all others, since torch caches results for
    equal meshes.
    """
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh

    torchs = cast("Any", torch)._C._distributed_c10d
    name = f"planned {axis} {uuid.uuid4().hex}"
    group = cast("Any", dist.ProcessGroup)(0, size)
    backend = torchs.FakeProcessGroup._create_internal(0, size)  # a group without backends has no name
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    torchs._register_process_group(name, group)
    try:
        with unset_fake_temporarily():  # a device mesh reads its own tensor
            mesh: Any = cast("Any", DeviceMesh)(
                "cpu", torch.arange(size), mesh_dim_names=(name,), _init_backend=False, _rank=0
            )
        mesh._dim_group_names = [name]
        recorder.axes[name] = axis, size
        yield mesh, group
    finally:
        torchs._unregister_process_group(name)
