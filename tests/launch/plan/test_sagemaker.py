"""Jobs on Amazon SageMaker: the plan, what is refused, and the calls of the sagemaker package."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch import SagemakerPlan, Script, parse_flags, plan_sagemaker, resolve
from accelfn.launch.config.accelerate import import_accelerate
from accelfn.launch.main import main
from accelfn.launch.plan.sagemaker import read_hyperparameters

VERSIONS = ("--py_version=py312", "--pytorch_version=2.8.0", "--transformers_version=4.56.2")
JOB = (
    *(
        "--compute_environment=AMAZON_SAGEMAKER",
        "--ec2_instance_type=ml.p4d.24xlarge",
        "--iam_role_name=role",
    ),
    *VERSIONS,
)


def plan_of(*argv: str, inputs: str | None = None, metrics: str | None = None) -> SagemakerPlan:
    parsed = parse_flags(argv)
    assert parsed.script is not None
    script = Script(parsed.script, parsed.script_args)
    return plan_sagemaker(resolve(parsed.flags, {}), script, inputs=inputs, metrics=metrics)


def test_the_estimators_arguments() -> None:
    plan = plan_of(
        *(*JOB, "--num_machines=2", "--sagemaker_distributed_type=DATA_PARALLEL", "--mixed_precision=bf16"),
        *(
            "--profile=work",
            "--region=eu-west-1",
            "--additional_args=max_run=3600",
            "--dynamo_backend=inductor",
        ),
        *("--additional_args=instance_count=9", "src/train.py", "--lr", "1e-3", "--fast", "True"),
        inputs="name\tplace\ntrain\ts3://b/train\n",
        metrics="name\tregex\nloss\tloss=(.*?);\n",
    )
    assert (plan.region, plan.profile, plan.inputs) == ("eu-west-1", "work", {"train": "s3://b/train"})
    environment = plan.estimator["environment"]
    for prefix in ("ACCELFN_", "ACCELERATE_"):
        assert environment[f"{prefix}MIXED_PRECISION"] == "bf16"
        assert environment[f"{prefix}DYNAMO_BACKEND"] == "INDUCTOR"
        assert environment[f"{prefix}USE_SAGEMAKER"] == "true"
        assert environment[f"{prefix}SAGEMAKER_DISTRIBUTED_TYPE"] == "DATA_PARALLEL"
    assert {name: value for name, value in plan.estimator.items() if name != "environment"} == {
        "base_job_name": "accelfn-sagemaker-1",
        "debugger_hook_config": False,
        "distribution": {"smdistributed": {"dataparallel": {"enabled": True}}},
        "entry_point": "train.py",
        "hyperparameters": {"fast": True, "lr": 0.001},
        "instance_count": 2,  # what is computed wins over additional_args
        "instance_type": "ml.p4d.24xlarge",
        "max_run": 3600,
        "metric_definitions": [{"Name": "loss", "Regex": "loss=(.*?);"}],
        "py_version": "py312",
        "pytorch_version": "2.8.0",
        "role": "role",
        "source_dir": "src",
        "transformers_version": "4.56.2",
    }


def test_an_image_needs_no_versions_and_a_secret_is_not_printed() -> None:
    plan = plan_of(*JOB[:3], "--image_uri=me/image:1", "train.py", "--hub_token", "hush")
    assert (plan.estimator["image_uri"], plan.estimator["source_dir"]) == ("me/image:1", ".")
    assert "pytorch_version" not in plan.estimator
    assert plan.estimator["hyperparameters"] == {"hub_token": "hush"}
    assert "hush" not in str(plan)
    assert json.loads(str(plan))["estimator"]["role"] == "role"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            (JOB[0], "train.py"),
            "needs --ec2_instance_type, --iam_role_name, --py_version.* --image_uri names",
        ),
        ((*JOB, "train.sh"), "runs a Python file: got the script 'train.sh'"),
        ((*JOB, "-m", "train.py"), "--module .*has no effect on SageMaker"),
        ((*JOB, "--num_processes=8", "train.py"), "--num_processes .flag --num_processes. has no effect"),
        ((*JOB, "--max_restarts=1", "train.py"), "--max_restarts .*has no effect"),
        ((*JOB, "--num_machines=2", "train.py"), "needs --sagemaker_distributed_type DATA_PARALLEL"),
        (
            (*JOB, "--sagemaker_distributed_type=MODEL_PARALLEL", "train.py"),
            "MODEL_PARALLEL: SageMaker's model",
        ),
        ((*JOB, "--additional_args=7", "train.py"), "--additional_args takes NAME=VALUE, got '7'"),
        ((*JOB, "train.py", "data"), "as --name value, got 'data'"),
        ((*JOB, "train.py", "--fast", "--lr", "1"), "--fast has none. Write --fast True"),
        ((*JOB, "train.py", "--lr", "1", "--lr=2"), "--lr is repeated"),
    ],
)
def test_what_a_job_cannot_have_is_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(*argv)


@pytest.mark.parametrize("text", ["name\tplace\n", "name\tplace\ntrain\n", ""])
def test_tables_need_two_columns_and_a_line(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--sagemaker_inputs_file"):
        plan_of(*JOB, "train.py", inputs=text)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z_]{0,5}", fullmatch=True),
        st.one_of(
            st.integers(),
            st.booleans(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.sampled_from("ab"),
        ),
    )
)
def test_hyperparameters_keep_their_values(values: dict[str, Any]) -> None:
    read = read_hyperparameters(
        [word for name, value in values.items() for word in (f"--{name}", str(value))]
    )
    assert read == values
    assert {name: type(value) for name, value in read.items()} == {
        name: type(value) for name, value in values.items()
    }


# As Accelerate 1.15 writes it.
FILE = """
additional_args: {max_run: 100, tags: [{Key: a, Value: b}]}
base_job_name: accelerate-sagemaker-1
compute_environment: AMAZON_SAGEMAKER
debug: false
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p3.16xlarge
gpu_ids: all
iam_role_name: accelerate_sagemaker_execution_role
image_uri: null
mixed_precision: fp16
num_machines: 2
profile: default
py_version: py38
pytorch_version: 1.10.2
region: us-east-1
sagemaker_inputs_file: null
sagemaker_metrics_file: null
transformers_version: 4.17.0
use_cpu: false
"""


def test_a_file_of_accelerate_makes_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = import_accelerate(yaml.load(FILE, yaml.BaseLoader), "a.yaml").config
    assert (config.sagemaker_distributed_type, config.num_machines) == ("DATA_PARALLEL", 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "a.yaml").write_text(FILE)
    assert main(["launch", "--config_file=a.yaml", "--dry_run", "train.py"]) == 0
    estimator = json.loads(capsys.readouterr().out)["estimator"]
    assert (estimator["max_run"], estimator["tags"]) == (100, [{"Key": "a", "Value": "b"}])
    assert (estimator["role"], estimator["py_version"]) == ("accelerate_sagemaker_execution_role", "py38")


def test_the_sagemaker_package_is_asked_for_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "in.tsv").write_text("name\tplace\ntrain\ts3://b/train\n")
    argv = ["launch", *JOB, "--sagemaker_inputs_file=in.tsv", "--profile=work", "train.py", "--lr", "1"]
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    assert main(argv) == 2
    assert "pip install 'accelfn[sagemaker]'" in capsys.readouterr().err
    calls: dict[str, Any] = {}

    class Session:
        def __init__(self, **options: Any) -> None:
            self.options = options

    class HuggingFace:
        model_data = "s3://b/model.tar.gz"

        def __init__(self, **options: Any) -> None:
            calls["estimator"] = options

        def fit(self, inputs: Any) -> None:
            calls["inputs"] = inputs

    for name, members in {
        "boto3": {"Session": Session},
        "sagemaker": {"Session": Session},
        "sagemaker.huggingface": {"HuggingFace": HuggingFace},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    assert main(argv) == 0
    assert capsys.readouterr().out == "model: s3://b/model.tar.gz\n"
    assert calls["inputs"] == {"train": "s3://b/train"}
    session = calls["estimator"].pop("sagemaker_session")
    assert session.options["boto_session"].options == {"profile_name": "work", "region_name": "us-east-1"}
    assert calls["estimator"]["hyperparameters"] == {"lr": 1}


def test_version_3_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boto3", "sagemaker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    from accelfn.launch.run.sagemaker import run_sagemaker

    with pytest.raises(MissingExtraError, match="of a version before 3"):
        run_sagemaker(plan_of(*JOB, "train.py"))
