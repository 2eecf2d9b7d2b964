"""How the gradients of ranks are combined, where the default is not enough."""

from dataclasses import dataclass

from accelfn.context.config.checks import check_ints

__all__ = ("CanonicalReduction",)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalReduction:
    """Exact mode: an optimizer step sums the gradients of a fixed number of microbatches in a fixed order.

    So training gives the same bits at any number of ranks that divides the number of microbatches.

    Attributes:
        num_microbatches: Batches of all ranks together in one optimizer step, at least 1. The accumulation
            window of a rank follows: ``num_microbatches`` divided by the number of ranks. ``None``: as many
            as the window and the number of ranks make. Default None.
        seed: Of what torch draws at random inside of ``accumulate``, at least 0. Default 0.
    """

    num_microbatches: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_ints(self, "num_microbatches", minimum=1, optional=True)
        check_ints(self, "seed", minimum=0)
