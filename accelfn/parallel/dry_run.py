"""A forward and backward pass of a model on ranks that aren't there: what it keeps, and what it sends.

A copy of the model, of tensors without memory, is spread over ranks by the functions that spread a real one.
It is run once, and collectives are counted in the place of being done.
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
    """What one stage of a model keeps and receives in the forward and backward pass of a batch, in bytes.

    Attributes:
        kept: From the forward until the backward: what autograd saves, parameters and buffers left out, and
            what recomputed blocks and other stages are given.
        recomputed: Of the largest recomputed block on top, while the backward passes it.
        received: Of the stage before; as much comes back to that one as the gradient.
        moved: Received by collectives, by axis.
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
    """Return what each stage keeps and receives in the forward and backward pass of a batch. Pure.

    Ranks: local.

    Args:
        ctx: The mesh, the device and the precision.
        model: Not prepared yet, and not changed; in train mode here whatever its own mode is.
        plans: Of the model, at each place along "pp" that is planned for.
        batch: Of the loss function; tensors of any device, of which shapes and dtypes are used.
        loss_fn: Called with the model and the batch, returns a tree of tensors, of which those that have a
            gradient are differentiated; None to call the model with the batch.

    Returns:
        A record for each stage; one, where there is no pipeline.

    Raises:
        ConfigurationError: What the model computes depends on values, or experts are spread over ranks.
        Exception: As the loss function and the model.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    if any(plan.experts is not None for plan in plans):
        raise ConfigurationError(
            "plan_memory: how many rows reach the experts of a rank is known in each step alone, and with it "
            "what a batch takes. Leave batch out where ep_size is above 1."
        )
    plan = plans[0]
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    traffic = _Traffic()
    tensor = _merge_tensor_plans(plans)
    attention = plan.attention
    with ExitStack() as stack:
        # Before tensors have no memory: a device mesh looks at its own.
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
            names = (name for one in plans if one.attention is not None for name in one.attention.modules)
            everywhere = attention._replace(modules=tuple(dict.fromkeys(names)))
            apply_attention(twin, everywhere, seq.group, ring=traffic.attend_in_ring)
        _set_precision(ctx, twin, plans)
        recorder = _Recorder(twin, plan.pipeline, {name for one in plans for name in one.recomputed}, traffic)
        given = _without_memory(batch, ctx.device)
        try:
            with traffic, _FusedAttention():
                with recorder.recording():
                    result = _call(twin, given) if loss_fn is None else loss_fn(twin, given)
                kept = recorder.read()
                if traffic.axes:
                    _differentiate(result)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigurationError(
                f"plan_memory: what {type(model).__name__} or loss_fn computes depends on the values of "
                f"tensors ({error}), which a plan doesn't have. Leave batch out, or pass a loss_fn that "
                "calls the model without what depends on them."
            ) from error
    return tuple(
        StageCost(held, again, received, moved)
        for (held, again, received), moved in zip(kept, traffic.moved, strict=True)
    )


def _without_memory(batch: Any, device: torch.device) -> Any:
    """Return a batch of new tensors; what is one tensor in several places is one here too."""
    made: dict[int, torch.Tensor] = {}

    def make(one: torch.Tensor) -> torch.Tensor:
        if id(one) not in made:
            new = torch.empty(one.shape, dtype=one.dtype, device=device)
            made[id(one)] = new.requires_grad_(one.requires_grad)
        return made[id(one)]

    return map_tensors(make, batch)


def _call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: by keyword, by place, or as its one argument."""
    if isinstance(batch, Mapping):
        return model(**cast("Mapping[str, Any]", batch))
    if isinstance(batch, (list, tuple)):
        return model(*cast("Sequence[Any]", batch))
    return model(batch)


def _differentiate(result: Any) -> None:
    """Run the backward pass of all tensors in a tree that have one."""
    leaves: list[Any] = _pytree.tree_leaves(result)
    roots = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])


def _copy(model: nn.Module, plans: Sequence[ModelPlan], device: torch.device) -> nn.Module:
    """Return a copy of a model, in the dtypes in which it computes, of tensors that have no memory.

    Inside of a mode that makes no others. Ties and strides stay.
    """
    shards = [plan.shard for plan in plans if plan.shard is not None]
    whole = {name for one in shards for name in one.ignored}
    memo: dict[int, Any] = {}
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        dtype = one.dtype
        is_parameter = isinstance(one, nn.Parameter)
        if shards and is_parameter and name not in whole and dtype.is_floating_point:
            dtype = shards[0].param_dtype or dtype
        made = torch.empty_strided(one.shape, one.stride(), dtype=dtype, device=device)
        memo[id(one)] = nn.Parameter(made, requires_grad=one.requires_grad) if is_parameter else made
    return copy.deepcopy(model, memo).train()


def _merge_tensor_plans(plans: Sequence[ModelPlan]) -> TensorPlan | None:
    """Return the plan of all stages together."""
    found = [plan.tensor for plan in plans if plan.tensor is not None]
    if not found:
        return None
    return found[0]._replace(
        styles={name: style for one in found for name, style in one.styles.items()},
        heads={name: counts for one in found for name, counts in one.heads.items()},
        logits=frozenset(name for one in found for name in one.logits),
        follows={name: leader for one in found for name, leader in one.follows.items()},
    )


def _set_precision(ctx: Context, model: nn.Module, plans: Sequence[ModelPlan]) -> None:
    """Compute under autocast, or cast inputs and outputs as FSDP does."""
    shards = [plan.shard for plan in plans if plan.shard is not None]
    if not shards:
        if ctx.precision.mode != "no":
            model.forward = MixedPrecisionForward(model.forward, ctx.precision, ctx.device.type)
        return
    policy = shards[0]

    def cast_to(tree: Any, dtype: torch.dtype) -> Any:
        return map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, tree)

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = cast("torch.dtype", policy.param_dtype)
        return cast_to(args, dtype), cast_to(kwargs, dtype)

    if policy.cast_inputs and policy.param_dtype is not None:
        for name in {name for one in shards for name in one.units}:
            model.get_submodule(name).register_forward_pre_hook(cast_inputs, with_kwargs=True)
    if policy.output_dtype is not None:
        dtype = policy.output_dtype
        model.register_forward_hook(lambda module, args, output: cast_to(output, dtype))


class _Ranks(NamedTuple):
    """Ranks along one axis, as torch knows them."""

    mesh: Any
    group: dist.ProcessGroup


@contextmanager
def _absent_ranks(
    axis: Literal["tp", "cp", "sp"], size: int, traffic: _Traffic
) -> Generator[_Ranks, None, None]:
    """Yield ranks that aren't there: collectives between them are to be counted.

    Torch knows a group by its name alone. The mesh must be equal to no other one, since torch keeps what it
    has found out for equal meshes.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torchs = cast("Any", torch)._C._distributed_c10d
    name = f"planned {axis} {uuid.uuid4().hex}"
    group = cast("Any", dist.ProcessGroup)(0, size)
    backend = torchs.FakeProcessGroup._create_internal(0, size)  # a group without any has no name
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
    """Counts what collectives along planned axes bring, by the stage that runs.

    Attributes:
        axes: Name and size of the axis, by the name of its group.
        moved: Bytes by axis, for each stage.
        stage: That runs now.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.axes: dict[str, tuple[str, int]] = {}
        self.moved: list[Counter[str]] = [Counter()]
        self.stage = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(one, "_local_tensor") or one.__name__ == "DTensor" for one in types):
            return NotImplemented  # and come back with what is in it
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and args and args[-1] in self.axes:
            axis, size = self.axes[args[-1]]
            name = func._schema.name.partition("::")[2]
            self.moved[self.stage][axis] += _received(name, args[0].nbytes, size)
        return result

    def attend_in_ring(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, **options: Any
    ) -> torch.Tensor:
        """Stand in for :func:`accelfn.parallel.attention.ring_attention`, which needs processes."""
        return cast("torch.Tensor", cast("Any", _Ring).apply(query, key, value, self, group.size()))


class _Ring(torch.autograd.Function):
    """What ring attention keeps and receives: keys and values twice, and their gradients in float32."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, traffic: _Traffic, size: int
    ) -> torch.Tensor:
        # Contiguous, as on all ranks but the last one, so that to join the heads is a copy.
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
        for one in (key, value):
            traffic.moved[traffic.stage]["cp"] += (size - 1) * one.nbytes + size * 4 * one.numel()
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


def _received(collective: str, size: int, num_ranks: int) -> int:
    """Return the bytes that a rank receives in a collective of tensors of ``size`` bytes, by rings."""
    others = num_ranks - 1
    if collective.startswith("all_gather"):
        return size * others
    return (2 if collective.startswith("all_reduce") else 1) * size * others // num_ranks


class _FusedAttention(TorchFunctionMode):
    """Attention without dropout: with it, the CPU has no kernel that keeps what those of accelerators do."""

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
    """A tensor that autograd keeps; gone as soon as autograd lets go of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Recorder:
    """Writes down what is kept in a forward pass, for each stage."""

    def __init__(
        self, model: nn.Module, pipeline: PipelinePlan | None, recomputed: set[str], traffic: _Traffic
    ) -> None:
        self._traffic = traffic
        num_stages = 1 if pipeline is None else len(pipeline.stages)
        traffic.moved = [Counter() for _ in range(num_stages)]
        self._own = {_storage(one)._cdata for one in (*model.parameters(), *model.buffers())}
        self._block = ""
        self._saved: list[tuple[weakref.ref[_Saved], int, str]] = []
        self._given: list[dict[int, Any]] = [{} for _ in range(num_stages)]
        self._received = [0] * num_stages
        # In front of what other hooks do with inputs: what a stage before sends.
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
            for one in _pytree.tree_leaves((args, kwargs)):
                if isinstance(one, torch.Tensor):
                    self._keep(one, self._traffic.stage)

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
        """Return bytes that are kept, computed again and received, by stage, while the result lives."""
        kept = [{key: one.nbytes() for key, one in given.items()} for given in self._given]
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
                    (sum(size for key, size in one.items() if key not in held) for one in own.values()),
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
