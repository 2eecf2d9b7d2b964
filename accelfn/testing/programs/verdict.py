"""Compare what a program came to with its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from accelfn.testing.programs import plain
from accelfn.testing.programs.grammar import Program
from accelfn.testing.programs.loops import num_rows
from accelfn.testing.programs.run import (
    TIMEOUT_S,
    Failure,
    Outcome,
    RankLog,
    State,
    run_programs,
    run_reference,
)

Kind = Literal["equal", "refused", "different", "error", "hang", "crash", "invalid"]
# How far numbers may be off by rounding: relative to the largest, or to what the reference loses by rounding.
_FLOOR = 3e-5
_FLOORS_BF16 = MappingProxyType({"loss": 0.02, "total": 0.02, "eval": 0.05, "norm": 0.1, "state": 0.05})
_TIMES_ROUNDING = 4.0
# A training whose losses grow beyond it diverges, so that any rounding decides.
_LIMIT = 1e3


class Verdict(NamedTuple):
    """What a program came to.

    Attributes:
        kind: "equal": the numbers of the reference. "refused": an error of accelfn about the program, the
            same kind on every rank. "different": other numbers, and no error. "error": any other exception.
            "hang", "crash": a rank didn't end, or died. "invalid": the reference fails, or diverges.
        what: What differs, or the error's text.
        where: Of an error: the place that raised it.
    """

    kind: Kind
    what: str = ""
    where: str = ""

    def is_like(self, other: Verdict) -> bool:
        """Return whether both are one finding, when a program is shrunk."""
        return self.kind == other.kind and (
            self.kind not in ("refused", "error") or self.where == other.where
        )


class Numbers(NamedTuple):
    """The logs of all ranks as one process would have written them.

    Attributes:
        series: By name, the tensors of a series; several where each rank has all of it.
        states: By name, the states of the ranks' models.
    """

    series: dict[str, list[list[torch.Tensor]]]
    states: dict[str, list[State]]


def join_ranks(parts: Sequence[Sequence[RankLog]]) -> Numbers:
    """Join the logs of ranks.

    Raises:
        ValueError: Ranks logged different numbers of values.
    """
    series: dict[str, list[list[torch.Tensor]]] = {}
    states: dict[str, list[State]] = {}
    for ranks in parts:
        for name in dict.fromkeys(name for log in ranks for name in log.values):
            joined = _join_series(name, ranks)
            before = series.get(name, [[] for _ in joined])
            same = len(before) == len(joined)  # else other ranks resumed: one of each is as good as all
            pairs = zip(before, joined, strict=True) if same else [(before[0], joined[0])]
            series[name] = [[*old, *new] for old, new in pairs]
    for log in parts[-1]:  # those at the end
        for name, state in log.states.items():
            states.setdefault(name, []).append(state)
    return Numbers(series, states)


def _join_series(name: str, ranks: Sequence[RankLog]) -> list[list[torch.Tensor]]:
    """Join the values of one name: a mean over the ranks, or their sum, rows, or each rank's own."""
    logs = [log.values[name] for log in ranks if name in log.values]
    if len({len(values) for values in logs}) > 1:
        raise ValueError(f"ranks logged {[len(values) for values in logs]} times {name}")
    if name == "norm":  # the same on each rank
        return [[value.tensor for value in values] for values in logs]
    # Ranks along other axes have the same.
    distinct = {(log.dp, log.seq): log.values[name] for log in reversed(ranks) if name in log.values}
    if name == "seen":
        first = [values for (_, seq), values in sorted(distinct.items()) if seq == 0]
        return [
            [
                torch.cat([one.tensor.flatten() for one in step]).sort().values
                for step in zip(*first, strict=True)
            ]
        ]
    joined: list[torch.Tensor] = []
    for step in zip(*distinct.values(), strict=True):
        total = torch.stack([one.tensor for one in step]).sum(0)
        weights = [1.0 if one.weight is None else one.weight for one in step]
        joined.append(total if name == "total" else total / max(sum(weights), 1e-9))
    return [joined]


class Reference(NamedTuple):
    """The right numbers, and those of a lower precision: how far off rounding alone may be."""

    right: Numbers
    rough: Numbers


# References of programs that were compared before, by what determines them.
References = dict[tuple[Any, ...], Reference]


def reference_of(program: Program, known: References | None = None) -> Reference:
    """Return the numbers of a program's reference.

    Args:
        program: The program.
        known: References of other programs, to which this one is added.

    Raises:
        ArithmeticError: It diverges, so that rounding alone decides what comes out.
        Exception: Of the program itself.
    """
    plainest, bf16 = program.reference(), program["precision"] == "bf16"
    context = _context_of(plainest)
    key = (plainest.source(), context, bf16)
    if known is not None and key in known:
        return known[key]
    single = run_reference(program, context)
    rough = run_reference(
        program, context._replace(bf16=True) if bf16 else context._replace(dtype=torch.float64)
    )
    found = Reference(join_ranks([[single]]), join_ranks([[rough]]))
    for name in ("loss", "total", "norm"):
        for values in found.right.series.get(name, []):
            if values and not bool((torch.stack(values).abs() < _LIMIT).all()):
                raise ArithmeticError(f"the reference diverges: its {name} is {_short(torch.stack(values))}")
    if known is not None:
        known[key] = found
    return found


def _context_of(reference: Program) -> plain.Context:
    return plain.Context(
        ranks=reference["dp"],
        window=reference["accumulation"],
        rank_by_rank=reference.grammar.sees_other_rows(reference),
    )


def compare(program: Program, outcome: Outcome, reference: Reference) -> Verdict:
    """Compare what a program came to with its reference.

    Args:
        program: The program.
        outcome: From :func:`run_programs`.
        reference: From :func:`reference_of`.
    """
    if outcome.failures:
        verdict = _judge_failures(outcome.failures)
        if verdict.kind in ("hang", "crash"):  # no error names a line
            return verdict._replace(what=f"{verdict.what}\n{program.source()}")
        return verdict
    try:
        seen = join_ranks(outcome.parts)
    except ValueError as error:
        return Verdict("different", str(error))
    differences = _differences(seen, reference, bf16=program["precision"] == "bf16")
    if not differences and program["exact"]:
        differences = _other_bits(program, seen)
    return Verdict("different", "; ".join(differences)) if differences else Verdict("equal")


def check_programs(programs: Sequence[Program], *, timeout_s: float = TIMEOUT_S) -> list[Verdict]:
    """Run programs and compare each with its reference; return the verdicts in the same order.

    Args:
        programs: Any. The references run first, in this process: ranks are forked from it, and so have the
            modules that they import. What differs in float32 is compared again in float64.
        timeout_s: How long ranks wait for each other; a program may take 12 s longer in all.
    """
    known: References = {}
    references: dict[Program, Reference] = {}
    verdicts: dict[Program, Verdict] = {}
    for program in programs:
        try:
            references[program] = reference_of(program, known)
        except Exception as error:  # noqa: BLE001, PERF203 -- the program isn't one
            verdicts[program] = Verdict("invalid", f"{type(error).__name__}: {error}"[:500])
    for program, outcome in zip(references, run_programs([*references], timeout_s=timeout_s), strict=True):
        verdicts[program] = compare(program, outcome, references[program])
    for program, verdict in verdicts.items():
        if verdict.kind == "different" and program["precision"] == "no":
            verdicts[program] = _verdict_in_float64(program, verdict, timeout_s)
    return [verdicts[program] for program in programs]


def _verdict_in_float64(program: Program, verdict: Verdict, timeout_s: float) -> Verdict:
    """Return "equal" where a difference is gone in float64: where rounding decided, as at a ReLU's kink."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # ranks inherit it: they are forked, or threads
    try:
        context = _context_of(program.reference())._replace(dtype=torch.float64)
        right = join_ranks([[run_reference(program, context)]])
        (outcome,) = run_programs([program], timeout_s=timeout_s)
    except Exception:  # noqa: BLE001 -- a model that has no float64
        return verdict
    finally:
        torch.set_default_dtype(before)
    found = compare(program, outcome, Reference(right, right))
    return found if found.kind == "equal" else verdict


def _judge_failures(failures: Sequence[Failure]) -> Verdict:
    causes = [one for one in failures if not one.is_lost]
    if causes:
        worst = next((one for one in causes if not one.is_named), causes[0])
        text = f"{worst.kind}: {worst.text}"
        if worst.is_named:
            return Verdict("refused", text, f"{worst.kind} {worst.where}")
        return Verdict("error", f"{text} [{worst.where}]", f"{worst.kind} {worst.where}")
    text = " | ".join(f"{one.kind}: {one.text}" for one in failures)
    has_died = any(word in text for word in ("was killed by", "exited with code"))
    is_late = any(one.kind == "TimeoutError" for one in failures)
    return Verdict("crash" if has_died and not is_late else "hang", text)


def _other_bits(program: Program, seen: Numbers) -> list[str]:
    """Return how the model differs from that of one rank with longer windows, which has the same bits."""
    windows = {"dp": 1, "accumulation": program["accumulation"] * program["dp"], "world": "processes"}
    rows = 2 * num_rows(program)  # of which one rank has half
    chosen = {**dict(program.choices), **windows, "rows": rows}
    alone = Program(program.grammar, tuple(chosen.items()))  # longer windows than a feature has
    (outcome,) = run_programs([alone])
    if outcome.failures:
        return [f"in exact mode on one rank: {outcome.failures[0].kind}: {outcome.failures[0].text}"]
    right = outcome.parts[0][0].states["model"].parameters
    for state in seen.states["model"]:
        for name, tensor in state.parameters.items():
            if not torch.equal(tensor, right[name]):
                off = float((tensor - right[name]).abs().max())
                return [f"in exact mode {name} has other bits than on one rank, by {off:.1g}"]
    return []


def _differences(seen: Numbers, reference: Reference, *, bf16: bool) -> list[str]:
    right, rough = reference
    floors: Mapping[str, float] = _FLOORS_BF16 if bf16 else {}
    logged = {*seen.series, *seen.states}, {*right.series, *right.states}
    if logged[0] != logged[1]:
        return [f"logged {sorted(logged[0])} instead of {sorted(logged[1])}"]
    found: list[str] = []
    for name, values in right.series.items():
        noisy = rough.series[name][0]
        for own in seen.series[name]:
            off = _series_off(name, own, values[0], noisy, floors.get(name, _FLOOR))
            if off:
                found.append(off)
                break
    for name, states in seen.states.items():
        off = _state_off(
            name, states, right.states[name][0], rough.states[name][0], floors.get("state", _FLOOR)
        )
        if off:
            found.append(off)
    return found


def _series_off(
    name: str, own: Sequence[Any], right: Sequence[Any], rough: Sequence[Any], floor: float
) -> str:
    if len(own) != len(right):
        return f"{name}: {len(own)} values instead of {len(right)}"
    if not own:
        return ""
    if name == "seen":
        wrong = next((step for step in range(len(own)) if not torch.equal(own[step], right[step])), None)
        if wrong is None:
            return ""
        return f"seen {own[wrong].tolist()} instead of {right[wrong].tolist()} in step {wrong}"
    return _off(name, torch.stack([*own]), torch.stack([*right]), torch.stack([*rough]), floor)


def _state_off(name: str, ranks: Sequence[State], right: State, rough: State, floor: float) -> str:
    """Compare the parameters of all ranks, and the buffers of the first that has them."""
    buffers: dict[str, torch.Tensor] = {}
    parameters: dict[str, torch.Tensor] = {}
    for number, state in enumerate(ranks):
        for key, tensor in state.parameters.items():
            off = _tensor_off(
                f"{name}.{key} of rank {number}", key, tensor, right.parameters, rough.parameters, floor
            )
            if off:
                return off
        parameters |= state.parameters
        buffers = {**state.buffers, **buffers}
    for key, tensor in buffers.items():
        if off := _tensor_off(f"{name}.{key}", key, tensor, right.buffers, rough.buffers, floor):
            return off
    missing = sorted({*right.parameters, *right.buffers} - {*parameters, *buffers})
    return f"{name} has no {', '.join(missing[:3])}" if missing else ""


def _tensor_off(
    label: str,
    key: str,
    tensor: torch.Tensor,
    right: dict[str, torch.Tensor],
    rough: dict[str, torch.Tensor],
    floor: float,
) -> str:
    if key not in right:
        return f"{label} isn't in the reference"
    if tensor.shape != right[key].shape:
        return f"{label}: shape {tuple(tensor.shape)} instead of {tuple(right[key].shape)}"
    return _off(label, tensor, right[key], rough[key], floor)


def _off(label: str, own: torch.Tensor, right: torch.Tensor, rough: torch.Tensor, floor: float) -> str:
    scale = right.double().abs().max().clamp(min=1e-6) if right.numel() else torch.ones(())
    off = float((own.double() - right.double()).abs().max() / scale) if right.numel() else 0.0
    noise = float((rough.double() - right.double()).abs().max() / scale) if right.numel() else 0.0
    if off <= max(floor, _TIMES_ROUNDING * noise):  # false for NaN
        return ""
    return f"{label} off by {off:.2g} (rounding {noise:.1g}): {_short(own)} instead of {_short(right)}"


def _short(tensor: torch.Tensor) -> str:
    shown = ", ".join(f"{float(value):.5g}" for value in tensor.flatten()[:4])
    return f"[{shown}{', ...' if tensor.numel() > 4 else ''}]"
