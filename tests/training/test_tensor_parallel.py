"""Models whose layers ranks share, where tests/parallel/test_layouts.py doesn't look."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.errors import NotAvailableError
from accelfn.testing import run_ranks
from tests.parallel.layouts import LAYOUTS
from tests.parallel.tensor_models import GPT, SEQUENCE, make_batch
from tests.parallel.test_layouts import Case, by_functions, far, moved, plain, train


@pytest.mark.parametrize("name", ["tp2", "tp2xfsdp2"])
def test_layers_that_share_sequences_train_as_in_one_process(name: str) -> None:
    case = Case(2, "AdamW", weighted=True)
    expected, config = plain(case), LAYOUTS[name].config(SEQUENCE)
    options: Any = {"parallelism_config": config, "timeout_s": 60}
    for seen in run_ranks(
        lambda ctx: train(ctx, case, by_functions), config.total_size, "processes", **options
    ):
        assert far(seen.losses, expected.losses) < 1e-5
        assert far(seen.norms, expected.norms) < 1e-5
        assert moved(case, seen, expected) < 1e-4


def test_dropout_is_equal_on_ranks_that_share_layers_and_differs_between_batches() -> None:
    def draw(ctx: af.Context) -> tuple[int, list[float]]:
        model = af.prepare(ctx, GPT(dropout=0.5))
        torch.manual_seed(ctx.coordinate("loss"))  # pyright: ignore[reportUnknownMemberType]
        return ctx.coordinate("loss"), model(make_batch(1)[0]).flatten()[:50].tolist()

    found = run_ranks(draw, 4, "processes", parallelism_config=LAYOUTS["tp2xdp2"].config())
    by_batch = [[drawn for coordinate, drawn in found if coordinate == one] for one in range(2)]
    for one, other in by_batch:
        assert one == other
    assert by_batch[0] != by_batch[1]


def test_ranks_that_are_threads_cannot_share_layers() -> None:
    config = LAYOUTS["tp2"].config()
    with pytest.raises(NotAvailableError, match='on="processes"'):
        run_ranks(lambda ctx: af.prepare(ctx, GPT()), 2, parallelism_config=config)
