"""Check a layout of ranks: compare the loss and the gradients of a batch with those of one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.comm import Call, agree, broadcast_object_list, catch, check_replicas, gather_object
from accelfn.config import GradientAccumulationPlugin
from accelfn.context import (
    AXES,
    Collectives,
    Context,
    Strategy,
    World,
    takes_context,
)
from accelfn.data import shard_sequence
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import modules_of, table_text
from accelfn.parallel.handle import handles_of
from accelfn.parallel.pointers import named
from accelfn.parallel.strategies.compilation import without_compile
from accelfn.parallel.strategies.position_check import precision_of, random_states_restored
from accelfn.parallel.values import gathered, names_on_meta
from accelfn.training.loss import Loss
from accelfn.training.preparation import prepare_model
from accelfn.training.train_step import init_train_state, make_train_step
from accelfn.training.unwrap import unwrap_model
from accelfn.tree import count_rows, flatten, is_dtensor, map_tensors, slice_tensors

M = TypeVar("M", bound=nn.Module)
Batch = TypeVar("Batch")
T = TypeVar("T")

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Share of the mean size of all gradients that one counts as at least: a gradient far below, as of a bias
# before a normalization, is rounding alone.
_LEAST_SIZE = 0.1
# Steps of float16 that may be skipped at first: each halves the scale of the loss.
_MAX_SKIPPED = 30


class LayoutReport(NamedTuple):
    """What :func:`verify_layout` found; the same on every rank. ``print(report)`` shows it as a table.

    A difference is relative to the norm of the tensor in one process, and the largest of all ranks.

    Attributes:
        layout: The axes of several ranks.
        loss: Loss of the ranks.
        loss_of_one: Loss of one process.
        outputs: Difference of what modules return, by their names, in the order of the calls. The model
            itself has the name of its class. Modules that return no rows, or on a rank only a part of what
            belongs to its rows and positions, aren't compared.
        gradients: Difference of each parameter's gradient, by its name.
        tolerance: The difference that counts as rounding.
    """

    layout: str
    loss: float
    loss_of_one: float
    outputs: Mapping[str, float]
    gradients: Mapping[str, float]
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether loss, outputs and gradients are equal, except for rounding."""
        return self._has_equal_loss and not (self._differing(self.outputs) or self._differing(self.gradients))

    @property
    def first_module(self) -> str | None:
        """Name of the module at which the ranks and one process part; None for none.

        The first that returns something else. If none does and the losses are equal, the last module with a
        parameter whose gradient differs, as that comes first in the backward pass; a parameter of the model
        itself is named in its place.
        """
        names = self._differing(self.outputs)
        if names or not self._has_equal_loss:
            return names[0] if names else None
        names = self._differing(self.gradients)
        return (names[-1].rpartition(".")[0] or names[-1]) if names else None

    @property
    def _has_equal_loss(self) -> bool:
        gap = abs(self.loss - self.loss_of_one)
        return _ratio(gap, abs(self.loss_of_one)) <= self.tolerance

    def _differing(self, differences: Mapping[str, float]) -> list[str]:
        return [name for name, difference in differences.items() if difference > self.tolerance]

    def __str__(self) -> str:
        """Return the report as a table."""
        found = "equal to one process"
        if not self.is_equal:
            found = "not equal to one process, at first in " + (
                self.first_module or "the loss, not in a module that was compared"
            )
        return table_text(
            {
                "layout": self.layout,
                "loss": f"{self.loss:.6g}, and {self.loss_of_one:.6g} in one process",
                "outputs": _text_of(self.outputs, "modules"),
                "gradients": _text_of(self.gradients, "parameters"),
                "tolerance": f"{self.tolerance:.1e}",
                "found": found,
            }
        )


def _text_of(differences: Mapping[str, float], what: str) -> str:
    if not differences:
        return f"none of {what}"
    name = max(differences, key=lambda one: differences[one])
    return f"of {len(differences)} {what}; the largest difference is {differences[name]:.1e}, of {name}"


@takes_context
def verify_layout(
    ctx: Context,
    model: M,
    batch: Batch,
    loss_fn: Callable[[M, Batch], torch.Tensor | Loss],
    *,
    tolerance: float | None = None,
) -> LayoutReport:
    """Compare the loss and gradients of a batch on all ranks with those of one process; name what differs.

    Runs a step of :func:`make_train_step` on two copies of the model: on each rank alone with the complete
    batch, and prepared as the context says with this rank's part of it. The model itself and random states
    stay as they are. Meant for a small model of the same architecture, before training: each rank has memory
    for two complete ones and their gradients.

    The copies run in the model's own mode, but without dropout, which differs between layouts, and without
    ``torch.compile``. Batch normalization in training uses the rows of each rank, and isn't equal.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world, the mesh and the precision.
        model: Not prepared. All ranks use rank 0's values.
        batch: Tensors, complete and the same on every rank. Ranks along "dp" divide the rows, and those along
            "cp" or "sp" the sequences that ``DataLoaderConfiguration(sequence=...)`` names.
        loss_fn: As for :func:`make_train_step`.
        tolerance: Relative difference that counts as rounding. None for the square root of the precision's
            smallest relative step: 3.5e-4 in float32, 0.09 in bfloat16.

    Raises:
        ConfigurationError: The model is prepared already, on the meta device, or draws random numbers other
            than by dropout modules; no sequences are named; or an engine such as DeepSpeed trains.
        ReplicaDriftError: The batch differs between ranks.
        TypeError: The model is no module.
        ValueError: The rows or sequences can't be divided.

    >>> print(verify_layout(Context(), nn.Linear(2, 1), torch.ones(4, 2), lambda model, x: model(x).mean()))
    layout     one rank
    loss       ...
    outputs    of 1 modules; the largest difference is 0.0e+00, of Linear
    gradients  of 2 parameters; the largest difference is 0.0e+00, of weight
    tolerance  3.5e-04
    found      equal to one process
    """
    ctx = ctx.replace(dynamo_backend="no")
    with random_states_restored(ctx) as is_drawing:
        part, whole = _on_all(ctx, lambda: (_take_part(ctx, batch), _copied(ctx, model)))
        tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
        check_replicas(ctx, tensors, name="batch")
        spread = copy.deepcopy(whole)

        def run_alone() -> tuple[float, dict[str, torch.Tensor], dict[str, list[torch.Tensor | None]]]:
            returned: dict[str, list[torch.Tensor | None]] = {}
            loss, gradients = _run(_alone(ctx), whole, batch, loss_fn, _noting(returned))
            if is_drawing():
                raise ConfigurationError(
                    "verify_layout: the model or loss_fn draws random numbers, which differ between layouts. "
                    "Set the probability of its dropout to 0, or pass model.eval()."
                )
            return loss, {name: _copy_of(one) for name, one in gradients.items()}, returned

        # Rank 0 is the one process: the model may compute other numbers on another rank.
        ((loss_of_one, complete, returned),) = broadcast_object_list(ctx, [_on_all(ctx, run_alone)])
        expected = {name: [part.of_output(leaf) for leaf in leaves] for name, leaves in returned.items()}
        outputs: dict[str, float] = {}
        loss, gradients = _run(ctx, spread, part.batch, loss_fn, _comparing(expected, outputs))
        found = gather_object(ctx, [(outputs, _compare_gradients(gradients, complete))])
    axes = [axis for axis in AXES if ctx.axis_size(axis) > 1]
    by_module = _largest(expected, [of_rank for of_rank, _ in found])
    return LayoutReport(
        layout=" x ".join(f"{axis} {ctx.axis_size(axis)}" for axis in axes) or "one rank",
        loss=loss,
        loss_of_one=loss_of_one,
        outputs={name or type(whole).__name__: one for name, one in by_module.items()},
        gradients=_largest(complete, [of_rank for _, of_rank in found]),
        tolerance=precision_of(ctx, model) ** 0.5 if tolerance is None else tolerance,
    )


def _on_all(ctx: Context, action: Callable[[], T]) -> T:
    """Return the result of an action that may fail on one rank: then all raise. Ranks: every rank."""
    result, error = catch(action)
    if ctx.num_processes > 1:
        agree(ctx, Call("verify_layout", takes_long=True), error=error)
    if error is not None:
        raise error
    return cast("T", result)


def _copied(ctx: Context, model: object) -> nn.Module:
    """Return a copy without dropout of a model that can be verified."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"verify_layout: model must be a module, got {type(model).__name__}.")
    empty = names_on_meta(model)
    problem = ""
    if ctx.strategy.engine is not None:
        problem = f"{ctx.strategy.engine} trains, whose steps can't be compared. Use a context without it."
    elif any(handles_of(one) for one in model.parameters()):
        problem = "the model is prepared already. Pass it before prepare_model: a copy is prepared here."
    elif empty:
        problem = f"{empty[0]} is on the meta device. Pass a model with values; a small one is enough."
    elif ctx.axis_size("seq") > 1 and ctx.loading.sequence is None:
        problem = (
            "ranks share sequences, and it isn't known which tensors of the batch have them. Name them with "
            "DataLoaderConfiguration(sequence={...})."
        )
    if problem:
        raise ConfigurationError(f"verify_layout: {problem}")
    copied = copy.deepcopy(without_compile(model))
    for module in copied.modules():
        module.training = module.training and not isinstance(module, _DROPOUT)
    return copied


def _alone(ctx: Context) -> Context:
    """Return the context of one process with this one's device and precision."""
    return replace(
        ctx,
        world=World(device=ctx.device),
        collectives=Collectives(),
        mesh=None,
        strategy=Strategy(),
        reduction=None,
        accumulation=GradientAccumulationPlugin(),
    )


class _Part(NamedTuple):
    """This rank's part of a batch.

    Attributes:
        ctx: The mesh.
        batch: The part.
        rows: Its place in the complete batch.
        num_rows: Of the complete batch.
        lengths: Of the complete sequences that ranks share.
    """

    ctx: Context
    batch: Any
    rows: slice
    num_rows: int
    lengths: frozenset[int]

    def of_output(self, leaf: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's part of what a module returns for the complete batch; None if there is none."""
        if leaf is None or len(leaf) != self.num_rows:
            return None
        dims = [dim for dim, extent in enumerate(leaf.shape) if extent in self.lengths]
        if len(dims) > 1 or 0 in dims:  # it isn't certain which dimension has the positions
            return None
        own = leaf[self.rows]
        return shard_sequence(self.ctx, [own], {0: dims[0]})[0] if dims else own


def _take_part(ctx: Context, batch: Any) -> _Part:
    place, number = ctx.coordinate("dp"), ctx.axis_size("dp")
    reason = f"verify_layout: {number} ranks along dp divide the batch"
    total = count_rows(batch, "batch", reason, with_others=number == 1)
    if total % number:
        raise ValueError(f"{reason}, whose {total} rows can't be divided evenly. Pass a multiple.")
    rows = slice(place * total // number, (place + 1) * total // number)
    of_rows = batch if number == 1 else slice_tensors(batch, rows)
    dims = ctx.loading.sequence if ctx.axis_size("seq") > 1 else None
    own = of_rows if dims is None else shard_sequence(ctx, of_rows, dims)
    lengths = {
        length
        for whole, part in zip(flatten(of_rows)[0], flatten(own)[0], strict=True)
        if whole is not part
        for length, shared in zip(whole.shape, part.shape, strict=True)
        if length != shared
    }
    return _Part(ctx, own, rows, total, frozenset(lengths))


_See = Callable[[str, list[Any]], None]


def _noting(returned: dict[str, list[torch.Tensor | None]]) -> _See:
    """Return a function that copies a module's output into ``returned``."""

    def see(name: str, leaves: list[Any]) -> None:
        # A module that is called twice may get other rows each time.
        again = name in returned
        returned[name] = [] if again else [_copy_of(leaf) if _has_rows(leaf) else None for leaf in leaves]

    return see


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _comparing(expected: Mapping[str, list[torch.Tensor | None]], differences: dict[str, float]) -> _See:
    """Return a function that writes the difference of a module's output into ``differences``."""
    starts: dict[str, int] = {}  # a batch may run in several pieces

    def see(name: str, leaves: list[Any]) -> None:
        start = starts.get(name, 0)
        for leaf, whole in zip(leaves, expected.get(name, ()), strict=False):
            own = None if whole is None or not _has_rows(leaf) else whole[start : start + len(leaf)]
            if own is not None and own.shape == leaf.shape:
                differences[name] = max(differences.get(name, 0.0), _difference(leaf, own))
                starts[name] = start + len(leaf)

    return see


class _Recorder(Optimizer):
    """Keeps the gradients of a step, which changes nothing."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.gradients: dict[int, torch.Tensor | None] = {}

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keep the gradients."""
        del closure
        self.gradients = {id(one): one.grad for group in self.param_groups for one in group["params"]}


def _run(
    ctx: Context, model: nn.Module, batch: Any, loss_fn: Any, see: _See
) -> tuple[float, dict[str, torch.Tensor]]:
    """Run a train step that changes nothing, and return the loss and this rank's gradients, or its shards.

    ``see`` gets what each module returns.
    """
    prepared = prepare_model(ctx, model)
    inner = unwrap_model(prepared)
    optimizer = _Recorder(prepared.parameters())
    step = make_train_step(ctx, loss_fn, optimizer, model=prepared)
    state = init_train_state(ctx, optimizer)

    def fresh() -> Any:  # loss_fn may change its batch
        return map_tensors(lambda tensor: tensor.to(ctx.device, copy=True), batch)

    with _watched(inner, see):
        state, metrics = step(state, fresh())
    for _ in range(_MAX_SKIPPED if ctx.precision.scales_loss else 0):
        if not metrics.skipped:
            break
        state, metrics = step(state, fresh())
    gradients: dict[str, torch.Tensor] = {}
    for name, one in named(inner).items():
        if one.requires_grad:
            gradient = optimizer.gradients.get(id(one))
            gradients[name] = torch.zeros_like(one) if gradient is None else gradient.to_dense()
    return float(metrics.loss), gradients


@contextmanager
def _watched(model: nn.Module, see: _See) -> Generator[None]:
    """Pass what modules return to ``see``, in passes with gradients that aren't a recomputation."""

    def watch(name: str, output: Any) -> None:
        in_backward: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if torch.is_grad_enabled() and in_backward < 0:
            see(name, flatten(output)[0])

    with ExitStack() as stack:
        for name, module in modules_of(model).items():
            handle = module.register_forward_hook(lambda _module, _args, out, name=name: watch(name, out))
            stack.callback(handle.remove)
        yield


def _has_rows(leaf: Any) -> bool:
    is_plain = isinstance(leaf, torch.Tensor) and not is_dtensor(leaf) and leaf.layout == torch.strided
    has_numbers = is_plain and (leaf.is_floating_point() or leaf.is_complex())
    return has_numbers and leaf.dim() > 0 and not leaf.is_meta


def _difference(tensor: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Return the norm of the difference, relative to the expected norm or ``least``."""
    tensor, expected = _as_double(tensor), _as_double(expected)
    # Both may be infinite, as in a mask.
    is_same = torch.isclose(tensor, expected, 0.0, 0.0, equal_nan=True)
    gap = torch.where(is_same, 0.0, tensor - expected).square().sum().sqrt()
    size = torch.where(expected.isfinite(), expected, 0.0).square().sum().sqrt()
    return _ratio(float(gap), max(float(size), least))


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU; of complex numbers their two parts."""
    plain = tensor.detach().cpu()
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).double()


def _ratio(gap: float, size: float) -> float:
    if gap == 0.0:
        return 0.0
    return gap / size if size and not math.isnan(gap) else math.inf


def _compare_gradients(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return the difference of each gradient of which this rank has a part.

    Ranks: those that have parts of the same gradients.
    """
    squares = sum(float(_as_double(one).square().sum()) for one in expected.values())
    mean = math.sqrt(squares / max(sum(one.numel() for one in expected.values()), 1))
    differences: dict[str, float] = {}
    for name, one in found.items():
        whole = gathered(one) if is_dtensor(one) else one
        least = _LEAST_SIZE * mean * math.sqrt(whole.numel())
        if name in expected:
            differences[name] = _difference(whole, expected[name], least)
    return differences


def _largest(order: Iterable[str], by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest difference of all ranks, by name and in this order."""
    found = {name: [one[name] for one in by_rank if name in one] for name in order}
    return {name: max(differences) for name, differences in found.items() if differences}
