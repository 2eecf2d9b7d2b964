"""``accelfn to-fsdp2``: which keys go, which stay, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelfn.launch.to_fsdp2 import rewrite_for_fsdp2

Command = Callable[..., tuple[int, str, str]]
OLD: dict[str, Any] = yaml.safe_load("""
{distributed_type: FSDP, num_processes: 8, fsdp_config: {fsdp_version: 1, fsdp_sharding_strategy:
SHARD_GRAD_OP, fsdp_backward_prefetch: BACKWARD_PRE, fsdp_forward_prefetch: false, fsdp_use_orig_params: true,
fsdp_sync_module_states: true, fsdp_offload_params: false, fsdp_state_dict_type: SHARDED_STATE_DICT}}
""")
NEW: dict[str, Any] = yaml.safe_load("""
{distributed_type: FSDP, num_processes: 8, fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false,
fsdp_offload_params: false, fsdp_state_dict_type: SHARDED_STATE_DICT}}
""")


def test_a_file_of_accelerate_is_rewritten() -> None:
    made = rewrite_for_fsdp2(OLD)
    assert made.tree == NEW
    assert "fsdp_sharding_strategy: SHARD_GRAD_OP becomes fsdp_reshard_after_forward: false." in made.notes
    assert len(made.notes) == 6
    assert OLD["fsdp_config"]["fsdp_version"] == 1


STRATEGIES = (
    *(("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False)),
    *(("NO_SHARD", False), ("full_shard", True), ("4", True), (3, False)),
)


@pytest.mark.parametrize(("strategy", "reshards"), STRATEGIES)
def test_each_sharding_strategy(strategy: object, reshards: bool) -> None:
    for section, prefix in (("fsdp_config", "fsdp_"), ("fsdp", "")):
        made = rewrite_for_fsdp2({section: {f"{prefix}sharding_strategy": strategy}})
        assert made.tree == {section: {f"{prefix}version": 2, f"{prefix}reshard_after_forward": reshards}}
        assert ("FSDP2 always shards" in " ".join(made.notes)) == (strategy in ("NO_SHARD", 3))


def test_what_needs_no_change_stays() -> None:
    for tree in ({"num_processes": 1}, {"fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": 1}}):
        assert rewrite_for_fsdp2(tree) == (tree, ())


def test_spellings_of_older_versions() -> None:
    older = {
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_transformer_cls_to_wrap": "Block",
        "fsdp_limit_all_gathers": True,
    }
    made = rewrite_for_fsdp2({"fsdp_config": older})
    kept = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "Block"}
    assert made.tree == {"fsdp_config": kept}
    reported = " ".join(made.notes)
    assert "fsdp_backward_prefetch_policy is dropped: FSDP2 has no such option." in reported
    assert "fsdp_transformer_cls_to_wrap is renamed to fsdp_transformer_layer_cls_to_wrap." in reported
    both = {"transformer_cls_to_wrap": "A", "transformer_layer_cls_to_wrap": "B"}
    assert rewrite_for_fsdp2({"fsdp": both}).tree["fsdp"]["transformer_layer_cls_to_wrap"] == "B"


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_the_command_writes_the_new_file(suffix: str, command: Command) -> None:
    # JSON is YAML as well.
    old, new = Path(f"old.{suffix}"), Path(f"new.{suffix}")
    old.write_text(json.dumps(OLD))
    status, stdout, _ = command(f"to-fsdp2 --config_file {old} --output-file {new}")
    assert (status, stdout.splitlines()[-1]) == (0, f"{new}: converted to FSDP2")
    assert (yaml.safe_load(new.read_text()), json.loads(old.read_text())) == (NEW, OLD)
    for said in (f"{old}: converted to FSDP2", f"{old}: nothing to change"):
        assert command(f"to-fsdp2 --config_file {old} --overwrite")[1].splitlines()[-1] == said
        assert yaml.safe_load(old.read_text()) == NEW
    assert sorted(Path().iterdir()) == [new, old]


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("{}", ("--overwrite",), "is empty"),
        ("fsdp: {version: 1}", (), "pass --output_file"),
        ("fsdp: {version: 1}", ("--output_file", "config.yaml"), "config.yaml exists"),
        ("fsdp: {sharding_strategy: HALF}", ("--overwrite",), "HYBRID_SHARD_ZERO2, got 'HALF'"),
        ("fsdp: on and on", ("--overwrite",), "fsdp must be a section"),
        (None, ("--overwrite",), "no config file"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    command: Command, text: str | None, flags: tuple[str, ...], message: str
) -> None:
    if text is not None:
        Path("config.yaml").write_text(text)
    status, _, stderr = command("to-fsdp2 --config_file config.yaml", *flags)
    assert (status, message in stderr.splitlines()[-1]) == (2, True), stderr
