"""Data parallelism: every rank holds the full model, and DistributedDataParallel averages its gradients."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from accelfn.comm import reduce, verify_structure
from accelfn.config import DistributedDataParallelKwargs
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.buffers import IGNORED, sync_buffers
from accelfn.parallel.facts import modules_of
from accelfn.parallel.forward_agreement import WITHOUT_TENSORS, check_each_forward
from accelfn.parallel.gradient_hooks import refuse_hook_of_replica
from accelfn.parallel.handle import BY_HAND, IN_NO_SYNC, Communication, Handle, handles_of
from accelfn.parallel.optimizers import stepping_of
from accelfn.parallel.strategies.comm_hooks import choose_comm_hook, register_comm_hook
from accelfn.parallel.strategies.exact import ExactReplica
from accelfn.parallel.strategies.thread_ddp import ThreadDDP
from accelfn.parallel.values import is_made_of_others, send_values
from accelfn.tree import is_dtensor


class ImmediateReplica(ThreadDDP):
    """Averages each gradient of one model as soon as a backward pass has computed it.

    For optimizers that step in backward: the gradient before has been averaged when they step with it. Every
    backward pass averages, also under no_sync, since a step follows each.
    """

    averages_at_once = True

    def _on_grad(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None  # it was just added
        with torch.no_grad():
            gradient.copy_(reduce(self._ctx, gradient, "mean"))
        self._unreduced = None


class DDPHandle(Handle):
    """The handle of a ``DistributedDataParallel``, whose gradients are averaged whatever computed the loss.

    Torch averages only after a forward pass of the wrapper. Before any other backward pass (the loss came
    from another method, from a function over the inner model, or it is the second one after a forward pass),
    the first parameter that gets a gradient prepares torch's reducer, by what :func:`accelfn.backward`
    differentiates where torch looks for unused parameters itself. And it averages only where all
    parameters get a gradient: at the end of :func:`accelfn.backward`, others get zeros that change no sum.
    """

    def __init__(self, ctx: Context, model: DistributedDataParallel) -> None:
        """Hook the parameters that ``model`` averages over the ranks of ``ctx``."""
        self._call_log = ctx.collectives.call_log
        ignored: set[str] = cast("Any", model).parameters_to_ignore
        module = cast("nn.Module", cast("Any", model).module)
        named = module.named_parameters()
        watched = {name: tensor for name, tensor in named if tensor.requires_grad and name not in ignored}
        super().__init__(model, watched.values())
        self._unreduced: str | None = BY_HAND
        self._watch(watched)
        model.register_forward_hook(self.after_forward)

    def _watched(self) -> Mapping[str, torch.Tensor]:
        found = {name: reference() for name, reference in self._parameters.items()}
        return {name: one for name, one in found.items() if one is not None}

    def _watch(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = {name: weakref.ref(one) for name, one in parameters.items()}
        self._backward = -1  # torch's id of the latest one
        self._got: set[int] = set()  # parameters with a gradient from that pass, and those it is nested in
        self._reductions = 0  # of the ranks before it
        self._is_announced = False  # by a forward pass, whose backward pass is to come
        watched: list[Any] = [*parameters.values()]
        self.hold([one.register_post_accumulate_grad_hook(self._on_gradient) for one in watched])

    @contextmanager
    def without_sync(self) -> Generator[None, None, None]:
        """Don't average gradients in backward passes inside.

        Raises:
            ConfigurationError: DistributedDataParallel has a static graph.
        """
        ddp: Any = self._model()
        if ddp.static_graph and torch.is_grad_enabled():
            raise ConfigurationError(
                "no_sync: torch 2.13 fails in a backward pass without averaging when static_graph=True. "
                "Use static_graph=False, or windows of one batch."
            )
        with ddp.no_sync():
            yield

    @contextmanager
    def trigger_sync(self) -> Generator[None, None, None]:
        """Average gradients in backward passes inside, including those accumulated before.

        Raises:
            ConfigurationError: DistributedDataParallel has a static graph.
        """
        ddp: Any = self._model()
        if ddp.static_graph:
            raise ConfigurationError(
                "trigger_sync_in_backward: with static_graph, DistributedDataParallel must know in the "
                "forward pass that its gradients will be averaged. Run the last one outside of no_sync."
            )
        before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True  # `_begin` does the rest
        try:
            yield
        finally:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before

    def torch_sends_buffers(self) -> bool:
        """Return whether torch sends buffers before a forward pass: for ranks that join, and for copies."""
        ddp: Any = self._model()
        if ddp is None or (self.buffers is not None and not self.is_joined):
            return False
        return bool(cast("Any", DistributedDataParallel).will_sync_module_buffers(ddp))

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass communicate."""
        ddp: Any = self._model()
        ours = self.buffers
        sent_by_torch = ours is None and bool(ddp.modules_buffers) and bool(ddp.will_sync_module_buffers())
        buffers = sent_by_torch if ours is None else ours.is_due()
        # Torch may broadcast its order of gradients in the next forward pass, once.
        may_rebuild = not ddp._has_rebuilt_buckets and (ddp.static_graph or not ddp.find_unused_parameters)
        gradients = bool(ddp.require_backward_grad_sync) and torch.is_grad_enabled()
        return Communication(gradients, buffers, at_once=buffers or may_rebuild)

    # Not torch.compiler.disable, which imports torch's compiler.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    def after_forward(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Hook after a forward pass: torch now expects its backward pass, if it averages."""
        ddp: Any = model
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._is_announced = True
            if ddp.static_graph:
                _check_static(self._watched(), output)

    def _on_gradient(self, parameter: Any) -> None:
        """Hook after a gradient was added to ``.grad``, before torch's own hook that averages it."""
        if len(parameter._post_accumulate_grad_hooks) > 1:
            refuse_hook_of_replica("backward", parameter)
        number: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if number != self._backward:
            self._backward = number
            self._begin()
        self._got.add(id(parameter))

    def _begin(self) -> None:
        ddp: Any = self._model()
        if ddp is None:
            return
        call_log, is_nested = self._call_log, _is_unfinished(ddp)
        # From it torch looks for unused parameters where it is to.
        value = None if call_log.backward is None else call_log.backward.value
        if not is_nested:
            self._got, self._reductions = set(), call_log.reductions
            if call_log.backward is not None and not (ddp.find_unused_parameters or ddp.static_graph):
                call_log.backward.append(self._complete)
        # With a static graph, checkpointed blocks have nested backward passes.
        is_announced, self._is_announced = self._is_announced, self._is_announced and ddp.static_graph
        if not is_announced and not ddp.require_backward_grad_sync:
            self._unreduced = IN_NO_SYNC
        elif is_announced:
            self._unreduced = None
            if not ddp.require_backward_grad_sync and not is_nested:
                # An earlier forward pass was announced and never reversed; others may be unused by now.
                ddp.reducer.prepare_for_backward([] if value is None else [value])
        elif ddp.static_graph or self.is_shared:
            self._unreduced = (
                "the loss wasn't computed by a call of the prepared model, which torch requires with "
                + ("parameters in two prepared models" if self.is_shared else "static_graph=True")
                + ". Compute it in the model's forward, and call the prepared model"
            )
        elif ddp.find_unused_parameters and value is None:
            self._unreduced = (
                "the loss wasn't computed by a call of the prepared model, from which torch would look for "
                "unused parameters. Call accelfn.backward in place of loss.backward()"
            )
        else:
            self._unreduced = None
            if not is_nested:
                if ddp.reducer._rebuild_buckets():  # once, as before a forward pass
                    ddp._has_rebuilt_buckets = True
                ddp.reducer.prepare_for_backward([] if value is None else [value])

    def _complete(self) -> None:
        """After a backward pass: take part in the averages that torch has not begun on this rank."""
        ddp: Any = self._model()
        if ddp is None or self._unreduced is not None:
            return
        if _is_unfinished(ddp):
            self._add_zeros()
        self._call_log.reductions = self._reductions + 1  # however many passes it took

    def _add_zeros(self) -> None:
        """Run a backward pass that adds minus zero, which changes no sum, to the gradients that are missing.

        A parameter that no rank has used gets minus zero as its average, and keeps no gradient.
        """
        left = [one for one in self._watched().values() if id(one) not in self._got]
        frozen = [one for one in left if not one.requires_grad]
        without = [one for one in left if one.grad is None]
        try:
            for one in frozen:
                one.requires_grad_(True)
            torch.autograd.backward(left, [torch.full_like(one, -0.0) for one in left])
        finally:
            for one in frozen:
                one.requires_grad_(False)
        for one in without:
            if one.grad is not None and bool(((one.grad == 0) & one.grad.signbit()).all()):
                one.grad = None

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are only this rank's own; None where they are averaged."""
        ddp: Any = self._model()
        if ddp is None or self._unreduced is not None:
            return self._unreduced
        if ddp.static_graph:
            self._is_announced = False
        if not _is_unfinished(ddp):
            return None
        return (
            "not all parameters of the model got a gradient in the latest backward pass, so torch averaged "
            "none. Call accelfn.backward, which lets the others count as zeros, in place of loss.backward()"
        )


def _check_static(parameters: Mapping[str, torch.Tensor], output: Any) -> None:
    """Refuse a forward pass, and later its backward passes, that break the promise of a static graph.

    Torch notices neither; it counts gradients in the first backward pass, and averages by that count.

    Raises:
        ConfigurationError: A parameter was frozen, or torch can't find the tensors of the output.
    """
    frozen = next((name for name, parameter in parameters.items() if not parameter.requires_grad), None)
    if frozen is not None:
        raise ConfigurationError(
            f"forward: static_graph=True promises that every pass trains the same parameters, and {frozen} "
            "was frozen after prepare. Freeze it before, or use static_graph=False if it is trained at times."
        )
    leaves = tree_leaves(output)
    strange = next((one for one in leaves if not isinstance(one, (torch.Tensor, *WITHOUT_TENSORS))), None)
    has_found = any(isinstance(one, torch.Tensor) and one.requires_grad for one in leaves)
    if strange is not None and not has_found:  # beside what it finds there may be a cache
        raise ConfigurationError(
            f"forward: with static_graph=True torch looks for tensors in the model's output, but can't look "
            f"into a {type(strange).__name__}. Return a tensor, tuple or dict, or use static_graph=False."
        )
    first: list[int] = []

    def before_backward(gradients: Any) -> None:
        del gradients
        first.append(torch._C._current_graph_task_id())  # pyright: ignore[reportPrivateUsage]
        if first[-1] != first[0]:
            raise ConfigurationError(
                "backward: with static_graph=True torch averages the gradients of one backward pass for each "
                "forward pass, and this is the second one (torch.autograd.grad counts). Add up losses and "
                "call backward once, or use static_graph=False."
            )

    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(before_backward)


def _is_unfinished(ddp: Any) -> bool:
    """Return whether a reduction has started and not ended."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


# The package of torch's classes of sharded modules, of both versions.
_FSDP = "torch.distributed.fsdp"


class DataParallel(DistributedDataParallel):
    """Torch's DistributedDataParallel, with the model's public attributes and methods.

    Gradients of losses from these methods are averaged too: :class:`DDPHandle`.
    """

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model if the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in vars(self).get("_modules", ()):
                raise
        return getattr(cast("nn.Module", cast("Any", self).module), name)


def replicate(ctx: Context, model: nn.Module) -> nn.Module:
    """Keep ``model`` equal on all ranks: rank 0's parameters from now on, and averaged gradients.

    On real processes this is torch's DistributedDataParallel, with the options of ``ctx.strategy.ddp``; an
    existing one is adopted. Ranks that are threads have no process group that DDP could use, and DDP's hooks
    don't fit XLA's recorded computation: there the gradients are averaged at the end of backward by one
    packed reduction, and the model itself is returned. So it is in exact mode, where :class:`ExactReplica`
    sums its gradients, and for optimizers that step in backward, where :class:`ImmediateReplica` averages
    each gradient by itself.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: On this rank's device. Without trainable parameters it gets rank 0's values alone.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype.
        ConfigurationError: A parameter has a hook that would see its gradient before the average;
            ``comm_state_option`` doesn't fit, or torch has no such hook for this backend; or
            an optimizer steps in backward, and the model is a ``DistributedDataParallel`` already.
        NotAvailableError: A ``comm_hook`` on ranks that are threads, or one that this torch can't run.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        send_values(ctx, model)
        return model
    for parameter in model.parameters() if ctx.num_processes > 1 else ():
        refuse_hook_of_replica("prepare_model", parameter)
    if ctx.reduction is not None:
        ExactReplica(ctx, model)
        return model
    if ctx.num_processes == 1:
        return model
    steps_in_backward = any(one.is_in_backward for one in stepping_of(model.parameters()))
    if isinstance(model, DistributedDataParallel):
        if steps_in_backward:
            raise ConfigurationError(
                "prepare_model: an optimizer steps in backward, before this DistributedDataParallel has "
                "averaged a gradient. Pass the model inside: prepare_model(ctx, model.module)."
            )
        if not cast("Any", model)._comm_hooks:
            register_comm_hook(ctx, model, None)
        return _watched(ctx, model)
    hook = choose_comm_hook(ctx)
    if steps_in_backward:
        verify_structure(ctx, dict(model.named_parameters()))
        check_each_forward(ctx, model)
        sync_buffers(ctx, model, ImmediateReplica(ctx, model))
        return model
    if ctx.world.group is None or ctx.device.type == "xla":
        check_each_forward(ctx, model)
        sync_buffers(ctx, model, ThreadDDP(ctx, model))
        return model
    # DDP would hang, or mix parameters up, where the models differ; comparing first gives an error by name.
    verify_structure(ctx, dict(model.named_parameters()))
    made_of_others = [name for name, tensor in model.named_parameters() if is_made_of_others(tensor)]
    if made_of_others:  # DDP can't send them, and they have no gradient
        marked: Any = model
        ignored: list[str] = list(getattr(model, IGNORED, ()))
        setattr(marked, IGNORED, [*ignored, *made_of_others])
    # What has no gradient counts as zero in any case; torch's search for it walks the graph, and fails for
    # losses that aren't of the forward pass.
    options: dict[str, Any] = {**ctx.strategy.ddp.to_kwargs(), "find_unused_parameters": False}
    with warnings.catch_warnings():
        # Torch 2.13 has a new name for half of this option's effect, and none for the other half.
        warnings.filterwarnings("ignore", ".broadcast_buffers. is deprecated", FutureWarning)
        wrapped = DataParallel(
            model,
            device_ids=[ctx.device] if _is_all_on(ctx.device, model) else None,
            process_group=ctx.world.group,
            **options,
        )
    register_comm_hook(ctx, wrapped, hook)
    return _watched(ctx, wrapped)


def _watched(ctx: Context, model: DistributedDataParallel) -> DistributedDataParallel:
    handle = DDPHandle(ctx, model)
    check_each_forward(ctx, model)
    if cast("Any", model).broadcast_buffers:
        sync_buffers(ctx, cast("nn.Module", cast("Any", model).module), handle)
    if handle.buffers is not None:
        setattr(model, "will_sync_module_buffers", handle.torch_sends_buffers)  # noqa: B010 -- it is a method
    return model


def check_wrapped(ctx: Context, model: nn.Module) -> None:
    """Refuse a model that torch has already spread over ranks, but for DDP over the ranks of ``ctx``.

    Ranks: local; the same on every rank.

    Raises:
        ConfigurationError: It is sharded by FSDP; or it is a ``DistributedDataParallel`` over other processes
            than the context's, or the context has options that it would not follow.
    """
    kind = type(model).__name__
    for name, module in modules_of(model).items():
        if any(base.__module__.startswith(_FSDP) for base in type(module).__mro__):
            where = f"its module {name}" if name else "it"
            raise ConfigurationError(
                f"prepare_model: the {kind} can't be prepared, because {where} is already sharded by FSDP. "
                "Prepare a complete model before any of its modules, or train what you sharded yourself "
                "without prepare."
            )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            found = f"prepare_model: {name} of the {kind} is already a shard (DTensor)"
            if handles_of(parameter):
                raise ConfigurationError(
                    f"{found}, as a part of another prepared model. Prepare the model that holds all of its "
                    "parameters."
                )
            if not _is_split_over(ctx, parameter):
                raise ConfigurationError(
                    f"{found} in a layout of its own, as transformers loads it with tp_plan or a "
                    f"DistributedConfig. With ParallelismConfig(tp_size={ctx.num_processes}) and nothing "
                    "else a model that is split over all ranks is taken as it is. Otherwise load it without, "
                    "and let prepare split it by the model's own plan."
                )
    if not isinstance(model, DistributedDataParallel):
        return
    group = ctx.world.group
    before = f"prepare_model: the model is already a {kind}, and "
    after = " Pass the model inside: prepare_model(ctx, model.module)."
    if group is None:
        kind_of_world = "one process" if ctx.num_processes == 1 else "ranks that are threads"
        raise ConfigurationError(f"{before}this context has {kind_of_world} and no process group.{after}")
    ranks = dist.get_process_group_ranks(group)
    wrapped_ranks = dist.get_process_group_ranks(cast("Any", model).process_group)
    if ranks != wrapped_ranks:
        raise ConfigurationError(
            f"{before}averages over the processes {wrapped_ranks}, where this context has {ranks}.{after}"
        )
    if ctx.reduction is not None or ctx.strategy.ddp != DistributedDataParallelKwargs():
        what = "DistributedDataParallelKwargs" if ctx.reduction is None else 'reduction="canonical"'
        raise ConfigurationError(f"{before}has options of its own, where this context has {what}.{after}")


def _is_split_over(ctx: Context, parameter: Any) -> bool:
    """Return whether a shard is of a layer that all ranks of a context share along tp."""
    mesh = parameter.device_mesh.mesh
    is_alone = ctx.mesh is not None and ctx.axis_size("tp") == ctx.num_processes
    return is_alone and mesh.dim() == 1 and mesh.tolist() == list(range(ctx.num_processes))


def _is_all_on(device: torch.device, model: nn.Module) -> bool:
    """Return whether DDP may move inputs to ``device``: not for a model on several, or on the CPU."""
    return device.type != "cpu" and all(parameter.device == device for parameter in model.parameters())
