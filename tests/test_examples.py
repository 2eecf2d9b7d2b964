"""The programs of docs/examples do what they say, on ranks with the variables that a launch gives them.

CI also launches each of them once, as its readers would.
"""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from accelfn import Context, Guard
from accelfn.testing import run_ranks
from tests.launch.forked import Job, launched, run_jobs
from tests.launch.processes import ROOT, environment

EXAMPLES = ROOT / "docs" / "examples"
TRAINING = ("train_digits.py", "train_digits_accelerator.py")
TEXT = "fine_tune_text.py"
TEXT_MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2"))


def job(name: str, *argv: str, ranks: int = 2, flags: str = "", file: str = "") -> Job:
    return launched(f"--num_processes={ranks} {flags}", EXAMPLES / name, *argv, file=file)


def run(
    folder: Path, *jobs: Job, shared: tuple[str, ...] = ("torch._dynamo", "sklearn.datasets")
) -> list[str]:
    for library in shared:
        pytest.importorskip(library)
    return run_jobs(jobs, folder, 500, shared)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_program_of_the_readme_trains_in_every_layout_by_flags_alone(tmp_path: Path) -> None:
    tp2 = "--use_parallelism_config --parallelism_config_tp_size=2"
    fsdp2 = "--use_fsdp --fsdp_version=2 --fsdp_auto_wrap_policy=SIZE_BASED_WRAP --fsdp_min_num_params=1e4"
    layouts = {"two": (2, ""), "accelerator": (2, ""), "fsdp2": (2, fsdp2), "one": (1, ""), "tp2": (2, tp2)}
    runs = {
        name: job(
            TRAINING[name == "accelerator"], "--epochs", "2", "--output", name, ranks=ranks, flags=flags
        )
        for name, (ranks, flags) in layouts.items()
    }
    runs["all epochs"] = job(TRAINING[0])
    for (name, one), output in zip(runs.items(), run(tmp_path, *runs.values()), strict=True):
        found = re.search(r"accuracy on 360 held-out digits: (\d+\.\d+)% \((\d) processes\)", output)
        assert found is not None, (name, output)
        assert float(found[1]) >= (97.0 if name == "all epochs" else 90.0)
        assert int(found[2]) == one.processes
    weights = {name: load_file(tmp_path / name / "model.safetensors") for name in layouts}
    assert all(weight.equal(weights["accelerator"][name]) for name, weight in weights["two"].items())
    # Ranks along tp read one batch: they learn what a single process learns.
    for plain, layout in (("two", "fsdp2"), ("one", "tp2")):
        assert weights[plain].keys() == weights[layout].keys()
        for name, weight in weights[plain].items():
            # Sums in another order, and hundreds of steps of Adam, which makes much of tiny gradients.
            apart = float((weights[layout][name] - weight).square().sum())
            assert apart < 1e-4 * float(weight.square().sum())


@pytest.mark.slow
@pytest.mark.timeout(850)
@pytest.mark.usefixtures("deepspeed_ops")
def test_one_loop_runs_in_every_layout_by_flags_alone(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    # Without a threshold, DeepSpeed keeps parameters as small as these on every rank.
    zero = {"stage": "auto", "stage3_param_persistence_threshold": 0}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    deepspeed = "--use_deepspeed --zero_stage=3 --deepspeed_config_file=ds.json"
    flags = ("--use_fsdp --fsdp_version=2", deepspeed)
    jobs = [job("same_loop.py", ranks=1), *(job("same_loop.py", flags=one) for one in flags)]
    plain, *others = (re.findall(r"loss (\d+\.\d+)", output) for output in run(tmp_path, *jobs))
    assert len(plain) == 2
    for found in others:
        assert [*map(float, found)] == pytest.approx([*map(float, plain)], abs=2e-5)


def losses(file: Path) -> list[float]:
    heading, *lines = file.read_text().splitlines()
    assert heading == "step,loss"
    return [float(line.partition(",")[2]) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_language_model_learns_as_in_plain_torch(tmp_path: Path) -> None:
    # Neither batches nor windows nor processes come out even at the end of the texts.
    size = ("--texts", "500", "--epochs", "2")
    outputs = run(
        tmp_path,
        Job(str(EXAMPLES / TEXT), ("--plain", *size, "--curve", "plain.csv")),
        job(TEXT, *size, "--curve", "accelfn.csv", ranks=3),
        shared=("torch._dynamo", *TEXT_MODELS),
    )
    plain, found = losses(tmp_path / "plain.csv"), losses(tmp_path / "accelfn.csv")
    assert len(plain) == 2 * 11
    assert sum(plain[-5:]) / 5 < 0.9 * plain[0]
    # Float32 sums in another order, and 22 steps of Adam on top of them.
    assert found == pytest.approx(plain, rel=1e-5)
    held_out = [float(text.rpartition("held-out texts: ")[2]) for text in outputs]
    assert held_out[1] == pytest.approx(held_out[0], abs=2e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_trains_in_fp8_by_the_file_of_the_guide(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "pages" / "guide" / "fp8.md").read_text()
    file = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert file is not None
    in_fp8, _ = run(
        tmp_path,
        job("fp8.py", "--curve", "fp8.csv", file=file[1]),
        job("fp8.py", "--curve", "bf16.csv", flags="--mixed_precision bf16"),
        shared=("torch._dynamo", "torchao"),
    )
    assert "by torchao, chosen by backend='AO'" in in_fp8
    assert "weights gathered in 8 bits" in in_fp8
    fp8, bf16 = losses(tmp_path / "fp8.csv"), losses(tmp_path / "bf16.csv")
    assert fp8[-1] < 0.5 * fp8[0]
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, abs=0.02)


@pytest.mark.slow
def test_meshes_are_planned_as_their_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "pages" / "guide" / "plan-ranks.md").read_text()
    command = [sys.executable, str(EXAMPLES / "plan_ranks.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert f"$ python docs/examples/plan_ranks.py\n{done.stdout}```" in page


def track(train: Callable[..., Any], ctx: Context, folder: Path) -> str:
    return train(ctx, folder, 0.1).name


def resume(train: Callable[..., Any], ctx: Context, folder: Path) -> list[float]:
    straight = train(ctx)
    train(ctx, folder, stop_after=straight.num_steps // 2)
    resumed = train(ctx, folder)
    assert resumed.num_steps == straight.num_steps == 16  # 29 batches an epoch: 7 windows of 4, and one of 1
    assert resumed.weights.equal(straight.weights)
    return resumed.weights.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "use"), [("tracking.py", track), ("resume.py", resume)])
def test_ranks_train_one_model_where_several_batches_make_a_window(
    name: str, use: Callable[..., Any], tmp_path: Path
) -> None:
    train = runpy.run_path(str(EXAMPLES / name))["train"]
    guard = Guard(check_replicas_every=1)  # compares the weights of the ranks after each step
    first, second = run_ranks(
        lambda ctx: use(train, ctx, tmp_path), 2, "processes", gradient_accumulation_steps=4, guard=guard
    )
    assert first == second


@pytest.mark.slow
def test_drawn_programs_find_the_feature_that_is_wrong_on_several_ranks() -> None:
    report = runpy.run_path(str(EXAMPLES / "programs.py"))["look"]()
    (shrunk,) = report.findings
    assert (shrunk.program["scaled"], shrunk.verdict.kind) == (True, "different")


@pytest.mark.slow
def test_the_transformer_of_functions_is_the_same_on_any_number_of_ranks() -> None:
    train = runpy.run_path(str(EXAMPLES / "functions.py"))["train"]
    ((whole,), *others) = (run_ranks(train, size) for size in (1, 2, 4))
    for size, plain in zip((2, 4), others, strict=True):
        assert run_ranks(lambda ctx: train(ctx, zero=True), size) == plain
    assert whole[-1][1] > 0.95
    assert len(whole) == 6
    for found in (one for ranks in others for one in ranks):
        for left, right in zip(found, whole, strict=True):
            assert left == pytest.approx(right, rel=1e-3)
