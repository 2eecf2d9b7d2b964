"""A mesh and the processes that are started."""

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch import Machine, Script, parse_flags, plan_launch, resolve


def start(words: str) -> dict[str, str]:
    """Plan a launch with a mesh; in ``words`` an axis and its size stand for the flag."""
    argv = ["--cpu", "--use_parallelism_config"]
    for word in words.split():
        axis, _, size = word.partition("=")
        argv.append(f"--parallelism_config_{axis}_size={size}" if axis in AXES else f"--{word}")
    resolved = resolve(parse_flags([*argv, "t.py"]).flags, {})
    return dict(plan_launch(resolved, Script("t.py"), {}, Machine(cores=8)).env_changes)


AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


@pytest.mark.parametrize(
    "words",
    [
        "num_processes=2 tp=2",
        "num_processes=4 tp=2 dp_shard=2",
        "num_processes=8 use_fsdp tp=2 dp_shard=2 dp_replicate=2",
        "num_processes=8 use_fsdp tp=2",  # FSDP takes the other four
        "num_processes=3",  # all sizes are 1: copies
        "num_processes=3 use_fsdp",
        "num_processes=4 use_fsdp fsdp_version=1 dp_replicate=2 dp_shard=2",
    ],
)
def test_a_mesh_that_has_a_place_for_each_process(words: str) -> None:
    variables = start(words)
    assert variables["ACCELFN_USE_PARALLELISM_CONFIG"] == "true"
    for axis in ("dp_replicate", "dp_shard", "tp"):
        output = next((word[-1] for word in words.split() if word.startswith(f"{axis}=")), "1")
        assert variables[f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"] == output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("num_processes=2 tp=4", r"needs 4 processes \(tp 4\), got 2\. Use --num_processes 4\.$"),
        ("tp=2", r"2 processes \(tp 2\), got 1"),
        (
            "num_processes=8 dp_shard=2 tp=2",
            r"4 processes \(dp_shard 2 x tp 2\), got 8.* or --parallelism_config_dp_replicate_size 2\.",
        ),
        ("num_processes=8 use_fsdp dp_replicate=2 tp=2", "needs 4 processes"),
        ("num_processes=6 use_fsdp tp=4", "needs 4 processes"),
        ("num_processes=2 use_fsdp tp=2", "--use_fsdp has nothing to shard over"),
        ("num_processes=4 use_fsdp tp=2 dp_replicate=2", "--use_fsdp has nothing to shard over"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_what_would(words: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        start(words)
