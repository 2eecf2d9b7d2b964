"""The command line is cut before the script, and mistakes are told with what was probably meant."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import launch_parser, parse_flags
from accelfn.launch.config import OPTIONS


@given(st.lists(st.booleans(), min_size=2, max_size=2))
def test_dash_and_underscore_spell_the_same_flag(dashes: list[bool]) -> None:
    first, second = ("-" if dash else "_" for dash in dashes)
    flag = f"--gradient{first}accumulation{second}steps"
    for argv in ((flag, "4", "train_it-now.py"), (f"{flag}=4", "train_it-now.py")):
        parsed = parse_flags(argv)
        assert {name: given.text for name, given in parsed.flags.items()} == {
            "gradient_accumulation_steps": "4"
        }
        assert parsed.script == "train_it-now.py"


def test_n_is_the_number_of_processes() -> None:
    parsed = parse_flags(["-n", "2", "train.py"])
    assert (parsed.flags["num_processes"].text, parsed.script) == ("2", "train.py")


@pytest.mark.parametrize("argv", [("-n2",), ("-n=2",), ("-n", "2")])
def test_a_short_flag_and_its_value_may_be_one_word(argv: tuple[str, ...]) -> None:
    parsed = parse_flags([*argv, "train.py"])
    assert (parsed.flags["num_processes"].text, parsed.script) == ("2", "train.py")


def test_a_value_may_stand_where_a_script_could() -> None:
    parsed = parse_flags(["--dry-run", "--log-dir", "train.py", "-t", "3", "--", "--odd.py", "x"])
    assert {name: given.text for name, given in parsed.flags.items()} == {"log_dir": "train.py", "tee": "3"}
    assert (parsed.script, parsed.script_args) == ("--odd.py", ("x",))
    assert "dry_run" in parsed.actions


@pytest.mark.parametrize(
    ("argv", "text", "script"),
    [
        (("--fsdp_offload_params", "train.py"), "true", "train.py"),
        (("--fsdp_offload_params", "true", "train.py"), "true", "train.py"),
        (("--fsdp_offload_params=no", "train.py"), "no", "train.py"),
        (("--no-fsdp-offload-params", "train.py"), "false", "train.py"),
    ],
)
def test_a_yes_or_no_may_stand_alone_or_have_a_value(argv: tuple[str, ...], text: str, script: str) -> None:
    parsed = parse_flags(argv)
    assert (parsed.flags["fsdp_offload_params"].text, parsed.script) == (text, script)


def test_all_spellings_of_booleans_are_read() -> None:
    assert parse_flags(["--cpu", "t.py"]).script == "t.py"
    assert parse_flags(["--cpu", "false", "t.py"]).flags["cpu"].text == "false"
    assert parse_flags(["--dry_run=yes", "t.py"]).actions == {"dry_run": "yes"}
    assert parse_flags(["--dry_run", "--no_print_config", "t.py"]).actions == {"dry_run": "true"}
    assert parse_flags(["--cpu=false", "t.py"]).flags["cpu"].text == "false"


def test_repeatable_flags_accumulate() -> None:
    assert parse_flags(["--vm", "a", "--vm=b", "t.py"]).flags["vm"].text == "a\nb"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--num_proceses", "2"), "unknown flag --num_proceses. Did you mean --num_processes?"),
        (("--num_proc", "2"), "unknown flag --num_proc. Did you mean --num_processes?"),
        (("--use_cpu",), "unknown flag --use_cpu. Did you mean --cpu?"),
        (("-np", "2", "t.py"), "Did you mean --num_processes, the number on all machines?"),
        (("-mtrain",), "unknown flag -mtrain."),
        (
            ("--nproc_per_node=2",),
            "unknown flag --nproc_per_node. Did you mean --num_processes, the number",
        ),
        (
            ("--nproc-per-node", "2"),
            "unknown flag --nproc-per-node. Did you mean --num_processes, the number",
        ),
        (("--nnodes", "3"), "unknown flag --nnodes. Did you mean --num_machines?"),
        (("--node_rank",), "unknown flag --node_rank. Did you mean --machine_rank?"),
        (("--zzz",), "unknown flag --zzz. accelfn launch --help lists the flags"),
        (("--num_processes",), "argument --num_processes: it needs a value"),
        (
            ("--machine_rank=0", "--machine-rank", "1"),
            "--machine_rank and --machine-rank contradict each other",
        ),
        (("--machine_rank=0", "--machine_rank=0"), "--machine_rank is given twice"),
        (("--cpu", "--no_cpu"), "--cpu and --no_cpu contradict each other: true and false"),
        (("--no_cpu=yes",), "argument --no_cpu: it takes no value, got 'yes'"),
        (("--config_file=a", "--config-file", "b"), "--config_file and --config-file contradict each other"),
    ],
)
def test_mistakes(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse_flags(argv)


def test_the_help_names_every_flag() -> None:
    output = launch_parser().format_help()
    assert all(
        f"--{name} " in output or f"--{name}\n" in output or f"--{name}," in output for name in OPTIONS
    )
    assert max(map(len, output.splitlines())) <= 120
