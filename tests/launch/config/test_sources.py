"""Every option from every source: flag before variable before SLURM's step before file before default."""

import json
import re
from typing import Any

import pytest

from accelfn.config.settings import VARIABLES
from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import parse_flags
from accelfn.launch.config import LaunchConfig
from accelfn.launch.config_file import format_config, parse_config
from accelfn.launch.options import OPTIONS, Option
from accelfn.launch.sources import Given, Resolved, origin_rows, resolve

# Two texts for an option, neither its default, where its kind doesn't say enough.
SAMPLES = {
    "rdzv_endpoint": ("a:1", "b:2"),
    "fsdp_version": ("2", "1"),
    "zero_stage": ("3", "1"),
    "fp8_override_linear_precision": ("true,false,true", "false,true,true"),
    "gpu_ids": ("2,3", "4"),
    "rdzv_conf": ("a=1", "a=1,b=2"),
}
# What else must be true for an option to be allowed; with it every option can be tried alone.
BESIDE: dict[str, dict[str, str]] = {
    "machine_rank": {"num_machines": "4", "main_process_ip": "h", "rdzv_backend": "c10d"},
    "num_machines": {"main_process_ip": "h", "machine_rank": "0"},
    "fsdp_sync_module_states": {"fsdp_cpu_ram_efficient_loading": "false"},
    "fsdp_version": {"use_fsdp": "true"},
    "fsdp_activation_checkpointing_offload": {"fsdp_version": "2", "fsdp_activation_checkpointing": "true"},
}


def samples(option: Option) -> tuple[str, str]:
    kind = option.kind
    if option.name in SAMPLES:
        return SAMPLES[option.name]
    if kind.choices:
        other = [one for one in kind.choices if one != option.default]
        return (other[0], other[-1]) if other else ("", "")
    if kind.is_bool:
        return ("true", "false") if option.default is not True else ("false", "true")
    if "text" in kind.accepts or "names" in kind.accepts:
        return "some text: #1", "other"
    return ("0.5", "0.25") if kind.can_read("0.25") else ("2", "3")


def beside(option: Option) -> dict[str, str]:
    wanted = dict(BESIDE.get(option.name, {}))
    section = option.section
    if section.switch in OPTIONS and option.name != section.switch:
        # A section's flag needs its switch.
        text = "true" if section.on is True else str(section.on or "inductor")
        wanted |= {section.switch: text, **BESIDE.get(section.switch, {})}
    return {name: text for name, text in wanted.items() if name != option.name}


def as_file(name: str, text: str) -> str:
    option = OPTIONS[name]
    entry: dict[str, object] = {option.key: text}
    return json.dumps({option.section.name: entry} if option.section.name else entry)


def resolve_from(option: Option, *, flag: str = "", variable: str = "", file: str = "") -> Resolved:
    flags = {name: Given(text, f"--{name}") for name, text in beside(option).items()}
    if flag:
        flags[option.name] = Given(flag, option.flags[0])
    config_file = parse_config(as_file(option.name, file), "a.json") if file else None
    return resolve(flags, {option.variables[0]: variable} if variable else {}, config_file)


CAN_CHANGE = pytest.mark.parametrize(
    "option", [option for option in OPTIONS.values() if samples(option)[0]], ids=lambda option: option.name
)


@CAN_CHANGE
def test_every_option_from_every_source(option: Option) -> None:
    first, second = samples(option)
    for sources, origin in (
        ({"flag": first, "variable": second, "file": second}, "flag"),
        ({"variable": first, "file": second}, "environment"),
        ({"file": first}, "file"),
        ({"flag": second, "file": first}, "flag"),
        ({"variable": second, "file": first}, "environment"),
        ({}, "default"),
    ):
        found = resolve_from(option, **sources)
        text = next(iter(sources.values()), "")
        assert getattr(found.config, option.name) == (option.kind.read(text) if text else option.default)
        assert found.origins[option.name].source == origin


@CAN_CHANGE
def test_an_option_is_parsed_from_its_flag_and_written_to_a_file(option: Option) -> None:
    others = [f"--{name}={text}" for name, text in beside(option).items()]
    config = resolve(parse_flags([*others, f"{option.flags[0]}={samples(option)[0]}"]).flags, {}).config
    for path in ("a.yaml", "a.json"):
        assert LaunchConfig(**parse_config(format_config(config, path), path).values) == config
    if option.no_flag:
        off = resolve(parse_flags([*others, option.no_flag]).flags, {}).config
        assert getattr(off, option.name) is False


def test_names_are_unique() -> None:
    flags = [flag for option in OPTIONS.values() for flag in (*option.flags, option.no_flag) if flag]
    variables = [name for option in OPTIONS.values() for name in option.variables]
    paths = [option.path for option in OPTIONS.values()]
    for names in (flags, variables, paths):
        assert len(set(names)) == len(names)


def test_a_slurm_step_ranks_between_variable_and_file() -> None:
    step = {"num_machines": (2, "SLURM_STEP_NUM_NODES"), "machine_rank": (1, "SLURM_NODEID")}
    file = parse_config("num_machines: 3\nmain_process_ip: h", "a.yaml")
    found = resolve({}, {"ACCELFN_MACHINE_RANK": "0"}, file, step)
    assert (found.config.num_machines, found.config.machine_rank) == (2, 0)
    assert str(found.origins["num_machines"]) == "launcher SLURM_STEP_NUM_NODES"


def test_a_source_with_higher_precedence_wins_among_exclusive_options() -> None:
    file = parse_config("use_fsdp: true\ncpu: true", "a.yaml")
    found = resolve(parse_flags(["--use_deepspeed", "--multi_gpu", "t.py"]).flags, {}, file).config
    assert (found.use_fsdp, found.use_deepspeed, found.cpu, found.multi_gpu) == (False, True, False, True)
    off = resolve(parse_flags(["--no_use_fsdp", "t.py"]).flags, {}, file).config
    assert (off.use_fsdp, off.cpu) == (False, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cpu --tpu", "--cpu and --tpu exclude each other. Pass one of them"),
        ("--use_fsdp --use_deepspeed", "--use_deepspeed and --use_fsdp exclude each other"),
        ("--use_deepspeed --tpu", "--use_deepspeed and --tpu exclude each other"),
        ("--module --no_python", "exclude each other"),
        ("--tpu --no_python", "Leave --no_python out"),
        ("--multi_gpu --num_processes=1", "--multi_gpu needs at least two processes"),
        ("--multi_gpu --gpu_ids=3", "--multi_gpu needs several accelerators: got --gpu_ids 3"),
        ("--gpu_ids=1,1", "--gpu_ids lists an accelerator twice"),
        (
            "--use_fsdp --fsdp_cpu_ram_efficient_loading --fsdp_sync_module_states=no",
            "needs --fsdp_sync_module_states",
        ),
        (
            "--use_fsdp --fsdp_activation_checkpointing --fsdp_activation_checkpointing_offload",
            "--fsdp_activation_checkpointing_offload needs --fsdp_version 2",
        ),
        ("--parallelism_config_tp_size=2", "has no effect without --use_parallelism_config"),
        ("--fsdp_version=2", "--fsdp_version has no effect without --use_fsdp"),
        ("--fp8_backend=te", "--fp8_backend has no effect without --mixed_precision fp8"),
        ("--dynamo_mode=max-autotune", "--dynamo_mode has no effect without --dynamo_backend NAME"),
        ("--dynamo_mode=default --dynamo_backend=no", "--dynamo_mode has no effect without"),
        ("--vm=1 --cpu", "--vm has no effect without --tpu. Pass both"),
        ("--machine_rank=1", "--machine_rank must be 0 to 0 with --num_machines 1, got 1"),
        ("--num_processes=5 --num_machines=2", "got 5 processes on 2 machines. Use 4 or 6 processes"),
        ("--num_processes=1 --num_machines=3", "got 1 processes on 3 machines. Use 3 processes"),
        ("--num_machines=2", "--num_machines 2 needs --main_process_ip"),
        ("--num_machines=2 --main_process_ip=h", "needs --machine_rank (0 to 1, different on every machine)"),
        ("--num_machines=2 --main_process_ip=h --main_process_port=0", "Pass the same port on every machine"),
        ("--rdzv_endpoint=a:1 --main_process_ip=b", "replaces --main_process_ip"),
        ("--num_processes=two", "argument --num_processes: it must be an integer, 1 or more, got 'two'"),
        ("--main_process_ip=bad=host", "got 'bad=host'"),
        ("--fsdp_state_dict_type=FULL_STAT_DICT --use_fsdp", "Did you mean FULL_STATE_DICT?"),
    ],
)
def test_impossible_configurations(flags: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve(parse_flags(flags.split()).flags, {})


def test_only_flags_must_have_an_effect() -> None:
    file = parse_config("deepspeed: {zero_stage: 3}\ndynamo: {mode: max-autotune}", "a.yaml")
    found = resolve({}, {"ACCELFN_VM": "1"}, file).config
    assert (found.zero_stage, found.dynamo_mode, found.vm) == (3, "max-autotune", ("1",))


def test_a_conflict_names_the_sources() -> None:
    file = parse_config("num_machines: 2\nmain_process_ip: h\nmachine_rank: 0", "a.yaml")
    with pytest.raises(ConfigurationError, match=r"num_machines is from file a\.yaml, line 1"):
        resolve({"num_processes": Given("3", "--num_processes")}, {}, file)
    with pytest.raises(ConfigurationError, match=r"the variable ACCELFN_CPU must be true or false .*0\)\.$"):
        resolve({}, {"ACCELFN_CPU": "maybe"})


@pytest.mark.parametrize("changes", [{"num_processes": 0}, {"num_processes": True}, {"role": ""}, {"cpu": 1}])
def test_a_record_refuses_what_no_text_could_give(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"LaunchConfig\.\w+ must be"):
        LaunchConfig(**changes)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ACCELFN_NUM_PROCESES", "ACCELFN_NUM_PROCESSES"),
        ("ACCELFN_TORCH_DEVIC", "ACCELFN_TORCH_DEVICE"),
        ("ACCELFN_CONFIG_FILE", "ACCELFN_CONFIG"),
    ],
)
def test_a_misspelt_variable_is_refused(name: str, meant: str) -> None:
    message = f"unknown variable {name}. Did you mean {meant}?"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve({}, {name: "4"})
    assert resolve({}, {name: " "}).config == LaunchConfig()


def test_other_variables_are_left_alone() -> None:
    theirs = {"ACCELFN_MY_OWN": "1", "ACCELFN_": "1", "NUM_PROCESES": "1"}
    ours = {name: "" for variable in VARIABLES for name in variable.names if name.startswith("ACCELFN_")}
    assert len(ours) > 40
    assert resolve({}, theirs).config == LaunchConfig()
    options = {name for option in OPTIONS.values() for name in option.variables}
    # Whatever a script may read is never taken for a misspelt name.
    assert resolve({}, {name: "1" for name in ours if name not in options}).config == LaunchConfig()


def test_print_config_names_sources() -> None:
    flags = parse_flags(["--num-processes=2", "--tpu", "--env=A=1", "--env=B=2", "t.py"]).flags
    found = origin_rows(
        resolve(flags, {"ACCELFN_MIXED_PRECISION": "bf16", "ACCELFN_COMMANDS": "login s3cret"})
    )
    rows = {path: f"{value} {origin}".split() for path, value, origin in found}
    assert len(rows) == len(OPTIONS)
    assert rows["num_processes"] == ["2", "flag", "--num-processes"]
    assert rows["mixed_precision"] == ["bf16", "environment", "ACCELFN_MIXED_PRECISION"]
    assert rows["num_machines"] == ["1", "default"]
    assert rows["tpu_options.env"][:2] == ["A=1;", "B=2"]
    # What was typed is shown; the text of a variable may be a secret.
    assert rows["tpu_options.commands"] == ["(not", "shown)", "environment", "ACCELFN_COMMANDS"]
