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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, owner_of
from accelfn.parallel.plan import ModelPlan
from accelfn.parallel.planning.costs import StepCost
from accelfn.parallel.planning.recorder import CountedTraffic, FusedAttention, Recorder
from accelfn.parallel.planning.repeats import Repeats, find_repeats
from accelfn.parallel.pointers import named, retie
from accelfn.parallel.strategies.attention import apply_attention
from accelfn.parallel.strategies.fp8 import Fp8Plan, apply_fp8
from accelfn.parallel.strategies.pipeline_plan import outer_blocks
from accelfn.parallel.strategies.precision import MixedPrecisionForward
from accelfn.parallel.strategies.tensor import TensorPlan, apply_tensor
from accelfn.tree import map_tensors

if TYPE_CHECKING:
    import torch.distributed as dist


def dry_run(
    ctx: Context,
    model: nn.Module,
    facts: ModelFacts,
    plans: Sequence[ModelPlan],
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Any] | None,
    dtype: torch.dtype | None = None,
) -> StepCost:
    """Return the cost of the forward and backward pass of a batch. Pure.

    Ranks: local.

    Args:
        ctx: The mesh, the device and the precision.
        model: Not prepared yet; not changed. Simulated in train mode.
        facts: Of the model.
        plans: Plans of the model for each place along "pp".
        batch: Argument of the loss function, with tensors of any device; only shapes and dtypes count.
        loss_fn: Called with the model and the batch, returns a tree of tensors; those with a gradient are
            differentiated. None to call the model with the batch.
        dtype: That an engine converts the model to; None for that of the plans.

    Raises:
        ConfigurationError: The computation depends on values, or experts are spread over ranks.
        Exception: Raised by the loss function or the model.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    if any(plan.experts is not None for plan in plans):
        raise ConfigurationError(
            "a plan with a batch: the rows that reach a rank's experts depend on values, and so does the "
            "memory of a batch. Leave batch out where ep_size is above 1."
        )
    blocks = outer_blocks(facts)
    pipeline = plans[0].pipeline
    starts = dict.fromkeys((*blocks, *(() if pipeline is None else pipeline.split)))
    repeats = find_repeats(model, blocks)
    if repeats:
        kept = {name for run in repeats for name in run.names[len(run.kept) :]}
        try:
            short = _simulate(ctx, model, plans, batch, loss_fn, dtype, [*starts], repeats)
        # The model may count on all of its blocks; if it fails with them too, that is raised below.
        except Exception:  # noqa: BLE001
            short = None
        if short is not None and _ran_once(short, [name for name in starts if name not in kept]):
            return _prolong(short, repeats)
    try:
        return _simulate(ctx, model, plans, batch, loss_fn, dtype, [*starts])
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(
            f"a plan with a batch: the computation of {type(model).__name__} or loss_fn depends on values of "
            f"tensors ({error}), which a plan doesn't have. Leave batch out, or pass a loss_fn that "
            "calls the model without that."
        ) from error


def _ran_once(cost: StepCost, blocks: Sequence[str]) -> bool:
    return [name for segment in cost.segments for name in segment.names if name] == [*blocks]


def _prolong(cost: StepCost, repeats: Sequence[Repeats]) -> StepCost:
    """Return the cost of a model from that of the shortened one."""
    names = {name: names for run in repeats for name, names in run.stands_for.items()}
    return StepCost(
        tuple(segment._replace(names=names.get(segment.names[0], segment.names)) for segment in cost.segments)
    )


def _simulate(
    ctx: Context,
    model: nn.Module,
    plans: Sequence[ModelPlan],
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Any] | None,
    dtype: torch.dtype | None,
    starts: Sequence[str],
    repeats: Sequence[Repeats] = (),
) -> StepCost:
    """Run both passes of a copy of a model, in which of ``repeats`` only the kept blocks are left."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    gone = {name for run in repeats for name in run.names[len(run.kept) :]}

    def is_here(name: str) -> bool:
        return owner_of(name, gone) is None

    plan = plans[0]
    traffic = CountedTraffic()
    tensor = _merge_tensor_plans(plans, is_here)
    attention = plan.attention
    with ExitStack() as stack:
        # Before the fake mode: a device mesh reads its own tensor.
        tp = None if tensor is None else stack.enter_context(_absent_ranks("tp", tensor.size, traffic))
        seq = None
        if attention is not None:
            seq = stack.enter_context(_absent_ranks(attention.axis, attention.size, traffic))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.enable_grad())
        twin = _copy(model, plans, dtype, ctx.device, repeats)
        if tensor is not None and tp is not None:
            before = named(twin)
            apply_tensor(twin, tensor, tp.mesh)
            retie(before, twin)
        if attention is not None and seq is not None:
            names = (
                name for other in plans if other.attention is not None for name in other.attention.modules
            )
            everywhere = attention._replace(modules=tuple(filter(is_here, dict.fromkeys(names))))
            apply_attention(twin, everywhere, seq.group, ring=traffic.attend_in_ring)
        if (fp8 := _merge_fp8_plans(plans, is_here)) is not None:
            apply_fp8(twin, fp8)
        if dtype is None:
            _set_precision(ctx, twin, plans, is_here)
        recomputed = {name for other in plans for name in other.recomputed if is_here(name)}
        recorder = Recorder(twin, [name for name in starts if is_here(name)], recomputed, traffic)
        fake_batch = _without_memory(batch, ctx.device)
        with traffic, FusedAttention():
            with recorder.recording():
                result = _call(twin, fake_batch) if loss_fn is None else loss_fn(twin, fake_batch)
            saved = recorder.read()
            _differentiate(result)
    return recorder.cost(saved)


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
    model: nn.Module,
    plans: Sequence[ModelPlan],
    to_dtype: torch.dtype | None,
    device: torch.device,
    repeats: Sequence[Repeats],
) -> nn.Module:
    """Return a copy of a model with fake tensors, in the dtypes in which it computes. Keeps ties and strides.

    Of ``repeats`` it has the kept blocks only, under their own names.

    Runs inside of the fake mode.
    """
    shards = [plan.shard for plan in plans if plan.shard is not None]
    whole = {name for shard in shards for name in shard.ignored}
    gone = {name for run in repeats for name in run.names[len(run.kept) :]}
    memo: dict[int, Any] = {id(model.get_submodule(name)): None for name in gone}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if owner_of(name, gone) is not None:
            continue
        dtype = tensor.dtype
        is_parameter = isinstance(tensor, nn.Parameter)
        if to_dtype is not None and dtype.is_floating_point:
            dtype = to_dtype
        elif shards and is_parameter and name not in whole and dtype.is_floating_point:
            dtype = shards[0].param_dtype or dtype
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
        memo[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
    twin = copy.deepcopy(model, memo)
    for run in repeats:
        modules = cast("Any", twin.get_submodule(run.container))._modules
        for key in run.keys[len(run.kept) :]:
            del modules[key]
    return twin.train()


def _merge_tensor_plans(plans: Sequence[ModelPlan], is_here: Callable[[str], bool]) -> TensorPlan | None:
    """Merge the plans of all stages, for the modules that are left."""
    found = [plan.tensor for plan in plans if plan.tensor is not None]
    if not found:
        return None
    return found[0]._replace(
        styles={name: style for plan in found for name, style in plan.styles.items() if is_here(name)},
        heads={name: counts for plan in found for name, counts in plan.heads.items() if is_here(name)},
        logits=frozenset(name for plan in found for name in plan.logits if is_here(name)),
        follows={name: leader for plan in found for name, leader in plan.follows.items() if is_here(name)},
    )


def _merge_fp8_plans(plans: Sequence[ModelPlan], is_here: Callable[[str], bool]) -> Fp8Plan | None:
    """Merge the plans of all stages, for the modules that are left."""
    found = [plan.fp8 for plan in plans if plan.fp8 is not None]
    if not found:
        return None
    return found[0]._replace(
        converted=tuple(dict.fromkeys(name for plan in found for name in plan.converted if is_here(name))),
        norms=tuple(dict.fromkeys(name for plan in found for name in plan.norms if is_here(name))),
    )


def _set_precision(
    ctx: Context, model: nn.Module, plans: Sequence[ModelPlan], is_here: Callable[[str], bool]
) -> None:
    """Compute under autocast, with the casts of FSDP, or both."""
    shards = [plan.shard for plan in plans if plan.shard is not None]
    if ctx.precision.mode != "no" and (not shards or shards[0].autocasts):
        model.forward = MixedPrecisionForward(model.forward, ctx.precision, ctx.device.type)
    if not shards:
        return
    policy = shards[0]

    def cast_to(tree: Any, dtype: torch.dtype) -> Any:
        return map_tensors(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = cast("torch.dtype", policy.param_dtype)
        return cast_to(args, dtype), cast_to(kwargs, dtype)

    if policy.cast_inputs and policy.param_dtype is not None:
        for name in {name for shard in shards for name in shard.units if is_here(name)}:
            model.get_submodule(name).register_forward_pre_hook(cast_inputs, with_kwargs=True)
    if policy.output_dtype is not None:
        dtype = policy.output_dtype
        model.register_forward_hook(lambda module, args, output: cast_to(output, dtype))


class _Ranks(NamedTuple):
    """The ranks along one axis, as mesh and process group."""

    mesh: Any
    group: dist.ProcessGroup


@contextmanager
def _absent_ranks(
    axis: Literal["tp", "cp", "sp"], size: int, traffic: CountedTraffic
) -> Generator[_Ranks, None, None]:
    """Yield ranks that don't exist; collectives between them are counted.

    Torch identifies a group by its name. The mesh must differ from all others, since torch caches results for
    equal meshes.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torchs = cast("Any", torch)._C._distributed_c10d
    name = f"planned {axis} {uuid.uuid4().hex}"
    group = cast("Any", dist.ProcessGroup)(0, size)
    backend = torchs.FakeProcessGroup._create_internal(0, size)  # a group without backends has no name
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    torchs._register_process_group(name, group)
    try:
        mesh: Any = cast("Any", DeviceMesh)(
            "cpu", torch.arange(size), mesh_dim_names=(name,), _init_backend=False, _rank=0
        )
        mesh._dim_group_names = [name]
        traffic.axes[name] = axis, size
        yield _Ranks(mesh, group)
    finally:
        torchs._unregister_process_group(name)
