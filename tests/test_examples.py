"""The programs of docs/examples run as their readers would start them."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from accelfn import Context, Guard
from accelfn.testing import run_ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
TRAINING = ("train_digits.py", "train_digits_accelerator.py")
TEXT = "fine_tune_text.py"


def launch(
    name: str, folder: Path, *arguments: str, num_processes: int = 2, flags: Sequence[str] = ()
) -> str:
    launcher = ("-m", "accelfn", "launch", "--num_processes", str(num_processes), "--cpu", *flags)
    return run(folder, *launcher, str(EXAMPLES / name), *arguments)


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_trainings_learn_the_digits_and_end_with_equal_weights(tmp_path: Path) -> None:
    weights: list[bytes] = []
    for name in TRAINING:
        output = launch(name, tmp_path, "--output", name)
        found = re.search(r"accuracy on 360 held-out digits: (\d+\.\d+)% \(2 processes\)", output)
        assert found is not None, output
        assert float(found[1]) >= 97.0
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


LAYOUTS = {
    "plain": (1, ()),
    "replicated": (2, ()),
    "FSDP2": (2, ("--use_fsdp", "--fsdp_version=2")),
    "ZeRO-3": (2, ("--use_deepspeed", "--zero_stage=3")),
}


@pytest.mark.slow
@pytest.mark.timeout(850)
@pytest.mark.usefixtures("deepspeed_ops")
def test_one_loop_runs_in_every_layout_by_flags_alone(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for layout, (num_processes, flags) in LAYOUTS.items():
        output = launch("same_loop.py", tmp_path, num_processes=num_processes, flags=flags)
        losses[layout] = [float(one) for one in re.findall(r"loss (\d+\.\d+)", output)]
        assert len(losses[layout]) == 2, output
    for layout, found in losses.items():
        assert found == pytest.approx(losses["plain"], abs=2e-5), layout


FSDP2 = (
    "--use_fsdp",
    "--fsdp_version=2",
    "--fsdp_auto_wrap_policy=SIZE_BASED_WRAP",
    "--fsdp_min_num_params=1e4",
)
MESH = "--use_parallelism_config"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_processes", "num_copies", "flags"),
    [
        (2, 1, (MESH, "--parallelism_config_tp_size=2")),
        (
            *(4, 4),
            (
                *FSDP2,
                MESH,
                "--parallelism_config_dp_replicate_size=2",
                "--parallelism_config_dp_shard_size=2",
            ),
        ),
    ],
    ids=["tp2", "hsdp2x2"],
)
def test_the_program_of_the_readme_trains_in_every_layout_by_flags_alone(
    num_processes: int, num_copies: int, flags: Sequence[str], tmp_path: Path
) -> None:
    # Ranks along tp read one batch: they learn what a single process learns.
    plain = launch(TRAINING[0], tmp_path, "--output", "plain", num_processes=num_copies)
    found = launch(TRAINING[0], tmp_path, "--output", "found", num_processes=num_processes, flags=flags)
    for output, number in ((plain, num_copies), (found, num_processes)):
        said = re.search(r"accuracy on 360 held-out digits: (\d+\.\d+)%", output)
        assert said is not None, output
        assert float(said[1]) >= 97.0
        assert f"({number} processes)" in output
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "found"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        # Sums in another order, and hundreds of steps of Adam, which makes much of the smallest gradients.
        apart = float((after[name] - weight).square().sum())
        assert apart < 1e-4 * float(weight.square().sum())


def losses(file: Path) -> list[float]:
    heading, *lines = file.read_text().splitlines()
    assert heading == "step,loss"
    return [float(line.partition(",")[2]) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "num_processes"), [("bert", 2), ("gpt", 3)])
def test_language_models_learn_as_in_plain_torch(model: str, num_processes: int, tmp_path: Path) -> None:
    # Neither batches nor windows nor processes come out even at the end of the texts.
    size = ("--model", model, "--texts", "500", "--epochs", "2")
    by_torch = run(tmp_path, str(EXAMPLES / TEXT), "--plain", *size, "--curve", "plain.csv")
    by_accelfn = launch(TEXT, tmp_path, *size, "--curve", "accelfn.csv", num_processes=num_processes)

    plain, found = losses(tmp_path / "plain.csv"), losses(tmp_path / "accelfn.csv")
    assert len(plain) == 2 * 11
    assert sum(plain[-5:]) / 5 < 0.9 * plain[0]
    # Float32 sums in another order, and 22 steps of Adam on top of them.
    assert found == pytest.approx(plain, rel=1e-5)
    held_out = [float(text.rpartition("held-out texts: ")[2]) for text in (by_torch, by_accelfn)]
    assert held_out[1] == pytest.approx(held_out[0], abs=2e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_trains_in_fp8_by_the_file_of_the_guide(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    page = (ROOT / "docs" / "pages" / "guide" / "fp8.md").read_text()
    file = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert file is not None
    (tmp_path / "fp8.yaml").write_text(file[1])
    in_fp8 = launch("fp8.py", tmp_path, "--curve", "fp8.csv", flags=("--config_file", "fp8.yaml"))
    launch("fp8.py", tmp_path, "--curve", "bf16.csv", flags=("--mixed_precision", "bf16"))
    assert "by torchao, chosen by backend='AO'" in in_fp8
    assert "weights gathered in 8 bits" in in_fp8
    fp8, bf16 = losses(tmp_path / "fp8.csv"), losses(tmp_path / "bf16.csv")
    assert fp8[-1] < 0.5 * fp8[0]
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, abs=0.02)


def test_meshes_are_planned_as_their_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "pages" / "guide" / "plan-ranks.md").read_text()
    assert (
        f"$ python docs/examples/plan_ranks.py\n{run(tmp_path, str(EXAMPLES / 'plan_ranks.py'))}```" in page
    )


def track(train: Callable[..., Any], ctx: Context, folder: Path) -> str:
    return train(ctx, folder, 0.1).name


def resume(train: Callable[..., Any], ctx: Context, folder: Path) -> list[float]:
    straight = train(ctx)
    train(ctx, folder, stop_after=straight.num_steps // 2)
    resumed = train(ctx, folder)
    assert resumed.num_steps == straight.num_steps == 16  # 29 batches an epoch: 7 windows of 4, and one of 1
    assert resumed.weights.equal(straight.weights)
    return resumed.weights.tolist()


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
    assert (str(shrunk.program), shrunk.verdict.kind) == ("dp=2 scaled", "different")
