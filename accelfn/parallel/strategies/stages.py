"""The forward pass of one stage of a pipelined model.

Every stage runs the model's own forward on the arguments of the full model. Modules of other stages are
skipped, and stand-in tensors take the place of their outputs; where the forward calls the first block of the
next stage, the stage ends. A stage receives the values of the stand-ins in the call of its first block: the
stage before has the values at the same paths of that call. So masks, positions and Python control flow are
computed by the model itself on each stage. Any other dependency on another stage is an error by name.

The paths, and what modules of earlier stages return, are found once for each shape of batch by running the
stages (:class:`StageRun`): one after another for the first shape; for others all at once, on sizes that are
guessed (:func:`resized`) and thereby confirmed.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.utils import _pytree
from typing_extensions import override

from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import modules_of
from accelfn.parallel.forward import WrappedForward
from accelfn.parallel.handle import swapped
from accelfn.parallel.pointers import remember_whole
from accelfn.parallel.strategies.pipeline_plan import PipelinePlan
from accelfn.parallel.strategies.strategy import Application

# The result depends only on shape, dtype and device of all arguments but the first one.
_LIKE_OTHERS = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))
# Functions that return values for Python to branch on.
_READS = frozenset(
    (
        "item",
        "tolist",
        "numpy",
        "equal",
        "allclose",
        "is_nonzero",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__contains__",
        "__array__",
    )
)
_LEAVES = (torch.Tensor, type(None), bool, int, float, str)


class StandIn(torch.Tensor):
    """A tensor whose values are on another stage, or depend on such. Made by :func:`stand_in_for`.

    Attributes:
        value: The tensor that it stood for, once this rank has received it. It is used from then on, also
            where the backward pass computes a block again, on the arguments of its first call.
    """

    value: torch.Tensor | None = None

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; its results are stand-ins too, unless they depend on shapes only."""
        args, kwargs = cast(
            "tuple[tuple[Any, ...], dict[str, Any]]", _pytree.tree_map(_received, (tuple(args), kwargs or {}))
        )
        if not has_stand_in(*args, *kwargs.values()):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in _READS:
            raise ConfigurationError(
                f"{name}() was called on a tensor whose values are on another stage of the pipeline. The "
                "model's forward must not depend on such values around its blocks."
            )
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            result: Any = func(*args, **kwargs)
        written = args[0] if name == "__setitem__" else kwargs.get("out", result)
        used = (*args, *kwargs.values())
        if name.startswith("new_") or name.endswith("_like"):  # only on those of the first one
            used = used[1:]
        elif name in _LIKE_OTHERS:
            used = args[:1]
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(written))
        if not has_tensors or not has_stand_in(*used):
            return result
        targets = (*args, kwargs.get("out"))
        if not isinstance(written, StandIn) and any(written is target for target in targets):
            raise ConfigurationError(
                f"{name}() wrote values of another pipeline stage into a tensor that the model may use "
                "elsewhere. Compute a new tensor instead."
            )

        def stand_in(value: Any) -> Any:
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, StandIn)
            return stand_in_for(value) if is_plain else value

        return _pytree.tree_map(stand_in, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return itself: it is never written to."""
        return self


def _received(leaf: Any) -> Any:
    """Return the tensor that a leaf stands for; the leaf itself if it is none, or there is none yet."""
    # Not by the attribute of a tensor of any other class, whose __torch_function__ it would reach.
    return leaf if not isinstance(leaf, StandIn) or leaf.value is None else leaf.value


def stand_in_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return a stand-in with the shape, dtype and device of ``tensor``."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return cast("Any", tensor.detach()).as_subclass(StandIn)


def has_stand_in(*values: Any) -> bool:
    """Return whether any leaf of some trees, most of which are single leaves, is a stand-in."""
    for value in values:
        # Fast path: walking a tree costs as much as a small module.
        leaves = (value,) if isinstance(value, _LEAVES) else _pytree.tree_iter(value)
        for leaf in leaves:
            if isinstance(leaf, StandIn):
                return True
    return False


def _leaves(args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the leaves of a call's arguments by their paths, such as ``args[0]`` and ``kwargs['mask']``."""
    return {
        name + _pytree.keystr(path): leaf
        for name, tree in (("args", args), ("kwargs", kwargs))
        for path, leaf in _pytree.tree_flatten_with_path(tree)[0]
    }


# Torch's Module.__call__ runs this attribute instead of hooks and forward, if it is set.
_CALL = "_compiled_call_impl"


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device | str) -> torch.Tensor:
        """Return a tensor of this form."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


class Outline(NamedTuple):
    """What other stages must know about a stage, for batches of one shape: forms in the place of tensors.

    Attributes:
        receives: Paths of the received tensors in the call of its first block, such as ``args[0]`` or
            ``kwargs['mask']``. Empty for the first stage.
        results: What its modules returned, by name and index of the call.
        offers: The tensors in the call of the next stage's first block, by path; empty for the last stage.
    """

    receives: tuple[str, ...]
    results: Mapping[tuple[str, int], Any]
    offers: Mapping[str, Form]

    def sent_to(self, following: Outline) -> tuple[Form, ...]:
        """Return the forms of the tensors that this stage sends to ``following``."""
        return tuple(self.offers[path] for path in following.receives)


def resized(outlines: Sequence[Outline], before: Sequence[int], now: Sequence[int]) -> list[Outline]:
    """Return outlines for a batch of other sizes: a guess, by which sizes of the batch they have.

    Args:
        outlines: Of all stages.
        before: The rows of the batch that they were found with, and its other sizes.
        now: The same of the other batch.
    """
    rows, sizes = {before[0]: now[0]}, dict(zip(before[1:], now[1:], strict=True))
    # Modules may also join a batch's rows and positions into one dimension.
    joined = {before[0] * old: now[0] * new for old, new in sizes.items()}
    of_first, of_others = {**joined, **sizes, **rows}, {**rows, **sizes}

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Form):
            return leaf
        others = [of_others.get(size, size) for size in leaf.shape[1:]]
        return Form((*(of_first.get(size, size) for size in leaf.shape[:1]), *others), leaf.dtype)

    return _pytree.tree_map(resize, [*outlines])


class LeaveError(Exception):
    """Ends a model's forward where the next stage begins.

    An ``Exception``, so that modules' hooks for failed forwards run.
    """


class _Received(torch.autograd.Function):
    """Received tensors. Each one gets a gradient: zeros if the stage doesn't use it."""

    @staticmethod
    @override
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del ctx
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del ctx
        return gradients


class StageRun:
    """One forward pass of one stage: its inputs and its outputs.

    Attributes:
        plan: The plan that split the model.
        index: Index of the stage.
        outlines: Outlines of all stages, for batches of this shape; only of the stages before, to outline
            this stage.
        received: The tensors that the previous stage sent; empty for the first stage and while outlining.
        device: Device of this rank.
        sent: After the run, the tensors for the next stage, of the dtypes in the call of its first block.
            None on the last stage.
        outline: After the run, the outline of this stage.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        index: int,
        outlines: Sequence[Outline],
        received: tuple[torch.Tensor, ...],
        device: torch.device | str,
    ) -> None:
        self.plan = plan
        self.index = index
        self.outlines = outlines
        self.received: tuple[torch.Tensor, ...] = received
        self.device = device
        self.sent: tuple[torch.Tensor, ...] | None = None
        self.is_outlining: bool = len(outlines) == index
        self.outline: Outline = Outline((), {}, {}) if self.is_outlining else outlines[index]
        self._has_begun = index == 0
        self._called: Counter[str] = Counter()
        self._skipped: dict[str, None] = {}
        self._results: dict[tuple[str, int], Any] = {}

    @contextmanager
    def gates(self, units: Iterable[tuple[str, tuple[int, ...], nn.Module]]) -> Generator[None, None, None]:
        """Route calls of blocks and other modules through this run.

        The gates are outside of all hooks of a module, whatever was done with it since the model was split:
        the hooks of a skipped module don't run, and those of a module that runs see its real input.

        Args:
            units: Name, stages and module of each.
        """
        units = [*units]
        owners = [vars(module) for _, _, module in units]
        before = [owner.get(_CALL) for owner in owners]
        try:
            for owner, unit in zip(owners, units, strict=True):
                owner[_CALL] = self._gate(*unit)
            yield
        finally:
            for owner, call in zip(owners, before, strict=True):
                owner.pop(_CALL, None)
                if call is not None:
                    owner[_CALL] = call

    def _gate(self, name: str, stages: tuple[int, ...], module: nn.Module) -> Callable[..., Any]:
        # The module's own torch.compile, if it is compiled.
        inner: Callable[..., Any] = vars(module).get(_CALL) or cast("Any", module)._call_impl

        def gate(*args: Any, **kwargs: Any) -> Any:
            call = (name, self._called[name])
            self._called[name] += 1
            if self.index < stages[0]:
                self._leave(name, stages[0], args, kwargs)
            if self.index not in stages:
                return self._skip(call, stages[0])
            if not self._has_begun and name == self.plan.stages[self.index].blocks[0]:
                self._begin(name, args, kwargs)
            if has_stand_in(*args, *kwargs.values()):
                if not self._has_begun and len(stages) > 1:
                    return self._skip(call, stages[0])
                args, kwargs = self._substituted(name, args, kwargs)
            result = inner(*args, **kwargs)
            if self.is_outlining:
                self._results[call] = _pytree.tree_map(_outline_of, result)
            return result

        return gate

    def _skip(self, call: tuple[str, int], stage: int) -> Any:
        """Return stand-ins for the output of an earlier stage's module."""
        name, number = call
        if self._has_begun:
            raise ConfigurationError(
                f"{name} is on stage {stage}, but the model calls it after the first block of stage "
                f"{self.index}. Each block must be called once, in order. If {name} is only called after the "
                "blocks, name it in PipelineParallelConfig(last=...)."
            )
        before = reversed(self.outlines[: self.index])
        found = next((one.results for one in before if call in one.results), None)
        if found is None:
            raise ConfigurationError(
                f"{name} is on stage {stage}, where it was called {number} times, but stage {self.index} "
                "calls it once more before its first block. Which modules the model calls must not depend on "
                "values that only some stages have."
            )
        self._skipped[name] = None

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, Form):
                return leaf
            # Integers may be used as indexes, so they must be in range; other values are never read.
            make = torch.empty if leaf.dtype.is_floating_point else torch.zeros
            return stand_in_for(make(leaf.shape, dtype=leaf.dtype, device=self.device))

        return _pytree.tree_map(stand_in, found[call])

    def _leave(self, name: str, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """Collect the tensors in the call of a later stage's block, and end the model's forward.

        Raises:
            LeaveError: The stage is complete.
            ConfigurationError: It isn't the first block of the next stage, or has other tensors than before.
        """
        if stage != self.index + 1 or name != self.plan.stages[stage].blocks[0] or not self._has_begun:
            raise ConfigurationError(
                f"{name} is on stage {stage}, but the model calls it on stage {self.index}, before "
                f"{self.plan.stages[self.index + 1].blocks[0]}, the first block of the next stage. Blocks "
                "must be called in order, and a module that is called before them must be registered before "
                "them."
            )
        tensors = {
            path: tensor
            for path, tensor in _leaves(*self._substituted(name, args, kwargs)).items()
            if isinstance(tensor, torch.Tensor)
        }
        if self.is_outlining:
            offers = {path: _outline_of(tensor) for path, tensor in tensors.items()}
            self.outline = self.outline._replace(results=self._results, offers=offers)
            self.sent = ()
            raise LeaveError
        sent: list[torch.Tensor] = []
        for path in self.outlines[stage].receives:
            tensor, expected = tensors.get(path), self.outline.offers[path]
            if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                form = "none" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise ConfigurationError(
                    f"{path} in the call of {name}, which stage {self.index} sends, is {form}; for the first "
                    f"batch of this shape it was {expected.shape} of {expected.dtype}. The tensors that "
                    "stages send must depend on the shape of a batch only."
                )
            sent.append(tensor.contiguous())
        self.sent = tuple(sent)
        raise LeaveError

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Map the stand-ins in the call of the stage's first block to the received tensors."""
        self._has_begun = True
        found: dict[int, tuple[str, StandIn]] = {}
        for path, leaf in _leaves(args, kwargs).items():
            if isinstance(leaf, StandIn):
                found.setdefault(id(leaf), (path, leaf))
        receives = tuple(path for path, _ in found.values())
        if not found:
            raise ConfigurationError(
                f"{name} is the first block of stage {self.index}, but nothing in its call comes from "
                "earlier blocks. Blocks must be called one after another, each with the output of the one "
                "before."
            )
        if self.is_outlining:
            offers = self.outlines[-1].offers
            missing = [path for path in receives if path not in offers]
            if missing:
                raise ConfigurationError(
                    f"{name} is the first block of stage {self.index}, and {missing[0]} of its call comes "
                    "from an earlier stage, where it is no tensor. Stages can only receive tensors: begin "
                    "the stage with another block."
                )
            self.outline = self.outline._replace(receives=receives)
            self.received = tuple(offers[path].zeros(self.device) for path in receives)
        elif receives != self.outline.receives:
            raise ConfigurationError(
                f"stage {self.index} would receive {', '.join(receives)} of the call of {name}; for the "
                f"first batch of this shape it was {', '.join(self.outline.receives)}. The tensors that "
                "stages send must depend on the shape of a batch only."
            )
        received = self.received
        if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in received):
            raise ConfigurationError(
                f"{name} is the first block of stage {self.index}, and the model calls it without gradients: "
                "under no_grad, or in a checkpoint(..., use_reentrant=True), which doesn't see the tensors "
                "that a stage receives. Use checkpoint(..., use_reentrant=False)."
            )
        if len(received) > 1 and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in received):
            received = cast("tuple[torch.Tensor, ...]", cast("Any", _Received).apply(*received))
        for (_, stand_in), value in zip(found.values(), received, strict=True):
            stand_in.value = value
            # An autograd function, which __torch_function__ doesn't see, looks at the stand-in itself.
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                stand_in.requires_grad_(value.requires_grad)

    def _substituted(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with received tensors in the place of their stand-ins.

        Raises:
            ConfigurationError: Other stand-ins are among them.
        """
        args, kwargs = self._with_received((args, kwargs))
        if has_stand_in(*args, *kwargs.values()):
            path = next(path for path, leaf in _leaves(args, kwargs).items() if isinstance(leaf, StandIn))
            raise ConfigurationError(
                f"{name} is called on stage {self.index}, and {path} of its call depends on "
                f"{self._others()}. A stage only receives what is in the call of its first block. Pass it to "
                "that block too, or split the model elsewhere."
            )
        return args, kwargs

    def _with_received(self, tree: Any) -> Any:
        """Return a tree with received tensors in the place of their stand-ins."""
        return _pytree.tree_map(_received, tree) if has_stand_in(tree) else tree

    def _others(self) -> str:
        """Describe what the remaining stand-ins may depend on."""
        names = [*self._skipped]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        called = f" ({', '.join(names[:4])}{more})" if names else ""
        return f"modules of other stages{called}, or parameters of them"

    def check_output(self, output: Any) -> Any:
        """Return the last stage's output, with received tensors in the place of their stand-ins.

        Raises:
            ConfigurationError: It depends on earlier stages, or a stage didn't run.
        """
        if self.index + 1 < len(self.plan.stages) or not self._has_begun:
            later = self.index + 1 if self._has_begun else self.index
            raise ConfigurationError(
                f"the forward ended without a call of {self.plan.stages[later].blocks[0]}, the first block "
                f"of stage {later}. Every block must be called in each forward pass."
            )
        output = self._with_received(output)
        for path, leaf in _pytree.tree_flatten_with_path(output)[0]:
            if isinstance(leaf, StandIn):
                raise ConfigurationError(
                    f"output{_pytree.keystr(path)} of the model depends on {self._others()}, of which the "
                    "last stage only has what is in the call of its first block. Return the output of the "
                    "last block, or leave that output out."
                )
        return output


def _outline_of(leaf: Any) -> Any:
    """Return an output of a module as later stages know it: forms of tensors, plain Python values."""
    if isinstance(leaf, torch.Tensor):
        return Form(tuple(leaf.shape), leaf.dtype)
    # In the place of any other object, later stages have a stand-in that can't be used.
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return leaf if is_plain else Form((), torch.float32)


# Arguments of transformers models, and fields of their configs, for outputs that all blocks add to.
_OF_ALL_BLOCKS = (
    "cache",
    "past_key_values",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)


class StagedForward(WrappedForward):
    """The ``forward`` of a model with only some stages on this rank. Runs inside :func:`run_stage` only.

    It holds the model weakly, since it is an attribute of it.
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan) -> None:
        """Wrap the ``forward`` of ``model``."""
        forward = model.forward
        super().__init__(_WeakMethod(forward) if isinstance(forward, MethodType) else forward)
        self._plan = plan
        stages: dict[str, list[int]] = {}
        for index, stage in enumerate(plan.stages):
            for name in (*stage.blocks, *stage.modules):
                stages.setdefault(name, []).append(index)
        modules = modules_of(model)
        self._units = [(name, tuple(holders), modules[name]) for name, holders in stages.items()]
        self.run: StageRun | None = None  # while run_stage runs
        self._names = tuple(inspect.signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output on the last stage, and the tensors to send on the others."""
        run = self.run
        model = getattr(self.__wrapped__, "__self__", None)
        if run is None:
            raise ConfigurationError(
                f"{type(model).__name__} is split into {len(self._plan.stages)} pipeline stages, and no rank "
                "has all of them, so it can't be called. Use accelfn.forward_backward(ctx, model, loss_fn, "
                "...) to train it, and accelfn.training.forward(ctx, model, ...) for its output."
            )
        kwargs = self._without_collecting(model, args, kwargs)
        try:
            with run.gates(self._units):
                output = self.__wrapped__(*args, **kwargs)
        except LeaveError:
            return run.sent
        return run.check_output(output)

    def _without_collecting(
        self, model: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the keyword arguments, with ``use_cache=False`` where the model takes it.

        Raises:
            ConfigurationError: The call, or the model's config, requests an output that all blocks add to.
        """
        passed = {**dict(zip(self._names, args, strict=False)), **kwargs}
        config: object = getattr(model, "config", None)
        for name in _OF_ALL_BLOCKS:
            by_config = False if name == "use_cache" else getattr(config, name, None)
            requested = passed.get(name, by_config)
            if requested is not None and requested is not False:
                raise ConfigurationError(
                    f"{type(model).__name__}: {name} collects from all blocks, and each pipeline stage has "
                    f"only some of them. Leave it out, or pass {name}="
                    f"{'None' if name in ('cache', 'past_key_values') else 'False'}."
                )
        if "use_cache" in self._names and "use_cache" not in passed:
            return {**kwargs, "use_cache": False}
        return kwargs


class _WeakMethod:
    """A bound method that holds its object weakly."""

    def __init__(self, method: MethodType) -> None:
        self.__func__: Callable[..., Any] = method.__func__
        self._owner = weakref.ref(method.__self__)
        self.__signature__ = inspect.signature(method)

    @property
    def __self__(self) -> Any:
        return self._owner()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @override
    def __reduce__(self) -> tuple[type[_WeakMethod], tuple[MethodType]]:
        """Copy and pickle it together with its object."""
        return _WeakMethod, (MethodType(self.__func__, self.__self__),)


def apply_stages(
    model: nn.Module, plan: PipelinePlan, own: Sequence[int], device: torch.device | None = None
) -> None:
    """Keep only a model's stages ``own``; its other modules stay, without tensors. Writes into ``model``.

    Names and lengths of lists don't change. From then on the model runs by :func:`run_stage` only.

    Ranks: local.

    Args:
        model: The planned model; may be on the meta device.
        plan: From :func:`plan_stages`.
        own: Indexes of the stages that this rank runs.
        device: On which this rank computes; None for that of each tensor.

    Raises:
        ConfigurationError: A stage doesn't exist, or the plan is of another model. Nothing was changed.
    """
    if not own or not set(own) <= set(range(len(plan.stages))):
        raise ConfigurationError(
            f"apply_stages: own must be some of the stages 0 to {len(plan.stages) - 1}, got {list(own)}."
        )
    modules = modules_of(model)
    by_stage = [[*stage.blocks, *stage.modules] for stage in plan.stages]
    missing = [name for names in by_stage for name in names if name not in modules]
    if missing:
        raise ConfigurationError(
            f"apply_stages: the plan is of another model: {type(model).__name__} has no {', '.join(missing)}."
        )
    remember_whole(model)
    kept = {part for index in own for name in by_stage[index] for part in modules[name].modules()}
    for module in {part for name in plan.elsewhere(own) for part in modules[name].modules()} - kept:
        for kind in ("_parameters", "_buffers"):
            tensors = cast("dict[str, torch.Tensor | None]", vars(module)[kind])
            # Stand-ins as plain attributes, for models that read the dtype of a weight.
            for key, tensor in tensors.items():
                vars(module)[key] = None if tensor is None else _stand_in_of_parameter(tensor, device)
            tensors.clear()
    model.forward = StagedForward(model, plan)


def _stand_in_of_parameter(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    device = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
    return stand_in_for(torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape))


def run_stage(model: nn.Module, run: StageRun, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the forward pass of one stage, on the arguments of the full model's call.

    Ranks: any; doesn't communicate.

    Args:
        model: Split by :func:`apply_stages`, and possibly wrapped since.
        run: The stage and what it receives; afterwards it has the stage's outline.
        args: Positional arguments of the full model's call.
        kwargs: Keyword arguments of the full model's call.

    Returns:
        On the last stage the model's output; on the others the tensors for the next stage, none while
        outlining.

    Raises:
        ConfigurationError: The model isn't split, or can't run in these stages.
    """
    root, staged = _staged(model)
    is_last = run.index + 1 == len(run.plan.stages)
    hooks: dict[int, Any] = vars(root)["_forward_hooks"]
    staged.run = run
    try:
        with swapped("_forward_hooks", hooks if is_last else _of_libraries(hooks), [root]):
            output = model(*args, **kwargs)
    finally:
        staged.run = None
    if run.sent is None:
        return output
    # What hooks and wrappers made of them, so that a backward pass meets FSDP's hooks; without their casts.
    run.sent = tuple(made.to(sent.dtype) for made, sent in zip(output, run.sent, strict=True))
    return run.sent


def _of_libraries(hooks: Mapping[int, Any]) -> Mapping[int, Any]:
    """Return a model's forward hooks without those of the program, which are for the model's output."""
    return OrderedDict(
        (number, hook)
        for number, hook in hooks.items()
        if (getattr(hook, "__module__", None) or "").startswith(("torch.", "accelfn."))
    )


def _staged(model: nn.Module) -> tuple[nn.Module, StagedForward]:
    """Return a model, or the model inside a wrapper, and its StagedForward."""
    for module in cast("Iterable[nn.Module]", model.modules()):
        forward: object = vars(module).get("forward")
        while forward is not None:
            if isinstance(forward, StagedForward):
                return module, forward
            forward = getattr(forward, "__wrapped__", None)
    raise ConfigurationError(
        f"run_stage: {type(model).__name__} isn't split into stages. Call apply_stages first."
    )


def apply(plan: PipelinePlan, at: Application) -> None:
    """Keep this rank's stages of a model alone."""
    own = at.plans["schedule"].stages_of(at.ctx.coordinate("pp"))
    apply_stages(at.model, plan, own, at.ctx.device)
