"""The programs that train a model of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accelfn.testing.programs import habits, layouts, loops, plain
from accelfn.testing.programs.draft import Draft
from accelfn.testing.programs.grammar import Feature, Grammar, Program, Rule, feature, together
from accelfn.testing.programs.parts import default_collate
from accelfn.tree import digest_tensors, flatten, tree_structure

_BATCH = 2  # rows of a rank's batch in the plainest program


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

    The three functions must be importable or have a source, so that a program prints as a script.

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
            others at each call; there are too few rows; or the loss isn't one finite number with a gradient,
            isn't a mean, or is another one at each call (random numbers without a seed).

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
    subject = _Subject(build_model, make_rows, loss_of)
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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class _Subject:
    """The user's functions."""

    def __init__(self, build_model: Any, make_rows: Any, loss_of: Any) -> None:
        self._build, self._make_rows, self._loss_of = build_model, make_rows, loss_of
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
        other = dict(self._build().named_parameters())
        differing = [name for name, one in trained.items() if not torch.equal(one, other[name])]
        if differing:
            raise ValueError(
                "training_programs: two calls of build_model returned different weights: "
                f"{', '.join(differing[:3])}. Call torch.manual_seed in it, so that each rank and the "
                "reference begin with the same."
            )
        if len(self.rows) < 16:
            raise ValueError(
                f"training_programs: make_rows returned {len(self.rows)} rows, and 4 ranks need at least 16."
            )
        if not _are_equal(self.rows, self._make_rows()):
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
        first, second = self._loss(model), self._loss(model)
        if float(first.value) != float(second.value):
            raise ValueError(
                f"training_programs: the loss of the same batch was {float(first.value):.6g} and then "
                f"{float(second.value):.6g}: it draws random numbers, which differ between layouts. "
                "Set dropout to 0, or draw from a generator that is seeded in the call."
            )
        twice = self._loss(model, times=2)
        if first.weight is None and not torch.allclose(twice.value, first.value, rtol=0.01):
            raise ValueError(
                f"training_programs: the loss was {float(first.value):.6g}, and {float(twice.value):.6g} "
                "with each row twice: it isn't a mean over the rows. Divide it by their number, or return "
                "an accelfn.Loss of the sum and its weight."
            )
        return first.weight is not None

    def _loss(self, model: nn.Module, times: int = 1) -> plain.Loss:
        batch = default_collate([*self.rows[:_BATCH]] * times)
        loss = self._loss_of(model, batch)
        value = getattr(loss, "value", loss)
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"training_programs: loss_of returned {type(loss).__name__}. Return a tensor of shape (), or "
                "an accelfn.Loss."
            )
        if value.numel() != 1 or not value.is_floating_point() or not bool(torch.isfinite(value)):
            raise ValueError(
                f"training_programs: the loss must be one finite number, got {value.detach()} of shape "
                f"{tuple(value.shape)}."
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
