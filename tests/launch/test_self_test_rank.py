"""The checks of the self-test: they pass on sound worlds, and each fault makes the right ones fail."""

import pytest

import accelfn as af
from accelfn.launch.self_test import FAULTS
from accelfn.launch.self_test_rank import CHECKS, Check, Result, Trial, demand, main, run_checks
from accelfn.testing import Where, run_ranks

# Threads don't replicate models, and share the generators that "random states" is about.
OF_PROCESSES = ("random states", "training", "checkpoint")
FAILS_OF = {
    "settings": {"ranks and settings"},
    "value": {"collectives", "mesh"},
    "seed": {"random states"},
    "data": {"loader, shuffled", "loader, resumed"},
    "model": {"training, fp32"},  # and the other training, alike
}


def run_each(size: int, on: Where, *, of_processes: bool) -> None:
    """Run the checks in one world; they raise."""
    checks = [check for name, check in CHECKS.items() if name.startswith(OF_PROCESSES) == of_processes]

    def run(ctx: af.Context) -> None:
        for check in checks:
            check(Trial(ctx))

    run_ranks(run, size, on=on)


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_and_loaders_are_sound_on_threads(size: int) -> None:
    run_each(size, "memory", of_processes=False)


@pytest.mark.slow
def test_training_random_states_and_checkpoints_are_sound_on_processes() -> None:
    run_each(2, "processes", of_processes=True)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "window"), [("fp16", 2), ("bf16", 1)])
def test_training_as_configured_is_sound_in_each_precision(precision: str, window: int) -> None:
    output = run_ranks(
        lambda ctx: CHECKS["training, as configured"](Trial(ctx)),
        2,
        on="processes",
        mixed_precision=precision,
        gradient_accumulation_steps=window,
    )
    assert all(one.startswith(f"{precision}, {window} per window, within ") for one in output)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("hang", "death")])
def test_each_fault_is_found_by_the_checks_that_are_about_it(fault: str) -> None:
    for name in FAILS_OF[fault]:
        on: Where = "processes" if name.startswith(OF_PROCESSES) else "memory"
        with pytest.raises((AssertionError, af.errors.DistributedError)):
            run_ranks(lambda ctx, check=CHECKS[name]: check(Trial(ctx, fault)), 2, on=on)


def test_a_process_alone_prints_the_results_or_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELFN_USE_CPU", "true")
    assert main(["--only", "loader, shuffled", "--only", "mesh"]) == 0
    title, *_, last = capsys.readouterr().out.splitlines()
    assert (title, last) == ("accelfn test: 1 process(es) on 1 node(s), cpu", "2 of 2 checks passed")
    monkeypatch.setenv("ACCELFN_CPU_AFFINITY", "true")  # which accelfn launch gives to torchrun
    with pytest.raises(SystemExit, match=r"the ranks can't be set up: .*CPU_AFFINITY"):
        main([])


def test_after_a_failure_the_next_check_has_a_new_world() -> None:
    opened: list[af.Context] = []

    def open_context() -> af.Context:
        if len(opened) == 2:
            raise af.errors.DistributedError("nobody came")
        opened.append(af.Context())
        return opened[-1]

    def fail(trial: Trial) -> str:
        demand(trial.ctx.rank > 0, "this rank is the first")
        return "unseen"

    def crash(trial: Trial) -> str:
        raise OSError(f"no disk for {trial.fault}")

    checks: dict[str, Check] = {
        "one": fail,
        "two": crash,
        "three": lambda _: "well",
        **dict.fromkeys(("four", "five", "six"), fail),
    }
    results = run_checks(Trial(af.Context(), "seed"), open_context, checks)
    assert [(name, verdict, remark) for name, verdict, _, remark in results] == [
        ("one", "FAIL", "this rank is the first"),
        ("two", "FAIL", "OSError: no disk for seed"),
        ("three", "pass", "well"),
        ("four", "FAIL", "this rank is the first"),
        ("five", "not run", "nor any after it: the ranks could not reconnect: nobody came"),
    ]


def test_a_failure_on_one_rank_reaches_all() -> None:
    def fail_on_one(trial: Trial) -> str:
        demand(trial.ctx.rank == 0, "only here")
        return ""

    def run(ctx: af.Context) -> list[Result]:
        return list(run_checks(Trial(ctx), lambda: ctx, {"one": fail_on_one}))

    ((_, *first),), ((_, *second),) = run_ranks(run, 2)
    assert first[::2] == ["FAIL", "rank 1: AssertionError: only here"]
    assert second[::2] == ["FAIL", "only here"]
