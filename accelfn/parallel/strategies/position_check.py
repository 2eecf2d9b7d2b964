"""Check that a model computes each position of a sequence alone, except in attention.

Ranks that share sequences exchange them in attention only. A convolution, a sum or a mean along the sequence
would see this rank's part of it, and a model that counts positions itself would count those of the part: both
are other numbers in silence. Known kinds are refused by their class; the rest is tried once, on a few
positions of the first batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.comm import Call, catch, gather_bytes
from accelfn.comm.agreement import as_bytes
from accelfn.context import Context, device_random_state, set_device_random_state
from accelfn.parallel.buffers import KeptBuffers
from accelfn.parallel.facts import modules_of
from accelfn.tree import digest_tensors, flatten, is_dtensor, local_of

_POSITIONS = 16  # at most, that are tried
# Of the mean size of the numbers. Kernels may compute a position that moved in another way: rounding, also
# that of 8 bits, is below it.
_MOVED_TOLERANCE = 0.05
# Smallest relative steps of products of 8 bits, and of float32 where torch may round it.
_STEP_OF_8_BITS, _STEP_OF_ROUNDED = 2.0**-7, 2.0**-10
_CALL = Call("forward", "the check of positions")
_PLAIN = (str, bytes, int, float, complex, torch.Size, torch.dtype, torch.device)


def find_mixing_kind(model: nn.Module) -> str | None:
    """Describe a layer that is known to mix positions; None if there is none. Pure."""
    config: Any = getattr(model, "config", None)
    for number, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if "attention" not in kind or "linear" in kind:
            return f"layer {number} of {type(model).__name__} is of the kind {kind!r}"
    for name, module in modules_of(model).items():
        if isinstance(module, nn.RNNBase):
            return f"{name} is a {type(module).__name__}"
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
            return f"{name} is a {type(module).__name__} with kernel_size={module.kernel_size[0]}"
    return None


class _Trial(NamedTuple):
    """Inputs of a model with few positions.

    Attributes:
        leaves: Of the arguments.
        dims: The dimension of positions, by place in ``leaves``.
        rows: Number of rows.
        size: Number of positions.
    """

    leaves: list[Any]
    dims: dict[int, int]
    rows: int
    size: int

    def moved(self) -> list[Any]:
        """Return the leaves with a third of their positions in place, and others at all other places."""
        return [
            leaf.index_select(self.dims[place], _sources(self.size).to(leaf.device))
            if place in self.dims
            else leaf
            for place, leaf in enumerate(self.leaves)
        ]


def _sources(count: int) -> torch.Tensor:
    """Return which position is at each place in the second run; some twice, so that sums differ too."""
    places = torch.arange(count)
    return torch.where(places % 3 == 1, places, (count - 1 - places) // 2)


def find_mixing_module(
    ctx: Context,
    model: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    """Return the first module whose output at a position depends on the others, or on its place among them.

    The model runs twice on a few positions, in evaluation mode and without gradients, with the same random
    numbers. The second time a third of the positions is in place, for which only rounding may differ, and
    others have moved. Parameters that are one number, as gates that begin as zeros, have other values
    meanwhile. Parameters, buffers and random states are left as they were. A model that can't be tried so
    isn't: its inputs have no positions, or it fails on so few.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The mesh.
        model: The model.
        call: Calls its forward, with attention that computes each position alone.
        args: Positional arguments of the first call.
        kwargs: Keyword arguments of the first call.

    Returns:
        Its name, the same on every rank; None if there is none.
    """
    leaves, structure = flatten((args, kwargs))
    trial = _shorten(ctx, model, leaves)
    # All ranks or none: the model may communicate.
    if not all(gather_bytes(ctx, _CALL, b"" if trial is None else b"1")) or trial is None:
        return None
    outputs: list[dict[str, torch.Tensor]] = []
    draws = False
    with _undone(model), _recorded(model, trial) as recorded:
        for tried in (trial.leaves, trial.moved()):
            recorded.clear()
            few_args, few_kwargs = structure.unflatten(tried)
            with random_states_restored(ctx) as is_drawing:
                if catch(lambda a=few_args, k=few_kwargs: call(*a, **k))[1] is None:
                    outputs.append(dict(recorded))
                draws = draws or is_drawing()
    found = None
    if len(outputs) == 2:  # what failed will fail in the model's own pass too
        tolerance = _step_of(ctx, model) ** 0.5 / 4
        # A position that moved got the random numbers of another.
        tolerances = (tolerance, math.inf if draws else _MOVED_TOLERANCE)
        first, second = outputs
        found = next((name for name in first if _differs(first[name], second.get(name), *tolerances)), None)
    names = gather_bytes(ctx, _CALL, b"" if found is None else (found or type(model).__name__).encode())
    return next((name.decode() for name in names if name), None)


def _shorten(ctx: Context, model: nn.Module, leaves: Sequence[Any]) -> _Trial | None:
    """Return inputs with the first positions; None where it isn't certain which inputs have positions."""
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    dense = [leaves[place].detach() for place in places]
    is_plain = all(leaf is None or isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves)
    if any(is_dtensor(leaf) or leaf.layout != torch.strided for leaf in dense):
        is_plain, dense = False, []
    digests = as_bytes(digest_tensors(dense).view(torch.uint8)) if dense else b""
    by_rank = gather_bytes(ctx.along("seq"), _CALL, digests)
    size = len(digests) // max(len(dense), 1)
    # What is equal on all ranks is no part of a sequence, unless it is a mask, or kinds of tokens.
    shared = {
        place
        for number, place in enumerate(places)
        if len({blob[number * size : (number + 1) * size] for blob in by_rank}) > 1
    }
    found = [leaves[place].shape for place in places if place in shared and leaves[place].dim() > 1]
    rows, length = found[0][:2] if found else (0, 0)
    # A number that no other dimension has shows which dimension of an output is that of positions.
    taken = {extent for tensor in (*model.parameters(), *model.buffers()) for extent in tensor.shape}
    taken |= {rows, *(extent for tensor in dense for extent in tensor.shape if extent != length)}
    count = next((count for count in range(min(length, _POSITIONS), 2, -1) if count not in taken), 0)
    if not is_plain or not count:
        return None
    shortened, dims = list(leaves), dict[int, int]()
    first = int(rows == length)  # then the first dimension is that of rows
    for place in places:
        shape = list(leaves[place].shape)[first:]
        if shape.count(length) == 1 and (place in shared or not leaves[place].is_floating_point()):
            dims[place] = first + shape.index(length)
            shortened[place] = leaves[place].detach().narrow(dims[place], 0, count)
    return _Trial(shortened, dims, rows, count)


@contextmanager
def random_states_restored(ctx: Context) -> Generator[Callable[[], bool]]:
    """Restore torch's random states afterwards; yields whether they have changed."""

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.get_rng_state(), device_random_state(ctx.device)

    before = read()
    try:
        yield lambda: not all(map(torch.equal, before, read()))
    finally:
        torch.set_rng_state(before[0])
        set_device_random_state(ctx.device, before[1])


@contextmanager
def _undone(model: nn.Module) -> Generator[None]:
    """Run the model in evaluation mode without effects inside."""
    modules = list(model.modules())
    training = [module.training for module in modules]
    for module in modules:
        module.training = False
    torch.clear_autocast_cache()
    try:
        with (
            KeptBuffers(modules),
            _varied(model),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module, was_training in zip(modules, training, strict=True):
            module.training = was_training
        torch.clear_autocast_cache()  # of weights without gradients, and with other values


@contextmanager
def _varied(model: nn.Module) -> Generator[None]:
    """Set trained parameters of one number to other values inside: with a gate of zero nothing is seen.

    Frozen ones keep theirs. Of a parameter that is sharded, the local part is what counts.
    """
    values: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for number, parameter in enumerate(model.parameters()):
            # Not counted as a change, since ``data`` is written: a backward pass may need this tensor.
            one = local_of(parameter).data
            is_plain = type(one) is torch.Tensor and one.is_floating_point() and not one.is_meta
            if not parameter.requires_grad or not is_plain or not one.numel():
                continue
            value = one.flatten()[0].clone()
            if bool((one == value).all()):
                # By its number, so that ranks with other shards draw the same for one that they share.
                own = torch.Generator().manual_seed(number)
                drawn = torch.rand(one.shape, generator=own, device="cpu") / 2
                values.append((one, value))
                one.add_((drawn / one.shape[-1] ** 0.5 if one.dim() > 1 else drawn).to(one))
        yield
    finally:
        for one, value in values:
            one.fill_(value)
        fsdp = sys.modules.get("torch.distributed.fsdp")
        for unit in [*model.modules()][1:]:
            # It may keep what it has gathered. The model itself gathered before, and for its own pass.
            if fsdp is not None and isinstance(unit, fsdp.FSDPModule):
                cast("Any", unit).reshard()


@contextmanager
def _recorded(model: nn.Module, trial: _Trial) -> Generator[dict[str, torch.Tensor]]:
    """Yield what modules return for each position of the rows, by the module's name, in order."""
    found: dict[str, torch.Tensor] = {}

    def record(name: str, output: Any) -> None:
        for leaf in flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not is_dtensor(leaf):
                dims = [dim for dim, extent in enumerate(leaf.shape) if extent == trial.size]
                # Not lists of tokens: experts may get as many as there are rows or positions.
                if len(dims) == 1 and leaf.dim() > 2 and leaf.shape[0] == trial.rows:
                    of_rows = leaf.detach().movedim(dims[0], 0).flatten(2)
                    found.setdefault(name, of_rows.to(torch.float64, copy=True))

    with ExitStack() as stack:
        for name, module in modules_of(model).items():
            handle = module.register_forward_hook(lambda _module, _args, out, name=name: record(name, out))
            stack.callback(handle.remove)
        yield found


def precision_of(ctx: Context, model: nn.Module) -> float:
    """Return the smallest relative step of the coarsest dtype that the model computes in."""
    computed = {"fp8": torch.float8_e4m3fn, "fp16": torch.float16, "bf16": torch.bfloat16}
    parameters = [*model.parameters()]
    dtypes = {one.dtype.to_real() for one in parameters if one.is_floating_point() or one.is_complex()}
    dtypes.add(computed.get(ctx.mixed_precision, torch.float64))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _step_of(ctx: Context, model: nn.Module) -> float:
    """Return the smallest relative step of the coarsest numbers that the model computes with."""
    steps = [precision_of(ctx, model)]
    dtypes = {one.dtype for one in (*model.parameters(), *model.buffers())} - {torch.bool}
    if any(dtype.itemsize == 1 for dtype in dtypes):
        steps.append(_STEP_OF_8_BITS)
    # Torch doesn't tell if both of its settings were used.
    if ctx.device.type != "cpu" and catch(torch.get_float32_matmul_precision)[0] != "highest":
        steps.append(_STEP_OF_ROUNDED)
    return max(steps)


def _differs(
    first: torch.Tensor, second: torch.Tensor | None, tolerance: float, moved_tolerance: float
) -> bool:
    """Return whether positions are others in the second run, from (positions, rows, features) of both."""
    if second is None or first.shape != second.shape:
        return False
    sources = _sources(len(first)).to(first.device)
    is_kept = sources == torch.arange(len(first), device=first.device)
    difference = (second - first[sources]).abs().nan_to_num().mean(2)
    change = (second - first)[~is_kept].abs().nan_to_num().mean()
    size = torch.maximum(change, first.abs().nan_to_num().mean())
    # The median: where rounding is decisive, as for the choice of an expert, a token may be quite another.
    if difference[is_kept].median() > tolerance * size:
        return True
    return bool(difference[~is_kept].mean() > moved_tolerance * size)
