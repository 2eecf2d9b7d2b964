"""What started processes get as variables, and that a context reads it."""

import pytest

from accelfn.context.config import DeepSpeedPlugin, MegatronLMPlugin, read_settings
from accelfn.launch import LaunchPlan, Machine, Script, parse_flags, plan_launch, resolve
from accelfn.launch.config.files import parse_config

WORLD = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "RANK", "WORLD_SIZE"}


def plan_of(
    *argv: str, env: dict[str, str] | None = None, file: str = "", has_false_peers: bool = False
) -> LaunchPlan:
    parsed = parse_flags((*argv, "train.py"))
    config_file = parse_config(file, "a.yaml") if file else None
    resolved = resolve(parsed.flags, {}, config_file)
    machine = Machine(cores=8, has_false_peers=has_false_peers)
    return plan_launch(resolved, Script("train.py"), env or {}, machine)


def variables_of(*argv: str, env: dict[str, str] | None = None, file: str = "") -> dict[str, str]:
    changes = dict(plan_of(*argv, env=env, file=file).env_changes)
    return {name: value for name, value in changes.items() if name not in WORLD}


def twice(name: str, value: str) -> dict[str, str]:
    return {f"ACCELFN_{name}": value, f"ACCELERATE_{name}": value}


@pytest.mark.parametrize(
    ("flags", "env", "expected"),
    [
        pytest.param((), {}, {"OMP_NUM_THREADS": "8"}, id="one process takes all cores"),
        pytest.param(("--num_processes", "3"), {}, {"OMP_NUM_THREADS": "2"}, id="cores are shared"),
        pytest.param(("--num_processes", "20"), {}, {"OMP_NUM_THREADS": "1"}, id="never below one"),
        pytest.param((), {"OMP_NUM_THREADS": "5"}, {}, id="the user's variable stays"),
        pytest.param(
            ("--num_cpu_threads_per_process", "3"),
            {"OMP_NUM_THREADS": "5"},
            {"OMP_NUM_THREADS": "3"},
            id="a flag beats the variable",
        ),
        pytest.param(
            ("--mixed_precision", "bf16", "--gradient_accumulation_steps", "4", "--cpu", "--debug"),
            {"OMP_NUM_THREADS": "1"},
            {
                "ACCELFN_DEBUG": "true",
                "ACCELERATE_DEBUG_MODE": "true",
                **twice("GRADIENT_ACCUMULATION_STEPS", "4"),
                **twice("MIXED_PRECISION", "bf16"),
                **twice("USE_CPU", "true"),
            },
            id="defaults of contexts",
        ),
        pytest.param(
            ("--gpu_ids", "1,3"),
            {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"},
            {"CUDA_VISIBLE_DEVICES": "1,3"},
            id="a flag chooses accelerators",
        ),
        pytest.param(
            ("--dynamo_backend", "inductor", "--dynamo_use_fullgraph"),
            {"OMP_NUM_THREADS": "1"},
            {**twice("DYNAMO_BACKEND", "INDUCTOR"), **twice("DYNAMO_USE_FULLGRAPH", "true")},
            id="compiler",
        ),
        pytest.param(
            ("--mixed_precision=fp8", "--fp8_backend=te", "--fp8_override_linear_precision=false,true,false"),
            {"OMP_NUM_THREADS": "1"},
            {
                **twice("MIXED_PRECISION", "fp8"),
                **twice("FP8_BACKEND", "TE"),
                **twice("FP8_OVERRIDE_DGRAD", "true"),
            },
            id="fp8",
        ),
    ],
)
def test_only_what_was_given_changes_the_environment(
    flags: tuple[str, ...], env: dict[str, str], expected: dict[str, str]
) -> None:
    before = dict(env)
    assert variables_of(*flags, env=env) == expected
    assert env == before


def test_accelerators_that_the_shell_chose_win_over_a_file() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in variables_of(env={"CUDA_VISIBLE_DEVICES": "5"}, file="gpu_ids: 0,1")
    assert variables_of(file="gpu_ids: 0,1")["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_false_peer_access_is_disabled() -> None:
    def reported(*argv: str, env: dict[str, str] | None = None) -> dict[str, str]:
        changes = dict(plan_of(*argv, env=env, has_false_peers=True).env_changes)
        return {name: value for name, value in changes.items() if name.startswith("NCCL")}

    assert reported("--num_processes=2") == {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    assert reported("--num_processes=2", env={"NCCL_P2P_DISABLE": "0"}) == {"NCCL_IB_DISABLE": "1"}
    assert reported("--num_processes=2", "--cpu") == {}


def test_a_context_reads_exported_options_of_fsdp_and_the_mesh() -> None:
    mesh = ("--use_parallelism_config", "--parallelism_config_dp_shard_size=2")
    settings = read_settings(
        variables_of(
            *("--num_processes=2", "--use_fsdp", "--fsdp_version=2", "--fsdp_offload_params", *mesh),
            *("--fsdp_auto_wrap_policy=transformer_based_wrap", "--fsdp_transformer_layer_cls_to_wrap=Block"),
        )
    )
    assert settings.fsdp_plugin is not None
    assert settings.fsdp_plugin.fsdp_version == 2
    assert settings.fsdp_plugin.offloads_params
    assert settings.fsdp_plugin.transformer_cls_names_to_wrap == ("Block",)
    assert settings.parallelism_config is not None
    assert settings.parallelism_config.dp_shard_size == 2


def test_a_context_reads_exported_options_of_deepspeed() -> None:
    flags = ("--offload_optimizer_device=cpu", "--zero3_init_flag=no", "--deepspeed_moe_layer_cls_names=A,B")
    variables = variables_of("--use_deepspeed", "--zero_stage=3", "--gradient_clipping=0.5", *flags)
    assert read_settings(variables).deepspeed_plugin == DeepSpeedPlugin(
        zero_stage=3,
        offload_optimizer_device="cpu",
        zero3_init_flag=False,
        transformer_moe_cls_names=("A", "B"),
        gradient_clipping=0.5,
    )
    disk = variables_of(
        "--use_deepspeed", "--offload_optimizer_device=nvme", "--offload_optimizer_nvme_path=/n"
    )
    plugin = read_settings(disk).deepspeed_plugin
    assert plugin is not None
    assert plugin.offload_optimizer_nvme_path == "/n"


def test_a_context_reads_exported_options_of_other_engines() -> None:
    assert read_settings(
        variables_of("--use_megatron_lm", "--megatron_lm_tp_degree=2")
    ).megatron_lm_plugin == MegatronLMPlugin(tp_degree=2)


def test_an_inactive_section_is_not_exported() -> None:
    output = variables_of(file="fsdp: {version: 2}\ndeepspeed: {zero_stage: 2}", env={"OMP_NUM_THREADS": "1"})
    assert output == {}
