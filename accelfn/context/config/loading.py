"""How data loaders are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from accelfn.context.config.checks import check_bools, check_ints, settle, settle_classes, wrong_type
from accelfn.context.config.options import FrozenOptions

__all__ = ("DataLoaderConfiguration",)


@dataclass(frozen=True, slots=True)
class DataLoaderConfiguration:
    """How the batches of a loader reach the ranks.

    Attributes:
        split_batches: False: each rank takes whole batches, so the global batch is batch size times ranks.
            True: each batch of the loader is cut into one part per rank. Default False.
        dispatch_batches: True: rank 0 reads and sends each rank its part, for data that only one process can
            read. False or ``None``: each rank reads its own, which is faster for all others. Default None.
        even_batches: Whether the last round is completed with samples from the start, so that all ranks
            see equally many. Default True.
        use_seedable_sampler: Accepted, without effect: a shuffled order is always a function of seed and
            epoch. Default False.
        data_seed: Seed of a shuffled order, at least 0; ``None`` takes that of the sampler's generator, else
            rank 0's seed of torch. Default None.
        non_blocking: Whether copies to the device are asynchronous. Default False.
        use_stateful_dataloader: Whether streams that worker processes read are resumed by the state of their
            datasets: a loader is then torchdata's ``StatefulDataLoader`` (``pip install 'accelfn[data]'``).
            Without workers, and for data that is read by index, none is needed. Default False.
        custom_classes: Classes of your own whose instances ``prepare`` takes for loaders: iterables of
            batches that are no torch DataLoaders. Default none.
        sequence: What ranks along ``cp`` or ``sp`` share of a batch: the dimension of the tokens, by key of a
            batch that is a mapping, or place in one that is a list or tuple, such as
            ``{"ids": 1, "labels": 1, "positions": 1}``. What isn't named, each of them gets whole. Default
            none.
        sequence_padding: By what the sequence of each of these may be lengthened at its end, where ranks
            can't have equal pieces: ``{"ids": 0, "labels": -100, "positions": 0}``. A length that doesn't
            divide is an error without. Default none.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    _: KW_ONLY
    custom_classes: tuple[type, ...] = ()
    sequence: Mapping[str, int] | Mapping[int, int] | None = None
    sequence_padding: Mapping[str, float] | Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        check_bools(
            self,
            "split_batches",
            "even_batches",
            "use_seedable_sampler",
            "non_blocking",
            "use_stateful_dataloader",
        )
        check_bools(self, "dispatch_batches", optional=True)
        check_ints(self, "data_seed", minimum=0, optional=True)
        settle_classes(self, "custom_classes")
        for name, kinds in (("sequence", (int,)), ("sequence_padding", (int, float))):
            given = cast("object", getattr(self, name))
            if given is None:
                continue
            if not isinstance(given, Mapping):
                raise wrong_type(self, name, 'a mapping, such as {"ids": 1}, or None')
            items = dict(cast("Mapping[object, object]", given))
            if not all(isinstance(key, (str, int)) and type(one) in kinds for key, one in items.items()):
                raise wrong_type(self, name, "a mapping from keys or places to numbers")
            settle(self, **{name: FrozenOptions(cast("Mapping[str, Any]", items))})
