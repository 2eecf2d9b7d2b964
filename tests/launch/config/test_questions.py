"""The questionnaire as a plan: every path ends in a configuration that holds and survives its file."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context.config import FP8_PACKAGES
from accelfn.launch.config import (
    OPTIONS,
    LaunchConfig,
    format_config,
    parse_config,
    resolve,
)
from accelfn.launch.config.ask import FP8_MODULES, ask_questions
from accelfn.launch.config.questions import (
    QUESTIONS,
    Answers,
    Question,
    default_of,
    first_answers,
    next_question,
    read_answer,
    refuse,
    values_of,
)
from accelfn.launch.plan import machine as machines
from accelfn.launch.plan.choose import plan_launch
from accelfn.launch.plan.commands import Script

TEXTS = ("a", "10.0.0.7", "two words", "no", "a,b", "'quoted' \"twice\"", "x: y # z", "Grüße")
MESH = {
    "machine_type": "several processes on CPUs",
    "use_parallelism_config": True,
    "parallelism_config_tp_size": 2,
}
NUMBERS = ("0", "1", "2", "3", "4", "6", "8", "12", "-1", "0.5", "29501", "all", "0,1", "0,0", "none", "")


FP8_ENGINES = st.sampled_from(((), ("ao",), ("ao", "te", "msamp")))


@pytest.fixture(autouse=True, scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work where the files are that serve as examples: a file that is missing is asked for again."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("files")
    for name in ("hostfile", "ds.json"):
        (folder / name).touch()
    os.chdir(folder)
    yield
    os.chdir(before)


def refuse_nothing(reason: str) -> None:
    raise AssertionError(reason)


def draw_answers(data: st.DataObject, saved: Mapping[str, object], devices: int) -> tuple[Answers, int]:
    """Answer at random, right and wrong; say how many answers were refused."""
    refused = 0
    asked: list[str] = []

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        if asked.count(question.name) > 1:  # enough nonsense; what is offered must always do
            return "" if default is not None or question.optional else question.example
        asked.append(question.name)
        if question.kind.is_bool:
            return data.draw(st.sampled_from(("true", "false")), label=question.name)
        return data.draw(st.sampled_from(few or (*NUMBERS, *TEXTS)), label=question.name)

    def say(reason: str) -> None:
        nonlocal refused
        refused += 1
        assert len(reason) > 20

    here: dict[str, Any] = {
        "has_tpu": data.draw(st.booleans(), label="has TPU"),
        "has_deepspeed": data.draw(st.booleans(), label="has DeepSpeed"),
        "fp8_engines": data.draw(FP8_ENGINES, label="engines of fp8"),
    }
    first = first_answers(saved, devices, **here)
    return ask_questions(first, saved, put, say), refused


@given(st.data(), st.sampled_from((0, 1, 4)), st.sampled_from(("a.yaml", "a.json")))
def test_every_path_ends_in_a_configuration_that_survives_its_file(
    data: st.DataObject, devices: int, name: str
) -> None:
    answers, _ = draw_answers(data, {}, devices)
    config = LaunchConfig(**values_of(answers))
    values = values_of(answers)
    file = parse_config(format_config(config, name, frozenset(values)), name)
    assert LaunchConfig(**file.values) == config
    assert dict(file.values) == values
    assert resolve({}, {}, file).config == config


@given(st.data())
def test_pressing_enter_everywhere_keeps_the_file(data: st.DataObject) -> None:
    answers, _ = draw_answers(data, {}, 0)
    saved = values_of(answers)

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        return question.kind.write(default) if question.kind.is_bool or few else ""

    again = ask_questions(first_answers(saved, 4), saved, put, refuse_nothing)
    assert LaunchConfig(**values_of(again)) == LaunchConfig(**values_of(answers))


@given(st.data(), st.data())
def test_values_of_any_file_never_lead_into_a_dead_end(one: st.DataObject, two: st.DataObject) -> None:
    saved = values_of(draw_answers(one, {}, 2)[0])
    answers, _ = draw_answers(two, saved, 0)
    assert next_question(answers) is None
    LaunchConfig(**values_of(answers))


@given(st.data())
def test_defaults_are_never_refused(data: st.DataObject) -> None:
    answers: Answers = first_answers({}, data.draw(st.sampled_from((0, 1, 2, 8))))
    while (question := next_question(answers)) is not None:
        usual = default_of(question, answers, {})
        if usual is None and not question.optional:
            usual = read_answer(question, answers, question.example)
        assert not refuse(question, answers, usual), question.name
        few = question.choices(answers)
        texts = few or (("true", "false") if question.kind.is_bool else ("3", "7", "a"))
        text = data.draw(st.sampled_from(texts), label=question.name)
        try:
            value = read_answer(question, answers, text)
        except ValueError:
            value = usual
        answers = {**answers, question.name: value}


@given(st.data())
def test_launches_take_what_was_answered(data: st.DataObject) -> None:
    answers, _ = draw_answers(data, {}, 0)
    config = LaunchConfig(**values_of(answers))
    file = parse_config(format_config(config, "a.json", frozenset(values_of(answers))), "a.json")
    count: int = config.num_machines
    hosts = {f"n{number}": 2 for number in range(count)}
    here = machines.Machine(cores=4, mpirun="/usr/bin/mpirun", is_open_mpi=True, hosts=hosts)
    plan_launch(resolve({}, {}, file), Script("train.py"), {}, here)


def test_questions_hang_on_those_before_them_only() -> None:
    read: set[str] = set()
    names = [question.name for question in QUESTIONS]
    assert len(set(names)) == len(names)

    class Watched(dict[str, object]):
        def get(self, key: str, default: object = None) -> object:
            read.add(key)
            return super().get(key, default)

    for position, question in enumerate(QUESTIONS):
        read.clear()
        for kind in ("one process", "several processes on CPUs", "several accelerators", "TPU"):
            for yes in (True, False):
                answers = Watched(dict.fromkeys(names, yes) | {"machine_type": kind, "num_machines": 2})
                question.when(answers)
                question.choices(answers)
                question.default(answers)
        here = {"devices", "fp8_engines", "has_deepspeed", "has_sagemaker", "has_tpu", "rdzv_endpoint"}
        assert read <= {*names[: position + 1], *here}, question.name


def test_each_question_is_about_one_field_or_about_others() -> None:
    own = {question.name for question in QUESTIONS if question.name not in OPTIONS}
    assert own == {"machine_type"}


def answer_all(
    texts: Mapping[str, str], saved: Mapping[str, object], devices: int = 0, **here: Any
) -> LaunchConfig:
    """Answer by name; others as offered. Every text must be asked for, and be taken."""
    left = dict(texts)

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        if question.name in left:
            return left.pop(question.name)
        return question.kind.write(default) if question.kind.is_bool or few else ""

    first = first_answers(saved, devices, **here)
    answers = ask_questions(first, saved, put, refuse_nothing)
    assert not left
    return LaunchConfig(**values_of(answers))


def test_the_engine_of_fp8_is_asked_with_its_options() -> None:
    texts = {
        "machine_type": "one process",
        "mixed_precision": "fp8",
        "fp8_backend": "te",
        "fp8_format": "E4M3",
    }
    config = answer_all(texts, {}, fp8_engines=("ao", "te"))
    assert (config.fp8_backend, config.fp8_format) == ("te", "E4M3")
    modules = {str(name).lower(): package.module for name, package in FP8_PACKAGES.items()}
    assert modules == FP8_MODULES


def test_options_without_a_question_are_kept() -> None:
    saved = {"max_restarts": 3, "slurm_partition": "gpu", "num_processes": 2, "cpu": True}
    config = answer_all({}, saved)
    assert (config.max_restarts, config.slurm_partition, config.num_processes) == (3, "gpu", 2)
    one = answer_all({"machine_type": "one process"}, saved)
    assert (one.max_restarts, one.num_processes) == (3, 1)


@pytest.mark.parametrize("kind", ["one process", "several processes on CPUs", "several accelerators", "TPU"])
def test_the_kind_of_machine_is_found_in_a_file(kind: str) -> None:
    config = answer_all({"machine_type": kind}, {}, devices=2, has_tpu=True)
    values = {"cpu": config.cpu, "multi_gpu": config.multi_gpu, "tpu": config.tpu}
    saved = {**values, "num_processes": config.num_processes}
    assert answer_all({}, saved, devices=4) == config
    assert answer_all({}, saved, devices=0) == config  # a file that was made for another machine


def test_jobs_of_sagemaker_have_their_own_questions() -> None:
    texts = {
        "compute_environment": "AMAZON_SAGEMAKER",
        "iam_role_name": "role",
        "mixed_precision": "bf16",
        "sagemaker_distributed_type": "DATA_PARALLEL",
        "ec2_instance_type": "ml.p4d.24xlarge",
        "num_machines": "2",
        "image_uri": "me/image:1",
    }
    config = answer_all(texts, {}, devices=8, has_sagemaker=True)
    assert (config.num_machines, config.multi_gpu, config.image_uri) == (2, False, "me/image:1")
    assert answer_all({}, dict(parse_config(format_config(config, "a.json"), "a.json").values)) == config
    here = answer_all({"compute_environment": "LOCAL_MACHINE"}, {}, has_sagemaker=True)
    assert here == answer_all({}, {})


def test_values_of_a_file_that_no_longer_fit_are_not_defaults() -> None:
    saved = {"cpu": True, "num_processes": 3, "main_process_ip": "a", "machine_rank": 5}
    config = answer_all({"num_machines": "2"}, saved)
    assert (config.num_processes, config.machine_rank, config.main_process_ip) == (2, 0, "a")


@pytest.mark.parametrize(
    ("texts", "devices", "sizes", "num_processes"),
    [
        ({}, 8, (1, 1, 8), 8),
        ({"parallelism_config_tp_size": "2"}, 8, (1, 2, 4), 8),
        ({"parallelism_config_tp_size": "2", "parallelism_config_dp_replicate_size": "2"}, 0, (2, 2, 2), 8),
        ({"parallelism_config_tp_size": "2", "parallelism_config_dp_shard_size": "3"}, 0, (1, 2, 3), 6),
    ],
)
def test_a_mesh_is_filled_with_shards_and_has_as_many_processes(
    texts: dict[str, str], devices: int, sizes: tuple[int, ...], num_processes: int
) -> None:
    kind = "several accelerators" if devices else "several processes on CPUs"
    texts = {"machine_type": kind, "use_fsdp": "yes", "use_parallelism_config": "yes", **texts}
    config = answer_all(texts, {}, devices)
    axes = ("dp_replicate", "tp", "dp_shard")
    assert tuple(getattr(config, f"parallelism_config_{axis}_size") for axis in axes) == sizes
    assert config.num_processes == num_processes
    assert (config.fsdp_version, config.fsdp_auto_wrap_policy) == (2, "TRANSFORMER_BASED_WRAP")
    assert answer_all({}, dict(parse_config(format_config(config, "a.json"), "a.json").values)) == config


def test_deepspeed_by_answers() -> None:
    several = {"machine_type": "several processes on CPUs", "use_deepspeed": "yes"}
    texts = {**several, "zero_stage": "3", "offload_param_device": "nvme", "offload_param_nvme_path": "/n"}
    config = answer_all({**texts, "gradient_clipping": "1.0", "num_processes": "4"}, {}, has_deepspeed=True)
    assert (config.use_deepspeed, config.zero_stage, config.num_processes) == (True, 3, 4)
    assert (config.offload_param_device, config.offload_param_nvme_path) == ("nvme", "/n")
    assert (config.zero3_init_flag, config.gradient_clipping, config.mixed_precision) == (True, 1.0, "no")
    saved = dict(parse_config(format_config(config, "a.json"), "a.json").values)
    assert answer_all({}, saved) == config, "the file is enough to be asked about DeepSpeed"
    hosts = {"num_machines": "2", "deepspeed_multinode_launcher": "pdsh", "deepspeed_hostfile": "hostfile"}
    config = answer_all({**several, **hosts, "deepspeed_config_file": "ds.json"}, {}, has_deepspeed=True)
    assert config.deepspeed_hostfile == str(Path.cwd() / "hostfile")
    assert (config.num_processes, config.zero_stage, config.mixed_precision) == (None, None, None)
    assert (config.main_process_ip, config.machine_rank) == (None, None)


def test_faults_of_accelerates_questionnaire_are_none_here() -> None:
    tpu = answer_all({"mixed_precision": "bf16", "downcast_bf16": "yes"}, {"tpu": True})
    assert (tpu.mixed_precision, tpu.downcast_bf16) == ("bf16", True)
    backends = next(question for question in QUESTIONS if question.name == "dynamo_backend").choices({})
    assert "torchxla_trace_once" in backends
    assert not any("torh" in one for one in backends)
    text = format_config(LaunchConfig(mixed_precision="no"), "a.yaml")
    assert "mixed_precision: 'no'" in text


@pytest.mark.parametrize(
    ("before", "name", "text", "reason"),
    [
        ({"machine_type": "several accelerators"}, "num_processes", "1", "2 or more"),
        ({"machine_type": "several accelerators"}, "num_processes", "x", "an integer"),
        ({"machine_type": "several processes on CPUs", "num_machines": 2}, "num_processes", "3", "divide"),
        (
            {"machine_type": "several processes on CPUs", "num_machines": 2},
            "machine_rank",
            "2",
            "one of 0, 1",
        ),
        (
            {"machine_type": "several processes on CPUs", "num_machines": 2},
            "main_process_port",
            "0",
            "picks a free port",
        ),
        ({"machine_type": "several accelerators", "num_processes": 4}, "gpu_ids", "0,1", "0,1 lists 2"),
        ({"machine_type": "several accelerators", "num_processes": 2}, "gpu_ids", "1,1", "twice"),
        ({"machine_type": "TPU"}, "mixed_precision", "fp8", "one of no, bf16"),
        ({**MESH, "use_fsdp": True}, "parallelism_config_dp_shard_size", "1", "nothing to shard over"),
        ({**MESH, "num_machines": 3}, "parallelism_config_dp_shard_size", "2", "num_machines must divide"),
        ({**MESH, "parallelism_config_dp_shard_size": 2}, "num_processes", "2", "the mesh needs 4 processes"),
        ({"fsdp_version": 1}, "fsdp_sharding_strategy", "HYBRID_SHARD", "one of FULL_SHARD, SHARD_GRAD_OP"),
    ],
)
def test_answers_that_contradict_each_other_are_refused(
    before: dict[str, object], name: str, text: str, reason: str
) -> None:
    question = next(one for one in QUESTIONS if one.name == name)
    so_far = {**before, "main_process_ip": "10.0.0.1"} if before.get("num_machines") else before
    with pytest.raises(ValueError, match=reason):
        read_answer(question, so_far, text)


def test_no_program_is_kept_from_a_file_where_a_tpu_was_chosen() -> None:
    reported: list[str] = []
    texts = iter(("TPU", "one process"))

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        if question.name == "machine_type":
            return next(texts)
        return question.kind.write(default) if question.kind.is_bool or few else ""

    saved = {"no_python": True}
    answers = ask_questions(first_answers(saved, has_tpu=True), saved, put, reported.append)
    assert "--no_python" in reported[0]
    assert LaunchConfig(**values_of(answers)).no_python


LATER = ("megatron", "parallelism_config_cp", "parallelism_config_sp")
DEEPSPEED = ("deepspeed", "use_deepspeed", "zero", "offload_", "gradient_clipping")


@given(st.data(), st.sampled_from((0, 1, 4, None)), st.booleans(), st.booleans(), FP8_ENGINES)
def test_what_cannot_run_is_not_asked(
    data: st.DataObject,
    devices: int | None,
    has_tpu: bool,
    has_deepspeed: bool,
    engines: tuple[str, ...],
) -> None:
    asked: dict[str, tuple[str, ...]] = {}

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        asked[question.name] = few
        usual = "" if default is not None or question.optional else question.example
        return data.draw(st.sampled_from(few), label=question.name) if few else usual

    first = first_answers({}, devices, has_tpu=has_tpu, has_deepspeed=has_deepspeed, fp8_engines=engines)
    ask_questions(first, {}, put, lambda _: None)
    assert asked.get("fp8_backend", engines) == engines
    without = not engines or "tpu_cluster" in asked or "zero_stage" in asked
    assert ("fp8" in asked.get("mixed_precision", ())) is (not without and "mixed_precision" in asked)
    reported = [*asked, *(one for few in asked.values() for one in few)]
    assert not [
        one for one in reported if one.startswith(LATER) or any(f"use_{name}" in one for name in LATER)
    ]
    assert has_deepspeed or not [name for name in asked if name.startswith(DEEPSPEED)]
    assert ("TPU" in reported) is (has_tpu and "machine_type" in asked)
    if devices == 0:
        assert not {"several accelerators", "cpu", "gpu_ids", "enable_cpu_affinity"} & {*reported}
