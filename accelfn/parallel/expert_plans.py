"""Which modules of a model hold experts, and how these are spread over ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from accelfn.context.config import ExpertParallelConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, owner_of

_PROTOCOL = (
    "A module of experts has parameters of its own, each with a row for each expert (num_experts, ...), and "
    "its forward is (x, counts), where rows of x are sorted by expert and counts says how many each of "
    "them has, or (hidden, index, weights) as in transformers"
)


class HeldExperts(NamedTuple):
    """The experts of one module.

    Attributes:
        num_experts: Of all ranks together.
        takes: What the module's ``forward`` takes: "counts" for ``(x, counts)``, or "routes" for ``(hidden,
            index, weights)``.
    """

    num_experts: int
    takes: Literal["counts", "routes"]


class ExpertPlan(NamedTuple):
    """How experts are spread over ranks: each rank has as many of each module, the first ones on the first.

    Attributes:
        size: Ranks that experts are spread over.
        modules: What each module holds, by its name.
        names: Of the parameters of these modules; each rank has a part of their rows.
    """

    size: int
    modules: Mapping[str, HeldExperts]
    names: tuple[str, ...]

    def local(self, facts: ModelFacts) -> ModelFacts:
        """Return the facts of what one rank holds: parameters with the rows of its experts."""
        spread = frozenset(self.names)
        shapes = {
            name: (shape[0] // self.size, *shape[1:]) if name in spread else shape
            for name, shape in facts.shapes.items()
        }
        return facts._replace(shapes=shapes)

    def only(self, facts: ModelFacts) -> ExpertPlan | None:
        """Return the plan of those modules that ``facts`` have, a stage's; None where it has no experts."""
        modules = {name: held for name, held in self.modules.items() if name in facts.kinds}
        names = tuple(name for name in self.names if name in facts.shapes)
        return self._replace(modules=modules, names=names) if modules else None


def plan_experts(record: ExpertParallelConfig, facts: ModelFacts, size: int) -> ExpertPlan:
    """Choose the modules whose experts are spread over ranks. Pure: no model, no device, no process.

    Without a pattern they are those that say ``num_experts`` and whose parameters all have as many rows:
    such as Mixtral's and Qwen-MoE's in transformers.

    Args:
        record: Holds the pattern.
        facts: Of the model, from :func:`accelfn.parallel.read_facts`.
        size: Ranks that experts are spread over, the mesh's ``ep``.

    Raises:
        ConfigurationError: There are no experts, a module that the pattern names holds none, ``size`` doesn't
            divide their number, or an expert's parameter is tied to one of another module. The message lists
            all that is wrong.
    """
    by_owner: dict[str, list[str]] = {}
    for name in facts.shapes:
        by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    pattern = record.experts
    if pattern is None:
        known = [name for name, one in facts.experts.items() if name and one.num_experts is not None]
        chosen = [name for name in known if _rows(name, by_owner[name], facts)]
    else:
        chosen = [name for name in facts.kinds if name and fnmatchcase(name, pattern)]
    if not chosen:
        raise ConfigurationError(
            f"ep_size={size}: "
            + (
                f"no module of {facts.kinds['']} is known to hold experts. "
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
                f"{name} ({facts.kinds[name]}) isn't one: {_why_not(name, facts, by_owner, inner)}."
            )
        elif count % size:
            fitting = ", ".join(str(one) for one in range(1, count + 1) if count % one == 0)
            problems.append(f"{name} has {count} experts, which don't divide by {size}. Fitting: {fitting}.")
        else:
            modules[name] = HeldExperts(count, takes.takes)
    problems += _torn_ties(facts, frozenset(chosen))
    if problems:
        about = f" {_PROTOCOL}." if any("isn't one" in one for one in problems) else ""
        raise ConfigurationError(
            f"ep_size={size} doesn't fit the experts of {facts.kinds['']}:\n"
            + "\n".join(f"  - {one}" for one in problems)
            + (f"\n{about.strip()}" if about else "")
        )
    return ExpertPlan(size, modules, tuple(one for name in modules for one in by_owner[name]))


def _rows(name: str, parameters: list[str], facts: ModelFacts) -> int | None:
    """Return how many rows all parameters of a module have; None where it can't hold experts.

    A module that doesn't say ``num_experts`` may: only the user knows. One that says another number doesn't.
    """
    counts = {facts.shapes[one][0] if facts.shapes[one] else 0 for one in parameters}
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
            yield f"{' and '.join(group)} are one tied parameter, and experts share none. Untie them."
