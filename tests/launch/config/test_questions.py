"""The questionnaire as a plan: every path ends in a configuration that holds and survives its file."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.launch.ask import ask_questions
from accelfn.launch.config import LaunchConfig
from accelfn.launch.config_file import format_config, parse_config
from accelfn.launch.machine import Machine
from accelfn.launch.plan import plan_launch
from accelfn.launch.plan_commands import Script
from accelfn.launch.questions import (
    QUESTIONS,
    Answers,
    Question,
    first_answers,
    next_question,
    read_answer,
    values_of,
)
from accelfn.launch.sources import resolve

TEXTS = ("a", "10.0.0.7", "two words", "no", "a,b", "'quoted' \"twice\"", "x: y # z", "Grüße")
NUMBERS = ("0", "1", "2", "3", "4", "6", "8", "12", "-1", "0.5", "29501", "all", "0,1", "0,0", "none", "")
KINDS = ("one process", "several processes on CPUs", "several accelerators", "TPU")
ONE, CPUS, GPUS, TPU = KINDS


def refuse_nothing(reason: str) -> None:
    raise AssertionError(reason)


def usual(question: Question, few: tuple[str, ...], default: object) -> str:
    """Press Enter."""
    return question.kind.write(default) if question.kind.is_bool or few else ""


def draw_answers(data: st.DataObject, saved: Mapping[str, object], devices: int | None) -> Answers:
    """Answer at random, right and wrong, here or there."""
    asked: list[str] = []

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        if asked.count(question.name) > 1:  # enough nonsense; what is offered must always do
            return "" if default is not None or question.optional else question.example
        asked.append(question.name)
        choices = ("true", "false") if question.kind.is_bool else few or (*NUMBERS, *TEXTS)
        return data.draw(st.sampled_from(choices), label=question.name)

    def say(reason: str) -> None:
        assert len(reason) > 20

    installed = data.draw(st.sets(st.sampled_from(("torch_xla", "deepspeed", "torchao"))), label="installed")
    return ask_questions(first_answers(saved, devices, *installed), saved, put, say)


@given(st.data(), st.sampled_from((0, 1, 4)), st.sampled_from(("a.yaml", "a.json")))
def test_every_path_ends_in_a_configuration_that_survives_its_file_and_is_launched(
    data: st.DataObject, devices: int, name: str
) -> None:
    values = values_of(draw_answers(data, {}, devices))
    config = LaunchConfig(**values)
    file = parse_config(format_config(config, name, frozenset(values)), name)
    assert dict(file.values) == values
    resolved = resolve({}, {}, file)
    assert resolved.config == config
    if devices == 0:
        plan_launch(resolved, Script("train.py"), {}, Machine(cores=4))


@given(st.data())
def test_pressing_enter_everywhere_keeps_the_file(data: st.DataObject) -> None:
    saved = values_of(draw_answers(data, {}, 0))
    again = ask_questions(first_answers(saved, 4), saved, usual, refuse_nothing)
    assert LaunchConfig(**values_of(again)) == LaunchConfig(**saved)


@given(st.data(), st.data())
def test_values_of_any_file_never_lead_into_a_dead_end(one: st.DataObject, two: st.DataObject) -> None:
    saved = values_of(draw_answers(one, {}, 2))
    answers = draw_answers(two, saved, 0)
    assert next_question(answers) is None
    LaunchConfig(**values_of(answers))


def answer_all(
    texts: Mapping[str, str], saved: Mapping[str, object], devices: int = 0, *installed: str
) -> LaunchConfig:
    """Answer by name; others as offered. Every text must be asked for, and be taken."""
    left = dict(texts)

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        return left.pop(question.name) if question.name in left else usual(question, few, default)

    answers = ask_questions(first_answers(saved, devices, *installed), saved, put, refuse_nothing)
    assert not left
    return LaunchConfig(**values_of(answers))


def keeps_its_file(config: LaunchConfig) -> bool:
    return answer_all({}, dict(parse_config(format_config(config, "a.json"), "a.json").values)) == config


def test_options_without_a_question_are_kept() -> None:
    saved = {"max_restarts": 3, "tpu_name": "t", "num_processes": 2, "cpu": True}
    config = answer_all({}, saved)
    assert (config.max_restarts, config.tpu_name, config.num_processes) == (3, "t", 2)
    one = answer_all({"machine_type": ONE}, saved)
    assert (one.max_restarts, one.num_processes) == (3, 1)
    te = answer_all({}, {"mixed_precision": "fp8", "fp8_backend": "te", "fp8_format": "E4M3"})
    assert (te.mixed_precision, te.fp8_backend, te.fp8_format) == ("fp8", "te", "E4M3")


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_machine_is_found_in_a_file(kind: str) -> None:
    config = answer_all({"machine_type": kind}, {}, 2, "torch_xla")
    values = {"cpu": config.cpu, "multi_gpu": config.multi_gpu, "tpu": config.tpu}
    saved = {**values, "num_processes": config.num_processes}
    assert answer_all({}, saved, devices=4) == config
    assert answer_all({}, saved, devices=0) == config  # a file that was made for another machine


def test_jobs_of_sagemaker_have_their_own_questions() -> None:
    line = (
        "compute_environment=AMAZON_SAGEMAKER iam_role_name=role mixed_precision=bf16 num_machines=2 "
        "sagemaker_distributed_type=DATA_PARALLEL ec2_instance_type=ml.p4d.24xlarge image_uri=me/image:1"
    )
    texts = {name: text for name, _, text in (word.partition("=") for word in line.split())}
    config = answer_all(texts, {}, 8, "sagemaker")
    assert (config.num_machines, config.multi_gpu, config.image_uri) == (2, False, "me/image:1")
    assert keeps_its_file(config)
    here = answer_all({"compute_environment": "LOCAL_MACHINE"}, {}, 0, "sagemaker")
    assert here == answer_all({}, {})


def test_values_of_a_file_that_no_longer_fit_are_not_defaults() -> None:
    saved = {"cpu": True, "num_processes": 3, "main_process_ip": "a", "machine_rank": 5}
    config = answer_all({"num_machines": "2"}, saved)
    assert (config.num_processes, config.machine_rank, config.main_process_ip) == (2, 0, "a")


@pytest.mark.parametrize(
    ("texts", "devices", "sizes", "num_processes"),
    [
        ({}, 8, (1, 1, 8), 8),
        ({"tp": "2"}, 8, (1, 2, 4), 8),
        ({"tp": "2", "dp_replicate": "2"}, 0, (2, 2, 2), 8),
        ({"tp": "2", "dp_shard": "3"}, 0, (1, 2, 3), 6),
    ],
)
def test_a_mesh_is_filled_with_shards_and_has_as_many_processes(
    texts: dict[str, str], devices: int, sizes: tuple[int, ...], num_processes: int
) -> None:
    mesh = {f"parallelism_config_{axis}_size": text for axis, text in texts.items()}
    kind = {"machine_type": GPUS if devices else CPUS, "use_fsdp": "yes", "use_parallelism_config": "yes"}
    config = answer_all({**kind, **mesh}, {}, devices)
    axes = ("dp_replicate", "tp", "dp_shard")
    assert tuple(getattr(config, f"parallelism_config_{axis}_size") for axis in axes) == sizes
    assert config.num_processes == num_processes
    assert (config.fsdp_version, config.fsdp_auto_wrap_policy) == (2, "TRANSFORMER_BASED_WRAP")
    assert keeps_its_file(config)


def test_deepspeed_by_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"machine_type": CPUS, "use_deepspeed": "yes"}
    texts = {**several, "zero_stage": "3", "offload_param_device": "nvme", "offload_param_nvme_path": "/n"}
    config = answer_all({**texts, "gradient_clipping": "1.0", "num_processes": "4"}, {}, 0, "deepspeed")
    assert (config.use_deepspeed, config.zero_stage, config.num_processes) == (True, 3, 4)
    assert (config.offload_param_device, config.offload_param_nvme_path) == ("nvme", "/n")
    assert (config.zero3_init_flag, config.gradient_clipping, config.mixed_precision) == (True, 1.0, "no")
    assert keeps_its_file(config), "the file is enough to be asked about DeepSpeed"
    # Paths are kept as absolute ones; a file that is missing is asked for again.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").touch()
    config = answer_all({**several, "deepspeed_config_file": "ds.json"}, {}, 0, "deepspeed")
    assert config.deepspeed_config_file == str(tmp_path / "ds.json")
    assert (config.zero_stage, config.mixed_precision) == (None, None)
    with pytest.raises(AssertionError, match="no file "):
        answer_all({**several, "deepspeed_config_file": "other.json"}, {}, 0, "deepspeed")


MESH = {"machine_type": CPUS, "use_parallelism_config": True, "parallelism_config_tp_size": 2}
TWO = {"num_machines": 2, "main_process_ip": "10.0.0.1"}


@pytest.mark.parametrize(
    ("before", "name", "text", "reason"),
    [
        ({"machine_type": GPUS}, "num_processes", "1", "2 or more"),
        ({"machine_type": CPUS, **TWO}, "num_processes", "3", "divide"),
        ({"machine_type": CPUS, **TWO}, "machine_rank", "2", "one of 0, 1"),
        ({"machine_type": CPUS, **TWO}, "main_process_port", "0", "picks a free port"),
        ({"machine_type": GPUS, "num_processes": 4}, "gpu_ids", "0,1", "0,1 lists 2"),
        ({"machine_type": GPUS, "num_processes": 2}, "gpu_ids", "1,1", "twice"),
        ({"machine_type": TPU}, "mixed_precision", "fp8", "one of no, bf16"),
        ({**MESH, "use_fsdp": True}, "parallelism_config_dp_shard_size", "1", "nothing to shard over"),
        ({**MESH, "parallelism_config_dp_shard_size": 2}, "num_processes", "2", "the mesh needs 4 processes"),
        ({"fsdp_version": 1}, "fsdp_sharding_strategy", "HYBRID_SHARD", "one of FULL_SHARD, SHARD_GRAD_OP"),
    ],
)
def test_answers_that_contradict_each_other_are_refused(
    before: dict[str, object], name: str, text: str, reason: str
) -> None:
    question = next(one for one in QUESTIONS if one.name == name)
    with pytest.raises(ValueError, match=reason):
        read_answer(question, before, text)


LATER = ("megatron", "parallelism_config_cp", "parallelism_config_sp")
DEEPSPEED = ("deepspeed", "use_deepspeed", "zero", "offload_", "gradient_clipping")


@given(
    st.data(),
    st.sampled_from((0, 1, 4, None)),
    st.sets(st.sampled_from(("torch_xla", "deepspeed", "torchao"))),
)
def test_what_cannot_run_is_not_asked(data: st.DataObject, devices: int | None, installed: set[str]) -> None:
    asked: dict[str, tuple[str, ...]] = {}

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        asked[question.name] = few
        text = "" if default is not None or question.optional else question.example
        return data.draw(st.sampled_from(few), label=question.name) if few else text

    ask_questions(first_answers({}, devices, *installed), {}, put, refuse_nothing)
    without = "torchao" not in installed or "main_training_function" in asked or "zero_stage" in asked
    assert ("fp8" in asked.get("mixed_precision", ())) is (not without and "mixed_precision" in asked)
    reported = [*asked, *(one for few in asked.values() for one in few)]
    assert not [name for name in reported if name.removeprefix("use_").startswith(LATER)]
    assert "deepspeed" in installed or not [name for name in asked if name.startswith(DEEPSPEED)]
    assert (TPU in reported) is ("torch_xla" in installed and "machine_type" in asked)
    if devices == 0:
        assert not {GPUS, "cpu", "gpu_ids", "enable_cpu_affinity"} & {*reported}
