"""Data parallelism: every rank holds the whole model, and gradients are averaged."""

from __future__ import annotations

import hashlib
import json
import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage] -- what dropouts share
from torch.nn.parallel import DistributedDataParallel

from accelfn.comm import Call, catch, check, check_later, gather_bytes, verify_structure
from accelfn.comm.agreement import Shared, as_bytes, describe_tree
from accelfn.context import Context, check_context
from accelfn.context.config import DistributedDataParallelKwargs, GuardMode
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.ddp import DDPHandle, ThreadDDP, choose_comm_hook, register_comm_hook
from accelfn.parallel.exact import ExactReplica
from accelfn.parallel.facts import modules_of
from accelfn.parallel.handle import (
    Communication,
    handle_of,
    swapped,
    uncompiled,
)
from accelfn.parallel.parameters import is_made_of_others
from accelfn.tree import digest_tensors, flatten, is_dtensor

M = TypeVar("M", bound=nn.Module)


def convert_sync_batchnorm(ctx: Context, model: M) -> M:
    """Let batch normalisation take mean and variance over the batches of all ranks: torch's SyncBatchNorm.

    Call it before ``prepare``, and make the optimizer from what it returns. Names and values of the state
    dict stay as they are.

    Ranks: every rank of ``ctx``, in the same way; doesn't communicate.

    Args:
        ctx: The world, whose process group the layers will use.
        model: Its BatchNorm layers are replaced in place.

    Returns:
        The model; another module where it is a BatchNorm layer itself. With one process, and without such
        layers, it comes back as it is.

    Raises:
        NotAvailableError: Torch has no SyncBatchNorm on the CPU, nor for ranks that are threads.
        ConfigurationError: The model was prepared already.

    >>> model = nn.BatchNorm1d(3)
    >>> convert_sync_batchnorm(Context(), model) is model
    True
    """
    check_context("convert_sync_batchnorm", ctx)
    if ctx.num_processes == 1 or not any(isinstance(one, _BatchNorm) for one in model.modules()):
        return model
    if ctx.world.group is None:
        raise NotAvailableError(
            "convert_sync_batchnorm: ranks that are threads have no process group, which torch's "
            "SyncBatchNorm needs. Leave BatchNorm as it is there, or use processes with an accelerator each."
        )
    if ctx.device.type == "cpu":
        raise NotAvailableError(
            "convert_sync_batchnorm: torch's SyncBatchNorm does not compute on the CPU. Leave BatchNorm as "
            "it is there, or take a norm that looks at one sample, such as GroupNorm."
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            "convert_sync_batchnorm: the model was prepared already, and DistributedDataParallel holds on to "
            "its layers. Convert it first, and prepare what comes back."
        )
    converter = cast("Any", nn.SyncBatchNorm)
    return cast("M", converter.convert_sync_batchnorm(model, ctx.world.group))


# Where in the data its forward passes are now.
_PLACE = "_accelfn_place"

# By which DDP knows the tensors of a model that aren't its concern.
_IGNORED = "_ddp_params_and_buffers_to_ignore"

# Where torch's classes of sharded modules are, of both kinds.
_FSDP = "torch.distributed.fsdp"

# Anything else that is no known container may hold the tensor that a backward pass begins with.
_WITHOUT_TENSORS = (str, bytes, int, float, complex, torch.Size, torch.dtype, torch.device)


class DataParallel(DistributedDataParallel):
    """Torch's DistributedDataParallel, through which public attributes and methods of the model are reached.

    Their gradients are averaged too: :class:`DDPHandle`.
    """

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model where the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in vars(self).get("_modules", ()):
                raise
        return getattr(cast("nn.Module", cast("Any", self).module), name)


def replicate(ctx: Context, model: nn.Module) -> nn.Module:
    """Keep ``model`` equal on all ranks: parameters as on rank 0 from now on, gradients averaged in backward.

    On real processes this is torch's DistributedDataParallel, with the options of ``ctx.strategy.ddp``; a
    model that is one already is taken as it is. Ranks
    that are threads have no process group that DDP could use: there the gradients are averaged at the end of
    backward by one packed reduction, and the model itself is returned. In exact mode it is returned too, and
    its gradients are summed by :class:`ExactReplica`.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: On this rank's device. One without trainable parameters has nothing to average and is returned
            as it is.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype.
        ConfigurationError: In exact mode, a module keeps statistics that would depend on the number of ranks.
            Or ``comm_state_option`` doesn't fit, or torch has no such hook for this backend.
        NotAvailableError: A ``comm_hook`` on ranks that are threads, or one that this torch can't run.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    if ctx.reduction is not None:
        ExactReplica(ctx, model)
        return model
    if ctx.num_processes == 1:
        return model
    if isinstance(model, DistributedDataParallel):
        return _adopted(ctx, model)
    hook = choose_comm_hook(ctx)
    if ctx.world.group is None:
        check_each_forward(ctx, model)
        ThreadDDP(ctx, model)
        return model
    # DDP would hang, or mix parameters up, where the models differ; compared first, the difference has a
    # name.
    verify_structure(ctx, dict(model.named_parameters()))
    made_of_others = [name for name, one in model.named_parameters() if is_made_of_others(one)]
    if made_of_others:  # which DDP can't send, and which have no gradient
        marked: Any = model
        ignored: list[str] = list(getattr(model, _IGNORED, ()))
        setattr(marked, _IGNORED, [*ignored, *made_of_others])
    with warnings.catch_warnings():
        # Torch 2.13 has another name for half of what this option does, and none yet for the other half.
        warnings.filterwarnings("ignore", ".broadcast_buffers. is deprecated", FutureWarning)
        wrapped = DataParallel(
            model,
            device_ids=[ctx.device] if _is_all_on(ctx.device, model) else None,
            process_group=ctx.world.group,
            **ctx.strategy.ddp.to_kwargs(),
        )
    register_comm_hook(ctx, wrapped, hook)
    return _watched(ctx, wrapped)


def _watched(ctx: Context, model: DistributedDataParallel) -> DistributedDataParallel:
    DDPHandle(model)
    check_each_forward(ctx, model)
    return model


def _adopted(ctx: Context, model: DistributedDataParallel) -> DistributedDataParallel:
    """Adopt a model that the user has wrapped."""
    if not cast("Any", model)._comm_hooks:
        register_comm_hook(ctx, model, None)
    return _watched(ctx, model)


def check_wrapped(ctx: Context, model: nn.Module) -> None:
    """Refuse a model that torch has spread over ranks already, unless its replicas are on those of ``ctx``.

    Ranks: local; the same on every rank.

    Raises:
        ConfigurationError: It is FSDP's; or ``DistributedDataParallel`` over other processes than the
            context's, or with a context whose options it would not follow.
    """
    kind = type(model).__name__
    for name, module in modules_of(model).items():
        if any(base.__module__.startswith(_FSDP) for base in type(module).__mro__):
            where = f"its module {name}" if name else "it"
            raise ConfigurationError(
                f"prepare_model: the {kind} can't be prepared, because {where} is sharded by FSDP already. A "
                "module is sharded once. Prepare the model as a whole before any of its modules, or train "
                "what you have sharded yourself without prepare."
            )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ConfigurationError(
                f"prepare_model: {name} of the {kind} is a shard (DTensor) already, as a part of another "
                "prepared model. Prepare the model that holds all of its parameters."
            )
    if not isinstance(model, DistributedDataParallel):
        return
    group = ctx.world.group
    before = f"prepare_model: the model is a {kind} already, and "
    after = " Pass the model inside: prepare_model(ctx, model.module)."
    if group is None:
        ranks = "one process" if ctx.num_processes == 1 else "ranks that are threads"
        raise ConfigurationError(f"{before}this context has {ranks} and no process group.{after}")
    own = dist.get_process_group_ranks(group)
    theirs = dist.get_process_group_ranks(cast("Any", model).process_group)
    if own != theirs:
        raise ConfigurationError(
            f"{before}averages over the processes {theirs}, where this context has {own}.{after}"
        )
    if ctx.reduction is not None or ctx.strategy.ddp != DistributedDataParallelKwargs():
        what = "DistributedDataParallelKwargs" if ctx.reduction is None else 'reduction="canonical"'
        raise ConfigurationError(f"{before}has options of its own, where this context has {what}.{after}")


def _is_all_on(device: torch.device, model: nn.Module) -> bool:
    """Return whether DDP may move inputs to ``device``: not for a model on several, or on the CPU."""
    return device.type != "cpu" and all(parameter.device == device for parameter in model.parameters())


class ForwardAgreement:
    """Lets ranks agree on each forward pass of a model that communicates in it or in its backward.

    Torch's reductions have no names: a rank that is elsewhere would leave the others waiting inside them, or
    would be taken for one that is here.
    """

    def __init__(self, ctx: Context | None) -> None:
        """Check in the world of ``ctx``, or nothing without one."""
        self._ctx = ctx
        self._batches = None if ctx is None else _batches_by_rank(ctx)
        self._drops = False  # whether dropout draws in training
        # Whether the ranks that share sequences may have whole ones: until a first pass has shown shards.
        self._is_unsharded = ctx is not None and ctx.axis_size("seq") > 1
        self._is_first = True  # the next pass may compile kernels, on one rank longer than on others

    def watch(self, model: nn.Module) -> None:
        """Check each forward pass of ``model`` from now on."""
        self._drops = any(isinstance(one, _DropoutNd) and one.p > 0 for one in model.modules())
        # FSDP's own begins to gather.
        model.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        model.register_forward_hook(self.after)

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook before a forward pass: notify the others that this rank is here."""
        if self._ctx is None or torch.compiler.is_compiling():  # no Python runs in what is compiled
            return
        handle = handle_of(model)
        if handle is not None and handle.is_joined:
            return
        if self._is_unsharded:
            _check_sharded(self._ctx, args, kwargs)
            self._is_unsharded = False
        planned = Communication() if handle is None else handle.communicates()
        if not any(planned[:3]):
            return
        is_first, self._is_first = self._is_first, False
        text = str(planned)
        place: str = vars(model).get(_PLACE, "")
        call = Call("forward", text, lambda: {"model": text}, takes_long=is_first, place=place)
        if self._batches is not None:
            with_values = self._ctx.guard.mode == GuardMode.FULL
            drawing = self._ctx.device if self._drops and model.training else None
            leaves = partial(_describe, args, kwargs, with_values, drawing)
            call = call._replace(shared=Shared(*self._batches, leaves))
        if planned.at_once:
            check(self._ctx, call)
        else:
            check_later(self._ctx, call)

    def after(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Hook after a forward pass: hear whether they all are before the first gradient is reduced."""
        del arguments
        if self._ctx is None or torch.compiler.is_compiling():
            return
        call_log = self._ctx.collectives.call_log
        if call_log.unsettled is None:
            return

        def before_backward(gradients: Any) -> None:
            del gradients
            call_log.settle()

        starts = _starts_of_backward(output)
        if not starts:
            call_log.settle()
        for node in starts:
            node.register_prehook(before_backward)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardAgreement:
        """Check a copied model too."""
        return self

    def __reduce__(self) -> tuple[type[ForwardAgreement], tuple[None]]:
        """Pickle without the world: a model that is loaded belongs to none."""
        return ForwardAgreement, (None,)


def _batches_by_rank(ctx: Context) -> tuple[str, tuple[int, ...]] | None:
    """Return the axes along which ranks have equal inputs, and by rank which; None where each has its own."""
    if ctx.mesh is None or ctx.along("loss") is ctx:
        return None
    plan = ctx.mesh.plan
    axes = [axis for axis in plan.active() if axis not in plan.active("loss")]
    return ", ".join(axes), tuple(plan.coordinate(rank, "loss") for rank in range(plan.num_ranks))


def _check_sharded(ctx: Context, args: Any, kwargs: Any) -> None:
    """Refuse a first forward pass in which ranks that share sequences have equal inputs: whole ones.

    A model can't tell a sequence from a shard of it, and would compute wrong numbers.
    """
    inputs, error = catch(lambda: json.dumps(_describe(args, kwargs, True, None)).encode())
    found = gather_bytes(ctx.along("seq"), Call("forward", "the first batch"), inputs or b"", error)
    if flatten((args, kwargs))[0] and len(set(found)) == 1:
        axes = " and ".join(cast("Any", ctx.mesh).plan.active("seq"))
        raise ConfigurationError(
            f"forward: ranks along {axes} share sequences, and all of them called the model with the same "
            "tensors: whole sequences, which nobody has sharded. Name the tensors to shard, as in "
            'DataLoaderConfiguration(sequence={"ids": 1, "labels": 1}), and take batches from a prepared '
            "loader or microbatches; or call shard_sequence."
        )


def _describe(args: Any, kwargs: Any, with_values: bool, drawing: torch.device | None) -> dict[str, str]:
    """Describe the inputs of a model by path, and the state of the generator that it draws from.

    Args:
        args: Of its call.
        kwargs: Of its call.
        with_values: Say the bits too, and not only shapes and dtypes; waits for the device.
        drawing: Device whose generator it draws from, if it does.
    """
    kinds: dict[str, str] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tree in (("args", args), ("kwargs", kwargs)):
        own = describe_tree("forward", tree).leaves()
        for (path, kind), leaf in zip(own.items(), flatten(tree)[0], strict=True):
            kinds[path := name + path.removeprefix("tree")] = kind
            if with_values and _is_dense(leaf):
                dense[path] = leaf
    for path, digest in zip(dense, digest_tensors(list(dense.values())), strict=True):
        kinds[path] += f", digest {as_bytes(digest.view(torch.uint8)).hex()}"
    if drawing is not None:
        state = (torch if drawing.type == "cpu" else torch.get_device_module(drawing)).get_rng_state()
        digest = hashlib.blake2b(as_bytes(state), digest_size=8).hexdigest()
        kinds[f"the generator of {drawing.type}, for dropout"] = f"state {digest}"
    return kinds


def _is_dense(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return False
    return not (leaf.is_meta or is_dtensor(leaf))


def _starts_of_backward(output: Any) -> list[Node]:
    """Return the nodes at which a backward pass from ``output`` starts; none where that isn't sure."""
    starts: list[Node | None] = []
    for leaf in flatten(output)[0]:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                starts.append(leaf.grad_fn)
                if leaf._base is not None:  # to change a view in place replaces its node, and leaves this one
                    starts.append(leaf._base.grad_fn)
        elif not isinstance(leaf, _WITHOUT_TENSORS):
            return []
    found = [node for node in starts if node is not None]
    return found if len(found) == len(starts) else []  # a parameter has no node


def check_each_forward(ctx: Context, model: nn.Module) -> None:
    """Let ranks agree on each forward pass of a prepared model, unless the guard of ``ctx`` is off."""
    if ctx.guard.mode != GuardMode.OFF:
        ForwardAgreement(ctx).watch(model)


def at_place(place: str, *models: nn.Module) -> AbstractContextManager[None]:
    """Let ranks compare inside where in their data they are, in forward passes of ``models`` they agree on.

    Ranks: any; doesn't communicate.
    """
    return swapped(_PLACE, place, map(uncompiled, models))
