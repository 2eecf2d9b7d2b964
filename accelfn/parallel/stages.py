"""The forward pass of one stage of a model that is cut into several.

Every stage runs the model's own forward on the arguments of the whole model. Modules of other stages aren't
called, and tensors stand in for what they return; where the forward calls the first block of the next stage
it is left. What the call of a stage's first block has of such tensors is what the stage receives: the values
that the call has at the same places in the stage before. So masks, positions and Python's control flow are
the model's own on each stage. Whatever else depends on another stage is refused by name.

Which places these are, and what the modules of earlier stages return, is found out once for batches of one
shape, by running the stages one after another (:class:`StageRun`).
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.utils import _pytree
from typing_extensions import override

from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import modules_of
from accelfn.parallel.forward import WrappedForward
from accelfn.parallel.parameters import remember_whole
from accelfn.parallel.pipeline_plan import PipelinePlan

# Of the first argument these use shape, dtype and device alone; and those of all but the first one.
_LIKE_FIRST = frozenset(
    (
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_tensor",
    )
)
_LIKE_OTHERS = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))
# These give values out of tensors, for Python to decide by.
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
    """A tensor of no value, and what is computed from one. Made by :func:`stand_in_for`."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; its tensors stand in too, unless they depend on shapes alone."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _READS:
            raise ConfigurationError(
                f"{name}() was called on a tensor whose values another stage of the pipeline has. What the "
                "model's forward does around its blocks must not depend on such values."
            )
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            result: Any = func(*args, **kwargs)
        written = args[0] if name == "__setitem__" else kwargs.get("out", result)
        used = (*args, *kwargs.values())
        if name in _LIKE_FIRST:
            used = used[1:]
        elif name in _LIKE_OTHERS:
            used = args[:1]
        has_tensors = any(isinstance(one, torch.Tensor) for one in _pytree.tree_leaves(written))
        if not has_tensors or not has_stand_in(*used):
            return result
        given = (*args, kwargs.get("out"))
        if not isinstance(written, StandIn) and any(written is one for one in given):
            raise ConfigurationError(
                f"{name}() wrote values that another stage of the pipeline has into a tensor, which the "
                "model may have under other names. Compute a new tensor instead."
            )

        def stand_in(value: Any) -> Any:
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, StandIn)
            return stand_in_for(value) if is_plain else value

        return _pytree.tree_map(stand_in, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return itself: nobody writes into it."""
        return self


def stand_in_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape, dtype and device of ``tensor``, of which nobody may use the values."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return cast("Any", tensor.detach()).as_subclass(StandIn)


def has_stand_in(*values: Any) -> bool:
    """Return whether anything in some trees, most of which are leaves, stands in for a tensor."""
    for value in values:
        # A walk over a tree takes as long as a small module.
        leaves = (value,) if isinstance(value, _LEAVES) else _pytree.tree_iter(value)
        if any(isinstance(one, StandIn) for one in leaves):
            return True
    return False


def _leaves(args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the leaves of a call's arguments by their paths, such as ``args[0]`` and ``kwargs['mask']``."""
    return {
        name + _pytree.keystr(path): leaf
        for name, tree in (("args", args), ("kwargs", kwargs))
        for path, leaf in _pytree.tree_flatten_with_path(tree)[0]
    }


# What torch's Module.__call__ calls in the place of hooks and forward, where a module has it.
_CALL = "_compiled_call_impl"


class Outline(NamedTuple):
    """What other stages have to know of one, for batches of one shape. A value: its tensors are on "meta".

    Attributes:
        receives: Where the call of its first block has the tensors that it receives: paths such as
            ``args[0]`` or ``kwargs['mask']``. Empty for the first stage.
        results: What its modules have returned, by name and number of the call.
        offers: The tensors in the call of the first block of the next stage, by path; of the last one none.
    """

    receives: tuple[str, ...]
    results: Mapping[tuple[str, int], Any]
    offers: Mapping[str, torch.Tensor]

    def sent_to(self, following: Outline) -> tuple[torch.Tensor, ...]:
        """Return the outline of the tensors that the stage sends to the one that follows."""
        return tuple(self.offers[path] for path in following.receives)


class LeaveError(Exception):
    """Leaves the forward of a model where the next stage begins.

    An ``Exception``, so that hooks run that modules have for a forward that fails.
    """


class _Received(torch.autograd.Function):
    """What was received. Each tensor has a gradient: zeros where the stage doesn't use it."""

    @staticmethod
    @override
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del ctx
        return tuple(one.detach() for one in tensors)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del ctx
        return gradients


class StageRun:
    """One forward pass of one stage: what it is run with, and what comes of it.

    Attributes:
        plan: That the model was cut by.
        index: Of the stage.
        outlines: Of all stages, for a batch of the same shapes. Of those before it alone, to outline it.
        received: What the stage before has sent; nothing for the first one, and where it is outlined.
        device: Where this rank computes.
        sent: Afterwards what goes to the next stage: what is in the call of its first block, as the model
            computes it, and not in another dtype that a wrapper gives the model's output. Of the last stage
            None.
        outline: Afterwards that of the stage.
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
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what stands in, and what for
        self._results: dict[tuple[str, int], Any] = {}

    @contextmanager
    def gates(self, units: Iterable[tuple[str, tuple[int, ...], nn.Module]]) -> Generator[None, None, None]:
        """Let calls of blocks and other modules go through this run: ``units`` are name, stages, module.

        Around all of a module's hooks, whatever has been done with it since it was cut: so a module that
        doesn't run has no hooks that run, and one that runs has them see its real input.
        """
        units = [*units]
        owners = [vars(module) for _, _, module in units]
        before = [one.get(_CALL) for one in owners]
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
        # Its own torch.compile, where it has one.
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
                args, kwargs = self._filled_in(name, args, kwargs)
            result = inner(*args, **kwargs)
            if self.is_outlining:
                self._results[call] = _pytree.tree_map(_outline_of, result)
            return result

        return gate

    def _skip(self, call: tuple[str, int], stage: int) -> Any:
        """Return something in the place of what a module of an earlier stage has returned there."""
        name, number = call
        if self._has_begun:
            raise ConfigurationError(
                f"{name} is a module of stage {stage}, and the model calls it after the first block of stage "
                f"{self.index}. Blocks have to be called once each, in their order. If it is called only "
                "after the blocks, name it in plan_stages(..., last=...)."
            )
        before = reversed(self.outlines[: self.index])
        found = next((one.results for one in before if call in one.results), None)
        if found is None:
            raise ConfigurationError(
                f"{name} is a module of stage {stage}, where it was called {number} times; in stage "
                f"{self.index} it is called once more before the stage begins. What the model calls must not "
                "depend on values that one of the stages alone has."
            )
        self._skipped[name] = None

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            # What indexes may be computed from has to be in range; of other values nothing is read.
            make = torch.empty if leaf.is_floating_point() else torch.zeros
            return stand_in_for(make(leaf.shape, dtype=leaf.dtype, device=self.device))

        return _pytree.tree_map(stand_in, found[call])

    def _leave(self, name: str, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """Keep what the call of a later stage's block has, and leave the model's forward.

        Raises:
            LeaveError: Always, if not the following.
            ConfigurationError: It isn't the first block of the next stage, or has other tensors than before.
        """
        if stage != self.index + 1 or name != self.plan.stages[stage].blocks[0] or not self._has_begun:
            raise ConfigurationError(
                f"{name} is a module of stage {stage}, and the model calls it in stage {self.index}, before "
                f"{self.plan.stages[self.index + 1].blocks[0]}, with which the next one begins. Blocks have "
                "to be called in their order, and a module that is called before them has to be registered "
                "before them."
            )
        tensors = {
            path: one
            for path, one in _leaves(*self._filled_in(name, args, kwargs)).items()
            if isinstance(one, torch.Tensor)
        }
        if self.is_outlining:
            offers = {path: _outline_of(one) for path, one in tensors.items()}
            self.outline = self.outline._replace(results=self._results, offers=offers)
            self.sent = ()
            raise LeaveError
        sent: list[torch.Tensor] = []
        for path in self.outlines[stage].receives:
            one, before = tensors.get(path), self.outline.offers[path]
            if one is None or (one.shape, one.dtype) != (before.shape, before.dtype):
                raise ConfigurationError(
                    f"{path} of the call of {name}, which stage {self.index} sends, has another shape or "
                    f"dtype than for the first batch of this shape: {_form(one)}, and {_form(before)} then. "
                    "What stages send must depend on the shape of a batch alone."
                )
            sent.append(one.contiguous())
        self.sent = tuple(sent)
        raise LeaveError

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find what stands for tensors of earlier stages in the call of the stage's first block."""
        self._has_begun = True
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, one in _leaves(args, kwargs).items():
            if isinstance(one, StandIn):
                found.setdefault(id(one), (path, one))
        receives = tuple(path for path, _ in found.values())
        if not found:
            raise ConfigurationError(
                f"{name} is the first block of stage {self.index}, and nothing in its call comes from the "
                "blocks before it. Blocks have to be called one after another, each with what the one before "
                "has returned."
            )
        if self.is_outlining:
            offers = self.outlines[-1].offers
            missing = [path for path in receives if path not in offers]
            if missing:
                raise ConfigurationError(
                    f"{name} is the first block of stage {self.index}, and {missing[0]} of its call comes "
                    "from an earlier stage, which has no tensor there: a stage can receive tensors alone. "
                    "Begin the stage with another block."
                )
            self.outline = self.outline._replace(receives=receives)
            self.received = tuple(torch.zeros_like(offers[path], device=self.device) for path in receives)
        elif receives != self.outline.receives:
            raise ConfigurationError(
                f"stage {self.index} would receive {', '.join(receives)} of the call of {name}, and for the "
                f"first batch of this shape it was {', '.join(self.outline.receives)}. What stages send must "
                "depend on the shape of a batch alone."
            )
        received = self.received
        if len(received) > 1 and torch.is_grad_enabled() and any(one.requires_grad for one in received):
            received = cast("tuple[torch.Tensor, ...]", cast("Any", _Received).apply(*received))
        for (_, one), value in zip(found.values(), received, strict=True):
            self._known[id(one)] = one, value

    def _filled_in(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with what was received in the place of what stands for it.

        Raises:
            ConfigurationError: Something else in them stands in for a tensor.
        """
        args, kwargs = self._with_received((args, kwargs))
        if has_stand_in(*args, *kwargs.values()):
            path = next(path for path, one in _leaves(args, kwargs).items() if isinstance(one, StandIn))
            raise ConfigurationError(
                f"{name} is called in stage {self.index}, and {path} of its call depends on "
                f"{self._others()}. A stage receives what is in the call of its first block, and has nothing "
                "else of earlier ones. Pass it to that block too, or cut the model elsewhere."
            )
        return args, kwargs

    def _with_received(self, tree: Any) -> Any:
        """Return a tree with what was received in the place of what stands for it."""

        def replace(leaf: Any) -> Any:
            return self._known[id(leaf)][1] if id(leaf) in self._known else leaf

        return _pytree.tree_map(replace, tree) if has_stand_in(tree) else tree

    def _others(self) -> str:
        """Return in words what tensors may depend on that stand in for others."""
        names = [*self._skipped]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        called = f" ({', '.join(names[:4])}{more})" if names else ""
        return f"modules of other stages{called}, or parameters of them"

    def check_output(self, output: Any) -> Any:
        """Return the output of the last stage, with what was received in it.

        Raises:
            ConfigurationError: Something in it depends on earlier stages, or a stage didn't run.
        """
        if self.index + 1 < len(self.plan.stages) or not self._has_begun:
            later = self.index + 1 if self._has_begun else self.index
            raise ConfigurationError(
                f"the forward ended without a call of {self.plan.stages[later].blocks[0]}, with which stage "
                f"{later} begins. Every block has to be called in each forward pass."
            )
        output = self._with_received(output)
        for path, one in _pytree.tree_flatten_with_path(output)[0]:
            if isinstance(one, StandIn):
                raise ConfigurationError(
                    f"output{_pytree.keystr(path)} of the model depends on {self._others()}, and the last "
                    "stage has nothing of them but what is in the call of its first block. Return what comes "
                    "out of the last block, or leave that output out."
                )
        return output


def _outline_of(leaf: Any) -> Any:
    """Return what a later stage knows of something that a module has returned."""
    if isinstance(leaf, torch.Tensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    # Of anything else it has something that can't be used.
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return leaf if is_plain else torch.empty((), device="meta")


def _form(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"


# What models of transformers collect from all blocks, by their names of arguments and of fields of a config.
_OF_ALL_BLOCKS = (
    "cache",
    "past_key_values",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)


class StagedForward(WrappedForward):
    """The ``forward`` of a model of which some stages are here. Runs inside :func:`run_stage` only.

    It doesn't keep the model alive, of which it is an attribute.
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan) -> None:
        """Stand in for the ``forward`` of ``model``."""
        forward = model.forward
        super().__init__(_WeakMethod(forward) if isinstance(forward, MethodType) else forward)
        self._plan = plan
        stages: dict[str, list[int]] = {}
        for index, one in enumerate(plan.stages):
            for name in (*one.blocks, *one.modules):
                stages.setdefault(name, []).append(index)
        modules = modules_of(model)
        self._units = [(name, tuple(own), modules[name]) for name, own in stages.items()]
        self.run: StageRun | None = None  # while run_stage runs
        self._names = tuple(inspect.signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model on the last stage, and elsewhere a tuple of what is sent."""
        run = self.run
        model = getattr(self.__wrapped__, "__self__", None)
        if run is None:
            raise ConfigurationError(
                f"{type(model).__name__} is cut into {len(self._plan.stages)} stages, and no rank has "
                "all of them: it can't be called. Use accelfn.forward_backward(ctx, model, loss_fn, ...) to "
                "train it, and accelfn.forward(ctx, model, ...) for its output."
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
        """Return the keyword arguments, with ``use_cache=False`` where the model has a default for it.

        Raises:
            ConfigurationError: The call, or the model's config, asks for what only all blocks have together.
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        config: object = getattr(model, "config", None)
        for name in _OF_ALL_BLOCKS:
            by_config = False if name == "use_cache" else getattr(config, name, None)
            asked = given.get(name, by_config)
            if asked is not None and asked is not False:
                raise ConfigurationError(
                    f"{type(model).__name__} was asked for {name}, which is collected from all blocks, "
                    f"and each stage of a pipeline has some of them. Leave it out, or pass {name}="
                    f"{'None' if name in ('cache', 'past_key_values') else 'False'}."
                )
        if "use_cache" in self._names and "use_cache" not in given:
            return {**kwargs, "use_cache": False}
        return kwargs


class _WeakMethod:
    """A bound method that doesn't keep its object alive."""

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
        """Copy and pickle it with its object."""
        return _WeakMethod, (MethodType(self.__func__, self.__self__),)


def apply_stages(model: nn.Module, plan: PipelinePlan, own: Sequence[int]) -> None:
    """Leave of a model only what its stages ``own`` need; the rest stays as modules without tensors.

    Names of what remains are as before, and lists keep their lengths. Writes into ``model``, which from then
    on runs by :func:`run_stage` only.

    Ranks: local.

    Args:
        model: That was planned for; may be on the meta device.
        plan: From :func:`plan_stages`.
        own: Indexes of the stages that this rank runs.

    Raises:
        ConfigurationError: There is no such stage, or the model isn't that of the plan. Nothing was changed.
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
            # As plain attributes of one element each, for models that look at the dtype of a weight.
            for key, one in tensors.items():
                vars(module)[key] = None if one is None else _stand_in_of_parameter(one)
            tensors.clear()
    model.forward = StagedForward(model, plan)


def _stand_in_of_parameter(tensor: torch.Tensor) -> torch.Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    return stand_in_for(torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape))


def run_stage(model: nn.Module, run: StageRun, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the forward pass of one stage, on the arguments of the whole model's call.

    Ranks: any; doesn't communicate.

    Args:
        model: In which :func:`apply_stages` has left the stage; whatever has been put around it since.
        run: Which stage, and what it receives; afterwards it has the outline of the stage.
        args: Positional arguments of the whole model's call.
        kwargs: Keyword arguments of it.

    Returns:
        Of the last stage the model's output; of others the tensors to be sent to the next stage, none where
        the stage is outlined.

    Raises:
        ConfigurationError: The model isn't cut, or can't run in these stages; the message says what depends
            on what.
    """
    staged = _staged(model)
    staged.run = run
    try:
        output = model(*args, **kwargs)
    finally:
        staged.run = None
    return output if run.sent is None else run.sent


def _staged(model: nn.Module) -> StagedForward:
    """Return what apply_stages has put around the forward of a model, or of one that a wrapper holds."""
    for module in cast("Iterable[nn.Module]", model.modules()):
        forward: object = vars(module).get("forward")
        while isinstance(forward, WrappedForward):
            if isinstance(forward, StagedForward):
                return forward
            forward = forward.__wrapped__
    raise ConfigurationError(
        f"run_stage: {type(model).__name__} isn't cut into stages. Call apply_stages before."
    )
