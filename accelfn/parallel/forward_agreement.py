"""How ranks agree on each forward pass of a model that communicates."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage] -- what dropouts share

from accelfn.comm import Call, catch, check, check_later, count_call, gather_bytes
from accelfn.comm.agreement import Shared, as_bytes, describe_tree
from accelfn.config import GuardMode
from accelfn.context import Context, device_random_state
from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import Communication, handle_of, swapped, uncompiled
from accelfn.tree import digest_tensors, flatten, is_dtensor

# Attribute of a model: the place in the data of its current forward passes.
_PLACE = "_accelfn_place"

# Leaves without tensors. Any other unknown object may contain the tensor where a backward pass begins.
WITHOUT_TENSORS = (type(None), str, bytes, int, float, complex, torch.Size, torch.dtype, torch.device)


class ForwardAgreement:
    """Makes ranks agree on each forward pass of a model that communicates in it or in its backward pass.

    Torch's reductions have no names: a rank elsewhere in the program would leave the others waiting, or would
    be taken for one that is here.
    """

    def __init__(self, ctx: Context | None) -> None:
        """Check in the world of ``ctx``; None checks nothing."""
        self._ctx = ctx
        self._batches = None if ctx is None else _batches_by_rank(ctx)
        self._drops = False  # whether dropout draws random numbers in training
        # Whether ranks that share sequences may have passed unsharded ones: until the first pass is checked.
        self._is_unsharded = ctx is not None and ctx.axis_size("seq") > 1
        self._is_first = True  # the next pass may compile kernels, which takes some ranks longer

    def watch(self, model: nn.Module) -> None:
        """Check each forward pass of ``model`` from now on."""
        self._drops = any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())
        # Before FSDP's own hook, which begins to gather.
        model.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        model.register_forward_hook(self.after)

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook before a forward pass: announce it to the other ranks."""
        if self._ctx is None or torch.compiler.is_compiling():  # compiled code runs no Python
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
        if planned.buffers and handle is not None and handle.buffers is not None:
            handle.buffers.is_announced = True
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
        """Hook after a forward pass: await the agreement before the first gradient is reduced."""
        del arguments
        if self._ctx is None or torch.compiler.is_compiling():
            return
        handle = handle_of(model)
        gathering = None if handle is None or handle.is_joined else handle.gathering()
        if gathering is not None:  # counted, it is compared before a norm, or with the next forward pass
            (check if gathering.is_new else count_call)(self._ctx, gathering.call)
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
        """Pickle without the world: a loaded model belongs to none."""
        return ForwardAgreement, (None,)


def _batches_by_rank(ctx: Context) -> tuple[str, tuple[int, ...]] | None:
    """Return the axes along which inputs are equal, and each rank's group; None if each rank has its own."""
    if ctx.mesh is None or ctx.along("loss") is ctx:
        return None
    plan = ctx.mesh.plan
    axes = [axis for axis in plan.active() if axis not in plan.active("loss")]
    return ", ".join(axes), tuple(plan.coordinate(rank, "loss") for rank in range(plan.num_ranks))


def _check_sharded(ctx: Context, args: Any, kwargs: Any) -> None:
    """Refuse a first forward pass in which ranks that share sequences have equal inputs: unsharded ones.

    A model can't tell a sequence from a shard of it, and would compute wrong numbers.
    """
    inputs, error = catch(lambda: json.dumps(_describe(args, kwargs, True, None)).encode())
    blobs = gather_bytes(ctx.along("seq"), Call("forward", "the first batch"), inputs or b"", error)
    if flatten((args, kwargs))[0] and len(set(blobs)) == 1:
        axes = " and ".join(cast("Any", ctx.mesh).plan.active("seq"))
        raise ConfigurationError(
            f"forward: ranks along {axes} share sequences, but all of them called the model with the same "
            "tensors: sequences that weren't sharded. Name the tensors to shard, as in "
            'DataLoaderConfiguration(sequence={"ids": 1, "labels": 1}), and take batches from a prepared '
            'loader or microbatches; or shard your own: shard_sequence(ctx, batch, {"ids": 1, "labels": 1}).'
        )


def _describe(args: Any, kwargs: Any, with_values: bool, drawing: torch.device | None) -> dict[str, str]:
    """Describe the inputs of a model by path, and the random state that it draws from.

    Args:
        args: Positional arguments of its call.
        kwargs: Keyword arguments of its call.
        with_values: Include digests of values, and not only shapes and dtypes; waits for the device.
        drawing: Device of the generator that the model draws from, if it draws.
    """
    kinds: dict[str, str] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tree in (("args", args), ("kwargs", kwargs)):
        described = describe_tree("forward", tree).leaves()
        for (path, kind), leaf in zip(described.items(), flatten(tree)[0], strict=True):
            kinds[path := name + path.removeprefix("tree")] = kind
            if with_values and _is_dense(leaf):
                dense[path] = leaf
    for path, digest in zip(dense, digest_tensors(list(dense.values())), strict=True):
        kinds[path] += f", digest {as_bytes(digest.view(torch.uint8)).hex()}"
    if drawing is not None:
        state = device_random_state(drawing)
        digest = hashlib.blake2b(as_bytes(state), digest_size=8).hexdigest()
        kinds[f"the generator of {drawing.type}, for dropout"] = f"state {digest}"
    return kinds


def _is_dense(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return False
    return not (leaf.is_meta or is_dtensor(leaf))


def _starts_of_backward(output: Any) -> list[Node]:
    """Return the graph nodes where a backward pass from ``output`` starts; empty where that is uncertain."""
    starts: list[Node | None] = []
    for leaf in flatten(output)[0]:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                starts.append(leaf.grad_fn)
                if leaf._base is not None:  # changing a view in place replaces its node, but not this one
                    starts.append(leaf._base.grad_fn)
        elif not isinstance(leaf, WITHOUT_TENSORS):
            return []
    found = [node for node in starts if node is not None]
    return found if len(found) == len(starts) else []  # a parameter has no node


def check_each_forward(ctx: Context, model: nn.Module) -> None:
    """Make ranks agree on each forward pass of a prepared model, unless the guard of ``ctx`` is off."""
    if ctx.guard.mode != GuardMode.OFF:
        ForwardAgreement(ctx).watch(model)


def at_place(place: str, *models: nn.Module) -> AbstractContextManager[None]:
    """Make ranks compare their place in the data in the forward passes of ``models`` inside.

    Ranks: any; doesn't communicate.
    """
    return swapped(_PLACE, place, map(uncompiled, models))
