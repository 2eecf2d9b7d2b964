"""A model of the user's own: what can't be compared is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing.programs import check_programs, training_programs


def build_model() -> nn.Module:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    return nn.Linear(2, 1)


def build_at_random() -> nn.Module:
    torch.seed()
    return nn.Linear(2, 1)


def build_frozen() -> nn.Module:
    return build_model().requires_grad_(False)


def make_rows() -> list[torch.Tensor]:
    return [*torch.arange(32.0).view(16, 2)]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def weighted_loss(model: Any, batch: Any) -> af.Loss:
    return af.Loss(model(batch).square().sum(), len(batch))


def few_rows() -> list[torch.Tensor]:
    return make_rows()[:3]


def no_tensor(model: Any, batch: Any) -> float:
    return 1.0


def several_numbers(model: Any, batch: Any) -> torch.Tensor:
    return model(batch)


def no_number(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).sum() / 0.0


def loss_at_random(model: Any, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * torch.rand(())


def changing_rows() -> list[torch.Tensor]:
    torch.seed()
    return [*torch.rand(16, 2)]


def build_in_bf16() -> nn.Module:
    return build_model().bfloat16()


def summed_loss(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).square().sum()


def detached_loss(model: Any, batch: Any) -> torch.Tensor:
    return loss_of(model, batch).detach()


def weightless_loss(model: Any, batch: Any) -> af.Loss:
    return af.Loss(model(batch).square().sum(), 0)


ONE_MODEL = build_model()


def loss_in_a_row(model: Any, batch: Any) -> torch.Tensor:
    return loss_of(model, batch).view(1)


def loss_by_its_weights(model: Any, batch: Any) -> torch.Tensor:
    weights = batch[:, 0]
    return (model(batch).square().squeeze(1) * weights).sum() / weights.sum()


def build_batchnorm() -> nn.Module:
    return nn.Sequential(build_model(), nn.BatchNorm1d(1))


def product(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch) * batch).mean()


def build_with_a_frozen_draw() -> nn.Module:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    return nn.Sequential(frozen, build_model())


class Counting(nn.Module):
    """Counts its forward passes."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x)


def draw_rows() -> list[torch.Tensor]:
    return [*torch.rand(16, 2)]


@pytest.mark.parametrize(
    ("error", "message", "functions"),
    [
        (ValueError, "no parameters that require gradients", {"build_model": build_frozen}),
        (
            ValueError,
            "two calls of build_model returned different weights: weight",
            {"build_model": build_at_random},
        ),
        (ValueError, "returned 3 rows, and 4 ranks need at least 16", {"make_rows": few_rows}),
        (TypeError, "loss_of returned float", {"loss_of": no_tensor}),
        (ValueError, "the loss must be one finite number", {"loss_of": several_numbers}),
        (ValueError, "the loss must be one finite number", {"loss_of": no_number}),
        (ValueError, "it draws random numbers, which differ between layouts", {"loss_of": loss_at_random}),
        (ValueError, "two calls of make_rows returned different rows", {"make_rows": changing_rows}),
        (ValueError, "weight is in torch.bfloat16", {"build_model": build_in_bf16}),
        (ValueError, "it is no mean over the rows", {"loss_of": summed_loss}),
        (ValueError, "the loss has no gradient", {"loss_of": detached_loss}),
        (ValueError, "the loss has the weight 0", {"loss_of": weightless_loss}),
        (ValueError, r"number of shape \(\), got .* of shape \(1,\)", {"loss_of": loss_in_a_row}),
        (ValueError, "by halves: it is no mean", {"loss_of": loss_by_its_weights}),
        (
            ValueError,
            "BatchNorm, say sees_other_rows=True",
            {"build_model": build_batchnorm, "loss_of": product},
        ),
        (ValueError, "returned one object", {"build_model": lambda: ONE_MODEL}),
        (ValueError, "different weights: 0.weight", {"build_model": build_with_a_frozen_draw}),
        # build_model has seeded torch before the first call of make_rows.
        (ValueError, "make_rows returned different rows", {"make_rows": draw_rows}),
    ],
)
def test_what_cannot_be_compared_is_refused(
    error: type[Exception], message: str, functions: dict[str, Any]
) -> None:
    arguments: dict[str, Any] = {"build_model": build_model, "make_rows": make_rows, "loss_of": loss_of}
    with pytest.raises(error, match=message):
        training_programs(**{**arguments, **functions})


def test_a_step_of_a_batch_in_parts_counts_more_passes_than_the_reference() -> None:
    grammar = training_programs(Counting, make_rows, loss_of)
    with pytest.raises(ValueError, match="the reference steps in one pass"):
        grammar.program("api=train_step accumulation=2")
    assert training_programs(build_model, make_rows, loss_of).program("api=train_step accumulation=2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2", "the feature tp can't be '2'. Choose among 1"),
        ("cp=2", "the feature cp can't be '2'. Choose among 1"),
        ("dp=3 shard=2", "there are at most 4 ranks"),
        ("seed=rank", "build_model takes no seed"),
        ("optimizer=two", "a model without layers is trained as one"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused(text: str, message: str) -> None:
    grammar = training_programs(build_model, make_rows, loss_of)
    with pytest.raises(ValueError, match=message):
        grammar.program(text)


def test_rows_that_matter_to_each_other_are_not_resumed_by_other_ranks() -> None:
    grammar = training_programs(build_model, make_rows, loss_of, sees_other_rows=True)
    with pytest.raises(ValueError, match="rows that matter to each other are of one number of ranks"):
        grammar.program("dp=2 save=middle resume=one")


def test_axes_are_there_for_models_that_say_how_they_are_shared() -> None:
    grammar = training_programs(
        build_model, make_rows, weighted_loss, tensor_plan={"0": "colwise"}, sequence={"x": 1}
    )
    for text in ("tp=2", "cp=2", "sp=2", "pp=2 api=forward_backward"):
        assert grammar.program(text).num_ranks == 2


def test_a_loss_with_a_weight_is_one_in_every_program() -> None:
    grammar = training_programs(build_model, make_rows, weighted_loss)
    assert grammar.program()["weighted"] is True
    assert "weight=loss.weight" in grammar.program().source()


def build_in_sequence() -> nn.Module:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def mean_loss(model: Any, batch: Any) -> torch.Tensor:
    return loss_of(model, batch / 32)


def test_layers_without_names_are_frozen_and_have_optimizers_too() -> None:
    grammar = training_programs(build_in_sequence, make_rows, mean_loss)
    programs = [grammar.program(f"dp=2 world=memory {one}") for one in ("freeze=freeze", "optimizer=groups")]
    assert [verdict.kind for verdict in check_programs(programs)] == ["equal", "equal"]
