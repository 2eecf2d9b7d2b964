"""Ranks with different numbers of batches, trained together by torch's Join."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.utils.data import DataLoader

from accelfn.comm import Call, agree, catch, failing_together
from accelfn.context import Context, takes_context
from accelfn.data import PreparedDataLoader
from accelfn.data.loader import passes_of
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.handle import joined, naming_lost_ranks, uncompiled


@takes_context
@contextmanager
def join_uneven_inputs(
    ctx: Context,
    joinables: Sequence[Any],
    loaders: Iterable[PreparedDataLoader[Any] | DataLoader[Any]] = (),
    even_batches: bool | None = None,
) -> Generator[bool, None, None]:
    """Let ranks that have run out of batches join the collectives of the others, so that none hangs.

    A rank that reaches the end of the block early takes part in the others' reductions, with zero gradients
    that count in the mean. At the end all ranks get the model of a rank that finished last. This is torch's
    ``Join``; it needs ``even_batches=False``, and does nothing otherwise.

    Inside is one pass over the data, by ``for batch in loader`` or by ``microbatches(ctx, loader,
    uneven="join")``, with forward, backward and the optimizer's step. Any other communication, such as
    ``gather``, would wait for ranks that have left the pass; and ranks don't agree on forward passes of the
    models.

    Ranks: every rank of ``ctx``. Does nothing with one process.

    Args:
        ctx: The world, and ``even_batches`` of its ``DataLoaderConfiguration``.
        joinables: Models prepared by this context, each a ``DistributedDataParallel``, and optimizers that
            are ``Joinable``.
        loaders: Prepared loaders that ``even_batches`` applies to.
        even_batches: Overrides the configuration for passes that begin inside; restored at the end, also
            after an exception.

    Yields:
        Whether ranks join.

    Raises:
        NotAvailableError: Ranks are threads, or losses are scaled for float16, where ranks agree on each
            step.
        ConfigurationError: One of ``loaders`` can't choose ``even_batches``, ``Guard.check_replicas_every``
            is set, or the context is in exact mode. Errors before the block are raised on every rank, and
            nothing was changed.
        TypeError: One of ``joinables`` can't join, or one of ``loaders`` isn't prepared.
        ValueError: There are no ``joinables``.
    """
    if ctx.num_processes == 1:
        yield False
        return
    even = ctx.loading.even_batches if even_batches is None else even_batches
    chosen = [] if even_batches is None else list(loaders)

    def check() -> list[Joinable]:
        for loader in chosen:
            _check_loader(loader, even)
        return [] if even else _joinables_of(ctx, joinables)

    joined, error = catch(check)
    text = f"even_batches={even} joinables={len(joinables)}"
    agree(ctx, Call("join_uneven_inputs", text, lambda: {"options": text}), None, error)
    with ExitStack() as stack:
        for loader in chosen:
            stack.enter_context(_evened(cast("PreparedDataLoader[Any]", loader), even))
        if joined:
            stack.enter_context(_joined(ctx, joined))
        yield bool(joined)


def _check_loader(loader: object, even: bool) -> None:
    if not isinstance(loader, PreparedDataLoader):
        raise TypeError(
            f"join_uneven_inputs: loaders must be prepared, got {type(loader).__name__}. Pass the loaders "
            "that prepare_data_loader returns."
        )
    reader = passes_of(cast("PreparedDataLoader[Any]", loader)).reader
    if reader.even_batches != even and not reader.can_choose_even:
        kind = type(reader).__name__
        raise ConfigurationError(
            f"join_uneven_inputs: one of the loaders doesn't support even_batches={even}, because of the way "
            f"it reads ({kind}). Call without even_batches, and set it in DataLoaderConfiguration for the "
            "loaders that support it."
        )


def _joinables_of(ctx: Context, items: Sequence[Any]) -> list[Joinable]:
    """Return the objects that torch's Join takes, or raise why it can't be used."""
    if ctx.reduction is not None:
        raise ConfigurationError(
            'join_uneven_inputs: with reduction="canonical" each step is over a fixed number of batches, and '
            "a rank without batches has none. Use even_batches=True, or drop_last=True in the loader."
        )
    if ctx.world.group is None:
        raise NotAvailableError(
            "join_uneven_inputs: ranks that are threads have no DistributedDataParallel, which torch's Join "
            'needs. Use microbatches(ctx, loader, uneven="pad"), or even_batches=True.'
        )
    if ctx.precision.scales_loss:
        raise NotAvailableError(
            "join_uneven_inputs: with float16 all ranks agree on whether a step is skipped, but a rank "
            "without "
            'batches doesn\'t step. Use bf16, or microbatches(ctx, loader, uneven="pad").'
        )
    if ctx.guard.check_replicas_every is not None:
        raise ConfigurationError(
            "join_uneven_inputs: check_replicas_every compares parameters in the steps of all ranks, but a "
            "rank without batches doesn't step. Use ctx.replace(guard=...) without it, and check_replicas "
            "after the block."
        )
    if not items:
        raise ValueError("join_uneven_inputs: got no joinables. Pass the models that are trained inside.")
    found: list[Any] = [uncompiled(item) if isinstance(item, nn.Module) else item for item in items]
    for item in found:
        if not isinstance(item, Joinable):
            raise TypeError(
                "join_uneven_inputs: joinables must be prepared models that are replicated, or optimizers "
                f"that are Joinable, got {type(item).__name__}. Leave out models without trainable "
                "parameters."
            )
    return found


@contextmanager
def _evened(loader: PreparedDataLoader[Any], even: bool) -> Generator[None, None, None]:
    reader = passes_of(loader).reader
    before, reader.even_batches = reader.even_batches, even  # from the next pass on
    try:
        yield
    finally:
        reader.even_batches = before


@contextmanager
def _joined(ctx: Context, joinables: list[Joinable]) -> Generator[None, None, None]:
    configs = [cast("Any", joinable)._join_config for joinable in joinables]
    models = [one for one in joinables if isinstance(one, nn.Module)]
    join = Join(joinables)
    try:
        with joined(*models), failing_together(ctx, "join_uneven_inputs"), naming_lost_ranks(ctx):
            yield
            # Called here, if there is no exception: torch's own `with` changes the filters of warnings for
            # good.
            with warnings.catch_warnings():
                join.__exit__(None, None, None)
    finally:
        # Torch leaves its models joined; each forward pass would go on notifying ranks that don't wait.
        for one, config in zip(joinables, configs, strict=True):
            cast("Any", one)._join_config = config
