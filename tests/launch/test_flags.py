"""The command line is cut before the script, and mistakes are told with what was probably meant."""

import re
import subprocess
import sys

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import launch_parser, parse_flags
from accelfn.launch.options import OPTIONS
from tests.launch.processes import ROOT, environment


@pytest.mark.parametrize(
    ("line", "flags", "script"),
    [
        *(
            (f"--gradient{dash}accumulation_steps{equals}4 train_it-now.py", steps, "train_it-now.py")
            for dash in "-_"
            for equals in "= "
            for steps in [{"gradient_accumulation_steps": "4"}]
        ),
        *((f"-n{equals}2 train.py", {"num_processes": "2"}, "train.py") for equals in ("", "=", " ")),
        # A value may stand where a script could.
        ("--log-dir train.py -t 3 -- --odd.py", {"log_dir": "train.py", "tee": "3"}, "--odd.py"),
        ("--vm a --vm=b t.py", {"vm": "a\nb"}, "t.py"),
        # A yes or no may stand alone or have a value.
        ("--fsdp_offload_params train.py", {"fsdp_offload_params": "true"}, "train.py"),
        ("--fsdp_offload_params false train.py", {"fsdp_offload_params": "false"}, "train.py"),
        ("--fsdp_offload_params=no train.py", {"fsdp_offload_params": "no"}, "train.py"),
        ("--no-fsdp-offload-params train.py", {"fsdp_offload_params": "false"}, "train.py"),
        ("--dry_run=yes --no_print_config t.py", {}, "t.py"),
    ],
)
def test_flags_end_where_the_script_begins(line: str, flags: dict[str, str], script: str) -> None:
    parsed = parse_flags([*line.split(), "--cpu"])
    assert {name: given.text for name, given in parsed.flags.items()} == flags
    assert (parsed.script, parsed.script_args) == (script, ("--cpu",))
    assert parsed.actions == ({"dry_run": "yes"} if "dry_run" in line else {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num_proceses 2", "unknown flag --num_proceses. Did you mean --num_processes?"),
        ("--num_proc 2", "unknown flag --num_proc. Did you mean --num_processes?"),
        ("--use_cpu", "unknown flag --use_cpu. Did you mean --cpu?"),
        ("-np 2 t.py", "-np is no flag of accelfn launch: pass --num_processes, the number on all machines."),
        ("-mtrain", "unknown flag -mtrain."),
        ("--nproc-per-node 2", "--nproc-per-node is no flag of accelfn launch: pass --num_processes"),
        ("--nnodes 3", "pass --num_machines."),
        ("--node_rank", "pass --machine_rank."),
        ("--zzz", "unknown flag --zzz. accelfn launch --help lists the flags"),
        ("--num_processes", "argument --num_processes: it needs a value"),
        ("--machine_rank=0 --machine-rank 1", "--machine_rank and --machine-rank contradict each other"),
        ("--machine_rank=0 --machine_rank=0", "--machine_rank is given twice"),
        ("--cpu --no_cpu", "--cpu and --no_cpu contradict each other: true and false"),
        ("--no_cpu=yes", "argument --no_cpu: it takes no value, got 'yes'"),
    ],
)
def test_mistakes(line: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse_flags(line.split())


def test_the_help_names_every_flag() -> None:
    output = launch_parser().format_help()
    assert not [name for name in OPTIONS if not re.search(rf"--{name}[ ,\n]", output)]
    assert max(map(len, output.splitlines())) <= 120


def test_a_dry_run_loads_few_modules_and_no_other_engine() -> None:
    probe = """
import sys
from accelfn.launch.main import main
main(["launch", "--cpu", "--dry_run", "README.md"])
ours = [name for name in sys.modules if name.startswith("accelfn")]
others = [name for name in sys.modules if "sagemaker" in name or "deepspeed" in name or name == "torch"]
print(len(ours), others)
"""
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    count, _, others = done.stdout.splitlines()[-1].partition(" ")
    assert (int(count) <= 24, others) == (True, "[]")
