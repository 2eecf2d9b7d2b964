"""Jobs on Amazon SageMaker: what the estimator gets, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch import SagemakerPlan, Script, parse_flags, plan_sagemaker, resolve

HERE = "--compute_environment=AMAZON_SAGEMAKER"
ON = f"{HERE} --ec2_instance_type=ml.p4d.24xlarge --iam_role_name=role"
JOB = f"{ON} --py_version=py312 --pytorch_version=2.8.0 --transformers_version=4.56.2"


def plan_of(line: str, inputs: str | None = None, metrics: str | None = None) -> SagemakerPlan:
    parsed = parse_flags(line.split())
    assert parsed.script is not None
    script = Script(parsed.script, parsed.script_args)
    return plan_sagemaker(resolve(parsed.flags, {}), script, inputs=inputs, metrics=metrics)


def test_the_estimators_arguments() -> None:
    plan = plan_of(
        f"{JOB} --num_machines=2 --sagemaker_distributed_type=DATA_PARALLEL --mixed_precision=bf16 "
        "--profile=work --region=eu-west-1 --additional_args=max_run=3600 --dynamo_backend=inductor "
        "--additional_args=instance_count=9 src/train.py --lr 1e-3 --fast True",
        inputs="name\tplace\ntrain\ts3://b/train\n",
        metrics="name\tregex\nloss\tloss=(.*?);\n",
    )
    assert (plan.region, plan.profile, plan.inputs) == ("eu-west-1", "work", {"train": "s3://b/train"})
    estimator = dict(plan.estimator)
    environment = estimator.pop("environment")
    for prefix in ("ACCELFN_", "ACCELERATE_"):
        assert environment[f"{prefix}MIXED_PRECISION"] == "bf16"
        assert environment[f"{prefix}DYNAMO_BACKEND"] == "INDUCTOR"
        assert environment[f"{prefix}USE_SAGEMAKER"] == "true"
        assert environment[f"{prefix}SAGEMAKER_DISTRIBUTED_TYPE"] == "DATA_PARALLEL"
    assert estimator == {
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
    image = plan_of(f"{ON} --image_uri=me/image:1 train.py").estimator
    assert (image["image_uri"], image["source_dir"], "pytorch_version" in image) == ("me/image:1", ".", False)


REFUSED = [
    (f"{HERE} train.py", "needs --ec2_instance_type, --iam_role_name, --py_version.* --image_uri names"),
    (f"{JOB} train.sh", "runs a Python file: got the script 'train.sh'"),
    (f"{JOB} -m train.py", "--module .*has no effect on SageMaker"),
    (f"{JOB} --num_processes=8 train.py", "--num_processes .flag --num_processes. has no effect"),
    (f"{JOB} --max_restarts=1 train.py", "--max_restarts .*has no effect"),
    (f"{JOB} --num_machines=2 train.py", "needs --sagemaker_distributed_type DATA_PARALLEL"),
    (
        f"{JOB} --sagemaker_distributed_type=MODEL_PARALLEL train.py",
        "it must be one of NO, DATA_PARALLEL, got",
    ),
    (f"{JOB} --additional_args=7 train.py", "--additional_args takes NAME=VALUE, got '7'"),
    (f"{JOB} train.py data", "as --name value; 'data' isn't so. Write"),
    (f"{JOB} train.py --fast --lr 1", "a value behind each name"),
    (f"{JOB} train.py --lr 1 --lr=2", "each argument of a script once, as --name value; '--lr'"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_a_job_cannot_have_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(line)
    for text in ("name\tplace\n", "name\tplace\ntrain\n", ""):  # a table needs two columns and a line
        with pytest.raises(ConfigurationError, match="--sagemaker_inputs_file"):
            plan_of(f"{JOB} train.py", inputs=text)


# As Accelerate 1.15 writes it, but for what has no effect.
FILE = """
{additional_args: {max_run: 100, tags: [{Key: a, Value: b}]}, compute_environment: AMAZON_SAGEMAKER,
distributed_type: DATA_PARALLEL, ec2_instance_type: ml.p3.16xlarge, image_uri: null, mixed_precision: fp16,
iam_role_name: accelerate_sagemaker_execution_role, num_machines: 2, profile: default, py_version: py38,
pytorch_version: 1.10.2, sagemaker_inputs_file: in.tsv, transformers_version: 4.17.0, use_cpu: false}
"""


def test_a_file_of_accelerate_makes_the_job(command: Callable[..., tuple[int, str, str]]) -> None:
    Path("train.py").touch()
    Path("a.yaml").write_text(FILE)
    Path("in.tsv").write_text("name\tplace\ntrain\ts3://b/train\n")
    status, stdout, _ = command("launch --dry_run --config_file=a.yaml train.py --lr 1")
    plan = json.loads(stdout)
    estimator = plan["estimator"]
    assert (status, plan["inputs"]) == (0, {"train": "s3://b/train"})
    assert (estimator["max_run"], estimator["hyperparameters"]) == (100, {"lr": 1})
    assert (estimator["tags"], estimator["py_version"]) == ([{"Key": "a", "Value": "b"}], "py38")
    status, _, stderr = command("launch --config_file=a.yaml train.py --lr 1")
    assert (status, "accelfn launch doesn't start the job" in stderr) == (2, True)
