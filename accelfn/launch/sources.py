"""Choose the value of each option: flag, then variable, then SLURM step, then config file, then default."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accelfn.devices import DEVICE_TYPES
from accelfn.errors import ConfigurationError
from accelfn.launch.config import LaunchConfig, is_active
from accelfn.launch.config_file import ConfigFile
from accelfn.launch.kinds import TEXT, TEXTS
from accelfn.launch.options import EXCLUSIVE, OPTIONS, Option, read_entry


@dataclass(frozen=True, slots=True)
class Given:
    """The text of a flag's value, and the flag as typed.

    >>> Given("4", "--num-processes")
    Given(text='4', spelling='--num-processes')
    """

    text: str
    spelling: str


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a value.

    Attributes:
        source: ``"flag"``, ``"environment"``, ``"launcher"`` (a SLURM step), ``"file"`` or ``"default"``.
        name: The flag, the variable, or the file and line; empty for a default.
    """

    source: str
    name: str = ""

    def __str__(self) -> str:
        """Return the source and its name."""
        return f"{self.source} {self.name}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration and the source of each value.

    Attributes:
        config: The configuration.
        origins: The sources by option name.
    """

    config: LaunchConfig
    origins: Mapping[str, Origin]


_DEFAULT = Origin("default")
_PREFIX = "ACCELFN_"
# Other variables with our prefix, of the launcher and of scripts.
_OTHER_VARIABLES = (
    *("ALLOW_CP_STANDALONE", "BYPASS_DEVICE_MAP", "COMPAT_CHILD", "CONFIG", "CONFIG_DS_FIELDS", "DEBUG_MODE"),
    *("ELASTIC_SIZE", "ELASTIC_SLOT", "ELASTIC_STORE"),
    *("FP8_OVERRIDE_DGRAD", "FP8_OVERRIDE_FPROP", "FP8_OVERRIDE_WGRAD", "FP8_USE_MXFP8_BLOCK_SCALING"),
    *("GUARD", "INIT_INCLUDE_BUFFERS", "IN_TPU_POD", "LOG_LEVEL", "REDUCTION", "RUN_DIR"),
    *("TORCH_DEVICE", "USE_CPU", "USE_SAGEMAKER"),
)


def resolve(
    flags: Mapping[str, Given],
    environment: Mapping[str, str],
    file: ConfigFile | None = None,
    step: Mapping[str, tuple[object, str]] | None = None,
) -> Resolved:
    """Resolve all options. Precedence: flag, variable, SLURM step, config file, default. Pure.

    Of mutually exclusive options (``cpu``, ``multi_gpu`` and ``tpu``; the engines), the source with the
    highest precedence wins.

    Args:
        flags: From ``parse_flags``.
        environment: Variables; empty ones are ignored.
        file: From ``read_config``.
        step: Values by option name, each with its variable, from ``read_step``.

    Raises:
        ConfigurationError: A value is invalid, values conflict, or a flag has no effect because its section
            is switched off. The message names the sources.

    >>> found = resolve({"num_processes": Given("4", "--num_processes")}, {"ACCELFN_NUM_PROCESSES": "2"})
    >>> found.config.num_processes, str(found.origins["num_processes"])
    (4, 'flag --num_processes')
    """
    _refuse_misspelled(environment)
    layers = (
        _read_layer(
            (OPTIONS[name], given.text, Origin("flag", given.spelling)) for name, given in flags.items()
        ),
        _read_layer(_from_environment(environment)),
        {name: (value, Origin("launcher", variable)) for name, (value, variable) in (step or {}).items()},
        _from_file(file),
    )
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(OPTIONS, _DEFAULT)
    for layer in layers:
        decided = {
            name for group in EXCLUSIVE if any(values.get(name) is True for name in group) for name in group
        }
        for name, (value, origin) in layer.items():
            if name not in values and not (name in decided and value is True):
                values[name], origins[name] = value, origin
    for name in _overruled(values, origins, environment):
        del values[name]
        origins[name] = _DEFAULT
    try:
        config = LaunchConfig(**values)
    except ConfigurationError as error:
        sources = [
            f"{name} is from {origin}"
            for name, origin in origins.items()
            if f"--{name} " in f"{error} " and origin.source not in ("flag", "default")
        ]
        raise ConfigurationError(f"{error} ({'; '.join(sources)})" if sources else str(error)) from None
    _refuse_inactive(config, origins)
    return Resolved(config=config, origins=MappingProxyType(origins))


def _overruled(
    values: Mapping[str, object], origins: Mapping[str, Origin], environment: Mapping[str, str]
) -> list[str]:
    """List the values of a config file that have no place beside a flag or a variable."""
    given = {name: value for name, value in values.items() if origins[name].source != "file"}
    is_one = given.get("num_processes") == 1 or "," not in str(given.get("gpu_ids", "all,"))
    overruled = {
        "multi_gpu": is_one and given.get("gpu_ids") != "all",
        "machine_rank": given.get("num_machines") == 1,
        "main_process_ip": "rdzv_endpoint" in given,
        "main_process_port": "rdzv_endpoint" in given,
        "enable_cpu_affinity": values.get("cpu") is True or values.get("tpu") is True,
        "gpu_ids": any(row.visible in environment for row in DEVICE_TYPES.values() if row.visible),
    }
    return [name for name, is_so in overruled.items() if is_so and origins[name].source == "file"]


_Layer = dict[str, tuple[object, Origin]]


def _read_layer(texts: Iterable[tuple[Option, str, Origin]]) -> _Layer:
    layer: _Layer = {}
    for option, text, origin in texts:
        try:
            name, value = read_entry(option, text)
        except ValueError as error:
            # The value of a variable is printed nowhere.
            message = f"the variable {origin.name} must be {option.kind.accepts}."
            is_typed = origin.source == "flag"
            raise ConfigurationError(f"argument {origin.name}: {error}" if is_typed else message) from None
        layer[name] = (value, origin)
    return layer


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[Option, str, Origin]]:
    for option in OPTIONS.values():
        name = next((name for name in option.variables if environment.get(name, "").strip()), None)
        if name is not None:
            yield option, environment[name], Origin("environment", name)


def _refuse_misspelled(environment: Mapping[str, str]) -> None:
    """Refuse a variable whose name is similar to one of ours."""
    known = {name for option in OPTIONS.values() for name in (*option.variables, *option.exports)}
    known |= {f"{_PREFIX}{name}" for name in _OTHER_VARIABLES}
    shorter = {name.removeprefix(_PREFIX): name for name in sorted(known) if name.startswith(_PREFIX)}
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in known or not environment[name].strip():
            continue
        close = difflib.get_close_matches(name.removeprefix(_PREFIX), shorter, n=1, cutoff=0.85)
        meant = shorter[close[0]] if close else f"{_PREFIX}CONFIG" if name == f"{_PREFIX}CONFIG_FILE" else ""
        if meant:
            raise ConfigurationError(f"unknown variable {name}. Did you mean {meant}? Correct or unset it.")


def _from_file(file: ConfigFile | None) -> _Layer:
    if file is None:
        return {}
    places = {name: ", ".join(filter(None, (file.path, file.lines.get(name)))) for name in file.values}
    return {name: (value, Origin("file", places[name])) for name, value in file.values.items()}


def _refuse_inactive(config: LaunchConfig, origins: Mapping[str, Origin]) -> None:
    """Refuse a flag that has no effect because its section is switched off."""
    for name, option in OPTIONS.items():
        if origins[name].source == "flag" and not is_active(config, option):
            raise ConfigurationError(
                f"{origins[name].name} has no effect without {option.section.needs}. Pass both or neither."
            )


def origin_rows(resolved: Resolved, *, everything: bool = True) -> list[tuple[str, str, str]]:
    """List the config key, value and source of each option.

    Args:
        resolved: From :func:`resolve`.
        everything: Include defaults.

    >>> found = resolve({"cpu": Given("true", "--cpu")}, {})
    >>> origin_rows(found, everything=False)
    [('cpu', 'true', 'flag --cpu')]
    """
    rows: list[tuple[str, str, str]] = []
    for name, option in OPTIONS.items():
        origin, value = resolved.origins[name], getattr(resolved.config, name)
        if origin.source == "default" and not everything:
            continue
        text = "-" if value is None else option.kind.write(value).replace("\n", "; ")
        if origin.source == "environment" and option.kind in (TEXT, TEXTS):
            text = "(not shown)"  # it may be a secret, which nobody typed here
        rows.append((option.path, text, str(origin)))
    return rows
