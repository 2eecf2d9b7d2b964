"""One run of a model's forward in which the modules of one stage run, and others are stood in for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree
from typing_extensions import override

from accelfn.errors import ConfigurationError
from accelfn.parallel.stage_plan import PipelinePlan
from accelfn.parallel.stand_in import Scope, StandIn, find_stand_ins, leaves_of_call, stand_in_for

__all__ = ("LeaveError", "Outline", "StageRun")

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
    """One forward pass of one stage; without its outline among ``outlines``, in order to make it."""

    def __init__(
        self,
        scope: Scope,
        plan: PipelinePlan,
        index: int,
        outlines: Sequence[Outline],
        received: tuple[torch.Tensor, ...],
        device: torch.device | str,
    ) -> None:
        self.scope = scope
        self.plan = plan
        self.index = index
        self.before: Sequence[Outline] = outlines[:index]
        self.outline: Outline | None = outlines[index] if len(outlines) > index else None
        self.following: Outline | None = outlines[index + 1] if len(outlines) > index + 1 else None
        self.received = received
        self.device = device
        self.has_begun: bool = index == 0
        self.called: Counter[str] = Counter()
        self.skipped: dict[str, None] = {}
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what stands in, and what for
        self.sent: tuple[torch.Tensor, ...] | None = None
        self.receives: tuple[str, ...] = ()
        self.results: dict[tuple[str, int], Any] = {}
        self.offers: dict[str, torch.Tensor] = {}

    @contextmanager
    def gates(self, units: Iterable[tuple[str, tuple[int, ...], nn.Module]]) -> Generator[None, None, None]:
        """Let calls of blocks and other modules go through this run: ``units`` are name, stages, module.

        Around all of a module's hooks, whatever has been done with it since it was cut: so a module that
        doesn't run has no hooks that run, and one that runs has them see its real input.
        """
        before: list[tuple[nn.Module, Any]] = []
        try:
            for name, stages, module in units:
                before.append((module, vars(module).get(_CALL)))
                vars(module)[_CALL] = self._gate(name, stages, module)
            yield
        finally:
            for module, call in before:
                if call is None:
                    del vars(module)[_CALL]
                else:
                    vars(module)[_CALL] = call

    def _gate(self, name: str, stages: tuple[int, ...], module: nn.Module) -> Callable[..., Any]:
        # Its own torch.compile, where it has one.
        inner: Callable[..., Any] = vars(module).get(_CALL) or cast("Any", module)._call_impl

        def gate(*args: Any, **kwargs: Any) -> Any:
            call = (name, self.called[name])
            self.called[name] += 1
            if self.index < stages[0]:
                return self._leave(name, stages[0], args, kwargs)
            if self.index not in stages:
                return self._skip(call, stages[0])
            if not self.has_begun and name == self.plan.stages[self.index].blocks[0]:
                self._begin(name, args, kwargs)
            args, kwargs = self._with_received((args, kwargs))
            if not self.has_begun and len(stages) > 1 and find_stand_ins((args, kwargs)):
                return self._skip(call, stages[0])
            self._check_input(name, args, kwargs)
            result = inner(*args, **kwargs)
            if self.outline is None:
                self.results[call] = _pytree.tree_map(_outline_of, result)
            return result

        return gate

    def _skip(self, call: tuple[str, int], stage: int) -> Any:
        """Return something in the place of what a module of an earlier stage has returned there."""
        name, number = call
        if self.has_begun:
            raise ConfigurationError(
                f"{name} is a module of stage {stage}, and the model calls it after the first block of stage "
                f"{self.index}. Blocks have to be called once each, in their order. If it is called only "
                "after the blocks, name it in plan_stages(..., last=...)."
            )
        found = next((one.results for one in reversed(self.before) if call in one.results), None)
        if found is None:
            raise ConfigurationError(
                f"{name} is a module of stage {stage}, where it was called {number} times; in stage "
                f"{self.index} it is called once more before the stage begins. What the model calls must not "
                "depend on values that one of the stages alone has."
            )
        self.skipped[name] = None

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return stand_in_for(torch.zeros_like(leaf, device=self.device), self.scope)

        return _pytree.tree_map(stand_in, found[call])

    def _leave(self, name: str, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stage != self.index + 1 or name != self.plan.stages[stage].blocks[0] or not self.has_begun:
            raise ConfigurationError(
                f"{name} is a module of stage {stage}, and the model calls it in stage {self.index}, before "
                f"{self.plan.stages[self.index + 1].blocks[0]}, with which the next one begins. Blocks have "
                "to be called in their order, and a module that is called before them has to be registered "
                "before them."
            )
        args, kwargs = self._with_received((args, kwargs))
        self._check_input(name, args, kwargs)
        leaves = leaves_of_call(args, kwargs)
        tensors = {path: one for path, one in leaves.items() if isinstance(one, torch.Tensor)}
        if self.outline is None:
            self.offers = {path: _outline_of(one) for path, one in tensors.items()}
        if self.following is None:
            self.sent = ()
            raise LeaveError
        sent: list[torch.Tensor] = []
        for path in self.following.receives:
            one, before = tensors.get(path), cast("Outline", self.outline).offers[path]
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
        self.has_begun = True
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, one in leaves_of_call(args, kwargs).items():
            if isinstance(one, StandIn):
                found.setdefault(id(one), (path, one))
        self.receives = tuple(path for path, _ in found.values())
        if not found:
            raise ConfigurationError(
                f"{name} is the first block of stage {self.index}, and nothing in its call comes from the "
                "blocks before it. Blocks have to be called one after another, each with what the one before "
                "has returned."
            )
        received = self.received
        if self.outline is None:
            offers = self.before[-1].offers
            missing = [path for path in self.receives if path not in offers]
            if missing:
                raise ConfigurationError(
                    f"{name} is the first block of stage {self.index}, and {missing[0]} of its call comes "
                    "from an earlier stage, which has no tensor there: a stage can receive tensors alone. "
                    "Begin the stage with another block."
                )
            received = tuple(torch.zeros_like(offers[path], device=self.device) for path in self.receives)
        elif self.receives != self.outline.receives:
            raise ConfigurationError(
                f"stage {self.index} would receive {', '.join(self.receives)} of the call of {name}, and "
                f"for the first batch of this shape it was {', '.join(self.outline.receives)}. What stages "
                "send must depend on the shape of a batch alone."
            )
        if len(received) > 1 and torch.is_grad_enabled() and any(one.requires_grad for one in received):
            received = cast("tuple[torch.Tensor, ...]", cast("Any", _Received).apply(*received))
        for (_, one), value in zip(found.values(), received, strict=True):
            self.known[id(one)] = one, value

    def _with_received(self, tree: Any) -> Any:
        """Return a tree with what was received in the place of what stands for it."""
        if not any(id(leaf) in self.known for leaf in _pytree.tree_leaves(tree)):
            return tree

        def replace(leaf: Any) -> Any:
            return self.known[id(leaf)][1] if id(leaf) in self.known else leaf

        return _pytree.tree_map(replace, tree)

    def _check_input(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = [f"args{one}" for one in find_stand_ins(args)]
        found += [f"kwargs{one}" for one in find_stand_ins(kwargs)]
        if found:
            raise ConfigurationError(
                f"{name} is called in stage {self.index}, and {found[0]} of its call depends on "
                f"{self._others()}. A stage receives what is in the call of its first block, and has nothing "
                "else of earlier ones. Pass it to that block too, or cut the model elsewhere."
            )

    def _others(self) -> str:
        """Return in words what tensors may depend on that stand in for others."""
        called = f" ({_few([*self.skipped])})" if self.skipped else ""
        return f"modules of other stages{called}, or parameters of them"

    def check_output(self, output: Any) -> Any:
        """Return the output of the last stage, with what was received in it.

        Raises:
            ConfigurationError: Something in it depends on earlier stages, or a stage didn't run.
        """
        if self.index + 1 < len(self.plan.stages) or not self.has_begun:
            later = self.index + 1 if self.has_begun else self.index
            raise ConfigurationError(
                f"the forward ended without a call of {self.plan.stages[later].blocks[0]}, with which stage "
                f"{later} begins. Every block has to be called in each forward pass."
            )
        output = self._with_received(output)
        found = find_stand_ins(output)
        if found:
            raise ConfigurationError(
                f"output{found[0]} of the model depends on {self._others()}, and the last stage has nothing "
                "of them but what is in the call of its first block. Return what comes out of the last "
                "block, or leave that output out."
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


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
