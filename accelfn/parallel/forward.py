"""Forward passes of prepared modules: wrappers of a module's ``forward``, and how ranks agree on calls.

A prepared module keeps its class, its attributes and the keys of its state dict; its hooks run around the
wrapped ``forward``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import Node, save_on_cpu
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage] -- what dropouts share
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from typing_extensions import Self

from accelfn.comm import Call, catch, check, check_later, count_call, gather_bytes
from accelfn.comm.agreement import Shared, as_bytes, describe_tree
from accelfn.context import Context, Precision, device_random_state
from accelfn.context.config import AutocastKwargs, GuardMode, TorchDynamoPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, modules_of, owner_of, repeated_blocks
from accelfn.parallel.handle import Communication, handle_of, swapped, uncompiled
from accelfn.tree import convert_to_fp32, digest_tensors, flatten, is_dtensor

M = TypeVar("M", bound=nn.Module)


class WrappedForward:
    """Replaces a module's ``forward``; ``inspect.signature`` sees the wrapped one."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        """Wrap ``forward``."""
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped forward."""
        return self.__wrapped__(*args, **kwargs)

    def around(self, forward: Callable[..., Any]) -> Self:
        """Return a copy around another ``forward``."""
        other = copy.copy(self)
        other.__wrapped__ = forward
        return other


def plain_forward(model: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` of a module without accelfn's wrappers."""
    forward: Any = model.forward
    while isinstance(forward, WrappedForward):
        forward = forward.__wrapped__
    return forward


def _own_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without the one that ``fully_shard`` adds."""
    kinds = type(model).__mro__
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it isn't loaded, nothing is sharded
    if fsdp is None or fsdp.FSDPModule not in kinds:
        return kinds[0]
    return kinds[kinds.index(fsdp.FSDPModule) + 1]


def copied_without(model: M, kind: type[WrappedForward], modules: dict[str, Any] | None = None) -> M:
    """Return a shallow copy of a module, without wrappers of a kind around its ``forward``.

    Args:
        model: Shares its parameters, buffers and (unless ``modules`` is given) submodules with the copy.
        kind: The class of wrappers to remove.
        modules: The copy's submodules.
    """
    other = cast("M", object.__new__(_own_class(model)))
    other.__dict__.update(vars(model))
    for name in ("_compiled_call_impl", "_call_impl"):  # which would call the original
        other.__dict__.pop(name, None)
    if modules is not None:
        other.__dict__["_modules"] = modules

    def rebuilt(forward: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(forward, WrappedForward):
            inner = rebuilt(forward.__wrapped__)
            return inner if isinstance(forward, kind) else forward.around(inner)
        if getattr(forward, "__self__", None) is model:
            return MethodType(cast("MethodType", forward).__func__, other)
        return forward

    if "forward" in other.__dict__:
        forward = rebuilt(other.__dict__.pop("forward"))
        if other.forward != forward:  # else the class gives the same
            other.__dict__["forward"] = forward
    return other


def autocast_in(
    precision: Precision, device_type: str, handler: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a context manager that computes in a precision, with the handler's options if there is one."""
    if precision.mode == "no":
        return nullcontext()
    options = precision.autocast if handler is None else handler
    return torch.autocast(
        device_type,
        dtype=torch.float16 if precision.mode == "fp16" else torch.bfloat16,
        enabled=options.enabled,
        cache_enabled=options.cache_enabled,
    )


class MixedPrecisionForward(WrappedForward):
    """A module's ``forward`` under autocast, with float32 results."""

    def __init__(self, forward: Callable[..., Any], precision: Precision, device_type: str) -> None:
        """Wrap ``forward``."""
        super().__init__(forward)
        self._precision = precision
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` in mixed precision."""
        if torch.is_autocast_enabled(self._device_type):
            # Around several steps it would keep its copies of the weights, from before the first of them.
            torch.clear_autocast_cache()
        with autocast_in(self._precision, self._device_type):
            result = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(result)


def with_precision(ctx: Context, model: M) -> M:
    """Make ``model.forward`` compute in the context's precision. Writes into the module."""
    if ctx.precision.mode != "no":
        model.forward = MixedPrecisionForward(model.forward, ctx.precision, ctx.device.type)
    return model


class CompiledForward(WrappedForward):
    """A module's ``forward``, compiled.

    Everything around it (hooks, autocast, DistributedDataParallel, the agreement of ranks) runs as ordinary
    Python and breaks no graph.
    """

    def __init__(self, forward: Callable[..., Any], options: TorchDynamoPlugin) -> None:
        """Compile ``forward`` at its first call."""
        super().__init__(forward)
        self._options = options
        self._compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled forward."""
        return self._compiled(*args, **kwargs)

    def around(self, forward: Callable[..., Any]) -> CompiledForward:
        """Compile another ``forward`` in the same way."""
        return CompiledForward(forward, self._options)

    def _compile(self) -> None:
        compiler = cast("Any", torch).compile
        self._compiled: Callable[..., Any] = compiler(self.__wrapped__, **self._options.to_kwargs())

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the compiled code."""
        return {"__wrapped__": self.__wrapped__, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Compile again at the first call."""
        self.__dict__.update(state)
        self._compile()


def plan_regions(model: nn.Module) -> tuple[str, ...]:
    """Return the modules of a model to compile one by one: repeated blocks, which compile once. Pure.

    Repeated blocks are the items of a ``ModuleList`` that are all of one class. Without any it is the model
    itself, by the name "".

    >>> plan_regions(nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), nn.ReLU()))
    ('0.0', '0.1')
    >>> plan_regions(nn.ReLU())
    ('',)
    """
    return repeated_blocks(model) or ("",)


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module or one inside it is compiled, by accelfn or by the user."""
    return any(_has_compiled_forward(module) or _is_compiled_by_user(module) for module in model.modules())


def _has_compiled_forward(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, CompiledForward) or isinstance(
        getattr(forward, "__wrapped__", None), CompiledForward
    )


def _is_compiled_by_user(module: nn.Module) -> bool:
    return vars(module).get("_compiled_call_impl") is not None or uncompiled(module) is not module


def compile_(model: M, options: TorchDynamoPlugin, names: Iterable[str]) -> M:
    """Compile modules of a model with torch.compile. Writes into the modules.

    A model that is compiled already, or has a compiled module inside, isn't changed.

    Ranks: local.

    Args:
        model: Not prepared yet.
        options: Options of the compiler.
        names: Names of the modules to compile, "" for the model itself.
    """
    chosen = tuple(names)
    if not chosen or is_compiled(model):
        return model
    for name in chosen:
        module = model.get_submodule(name)
        module.forward = CompiledForward(module.forward, options)
    return model


def without_compile(model: M) -> M:
    """Return a module that shares everything with ``model`` and has nothing compiled in it."""
    original = uncompiled(model)
    if original is not model:
        return cast("M", without_compile(original))
    before = cast("dict[str, nn.Module | None]", vars(model)["_modules"])
    modules = {name: None if one is None else without_compile(one) for name, one in before.items()}
    is_own = _has_compiled_forward(model) or _is_compiled_by_user(model)
    if not is_own and all(modules[name] is before[name] for name in before):
        return model
    return copied_without(model, CompiledForward, modules)


# Names of transformers' caches, to which a block appends keys and values.
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


def refuse_own_recomputation(model: nn.Module) -> None:
    """Refuse a model that recomputes activations by itself.

    Raises:
        ConfigurationError: Its own ``gradient_checkpointing`` is on.
    """
    for name, module in modules_of(model).items():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ConfigurationError(
                f"fsdp_plugin: activation_checkpointing is set, and {name or 'the model'} has its own "
                "gradient_checkpointing on: blocks would be computed three times. Turn one of them off."
            )


def plan_recompute(facts: ModelFacts, units: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the modules whose activations are recomputed in the backward pass. Pure.

    Args:
        facts: Of the model.
        units: The units that FSDP gathers, or would gather on several ranks. Of nested units the outermost
            is recomputed.

    Raises:
        ConfigurationError: The model itself is the only unit: recomputing it at once would save nothing.
    """
    chosen = set(units) - {""}
    if not chosen:
        raise ConfigurationError(
            f"fsdp_plugin: activation_checkpointing recomputes units one by one, and {facts.kinds['']} is a "
            "single unit. Pass transformer_cls_names_to_wrap or another auto_wrap_policy, or leave "
            "activation_checkpointing out; for this model alone with a context of its own: prepare_model("
            "ctx.replace(fsdp_plugin=dataclasses.replace(plugin, activation_checkpointing=False)), model)."
        )
    return tuple(
        name for name in facts.kinds if name in chosen and owner_of(name.rpartition(".")[0], chosen) is None
    )


class RecomputedForward(WrappedForward):
    """A module's ``forward``, recomputed in the backward pass from its inputs.

    It replaces ``forward`` and not the call, so that the module's hooks run once: FSDP has gathered the
    parameters when the backward pass recomputes it. Buffers are changed by the first time alone.
    """

    def __init__(
        self, forward: Callable[..., Any], module: nn.Module, offload_from: torch.device | None = None
    ) -> None:
        """Wrap the ``forward`` of a module, whose inputs are kept in host memory if a device is given."""
        super().__init__(forward)
        self._module = module
        self._offload_from = offload_from

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped forward; the backward pass calls it again, with the same random numbers."""
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        for name in _CACHES:
            if kwargs.get(name) is not None:
                kwargs[name] = _empty(name, kwargs[name])
        if torch.compiler.is_compiling():  # the compiler doesn't repeat changes of buffers
            # By this name torch.compile knows it.
            return cast("Any", checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs))
        changed = _copies_of_buffers(self._module)
        if changed:
            kwargs["context_fn"] = lambda: (nullcontext(), _Restored(changed))
        keeping = nullcontext()
        if self._offload_from is not None:
            keeping = save_on_cpu(pin_memory=self._offload_from.type == "cuda")
        with keeping:
            output = cast("Any", checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs))
        changed[:] = filter(_Copied.may_have_changed, changed)
        return output


class _Copied(NamedTuple):
    """A buffer as it was, and its copy from then."""

    owner: dict[str, torch.Tensor | None]  # the buffers of its module
    name: str
    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None

    def may_have_changed(self) -> bool:
        """Return whether it has changed since; torch doesn't count changes of statistics."""
        if self.owner.get(self.name) is not self.tensor or self.name in ("running_mean", "running_var"):
            return True
        return _version_of(self.tensor) != self.version


def _version_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _copies_of_buffers(module: nn.Module) -> list[_Copied]:
    """Copy the buffers of the modules in training, which may change them."""
    owners = [
        cast("dict[str, torch.Tensor | None]", vars(one)["_buffers"])
        for one in module.modules()
        if one.training
    ]
    return [
        _Copied(owner, name, one, _version_of(one), None if one is None else one.clone())
        for owner in owners
        for name, one in owner.items()
    ]


class _Restored:
    """Computes with buffers as they were; changes inside are lost. May be entered again."""

    def __init__(self, copied: Sequence[_Copied]) -> None:
        self._copied = copied
        self._now: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._now = [one.owner.get(one.name) for one in self._copied]
        for one in self._copied:
            one.owner[one.name] = None if one.copy is None else one.copy.clone()

    def __exit__(self, *error: object) -> None:
        for one, tensor in zip(self._copied, self._now, strict=True):
            one.owner[one.name] = tensor


def _empty(name: str, cache: Any) -> None:
    """Replace an empty cache by None: the recomputation would append to it a second time.

    Raises:
        ConfigurationError: It isn't empty, and without it the block would compute something else.
    """
    count = getattr(cache, "get_seq_length", None)
    if count is None or count() != 0:
        raise ConfigurationError(
            f"activation_checkpointing: a block got {name} with keys and values in it, to which recomputing "
            "the block in the backward pass would append again. Compute without gradients (torch.no_grad), "
            "or without activation_checkpointing."
        )


def recompute(ctx: Context, model: nn.Module, names: Iterable[str]) -> None:
    """Recompute modules of a model in the backward pass. Writes into the modules; names don't change.

    Ranks: local.

    Args:
        ctx: Whose plugin says where their inputs are kept.
        model: Neither compiled by accelfn nor sharded yet.
        names: Names of the modules, from :func:`plan_recompute`.
    """
    plugin = ctx.strategy.fsdp
    offloads = plugin is not None and plugin.activation_checkpointing_offload
    for name in names:
        module = model.get_submodule(name)
        module.forward = RecomputedForward(module.forward, module, ctx.device if offloads else None)


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
        # FSDP's own begins to gather.
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
