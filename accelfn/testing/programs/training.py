"""The programs that train a model of the user's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from accelfn.testing.programs import habits, layouts, loops, plain
from accelfn.testing.programs.draft import Draft
from accelfn.testing.programs.grammar import Feature, Grammar, Program, Rule, feature, together
from accelfn.testing.programs.parts import default_collate
from accelfn.tree import digest_tensors, flatten, tree_structure

_ROWS = 8  # of a batch whose loss is looked at, whole and by its halves

T = TypeVar("T")


def training_programs(
    build_model: Callable[..., nn.Module],
    make_rows: Callable[[], Sequence[Any]],
    loss_of: Callable[[Any, Any], Any],
    *,
    tensor_plan: Mapping[str, str] | None = None,
    sequence: Mapping[str, int] | None = None,
    sees_other_rows: bool = False,
    features: Sequence[Feature] = (),
    rules: Sequence[Rule] = (),
) -> Grammar:
    """Return the grammar of programs that train a model in every layout, with every habit of a loop.

    The three functions must be importable or in ``__main__``, so that a program prints as a script.

    Args:
        build_model: Returns the model, with the same weights at each call. Where it takes an argument, that
            is a seed, and programs in which ranks begin with weights of their own are drawn too.
        make_rows: Returns the samples, at least 16: trees of tensors that torch's ``default_collate`` takes.
        loss_of: ``loss_of(model, batch)`` returns the mean loss over the rows of a batch; or an
            ``accelfn.Loss`` with the sum and its weight.
        tensor_plan: How ranks along ``tp`` share its layers, as in ``TorchTensorParallelConfig(plan=...)``;
            None: they don't.
        sequence: Dimension of the sequence in each tensor of a batch, as in ``DataLoaderConfiguration``, for
            ranks along ``cp`` and ``sp``; None: there are none. They need a loss with a weight.
        sees_other_rows: Whether the model's output for a row depends on the other rows of its rank, as with
            BatchNorm. The reference then computes the rows of each rank on their own.
        features: More that may vary.
        rules: What can't be together.

    Raises:
        TypeError: The loss is neither a tensor nor an ``accelfn.Loss``.
        ValueError: The model has no parameters to train, or parameters in bf16 or fp16; weights or rows are
            others at each call, or in another random state; there are too few rows; or the loss isn't one
            finite number with a gradient, isn't a mean over its rows, or is another one at each call.

    >>> def build_model(seed=0):
    ...     torch.manual_seed(seed)
    ...     return nn.Linear(3, 1)
    >>> def make_rows():
    ...     return [(torch.full((3,), index / 16), torch.ones(1)) for index in range(16)]
    >>> def loss_of(model, batch):
    ...     return nn.functional.mse_loss(model(batch[0]), batch[1])
    >>> grammar = training_programs(build_model, make_rows, loss_of)
    >>> print(grammar.program("dp=2 accumulation=2 schedule"))
    dp=2 accumulation=2 schedule
    """
    subject = _Subject(build_model, make_rows, loss_of, sees_other_rows)
    weighted = subject.check()
    parts = [
        name for name, module in subject.model.named_children() if any(True for _ in module.parameters())
    ]

    @feature("model", ("own",))
    def model(p: Program, draft: Draft) -> None:
        """The user's model."""
        draft.words["part"] = f'model.get_submodule("{parts[0]}")' if parts else "model"

    own: list[Rule] = []
    if not inspect.signature(build_model).parameters:
        own.append(Rule("build_model takes no seed", together("seed")))
    if not parts:
        own.append(Rule("a model without layers is trained as one", together("optimizer=groups|two|turns")))
    if subject.changes_buffers:  # by each forward pass, and a step has one for each part of its batch
        own.append(Rule("the reference steps in one pass", together("api=train_step accumulation=2|3")))
    if subject.has_buffers:
        own.append(Rule("a tree has no buffers", together("api=pure|gradients")))
    number = len(subject.rows)
    loop = [replace(one, values=(weighted,)) if one.name == "weighted" else one for one in loops.LOOP]
    return Grammar(
        skeleton=loops.SKELETON,
        features=(
            *layouts.layouts(tensor_plan=tensor_plan, sequence=sequence),
            *(model, *loop, *habits.HABITS),
            *(loops.rows_feature((number, number - 1)), loops.SOURCE, *features, *habits.ENDS),
        ),
        rules=(*layouts.RULES, *loops.RULES, *habits.RULES, *own, *rules),
        scope={"build_model": build_model, "make_rows": make_rows, "loss_of": loss_of},
        is_imported=True,
        sees_other_rows=lambda program: sees_other_rows,
    )


def _are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    first, second = (default_collate([*rows]) for rows in (one, other))
    if tree_structure(first) != tree_structure(second):
        return False
    return bool((digest_tensors(_tensors(first)) == digest_tensors(_tensors(second))).all())


def _after_other_draws(build: Callable[[], T]) -> T:
    """Return what a function returns in another random state, which has to be the same."""
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(20_261_128)  # pyright: ignore[reportUnknownMemberType]
        return build()


def _weight(loss: plain.Loss) -> Any:
    return 1 if loss.weight is None else loss.weight


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class _Subject:
    """The user's functions."""

    def __init__(self, build_model: Any, make_rows: Any, loss_of: Any, sees_other_rows: bool) -> None:
        self._build, self._make_rows, self._loss_of = build_model, make_rows, loss_of
        self._sees_other_rows, self.changes_buffers = sees_other_rows, False
        self.model: nn.Module = build_model()
        self.rows = make_rows()
        self.has_buffers = any(True for _ in self.model.buffers())

    def check(self) -> bool:
        """Return whether the loss has a weight, after refusing what can't be compared."""
        trained = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        if not trained:
            raise ValueError(
                "training_programs: the model has no parameters that require gradients, so there is nothing "
                "to compare. Return a model that can be trained from build_model."
            )
        other = _after_other_draws(self._build)
        if other is self.model:
            raise ValueError(
                "training_programs: two calls of build_model returned one object. Build a model in each "
                "call, as each rank and the reference train their own."
            )
        first, second = self.model.state_dict(), other.state_dict()
        differing = [name for name, one in first.items() if not torch.equal(one, second[name])]
        if differing:
            raise ValueError(
                "training_programs: two calls of build_model returned different weights: "
                f"{', '.join(differing[:3])}. Call torch.manual_seed at its beginning, so that each rank and "
                "the reference begin with the same."
            )
        if len(self.rows) < 16:
            raise ValueError(
                f"training_programs: make_rows returned {len(self.rows)} rows, and 4 ranks need at least 16."
            )
        if not _are_equal(self.rows, _after_other_draws(self._make_rows)):
            raise ValueError(
                "training_programs: two calls of make_rows returned different rows. Draw them from a "
                "torch.Generator that is seeded in it."
            )
        half = next((name for name, one in trained.items() if one.dtype.itemsize < 4), "")
        if half:
            raise ValueError(
                f"training_programs: {half} is in {trained[half].dtype}, but the reference computes in "
                "float32. Build the model in float32; programs in bf16 are drawn too."
            )
        model = plain.prepare(plain.Context(), self._build())
        rows = self.rows[:_ROWS]
        before = [buffer.clone() for buffer in model.buffers()]
        whole, again = self._loss(model, rows), self._loss(model, rows)
        self.changes_buffers = not all(map(torch.equal, before, model.buffers()))
        if float(whole.value) != float(again.value):
            raise ValueError(
                f"training_programs: the loss of the same batch was {float(whole.value):.6g} and then "
                f"{float(again.value):.6g}: it draws random numbers, which differ between layouts. "
                "Set dropout to 0, or draw from a generator that is seeded in the call."
            )
        half = _ROWS // 2
        parts = [[*rows, *rows]] if self._sees_other_rows else [rows[:half], rows[half:]]
        split = [self._loss(model, part) for part in parts]
        mean = float(whole.value / _weight(whole))
        joined = float(sum(one.value for one in split) / sum(_weight(one) for one in split))
        if not math.isclose(joined, mean, rel_tol=1e-3, abs_tol=1e-6):
            how = "with each row twice" if self._sees_other_rows else "by halves"
            raise ValueError(
                f"training_programs: the loss of {_ROWS} rows is {mean:.6g}, and {joined:.6g} {how}: it is "
                "no mean over the rows. Divide it by their number, or return an accelfn.Loss of a sum and "
                "its weight. Where outputs depend on the other rows, as with BatchNorm, say "
                "sees_other_rows=True."
            )
        return whole.weight is not None

    def _loss(self, model: nn.Module, rows: Sequence[Any]) -> plain.Loss:
        loss = self._loss_of(model, default_collate([*rows]))
        value = getattr(loss, "value", loss)
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"training_programs: loss_of returned {type(loss).__name__}. Return a tensor of shape (), or "
                "an accelfn.Loss."
            )
        if value.shape != () or not value.is_floating_point() or not bool(torch.isfinite(value)):
            raise ValueError(
                f"training_programs: the loss must be one finite number of shape (), got {value.detach()} of "
                f"shape {tuple(value.shape)}."
            )
        if not value.requires_grad:
            raise ValueError(
                "training_programs: the loss has no gradient: it is detached, or computed without parameters."
            )
        weight = getattr(loss, "weight", None)
        if weight is not None and not float(weight) > 0:
            raise ValueError(
                f"training_programs: the loss has the weight {float(weight):g}, which must be > 0."
            )
        return plain.Loss(value.detach(), weight)
