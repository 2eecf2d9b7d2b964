"""Simulate a forward and backward pass on ranks that don't exist: saved activations and traffic.

A copy of the model, of tensors without memory, is spread over ranks by the functions that spread a real one.
It runs once, and collectives are counted instead of performed.
"""

from __future__ import annotations

import copy
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.attention import apply_attention
from accelfn.parallel.forward import MixedPrecisionForward
from accelfn.parallel.parameters import named, retie
from accelfn.parallel.pipeline_plan import PipelinePlan
from accelfn.parallel.plan import ModelPlan
from accelfn.parallel.tensor import TensorPlan, apply_tensor
from accelfn.tree import is_dtensor, map_tensors

if TYPE_CHECKING:
    import torch.distributed as dist


class StageCost(NamedTuple):
    """Activations and traffic of one stage in the forward and backward pass of a batch, in bytes.

    Attributes:
        kept: Tensors that autograd saves until the backward pass, without parameters and buffers; and the
            inputs of recomputed blocks and stages.
        recomputed: Additional activations of the largest recomputed block, in its backward pass.
        received: Activations from the stage before, which get as many bytes of gradients back.
        moved: Bytes received by collectives, by axis.
    """

    kept: int
    recomputed: int
    received: int
    moved: Mapping[str, int]


def dry_run(
    ctx: Context,
    model: nn.Module,
    plans: Sequence[ModelPlan],
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Any] | None,
) -> tuple[StageCost, ...]:
    """Return the activations and traffic of each stage for a batch. Pure.

    Ranks: local.

    Args:
        ctx: The mesh, the device and the precision.
        model: Not prepared yet; not changed. Simulated in train mode.
        plans: Plans of the model for each place along "pp".
        batch: Argument of the loss function, with tensors of any device; only shapes and dtypes count.
        loss_fn: Called with the model and the batch, returns a tree of tensors; those with a gradient are
            differentiated. None to call the model with the batch.

    Returns:
        A record for each stage; one without a pipeline.

    Raises:
        ConfigurationError: The computation depends on values, or experts are spread over ranks.
        Exception: Raised by the loss function or the model.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    if any(plan.experts is not None for plan in plans):
        raise ConfigurationError(
            "plan_memory: the rows that reach a rank's experts depend on values, and so does the memory of a "
            "batch. Leave batch out where ep_size is above 1."
        )
    plan = plans[0]
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    traffic = _Traffic()
    tensor = _merge_tensor_plans(plans)
    attention = plan.attention
    with ExitStack() as stack:
        # Before the fake mode: a device mesh reads its own tensor.
        tp = None if tensor is None else stack.enter_context(_absent_ranks("tp", tensor.size, traffic))
        seq = None
        if attention is not None:
            seq = stack.enter_context(_absent_ranks(attention.axis, attention.size, traffic))
        stack.enter_context(fakes)
        stack.enter_context(torch.enable_grad())
        twin = _copy(model, plans, ctx.device)
        if tensor is not None and tp is not None:
            before = named(twin)
            apply_tensor(twin, tensor, tp.mesh)
            retie(before, twin)
        if attention is not None and seq is not None:
            names = (
                name for other in plans if other.attention is not None for name in other.attention.modules
            )
            everywhere = attention._replace(modules=tuple(dict.fromkeys(names)))
            apply_attention(twin, everywhere, seq.group, ring=traffic.attend_in_ring)
        _set_precision(ctx, twin, plans)
        recomputed = {name for other in plans for name in other.recomputed}
        recorder = _Recorder(twin, plan.pipeline, recomputed, traffic)
        fake_batch = _without_memory(batch, ctx.device)
        try:
            with traffic, _FusedAttention():
                with recorder.recording():
                    result = _call(twin, fake_batch) if loss_fn is None else loss_fn(twin, fake_batch)
                kept = recorder.read()
                if traffic.axes:
                    _differentiate(result)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigurationError(
                f"plan_memory: the computation of {type(model).__name__} or loss_fn depends on values of "
                f"tensors ({error}), which a plan doesn't have. Leave batch out, or pass a loss_fn that "
                "calls the model without that."
            ) from error
    return tuple(
        StageCost(held, again, received, moved)
        for (held, again, received), moved in zip(kept, traffic.moved, strict=True)
    )


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
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _copy(model: nn.Module, plans: Sequence[ModelPlan], device: torch.device) -> nn.Module:
    """Return a copy of a model with fake tensors, in the dtypes in which it computes. Keeps ties and strides.

    Runs inside of the fake mode.
    """
    shards = [plan.shard for plan in plans if plan.shard is not None]
    whole = {name for shard in shards for name in shard.ignored}
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dtype = tensor.dtype
        is_parameter = isinstance(tensor, nn.Parameter)
        if shards and is_parameter and name not in whole and dtype.is_floating_point:
            dtype = shards[0].param_dtype or dtype
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
        memo[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(model, memo).train()


def _merge_tensor_plans(plans: Sequence[ModelPlan]) -> TensorPlan | None:
    """Merge the plans of all stages."""
    found = [plan.tensor for plan in plans if plan.tensor is not None]
    if not found:
        return None
    return found[0]._replace(
        styles={name: style for plan in found for name, style in plan.styles.items()},
        heads={name: counts for plan in found for name, counts in plan.heads.items()},
        logits=frozenset(name for plan in found for name in plan.logits),
        follows={name: leader for plan in found for name, leader in plan.follows.items()},
    )


def _set_precision(ctx: Context, model: nn.Module, plans: Sequence[ModelPlan]) -> None:
    """Compute under autocast, or with the casts of FSDP."""
    shards = [plan.shard for plan in plans if plan.shard is not None]
    if not shards:
        if ctx.precision.mode != "no":
            model.forward = MixedPrecisionForward(model.forward, ctx.precision, ctx.device.type)
        return
    policy = shards[0]

    def cast_to(tree: Any, dtype: torch.dtype) -> Any:
        return map_tensors(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = cast("torch.dtype", policy.param_dtype)
        return cast_to(args, dtype), cast_to(kwargs, dtype)

    if policy.cast_inputs and policy.param_dtype is not None:
        for name in {name for shard in shards for name in shard.units}:
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
    axis: Literal["tp", "cp", "sp"], size: int, traffic: _Traffic
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


class _Traffic(TorchDispatchMode):
    """Counts the bytes that collectives receive along planned axes, by the running stage.

    Attributes:
        axes: Name and size of the axis, by the name of its group.
        moved: Bytes by axis, for each stage.
        stage: The running stage.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.axes: dict[str, tuple[str, int]] = {}
        self.moved: list[Counter[str]] = [Counter()]
        self.stage = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "_local_tensor") or kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # called again with the local tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and args and args[-1] in self.axes:
            axis, size = self.axes[args[-1]]
            name = func._schema.name.partition("::")[2]
            self.moved[self.stage][axis] += _received(name, args[0].nbytes, size)
        return result

    def attend_in_ring(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, **options: Any
    ) -> torch.Tensor:
        """Replace :func:`accelfn.parallel.attention.ring_attention`, which needs processes."""
        return cast("torch.Tensor", cast("Any", _Ring).apply(query, key, value, self, group.size()))


class _Ring(torch.autograd.Function):
    """Memory and traffic of ring attention: keys and values twice, and their gradients in float32."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, traffic: _Traffic, size: int
    ) -> torch.Tensor:
        # Contiguous, as on all ranks except the last one, so that joining the heads copies.
        output = query.new_empty(query.shape)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.settings = traffic, size
        traffic.moved[traffic.stage]["cp"] += (size - 1) * (key.nbytes + value.nbytes)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        traffic, size = ctx.settings
        query, key, value, _, _ = ctx.saved_tensors
        for tensor in (key, value):
            traffic.moved[traffic.stage]["cp"] += (size - 1) * tensor.nbytes + size * 4 * tensor.numel()
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


def _received(collective: str, size: int, num_ranks: int) -> int:
    """Return the bytes that a rank receives in a ring collective of tensors of ``size`` bytes."""
    others = num_ranks - 1
    if collective.startswith("all_gather"):
        return size * others
    return (2 if collective.startswith("all_reduce") else 1) * size * others // num_ranks


class _FusedAttention(TorchFunctionMode):
    """Removes dropout from attention: with it, no CPU kernel saves the tensors that GPU kernels do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:])[: len(args)], {**kwargs}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class _Saved:
    """A tensor saved by autograd; dead as soon as autograd releases it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Recorder:
    """Records the tensors that a forward pass saves, for each stage."""

    def __init__(
        self, model: nn.Module, pipeline: PipelinePlan | None, recomputed: set[str], traffic: _Traffic
    ) -> None:
        self._traffic = traffic
        num_stages = 1 if pipeline is None else len(pipeline.stages)
        traffic.moved = [Counter() for _ in range(num_stages)]
        self._own = {_storage(tensor)._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._block = ""
        self._saved: list[tuple[weakref.ref[_Saved], int, str]] = []
        self._given: list[dict[int, Any]] = [{} for _ in range(num_stages)]
        self._received = [0] * num_stages
        # Before hooks that change the inputs: these are the tensors that the stage before sends.
        for stage in range(1, num_stages):
            first = model.get_submodule(cast("PipelinePlan", pipeline).stages[stage].blocks[0])
            first.register_forward_pre_hook(self._enter_stage(stage), with_kwargs=True, prepend=True)
        for name in recomputed:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._enter_block(name), with_kwargs=True)
            block.register_forward_hook(self._leave_block)

    def _enter_stage(self, stage: int) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            sent: torch.Tensor = (*args, *kwargs.values())[0]
            self._traffic.stage = stage
            self._received[stage] = _local(sent).nbytes
            for side in (stage - 1, stage):
                self._keep(sent, side)
            if sent.requires_grad:
                cast("Any", sent).register_hook(self._return_to(stage - 1))

        return enter

    def _return_to(self, stage: int) -> Callable[[torch.Tensor], None]:
        def enter(gradient: torch.Tensor) -> None:
            self._traffic.stage = stage

        return enter

    def _enter_block(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._block = name
            for leaf in _pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._keep(leaf, self._traffic.stage)

        return enter

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        self._block = ""

    def _keep(self, tensor: torch.Tensor, stage: int) -> None:
        storage = _storage(tensor)
        if storage._cdata not in self._own:
            self._given[stage][storage._cdata] = storage

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.append((weakref.ref(saved), self._traffic.stage, self._block))
        return saved

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Record what autograd saves inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def read(self) -> list[tuple[int, int, int]]:
        """Return kept, recomputed and received bytes by stage, while the result is alive."""
        kept = [{key: storage.nbytes() for key, storage in given.items()} for given in self._given]
        blocks: list[dict[str, dict[int, int]]] = [{} for _ in kept]
        for reference, stage, block in self._saved:
            saved = reference()
            if saved is None:
                continue
            storage = _storage(saved.tensor)
            if storage._cdata not in self._own:
                home = blocks[stage].setdefault(block, {}) if block else kept[stage]
                home[storage._cdata] = storage.nbytes()
        return [
            (
                sum(held.values()),
                max(
                    (sum(size for key, size in block.items() if key not in held) for block in own.values()),
                    default=0,
                ),
                received,
            )
            for held, own, received in zip(kept, blocks, self._received, strict=True)
        ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return cast("Any", tensor)._local_tensor if is_dtensor(tensor) else tensor


def _storage(tensor: torch.Tensor) -> Any:
    return _local(tensor).untyped_storage()
