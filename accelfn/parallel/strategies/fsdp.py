"""Fully sharded data parallelism: each rank stores a shard of every parameter, by torch's ``fully_shard``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from functools import partial, wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from accelfn.comm import Call
from accelfn.context import Context, Precision
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import modules_of
from accelfn.parallel.gradient_hooks import refuse_hook_of_shard
from accelfn.parallel.handle import (
    HANDLE,
    IN_NO_SYNC,
    Communication,
    Gathering,
    Handle,
    handle_of,
    raise_explained,
)
from accelfn.parallel.strategies.fsdp_plan import ShardPlan
from accelfn.parallel.strategies.precision import autocast_in
from accelfn.parallel.strategies.strategy import Application
from accelfn.parallel.waiting_gradients import WaitingGradients
from accelfn.tree import is_dtensor, local_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def apply_shard(
    model: nn.Module,
    plan: ShardPlan,
    device_mesh: DeviceMesh,
    device: torch.device,
    expert_mesh: DeviceMesh | None = None,
) -> list[nn.Module]:
    """Shard a model as planned. Writes into it: its modules get new parameters of the same names.

    Ranks: every rank of ``device_mesh``, with equal models; doesn't communicate.

    Args:
        model: Its parameters are on the meta device, and stay there.
        plan: From :func:`plan_shard`.
        device_mesh: With the dims of the plan.
        device: On which this rank computes.
        expert_mesh: With the plan's dims for experts, of one root with the mesh that these are spread over;
            None without experts.

    Returns:
        The units.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard

    pin = device.type != "cpu"  # pinning is for copies to a device, and needs one
    offload = CPUOffloadPolicy(pin_memory=pin) if plan.offload else OffloadPolicy()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ignored = {parameters[name] for name in plan.left_out}
    expert_units = plan.expert_units
    placements = {parameters[name]: Shard(dim) for name, dim in plan.expert_dims.items()}
    units: list[nn.Module] = []
    model.register_forward_hook(_own_memory)  # before FSDP's own hook
    for name in plan.units:
        module = model.get_submodule(name)
        are_experts = name in expert_units
        precision = MixedPrecisionPolicy(
            param_dtype=None if name in plan.in_full else plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            # Only the last unit casts: a cast of a block's output would give the next block two dtypes.
            output_dtype=None if name else plan.output_dtype,
            # The block around experts has cast their inputs, except for the router's weights.
            cast_forward_inputs=plan.cast_inputs and not are_experts,
        )
        fully_shard(
            module,
            mesh=expert_mesh if are_experts else device_mesh,
            shard_placement_fn=placements.get if are_experts else None,
            reshard_after_forward=plan.reshard if name else None,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=ignored or None,
        )
        units.append(module)
    if plan.prefetch:
        in_order = [module for module in model.modules() if any(module is unit for unit in units)][1:]
        for unit, following in pairwise(in_order):
            cast("Any", unit).set_modules_to_forward_prefetch([following])
    if plan.autocasts and device.type == "cpu":
        # Autocast knows fewer operations there: a norm or a recurrent layer would get two dtypes.
        for name, module in modules_of(model).items():
            has_own = next(module.parameters(recurse=False), None) is not None
            if has_own and name not in plan.in_full and type(module).__module__.startswith("torch.nn."):
                module.register_forward_pre_hook(_in_own_dtype)
    return units


def _in_own_dtype(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook before the forward of a layer: cast floating inputs to the dtype of its parameters."""
    dtype = next(module.parameters(recurse=False)).dtype
    return cast("tuple[Any, ...]", tree_map(partial(_cast, dtype), args))


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def register_forward_method(model: nn.Module, *names: str) -> None:
    """Make methods of a prepared model begin as its ``forward`` does. Writes into ``model``.

    A sharded model gathers its parameters, and buffers that have changed are set to rank 0's. Only for
    methods that use parameters or buffers directly: a method that calls the model needs nothing.

    Ranks: local; the same on every rank.

    Args:
        model: From :func:`accelfn.prepare_model`.
        *names: Names of the methods.

    Raises:
        ConfigurationError: The model has no such method.
    """
    for name in names:
        if not callable(getattr(model, name, None)):
            raise ConfigurationError(
                f"register_forward_method: {type(model).__name__} has no method {name!r}."
            )
        handle = handle_of(model)
        if isinstance(handle, ShardHandle):
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(model, name)
        if isinstance(handle, ShardHandle) or (handle is not None and handle.buffers is not None):
            method = getattr(model, name)
            setattr(model, name, wraps(method)(partial(handle.compute_method, method)))


def _compute_scales(model: nn.Module, args: Any) -> None:
    """Hook before a forward pass."""
    del args
    from accelfn.parallel.engines.torchao import compute_scales

    compute_scales(model)


def _own_memory(model: nn.Module, args: Any, output: Any) -> Any:
    """Hook after the model: copy outputs that are views.

    FSDP puts a hook on each output for its gathering in the backward pass. An operation in place on a view
    would drop the hook silently, and a layer that ranks share returns views.
    """
    from torch.utils._pytree import tree_map_only

    def owned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor

    return tree_map_only(torch.Tensor, owned, output) if torch.is_grad_enabled() else output


class ShardHandle(Handle):
    """The handle of a sharded model, whose gradients FSDP averages in the backward pass.

    FSDP sets gradients on its shards itself. Gradients from autograd come from a loss that used shards
    outside of a forward pass; they would not be averaged, and are refused.
    """

    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True
    gathers_in_fp8: bool = False

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        ctx: Context,
        plan: ShardPlan,
    ) -> None:
        """Watch the shards of ``model``.

        Args:
            model: A sharded model.
            units: Its sharded modules; the model is the last one.
            ctx: The world, and where the model computes.
            plan: By which it was sharded. Gradients of experts that FSDP leaves out are autograd's.
        """
        super().__init__(model, model.parameters())
        self._waits = ctx.device.type == "cpu"  # on accelerators streams wait, and the forward pass goes on
        precision = ctx.precision if plan.autocasts else Precision()
        self._autocast = partial(autocast_in, precision, ctx.device.type)
        self._units = [weakref.ref(unit) for unit in units]
        self._groups: list[weakref.ref[Any]] = []  # FSDP's, of the parameters of each unit
        self._depth = 0  # of nested calls: a registered method may call the model
        self._gathered: list[Any] = []  # FSDP's groups of the parameters that wait for a backward pass
        self._waiting = WaitingGradients[Any]()  # unsharded ones, of an open window
        self._num_passed = 0  # of units whose forward had ended when the current forward pass began
        self._identities: list[int] = []  # of the groups whose units the latest forward pass gathered
        self._is_reversible = False  # whether the latest backward pass may be reversed in turn
        self._keeps = False  # whether what is gathered stays in memory for that
        self._accumulates: bool | None = None  # whether it sets gradients; None for unknown
        self._gathering = Call("forward")
        self._usual = ""  # order of all units
        self._unused: list[Any] = []  # FSDP's records of parameters without a gradient in this backward pass
        for unit in cast("Sequence[Any]", units):
            # There are no public functions; a test checks these names.
            state = unit._get_fsdp_state()
            vars(unit)["__deepcopy__"] = _refuse_copy  # in place of FSDP's, which is an assertion
            state._register_root_post_backward_final_callback = partial(self._enter_backward, state)
            for group in _groups_of(state):
                group.post_backward = partial(self._reduce_unit, group)
                if self._waits:
                    group._all_gather_comm = _MonitoredAllGather(ctx, group._all_gather_comm)
                self._groups.append(weakref.ref(group))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and is_dtensor(parameter) and name not in plan.unshared:
                cast("Any", parameter).register_hook(_refusal_of(name))

    def gather_in_fp8(self) -> None:
        """Compute the scales of weights that are gathered in 8 bits before each forward pass."""
        self.gathers_in_fp8 = True
        # Before FSDP's own hook, which gathers; the agreement of the ranks on the pass comes first.
        cast("nn.Module", self._model()).register_forward_pre_hook(_compute_scales, prepend=True)

    def _living_units(self) -> list[Any]:
        found = [reference() for reference in self._units]
        return [unit for unit in found if unit is not None]

    def _living_groups(self) -> list[Any]:
        found = [reference() for reference in self._groups]
        return [group for group in found if group is not None]

    def _set_syncs(self, syncs: bool) -> None:
        if syncs == self._syncs:
            return
        self._syncs = syncs
        for unit in self._living_units():
            unit.set_requires_gradient_sync(syncs, recurse=False)
        model = cast("Any", self._model())
        if model is not None:
            model.set_is_last_backward(syncs)

    def reduce(self) -> None:
        """Average gradients that were accumulated under :meth:`without_sync`, without a backward pass."""
        self._release()
        self._accumulates = True
        with self._syncing(True):
            self._reduce_rest()
        self._leave_backward()

    def _reduce_rest(self) -> None:
        # As torch's pipelines do it; there is no public function. A test checks these names.
        for group in self._living_groups():
            group.post_backward()
        cast("Any", self._model())._get_fsdp_state()._root_post_backward_final_callback()

    def compute(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that uses gathered parameters, which are gathered anew."""
        if self._depth == 0 and self._gathered:
            self._free()
        return self.compute_part(call, *args, **kwargs)

    def compute_part(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that uses gathered parameters, and free them if no backward pass will.

        Torch keeps the last unit, and with ``reshard`` off all of them, gathered until the backward pass,
        which may never come. Until then the model shows its shards, which have the gradients and which
        optimizers step; and :meth:`compute` gathers again, since a step may lie in between. Parts of one
        batch, with no step between them, use what was gathered for the first.
        """
        if self._depth == 0:
            self._show_gathered()
            self._num_passed = len(self._passed())
        self._depth += 1
        try:
            output = call(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            if _has_backward(output):
                self._show_shards()
            else:
                self._free()
        return output

    def _free(self) -> None:
        """Free what is still gathered. A backward pass that follows all the same gathers it again."""
        self._gathered.clear()
        for unit in self._living_units():
            unit.reshard()

    def _keep(self, keeps: bool) -> None:
        """Keep the memory of gathered parameters when they are freed, or no longer.

        A backward pass that reverses another one reads parameters from its beginning, and other forward
        passes may come before it. Each of them gathers anew, into the same memory.
        """
        self._keeps = keeps
        for group in self._living_groups():
            for record in group.fsdp_params:
                if keeps:
                    record.free_unsharded_param = _keep_memory
                else:
                    del record.free_unsharded_param

    def _show_shards(self) -> None:
        """Let modules have the shards of the parameters that stay gathered. Local, and frees nothing."""
        self._gathered += [one for one in self._living_groups() if one.is_unsharded]
        for group in self._gathered:
            for record in group.fsdp_params:
                record._setattr_on_modules(record.sharded_param)

    def _show_gathered(self) -> None:
        """Undo :meth:`_show_shards`: a backward pass may recompute with what its forward pass gathered."""
        for group in self._gathered:
            for record in group.fsdp_params if group.is_unsharded else ():
                record._setattr_on_modules(record.unsharded_param)
        self._gathered.clear()

    def _enter_backward(self, state: Any) -> None:
        """Run in place of FSDP's method of the same unit that notices a backward pass."""
        if state._state_ctx.post_backward_final_callback_queued:
            return
        self._show_gathered()
        self._release()
        self._is_reversible = torch.is_grad_enabled()  # with create_graph
        if self._is_reversible:
            self._keep(True)
        self._accumulates = None
        cast("Any", type(state))._register_root_post_backward_final_callback(state)
        cast("Any", torch.autograd.Variable)._execution_engine.queue_callback(self._leave_backward)

    def _reduce_unit(self, group: Any, *unused: Any) -> None:
        """Run in place of FSDP's method that reduces the gradients of a unit, on parameters that have one.

        Ranks may use different ones, and must reduce the same: minus zeros count for nothing in a sum, and
        show where no rank has a gradient.
        """
        if group._orig_dtype is None:  # of what was trained in the first forward pass: then nothing was
            group._init_mp_dtypes()
        has_accumulated, new = False, list[Any]()
        for record in group.fsdp_params:
            if len(record.sharded_param._backward_hooks or ()) > 1:
                refuse_hook_of_shard("backward", record._param_fqn, record.sharded_param)
        for record in group.fsdp_params if group.reduce_grads else ():
            if record.unsharded_accumulated_grad is not None:
                has_accumulated = True
                continue
            whole = getattr(record, "_unsharded_param", None)
            if whole is None:
                continue
            if whole.grad is None:
                if not (record.sharded_param.requires_grad and self._sets_gradients()):
                    continue
                whole.grad = torch.zeros_like(whole).neg_()
                self._unused.append(record)
            new.append(record)
        # Gradients of earlier batches of a window are in the dtype in which all are reduced.
        for record in new if has_accumulated else ():
            record.to_accumulated_grad_if_needed()
        cast("Any", type(group)).post_backward(group, *unused)

    def _sets_gradients(self) -> bool:
        """Return whether the backward pass sets gradients of parameters, unlike ``torch.autograd.grad``."""
        if self._accumulates is None:
            wholes = [
                record._unsharded_param
                for group in self._living_groups()
                for record in group.fsdp_params
                if record.sharded_param.requires_grad and hasattr(record, "_unsharded_param")
            ]
            nodes = (torch.autograd.graph.get_gradient_edge(whole).node for whole in wholes)
            self._accumulates = any(cast("Any", torch)._C._will_engine_execute_node(node) for node in nodes)
        return self._accumulates

    def _leave_backward(self) -> None:
        """Run after a backward pass."""
        if self._keeps and not self._is_reversible:
            self._keep(False)
            if self._syncs and self._accumulates:  # gradients of the passes that it has reversed come last
                self._reduce_rest()
            self._free()
        for record in self._unused:
            shard = record.sharded_param
            # Twice, where the forward pass has called the unit twice.
            if shard.grad is not None and _is_minus_zero(local_of(shard.grad)):
                shard.grad = None
        self._unused.clear()
        if not self._syncs:
            self._hold()

    def _hold(self) -> None:
        """Let whoever clears the gradients of shards drop the unsharded ones that wait, too."""
        for record in self._unreduced():
            self._waiting.hold(record, record.sharded_param)

    def _release(self) -> None:
        """Undo :meth:`_hold`, and drop the gradients that were cleared."""
        for record in self._waiting.release():
            _drop(record)

    def compute_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that gathers parameters itself, in place of a forward pass."""
        if self.gathers_in_fp8:
            _compute_scales(cast("nn.Module", self._model()), args)
        with self._autocast():
            return self.compute(partial(super().compute_method, method), *args, **kwargs)

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass communicate."""
        gradients = self._syncs and torch.is_grad_enabled()
        buffers = self.buffers is not None and self.buffers.is_due()
        return Communication(gradients, buffers, parameters=True, at_once=self._waits or buffers)

    def _passed(self) -> list[Any]:
        """Return FSDP's groups whose forward has ended, in order, since a backward pass cleared the list."""
        state = cast("Any", self._model())._get_fsdp_state()
        return getattr(state._comm_ctx, "post_forward_order", [])  # which the first forward pass makes

    def gathering(self) -> Gathering | None:
        """Return the units that the forward pass gathered, in order: torch pairs those of ranks by order."""
        groups = self._passed()[self._num_passed :]
        identities = [*map(id, groups)]
        is_new = identities != self._identities
        if is_new:
            order = ", ".join(group._module_fqn or "the rest of the model" for group in groups)
            skipped = ", ".join(one._module_fqn for one in self._living_groups() if one not in groups)
            self._usual = self._usual or ("" if skipped else order)
            through = f" through all units but {skipped}" if skipped else f" through {order}"
            text = "forward" if order == self._usual else f"forward{through}"
            self._identities, self._gathering = identities, Call(text, order)
        return Gathering(self._gathering, is_new)

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are only this rank's own; None where they are averaged."""
        self._release()
        self._hold()
        return IN_NO_SYNC if self._waiting else None

    def discard(self) -> None:
        """Drop accumulated gradients that were not averaged yet."""
        self._release()
        for record in self._unreduced():
            _drop(record)

    def scale_held(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply accumulated gradients of ``parameters`` that were not averaged yet."""
        self._release()
        wanted = {id(parameter) for parameter in parameters}
        for record in self._unreduced():
            for held in (record.unsharded_accumulated_grad, record._unsharded_param.grad):
                if held is not None and id(record.sharded_param) in wanted:
                    held.mul_(factor.to(held))

    def _unreduced(self) -> Generator[Any, None, None]:
        """Yield FSDP's records of the parameters with unsharded gradients."""
        for group in self._living_groups():
            for record in group.fsdp_params:
                whole = getattr(record, "_unsharded_param", None)
                if record.unsharded_accumulated_grad is not None or (
                    whole is not None and whole.grad is not None
                ):
                    yield record


_SOON = timedelta(seconds=0.2)


class _MonitoredAllGather:
    """FSDP's gathering of a unit, which waits on the host and notices there that a rank won't come."""

    def __init__(self, ctx: Context, comm: Any) -> None:
        """Call ``comm``."""
        self._ctx = ctx
        self._comm = comm
        # Stages of a pipeline gather different numbers of units, so these say nothing there.
        self._inside = "" if ctx.axis_size("pp") > 1 else "units in the forward or backward pass of"
        self.allocate = comm.allocate

    def __call__(self, *, async_op: bool = False, **arguments: Any) -> None:
        """Gather, and wait."""
        del async_op
        work, call_log = self._comm(async_op=True, **arguments), self._ctx.collectives.call_log
        try:
            work.wait(_SOON)
        except RuntimeError:  # it goes on, or has failed, which shows again
            call_log.inside = self._inside
            try:
                self._ctx.collectives.finish(work, self._ctx.device)
            finally:
                call_log.inside = ""
        call_log.gathers += 1


def _refuse_copy(memo: Any) -> Any:
    del memo
    raise ConfigurationError(
        "deepcopy: torch can't copy a model that FSDP has sharded. Copy it before prepare, and prepare both: "
        "they are sharded alike, so that an average of the weights is computed shard by shard."
    )


def _keep_memory() -> None:
    pass


def _is_minus_zero(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) & torch.signbit(tensor)).all())


def _drop(record: Any) -> None:
    """Drop the unsharded gradient of a parameter."""
    record.unsharded_accumulated_grad = None
    record._unsharded_param.grad = None


def _groups_of(state: Any) -> Sequence[Any]:
    """Return FSDP's groups of parameters of a unit."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch before 2.13


def _has_backward(output: Any) -> bool:
    """Return whether a backward pass may follow; True for outputs of unknown classes."""
    if not torch.is_grad_enabled():
        return False
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return not tensors or any(tensor.requires_grad for tensor in tensors)


def _refusal_of(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(gradient: torch.Tensor) -> None:
        del gradient
        raise ConfigurationError(
            f"backward: the loss used {name}, a shard, outside of its model's forward pass, so the parameter "
            "wasn't gathered and its gradient would not be averaged over the ranks. Compute the loss in the "
            "model's forward, or in a method registered by register_forward_method(model, name). For a "
            "penalty on the weights use the optimizer's weight_decay, or add its gradient after the backward "
            "pass: parameter.grad.add_(parameter.detach(), alpha=2 * factor) for factor * "
            "parameter.square().sum()."
        )

    return refuse


class _NamedCall:
    """A model's call, whose errors name the lost ranks that it waited for.

    It holds the model weakly; a copied model gets a copy that calls it.
    """

    def __init__(self, model: nn.Module, translate_error: Callable[[Exception], Exception]) -> None:
        self._model = weakref.ref(model)
        self._translate_error = translate_error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = cast("Any", self._model())
        kind = cast("Any", type(own))
        handle = getattr(own, HANDLE, None)
        try:
            if isinstance(handle, ShardHandle):
                return handle.compute(kind._call_impl, own, *args, **kwargs)
            return kind._call_impl(own, *args, **kwargs)
        except RuntimeError as error:
            raise_explained(error, self._translate_error)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NamedCall:
        return _NamedCall(cast("nn.Module", copy.deepcopy(self._model(), memo)), self._translate_error)


def with_named_errors(model: nn.Module, translate_error: Callable[[Exception], Exception]) -> None:
    """Make errors of a model's calls name the lost ranks that they waited for. Writes into ``model``."""
    # FSDP waits in hooks, around and inside of ``forward``; all of them run inside of _call_impl.
    vars(model)["_call_impl"] = _NamedCall(model, translate_error)


def apply(plan: ShardPlan, at: Application) -> None:
    """Shard the parameters."""
    of_experts = None if at.plans["experts"] is None else at.device_mesh(*plan.expert_dims_of_mesh)
    apply_shard(at.model, plan, at.device_mesh(*plan.dims), at.ctx.device, of_experts)
