"""Configuration files: where they are looked for, and what is told of a wrong one."""

import re
from pathlib import Path

import pytest

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.config_file import default_path, find_config_file, parse_config, read_config


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({}, "linux", "/home/ann/.config/accelfn/config.yaml"),
        ({"XDG_CONFIG_HOME": "/etc/xdg"}, "linux", "/etc/xdg/accelfn/config.yaml"),
        ({"XDG_CONFIG_HOME": "relative"}, "linux", "/home/ann/.config/accelfn/config.yaml"),
        ({"XDG_CONFIG_HOME": "/x"}, "darwin", "/home/ann/Library/Application Support/accelfn/config.yaml"),
        ({"APPDATA": r"C:\Roaming"}, "win32", r"C:\Roaming\accelfn\config.yaml"),
    ],
)
def test_the_usual_place(environment: dict[str, str], platform: str, expected: str) -> None:
    assert str(default_path(environment, platform, "/home/ann")) == expected


def test_the_flag_wins_over_the_variable_and_both_are_asked_for() -> None:
    environment = {"ACCELFN_CONFIG": "b.yaml"}
    assert find_config_file("a.yaml", environment, "linux", "/h") == ("a.yaml", True)
    assert find_config_file(None, environment, "linux", "/h") == ("b.yaml", True)
    assert find_config_file(None, {"ACCELFN_CONFIG": " "}, "linux", "/h")[1] is False


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("num_proceses: 2", "a.yaml", "line 1: unknown key 'num_proceses'. Did you mean num_pro"),
        ("fsdp:\n  versoin: 2", "a.yaml", "line 2: unknown key 'fsdp.versoin'. Did you mean ver"),
        ("fsdp_version: 2", "a.yaml", "Did you mean version in the section fsdp?"),
        ("config_version: 1\nfsdp_config: {a: 1}", "a.yaml", "whose files have no config_version. Remove"),
        ("zzzz: 1", "a.yaml", "unknown key 'zzzz'."),
        ("cpu: maybe", "a.yaml", "line 1: cpu: it must be true or false"),
        ("cpu: [yes, no]", "a.yaml", "cpu: it must be true or false"),
        ("cpu: {a: 1}", "a.yaml", "1, 0), got a section"),
        ("fsdp: 2", "a.yaml", "fsdp must be a section"),
        ("a: b: c", "a.yaml", "a.yaml, line 1, column 5: not valid YAML"),
        ("cpu: 1\ncpu: 0", "a.yaml", "line 2: repeated key 'cpu'"),
        ("- 1", "a.yaml", "must be a mapping of keys to values"),
        ("config_version: 2", "a.yaml", "config_version must be 1 in this accelfn, got '2'. Update"),
        ("config_version: x", "a.yaml", "config_version must be 1"),
        ('{"cpu": 1,}', "a.json", "a.json is not valid JSON"),
        ("use_cpu: true", "a.yaml", "unknown key 'use_cpu'. Did you mean cpu?"),
        ("a: &a [*a]", "a.yaml", "a.yaml, line 1: aliases (*name) aren't supported"),
        ("[" * 9999 + "]" * 9999, "a.yaml", "nested too deeply"),
        ('{"a":' * 20000, "a.json", "nested too deeply"),
        (f'{{"num_processes": {"1" * 5000}}}', "a.json", "is not valid JSON"),
        ("main_process_ip: bad host", "a.yaml", "a host name or address, got 'bad host'"),
        ("rdzv_endpoint: a b:1", "a.yaml", "it must be HOST:PORT"),
    ],
)  # fmt: skip
def test_wrong_files(text: str, path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse_config(text, path)


def test_words_that_yaml_reads_as_booleans_are_what_they_are() -> None:
    text = "mixed_precision: no\ndebug: no\ndynamo:\n  backend: NO\nnum_processes: null\nvm: ~\n"
    values = parse_config(text.replace("vm: ~\n", "main_process_ip: ~\n"), "a.yaml").values
    assert dict(values) == {"mixed_precision": "no", "debug": False, "dynamo_backend": "no"}


def test_lists_may_be_lists() -> None:
    text = (
        "fsdp:\n  transformer_layer_cls_to_wrap: [A, B]\ntpu_options:\n  commands:\n    - echo 1\n    - ls\n"
    )
    values = parse_config(text, "a.yaml").values
    assert values["fsdp_transformer_layer_cls_to_wrap"] == ("A", "B")
    assert values["commands"] == ("echo 1", "ls")
    assert parse_config("", "a.yaml").values == {}


def test_a_file_that_is_not_there_and_a_file_in_latin_1(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config file .*create one with accelfn config"):
        read_config(str(tmp_path / "absent.yaml"))
    (tmp_path / "a.yaml").write_bytes(b"role: \xe9")
    with pytest.raises(ConfigurationError, match="can't read the config file"):
        read_config(str(tmp_path / "a.yaml"))


def test_yaml_without_pyyaml_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelfn\[cli\]'"):
        parse_config("cpu: true", "a.yaml")
    assert parse_config('{"cpu": true}', "a.json").values == {"cpu": True}
