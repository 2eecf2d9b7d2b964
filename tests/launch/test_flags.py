"""The command line is cut before the script, and mistakes are told with what was probably meant."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import ConfigurationError
from accelfn.launch.config.fields import FIELDS
from accelfn.launch.flags import flag_rows, format_help, parse_flags


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


def test_a_switch_takes_no_word_after_it() -> None:
    assert parse_flags(["--cpu", "false"]).script == "false"
    assert parse_flags(["--cpu=false", "t.py"]).flags["cpu"].text == "false"


def test_what_may_repeat_adds_up() -> None:
    assert parse_flags(["--vm", "a", "--vm=b", "t.py"]).flags["vm"].text == "a\nb"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--num_proceses", "2"), "unknown flag --num_proceses. Did you mean --num_processes?"),
        (("--num_proc", "2"), "unknown flag --num_proc. Did you mean --num_processes?"),
        (("--use_cpu",), "unknown flag --use_cpu. Did you mean --cpu?"),
        (("-np", "2", "t.py"), "unknown flag -np. Write --num_processes 2, on all machines together."),
        (("-np", "2"), "unknown flag -np. Write --num_processes 2, on all machines"),
        (("-mtrain",), "unknown flag -mtrain."),
        (("--nproc_per_node=2",), "unknown flag --nproc_per_node. Write --num_processes 2, on all machines"),
        (
            ("--nproc-per-node", "2"),
            "unknown flag --nproc-per-node. Write --num_processes 2, on all machines",
        ),
        (("--nnodes", "3"), "unknown flag --nnodes. Write --num_machines 3."),
        (("--node_rank",), "unknown flag --node_rank. Write --machine_rank N."),
        (("--zzz",), "unknown flag --zzz. accelfn launch --help lists the flags"),
        (("--num_processes",), "argument --num_processes: it needs a value"),
        (
            ("--machine_rank=0", "--machine-rank", "1"),
            "--machine_rank and --machine-rank contradict each other",
        ),
        (("--machine_rank=0", "--machine_rank=0"), "--machine_rank is given twice"),
        (("--cpu", "--no_cpu"), "--cpu and --no_cpu contradict each other: true and false"),
        (("--no_cpu=yes",), "argument --no_cpu: it takes no value, got 'yes'"),
        (("--dry_run=yes",), "argument --dry_run: it takes no value"),
        (("--config_file=a", "--config-file", "b"), "--config-file is given twice"),
    ],
)
def test_mistakes(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse_flags(argv)


def test_the_help_names_every_flag() -> None:
    said = format_help()
    assert all(f"{field.flags[0]} " in said or f"{field.flags[0]}\n" in said for field in FIELDS)
    assert max(map(len, said.splitlines())) <= 120
    assert len(list(flag_rows())) > len(FIELDS)
