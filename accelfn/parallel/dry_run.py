"""Simulate a forward and backward pass on ranks that don't exist: saved activations, operations and traffic.

A copy of the model, of tensors without memory, is spread over ranks by the functions that spread a real one.
It runs once, and collectives are counted instead of performed. Of many equal blocks three run: the first, one
that stands for those between, and the last.
"""

from __future__ import annotations

import copy
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree, flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.attention import apply_attention
from accelfn.parallel.facts import ModelFacts, owner_of
from accelfn.parallel.forward import MixedPrecisionForward
from accelfn.parallel.fp8 import Fp8Plan, apply_fp8
from accelfn.parallel.parameters import named, retie
from accelfn.parallel.pipeline_plan import outer_blocks
from accelfn.parallel.plan import ModelPlan
from accelfn.parallel.repeats import Repeats, find_repeats
from accelfn.parallel.step_cost import Collective, PassCost, Route, Segment, StepCost
from accelfn.parallel.tensor import TensorPlan, apply_tensor
from accelfn.tree import is_dtensor, map_tensors

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
    traffic = _Traffic()
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
        apply_fp8(twin, _merge_fp8_plans(plans, is_here))
        if dtype is None:
            _set_precision(ctx, twin, plans, is_here)
        recomputed = {name for other in plans for name in other.recomputed if is_here(name)}
        recorder = _Recorder(twin, [name for name in starts if is_here(name)], recomputed, traffic)
        fake_batch = _without_memory(batch, ctx.device)
        with traffic, _FusedAttention():
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


class _Tally:
    """A pass of a segment, as far as it has come."""

    def __init__(self) -> None:
        self.flops = 0
        self.largest = 0
        self.calls: Counter[Route] = Counter()
        self.received: Counter[Route] = Counter()

    def read(self) -> PassCost:
        return PassCost(self.flops, dict(self.calls), dict(self.received))

    def add(self, other: _Tally) -> None:
        self.flops += other.flops
        self.calls += other.calls
        self.received += other.received


class _Traffic(TorchDispatchMode):
    """Counts operations, and the bytes that collectives receive along planned axes.

    Attributes:
        axes: Name and size of the axis, by the name of its group.
        shapes: Of the parameters, also transposed: tensors like them are their gradients, or casts of them.
        tally: Of the running pass of the running segment.
        again: What the running recomputed block will do once more in its backward pass; None outside of one.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.axes: dict[str, tuple[str, int]] = {}
        self.shapes: set[tuple[int, ...]] = set()
        self.tally: _Tally = _Tally()
        self.again: _Tally | None = None

    def count(self, route: Route | None, *, calls: int = 0, received: int = 0, flops: int = 0) -> None:
        """Count what runs now."""
        for tally in (self.tally, self.again):
            if tally is not None:
                tally.flops += flops
                if route is not None:
                    tally.calls[route] += calls
                    tally.received[route] += received

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "_local_tensor") or kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # called again with the local tensors
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and not any(one.alias_info for one in func._schema.returns)
        if is_new and tuple(result.shape) not in self.shapes:
            self.tally.largest = max(self.tally.largest, result.nbytes)
        if func.namespace == "_c10d_functional" and args and args[-1] in self.axes:
            axis, size = self.axes[args[-1]]
            kind = _kind_of(func._schema.name.partition("::")[2])
            self.count((axis, kind), calls=1, received=_received(kind, args[0].nbytes, size))
        elif (name := func._schema.name).startswith("aten::_scaled_dot_product_"):
            # Torch's table has neither the CPU's kernel nor fewer heads of keys than of queries.
            is_backward = name.endswith("backward")
            query, key, value = args[1:4] if is_backward else args[:3]
            self.count(None, flops=_attention_flops(query, key, value, backward=is_backward))
        elif func._overloadpacket in flop_counter.flop_registry:
            count = flop_counter.flop_registry[func._overloadpacket]
            self.count(None, flops=count(*args, **(kwargs or {}), out_val=result))
        return result

    def attend_in_ring(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        *,
        rotation: str,
        **options: Any,
    ) -> torch.Tensor:
        """Replace :func:`accelfn.parallel.attention.ring_attention`, which needs processes."""
        return cast("torch.Tensor", cast("Any", _Ring).apply(query, key, value, self, group.size(), rotation))


def _attention_flops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, backward: bool = False
) -> int:
    """Return the operations of attention over (batch, heads, length, features), as kernels recompute it."""
    *batch, length, features = query.shape
    pairs = prod(batch) * length * key.shape[-2]
    # Scores and outputs; backward the scores once more, and the gradients of all four.
    return 2 * pairs * (3 * features + 2 * value.shape[-1] if backward else features + value.shape[-1])


class _Ring(torch.autograd.Function):
    """Memory and traffic of ring attention: keys and values twice, and their gradients in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        traffic: _Traffic,
        size: int,
        rotation: str,
    ) -> torch.Tensor:
        # Contiguous, as on all ranks except the last one, so that joining the heads copies.
        output = query.new_empty(query.shape)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.settings = traffic, size, rotation
        _rotate(traffic, key, value, size, rotation)
        traffic.count(None, flops=size * _attention_flops(query, key, value))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        traffic, size, rotation = ctx.settings
        query, key, value, _, _ = ctx.saved_tensors
        _rotate(traffic, key, value, size, rotation)
        passed_on = size * 4 * (key.numel() + value.numel())
        traffic.count(("cp", "all_to_all"), calls=size, received=passed_on)
        traffic.count(None, flops=size * _attention_flops(query, key, value, backward=True))
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None, None


def _rotate(traffic: _Traffic, key: torch.Tensor, value: torch.Tensor, size: int, rotation: str) -> None:
    kind, calls = ("all_to_all", size - 1) if rotation == "alltoall" else ("all_gather", 1)
    traffic.count(("cp", kind), calls=calls, received=(size - 1) * (key.nbytes + value.nbytes))


def _kind_of(name: str) -> Collective:
    kinds = get_args(Collective)
    return next((kind for kind in kinds if name.startswith(kind)), "send")


def _received(kind: Collective, size: int, num_ranks: int) -> int:
    """Return the bytes that a rank receives in a ring collective of tensors of ``size`` bytes."""
    others = num_ranks - 1
    if kind == "all_gather":
        return size * others
    return (2 if kind == "all_reduce" else 1) * size * others // num_ranks


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


class _Running:
    """A segment whose forward pass runs, or has run."""

    def __init__(self, name: str, entering: torch.Tensor | None) -> None:
        self.name = name
        self.entering: Any = None if entering is None else _storage(entering)  # which stays alive
        self.sent = 0 if entering is None else _local(entering).nbytes
        self.forward, self.backward = _Tally(), _Tally()
        self.inputs: dict[int, Any] = {}  # of recomputed blocks


class _Saving(NamedTuple):
    """What autograd keeps for a segment: sizes by storage, and those that a recomputed block saves again."""

    kept: Mapping[int, int]
    recomputed: Mapping[str, Mapping[int, int]]


class _Recorder:
    """Records what a forward pass saves, by segment: from the call of one of the ``starts`` to the next."""

    def __init__(
        self, model: nn.Module, starts: Sequence[str], recomputed: set[str], traffic: _Traffic
    ) -> None:
        self._traffic = traffic
        self._own = {_storage(tensor)._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._segments = [_Running("", None)]
        traffic.tally = self._segments[0].forward
        shapes = [tuple(_local(parameter).shape) for parameter in model.parameters()]
        traffic.shapes = {*shapes, *(shape[::-1] for shape in shapes)}
        self._block = ""
        self._done = _Tally()  # what the running recomputed block has done since it saved a tensor
        self._saved: list[tuple[weakref.ref[_Saved], int, str]] = []
        # Before hooks that change the inputs: these are the tensors that the stage before sends.
        for name in starts:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._enter_segment(name), with_kwargs=True, prepend=True)
        for name in recomputed:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._enter_block(name), with_kwargs=True)
            block.register_forward_hook(self._leave_block)

    def _enter_segment(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = _pytree.tree_leaves((args, kwargs))
            sent = next((leaf for leaf in given if isinstance(leaf, torch.Tensor)), None)
            before = self._segments[-1]
            self._segments.append(_Running(name, sent))
            self._traffic.tally = self._segments[-1].forward

            def leave(gradient: torch.Tensor) -> None:
                self._traffic.tally = before.backward

            if sent is not None and sent.requires_grad:
                cast("Any", sent).register_hook(leave)

        return enter

    def _enter_block(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._block = name
            self._traffic.again = self._done = _Tally()
            for leaf in _pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    storage = _storage(leaf)
                    self._segments[-1].inputs[storage._cdata] = storage

        return enter

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        self._block = ""
        self._traffic.again = None

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.append((weakref.ref(saved), len(self._segments) - 1, self._block))
        if self._block:
            # A recomputation ends as soon as it has saved all that the block saved.
            self._segments[-1].backward.add(self._done)
            self._traffic.again = self._done = _Tally()
        return saved

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Record what autograd saves inside, and the forward pass; then the backward pass begins."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield
        self._traffic.tally = self._segments[-1].backward

    def read(self) -> list[_Saving]:
        """Return what is kept for each segment, while the result is alive."""
        kept: list[dict[int, int]] = [
            {key: storage.nbytes() for key, storage in one.inputs.items() if key not in self._own}
            for one in self._segments
        ]
        blocks: list[dict[str, dict[int, int]]] = [{} for _ in kept]
        for reference, segment, block in self._saved:
            saved = reference()
            if saved is None:
                continue
            storage = _storage(saved.tensor)
            if storage._cdata not in self._own:
                home = blocks[segment].setdefault(block, {}) if block else kept[segment]
                home[storage._cdata] = storage.nbytes()
        return [_Saving(held, again) for held, again in zip(kept, blocks, strict=True)]

    def cost(self, saved: Sequence[_Saving]) -> StepCost:
        """Return the cost, after the backward pass."""
        return StepCost(
            tuple(
                Segment(
                    names=(one.name,),
                    entering=None if one.entering is None else (one.entering._cdata, one.entering.nbytes()),
                    sent=one.sent,
                    saved=held.kept,
                    recomputed=held.recomputed,
                    forward=one.forward.read(),
                    backward=one.backward.read(),
                    largest=max(one.forward.largest, one.backward.largest),
                )
                for one, held in zip(self._segments, saved, strict=True)
            )
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return cast("Any", tensor)._local_tensor if is_dtensor(tensor) else tensor


def _storage(tensor: torch.Tensor) -> Any:
    return _local(tensor).untyped_storage()
