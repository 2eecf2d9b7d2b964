"""Expert parallelism: ranks hold different experts, and exchange the rows that these process.

:func:`plan_experts`, which is pure, chooses the modules; :func:`apply_experts` spreads them.

No row is dropped or padded: ranks first exchange the number of rows of each expert, and torch's all-to-all
moves exactly these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn

from accelfn.config import DynamoBackend, ExpertParallelConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, list_text, modules_of, owner_of
from accelfn.parallel.pointers import retie
from accelfn.parallel.strategies.strategy import Application, Planning
from accelfn.parallel.strategies.tensor import StyledForward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PROTOCOL = (
    "A module of experts has parameters of its own, each with a row for each expert (num_experts, ...), and "
    "its forward is (x, counts), where rows of x are sorted by expert and counts has the number of rows of "
    "each, or (hidden, index, weights) as in transformers"
)


class HeldExperts(NamedTuple):
    """The experts of one module.

    Attributes:
        num_experts: Number of experts on all ranks.
        takes: Arguments of the module's ``forward``: "counts" for ``(x, counts)``, or "routes" for
            ``(hidden, index, weights)``.
    """

    num_experts: int
    takes: Literal["counts", "routes"]


class ExpertPlan(NamedTuple):
    """How experts are spread over ranks: equally many of each module, in rank order.

    Attributes:
        size: Ranks that experts are spread over.
        modules: The experts of each module, by its name.
        names: Names of the parameters of these modules; each rank has some of their rows.
    """

    size: int
    modules: Mapping[str, HeldExperts]
    names: tuple[str, ...]

    def row(self, num_shards: int) -> str:
        """Return the line of the model plan's table, where each expert is in ``num_shards`` shards."""
        counts = sorted({held.num_experts for held in self.modules.values()})
        each = " or ".join(str(count) for count in counts)
        local = " or ".join(str(count // self.size) for count in counts)
        text = f"{each} of {list_text(self.modules)}, spread over {self.size} ranks: {local} on each"
        if num_shards == 1:
            return text
        return f"{text}, sharded over {num_shards}"

    def local(self, facts: ModelFacts) -> ModelFacts:
        """Return the facts of one rank's model: parameters with the rows of its experts."""
        spread = frozenset(self.names)
        shapes = {
            name: (shape[0] // self.size, *shape[1:]) if name in spread else shape
            for name, shape in facts.shapes.items()
        }
        return facts._replace(shapes=shapes)

    def only(self, facts: ModelFacts) -> ExpertPlan | None:
        """Return the plan of the modules of ``facts``, a pipeline stage's; None without experts."""
        modules = {name: held for name, held in self.modules.items() if name in facts.kinds}
        names = tuple(name for name in self.names if name in facts.shapes)
        return self._replace(modules=modules, names=names) if modules else None


def plan_experts(record: ExpertParallelConfig, facts: ModelFacts, size: int) -> ExpertPlan:
    """Choose the modules whose experts are spread over ranks. Pure: no model, no device, no process.

    Without a pattern they are those with ``num_experts`` and as many rows in all of their parameters: such as
    Mixtral's and Qwen-MoE's in transformers.

    Args:
        record: Has the pattern.
        facts: Of the model, from :func:`accelfn.parallel.read_facts`.
        size: Ranks that experts are spread over, the mesh's ``ep``.

    Raises:
        ConfigurationError: There are no experts, a module that the pattern names has none, ``size`` doesn't
            divide their number, or an expert's parameter is tied to one of another module. The message lists
            all problems.
    """
    by_owner: dict[str, list[str]] = {}
    for name in facts.shapes:
        by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    pattern = record.experts
    if pattern is None:
        known = [
            name
            for name, module_experts in facts.experts.items()
            if name and module_experts.num_experts is not None
        ]
        chosen = [name for name in known if _rows(name, by_owner[name], facts)]
    else:
        chosen = [name for name in facts.kinds if name and fnmatchcase(name, pattern)]
    if not chosen:
        raise ConfigurationError(
            f"ep_size={size}: "
            + (
                f"no module of {facts.kinds['']} is recognised as a module of experts. "
                if pattern is None
                else f"ExpertParallelConfig.experts={pattern!r} matches no module of {facts.kinds['']}. "
            )
            + f"{_PROTOCOL}. Name them with ep_handler=ExpertParallelConfig(experts='layers.*.experts'); a "
            "model without experts is prepared under a mesh without ep_size, or with plan_model(ctx, model, "
            'engine="ddp").'
        )
    modules: dict[str, HeldExperts] = {}
    problems: list[str] = []
    for name in chosen:
        takes = facts.experts.get(name)
        count = _rows(name, by_owner.get(name, []), facts)
        inner = [one for owner, names in by_owner.items() if owner.startswith(f"{name}.") for one in names]
        if takes is None or count is None or inner:
            problems.append(
                f"{name} ({facts.kinds[name]}) isn't a module of experts: "
                f"{_why_not(name, facts, by_owner, inner)}."
            )
        elif count % size:
            fitting = ", ".join(str(divisor) for divisor in range(1, count + 1) if count % divisor == 0)
            problems.append(f"{name} has {count} experts, which {size} doesn't divide. Use one of {fitting}.")
        else:
            modules[name] = HeldExperts(count, takes.takes)
    problems += _torn_ties(facts, frozenset(chosen))
    if problems:
        about = f" {_PROTOCOL}." if any("isn't a module of" in problem for problem in problems) else ""
        raise ConfigurationError(
            f"ep_size={size} doesn't fit the experts of {facts.kinds['']}:\n"
            + "\n".join(f"  - {one}" for one in problems)
            + (f"\n{about.strip()}" if about else "")
        )
    return ExpertPlan(size, modules, tuple(one for name in modules for one in by_owner[name]))


def _rows(name: str, parameters: list[str], facts: ModelFacts) -> int | None:
    """Return the number of rows that all parameters of a module have; None if it can't hold experts.

    A module without ``num_experts`` may, if the user names it; one with another number can't.
    """
    counts = {facts.shapes[parameter][0] if facts.shapes[parameter] else 0 for parameter in parameters}
    if name not in facts.experts or len(counts) != 1:
        return None
    (count,) = counts
    return count if facts.experts[name].num_experts in (None, count) else None


def _why_not(name: str, facts: ModelFacts, by_owner: Mapping[str, list[str]], inner: list[str]) -> str:
    own = by_owner.get(name, [])
    if inner:
        return f"it has modules with parameters inside, such as {inner[0]}"
    if not own:
        return "it has no parameters"
    if name not in facts.experts:
        return "its forward takes neither two nor three arguments"
    shapes = ", ".join(f"{one.rpartition('.')[2]} {facts.shapes[one]}" for one in own)
    count = facts.experts[name].num_experts
    return f"its parameters have the shapes {shapes}" + (f", and num_experts is {count}" if count else "")


def _torn_ties(facts: ModelFacts, modules: frozenset[str]) -> Iterator[str]:
    for group in facts.ties:
        owners = {name: owner_of(name, modules) for name in group}
        if len(set(owners.values())) > 1:
            yield f"{' and '.join(group)} are one tied parameter, which experts can't have. Untie them."


def apply_experts(model: nn.Module, plan: ExpertPlan, device_mesh: DeviceMesh) -> None:
    """Spread the experts of a model over ranks. Writes into ``model``; names of parameters don't change.

    Their parameters become new ones, ``DTensor`` split along dim 0. Each rank takes its rows of its own
    values, which must be equal on all ranks; the parameters may be on the meta device. ``num_experts`` of the
    modules becomes the number of each rank.

    Each gradient is that of the sum of the losses of all ranks of ``device_mesh``, divided by their number:
    to be averaged over the ranks that have the same experts, as those of other parameters are over all ranks.

    Ranks: every rank of ``device_mesh``; nothing is communicated.

    Args:
        model: The planned model.
        plan: From :func:`plan_experts`.
        device_mesh: With one dim, of ``plan.size`` ranks.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    modules = modules_of(model)
    for name, held in plan.modules.items():
        module = modules[name]
        for leaf, old in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(old.detach(), device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(part, requires_grad=old.requires_grad))
        if hasattr(module, "num_experts"):
            setattr(module, "num_experts", held.num_experts // plan.size)  # noqa: B010 -- a Module's are typed
        kind = _CountedForward if held.takes == "counts" else _RoutedForward
        module.forward = kind(module, device_mesh, name, held.num_experts)


class _ExpertForward(StyledForward):
    """Replaces the ``forward`` of a module of experts: each rank computes with its own, for all ranks."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, name: str, count: int) -> None:
        """Wrap the ``forward`` of ``module``, which takes the arguments of one with ``count`` experts."""
        super().__init__(module, mesh, "experts")
        self.name = name
        self.count = count

    def _inside(self, parameter: Any) -> Any:
        """Return this rank's part of a parameter, whose gradient is a mean over the ranks that send rows."""
        part = parameter.to_local()
        if part.requires_grad:
            part.register_hook(self._average)
        return part

    def _average(self, gradient: torch.Tensor) -> torch.Tensor:
        # Not FSDP's divide factor: torch 2.13 supports none on gloo, divides twice by it where one rank has
        # the shards, and loses small float16 numbers by dividing after the sum.
        return gradient / self.mesh.size()

    def _exchange(
        self, rows: torch.Tensor, receive: list[int] | None, send: list[int] | None
    ) -> torch.Tensor:
        import torch.distributed._functional_collectives as collectives

        torchs: Any = collectives  # which has its types in part
        sent = torchs.all_to_all_single_autograd(rows, receive, send, self.mesh.get_group())
        return torchs.wait_tensor(sent)

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the output of this rank's experts for rows sorted by expert."""
        raise NotImplementedError

    def _send(self, rows_of: Callable[[int], torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
        """Return the output of all ranks' experts for this rank's rows.

        Args:
            rows_of: Returns the rows, sorted by expert, from their number.
            counts: Number of rows for each expert of all ranks; shape ``(all experts,)``, int64.
        """
        size = self.mesh.size()
        received = self._exchange(counts, None, None).view(size, -1)  # by sending rank, and local expert
        # In one transfer, since reading from a device waits for it.
        both = cast("Any", torch.stack([counts.view(size, -1).sum(1), received.sum(1)])).tolist()
        send, receive = cast("list[list[int]]", both)  # numbers of rows, by rank
        rows = rows_of(sum(send))
        if len(rows) != sum(send):
            raise ConfigurationError(
                f"{self.name}: counts add up to {sum(send)}, but x has {len(rows)} rows. Pass each row "
                "once for each of its experts, sorted by expert."
            )
        experts = torch.arange(received.shape[1], device=counts.device).repeat(size)
        # Sorts the rows, which come by rank, by this rank's experts.
        order = experts.repeat_interleave(received.flatten(), output_size=sum(receive)).argsort(stable=True)
        own, own_counts = self._exchange(rows, receive, send)[order], received.sum(0)
        # A rank whose experts get no row computes with one of zeros: FSDP reduces the gradients of the
        # parameters in the loss, which must be the same on each rank.
        is_idle = not len(own)
        if is_idle:
            own = torch.cat([own, own.new_zeros(1, *own.shape[1:])])
            own_counts = torch.cat([torch.ones_like(own_counts[:1]), own_counts[1:]])
        output = self._compute(own, own_counts)
        if len(output) != len(own):
            raise ConfigurationError(
                f"{self.name}: forward returned {len(output)} rows for {len(own)} rows. Experts must "
                "return a row for each row."
            )
        output = output[:0] if is_idle else output
        return self._exchange(torch.empty_like(output).index_copy(0, order, output), send, receive)


class _CountedForward(_ExpertForward):
    """The forward of a module that takes rows sorted by expert, and the number of rows of each expert."""

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return StyledForward.__call__(self, rows, counts)

    def __call__(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return a row for each row of ``x``.

        Args:
            x: This rank's rows, sorted by expert; shape ``(rows, ...)``.
            counts: Number of rows of each expert of all ranks; shape ``(experts,)``, of integers.

        Raises:
            ConfigurationError: ``counts`` has another shape or type.
        """
        if not isinstance(counts, torch.Tensor) or tuple(counts.shape) != (self.count,):  # pyright: ignore[reportUnnecessaryIsInstance]
            given = list(counts.shape) if isinstance(counts, torch.Tensor) else type(counts).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"{self.name}: counts must be a tensor of shape [{self.count}], with the number of rows of "
                f"each expert; got {given}."
            )
        return self._send(lambda number: x, counts.long())


class _RoutedForward(_ExpertForward):
    """The forward of a module that takes rows, their experts and weights, and returns weighted sums."""

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        index = torch.arange(len(counts), device=counts.device)
        index = index.repeat_interleave(counts, output_size=len(rows)).unsqueeze(1)
        # In float32, like routers' weights, so that they don't lower the output's precision.
        return StyledForward.__call__(self, rows, index, torch.ones_like(index, dtype=torch.float32))

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted output of the experts for ``hidden``, with its shape and dtype.

        Args:
            hidden: This rank's rows; shape ``(..., features)``.
            index: The experts of each row; shape ``(rows, experts of a row)``, of integers. An index of no
                expert contributes nothing.
            weights: Of each expert of a row; shape of ``index``.

        Raises:
            ConfigurationError: ``index`` and ``weights`` differ in shape, or have no entry for each row.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        if index.shape != weights.shape or index.ndim != 2 or len(index) != len(flat):
            raise ConfigurationError(
                f"{self.name}: index and weights must have the shape ({len(flat)}, experts of a row): got "
                f"{tuple(index.shape)} and {tuple(weights.shape)}."
            )
        experts = index.flatten()
        # Not bincount, which waits for the device. The last one counts rows of no expert.
        counts = experts.new_zeros(self.count + 1, dtype=torch.int64)
        counts.scatter_add_(
            0, experts.long().clamp(max=self.count), torch.ones_like(experts, dtype=torch.int64)
        )
        order = experts.argsort(stable=True)  # rows of no expert are last
        output = self._send(lambda number: flat[order[:number] // index.shape[1]], counts[: self.count])
        each = output.new_zeros(len(experts), *output.shape[1:])
        each = each.index_copy(0, order[: len(output)], output)
        # Reshaped before the sum: the result mustn't be a view, on which FSDP's hook could be lost.
        shape = (*hidden.shape[:-1], index.shape[1], -1)
        return (each.view(shape) * weights.reshape(shape)).sum(-2).to(hidden.dtype)


def plan(at: Planning) -> ExpertPlan | None:
    """Return how experts are spread over ranks; None where each rank has all of them."""
    mesh, dynamo, parallelism = at.mesh, at.ctx.strategy.dynamo, at.ctx.strategy.parallelism
    if at.engine != "shard":
        return None
    if mesh.size("tp") > 1:
        raise ConfigurationError(
            f"ep_size={mesh.ep_size} and tp_size={mesh.size('tp')}: expert and tensor parallelism can't be "
            "combined yet. Set one of them to 1."
        )
    if dynamo.backend != DynamoBackend.NO:
        raise ConfigurationError(
            f"ep_size={mesh.ep_size} and dynamo_backend={str(dynamo.backend)!r}: the number of "
            "rows that experts get differs between steps, which no compiled block supports. Leave one of the "
            "two out."
        )
    handler = None if parallelism is None else parallelism.ep_handler
    return plan_experts(handler or ExpertParallelConfig(), at.facts, mesh.ep_size)


def apply(plan: ExpertPlan, at: Application) -> None:
    """Spread experts over ranks."""
    apply_experts(at.model, plan, at.device_mesh("ep"))
    retie(at.before, at.model)
