"""Where each value comes from: flag, then variable, then SLURM's step, then file, then default."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.launch.config.files import ConfigFile
from accelfn.launch.config.options import EXCLUSIVE, OPTIONS, read_value
from accelfn.launch.config.record import LaunchConfig, is_active, list_not_yet
from accelfn.launch.config.secrets import hide_in_text


@dataclass(frozen=True, slots=True)
class Given:
    """The text that a flag was given, and the flag as it was written.

    >>> Given("4", "--num-processes")
    Given(text='4', spelling='--num-processes')
    """

    text: str
    spelling: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value came from.

    Attributes:
        source: ``"flag"``, ``"environment"``, ``"launcher"`` (a SLURM step), ``"file"`` or ``"default"``.
        name: The flag, the variable, or the file with the line; empty for a default.
    """

    source: str
    name: str = ""

    def __str__(self) -> str:
        """Return it in a few words."""
        return f"{self.source} {self.name}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration, and where each of its values came from.

    Attributes:
        config: The configuration.
        origins: By the option's name, for every option.
    """

    config: LaunchConfig
    origins: Mapping[str, Origin]


_DEFAULT = Origin("default")
_PREFIX = "ACCELFN_"
# Variables of scripts and of the launcher itself that no option is about.
_OTHERS = (
    *("ALLOW_CP_STANDALONE", "BYPASS_DEVICE_MAP", "CONFIG", "CONFIG_DS_FIELDS", "DEBUG_MODE"),
    *("FP8_OVERRIDE_DGRAD", "FP8_OVERRIDE_FPROP", "FP8_OVERRIDE_WGRAD", "FP8_USE_MXFP8_BLOCK_SCALING"),
    *("GUARD", "INIT_INCLUDE_BUFFERS", "IN_TPU_POD", "LOG_LEVEL", "REDUCTION", "RUN_DIR"),
    *("SAGEMAKER_DISTRIBUTED_TYPE", "TORCH_DEVICE", "USE_CPU", "USE_SAGEMAKER"),
)


def resolve(
    flags: Mapping[str, Given],
    environment: Mapping[str, str],
    file: ConfigFile | None = None,
    step: Mapping[str, tuple[object, str]] | None = None,
    *,
    writes_sbatch: bool = False,
) -> Resolved:
    """Decide every option: flag before variable before SLURM's step before file before default. Pure.

    Of fields that exclude each other (``cpu``, ``multi_gpu`` and ``tpu``; the engines) a stronger source's
    choice puts out what weaker sources chose.

    Args:
        flags: Texts by the options' names, as ``parse_flags`` gives them.
        environment: Variables; those that are empty don't count.
        file: From ``read_config``.
        step: Values by the options' names with the variable that says so, as ``read_step`` gives them.
        writes_sbatch: Whether ``--sbatch`` is given, which reads the options of SLURM.

    Raises:
        ConfigurationError: A value is not understood, or values contradict each other. It says where each
            of them came from. Or a flag has no effect, because its section is switched off.

    >>> found = resolve({"num_processes": Given("4", "--num_processes")}, {"ACCELFN_NUM_PROCESSES": "2"})
    >>> found.config.num_processes, str(found.origins["num_processes"])
    (4, 'flag --num_processes')
    """
    ladder = (
        _from_flags(flags),
        _from_environment(environment),
        {name: (value, Origin("launcher", variable)) for name, (value, variable) in (step or {}).items()},
        _from_file(file),
    )
    values: dict[str, object] = {}
    origins: dict[str, Origin] = dict.fromkeys(OPTIONS, _DEFAULT)
    for layer in ladder:
        put_out = {
            name for group in EXCLUSIVE if any(values.get(name) is True for name in group) for name in group
        }
        for name, (value, origin) in layer.items():
            if name not in values and not (name in put_out and value is True):
                values[name], origins[name] = value, origin
    try:
        config = LaunchConfig(**values)
    except ConfigurationError as error:
        others = [
            f"{name} is from {origin}"
            for name, origin in origins.items()
            if f"--{name} " in f"{error} " and origin.source not in ("flag", "default")
        ]
        raise ConfigurationError(f"{error} ({'; '.join(others)})" if others else str(error)) from None
    _refuse_unread(config, origins, writes_sbatch)
    return Resolved(config=config, origins=MappingProxyType(origins))


_Layer = dict[str, tuple[object, Origin]]


def _from_flags(flags: Mapping[str, Given]) -> _Layer:
    found: _Layer = {}
    for name, given in flags.items():
        try:
            value = read_value(OPTIONS[name], given.text)
        except ValueError as error:
            raise ConfigurationError(f"argument {given.spelling}: {error}") from None
        found[name] = (value, Origin("flag", given.spelling))
    return found


def _from_environment(environment: Mapping[str, str]) -> _Layer:
    _refuse_misspelt(environment)
    found: _Layer = {}
    for option in OPTIONS.values():
        name = next((name for name in option.variables if environment.get(name, "").strip()), None)
        if name is None:
            continue
        try:
            value = read_value(option, environment[name])
        except ValueError as error:
            raise ConfigurationError(f"the variable {name}: {error}") from None
        found[option.name] = (value, Origin("environment", name))
    return found


def _refuse_misspelt(environment: Mapping[str, str]) -> None:
    """Refuse a variable that is nearly one of ours; any other name may be the user's own."""
    known = {name for option in OPTIONS.values() for name in (*option.variables, *option.exports)}
    known |= {f"{_PREFIX}{name}" for name in _OTHERS}
    shorter = {name.removeprefix(_PREFIX): name for name in sorted(known) if name.startswith(_PREFIX)}
    if environment.get(f"{_PREFIX}CONFIG_FILE", "").strip():
        raise ConfigurationError(
            f"the variable {_PREFIX}CONFIG_FILE is not known. Did you mean {_PREFIX}CONFIG? Correct or unset "
            "it."
        )
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in known or not environment[name].strip():
            continue
        close = difflib.get_close_matches(name.removeprefix(_PREFIX), shorter, n=1, cutoff=0.85)
        if close:
            raise ConfigurationError(
                f"the variable {name} is not known. Did you mean {shorter[close[0]]}? Correct or unset it."
            )


def _from_file(file: ConfigFile | None) -> _Layer:
    found: _Layer = {}
    if file is None:
        return found
    for name, value in file.values.items():
        line = file.lines.get(name)
        found[name] = (value, Origin("file", f"{file.path}, {line}" if line else file.path))
    return found


def _refuse_unread(config: LaunchConfig, origins: Mapping[str, Origin], writes_sbatch: bool) -> None:
    """Refuse a flag whose section is switched off: who typed it meant something by it."""
    for name, option in OPTIONS.items():
        if origins[name].source == "flag" and not is_active(config, option, writes_sbatch=writes_sbatch):
            raise ConfigurationError(
                f"{origins[name].name} has no effect without {option.section.needs}. Give both or neither."
            )


def refuse_not_yet(resolved: Resolved) -> None:
    """Refuse engines that accelfn doesn't have yet. Pure.

    Raises:
        NotAvailableError: The configuration asks for one.

    >>> refuse_not_yet(resolve({"use_deepspeed": Given("true", "--use_deepspeed")}, {}))
    Traceback (most recent call last):
        ...
    accelfn.errors.NotAvailableError: --use_deepspeed can't be launched: accelfn doesn't support DeepSpeed \
yet. Leave it out.
    """
    for option, what in list_not_yet(resolved.config):
        origin, value = resolved.origins[option.name], getattr(resolved.config, option.name)
        asked = f"--{option.name}" if value is True else f"--{option.name} {option.kind.write(value)}"
        where = "" if origin.source == "flag" else f" (from {origin})"
        raise NotAvailableError(
            f"{asked}{where} can't be launched: accelfn doesn't support {what} yet. Leave it out."
        )


def origin_rows(resolved: Resolved, *, everything: bool = True) -> list[tuple[str, str, str]]:
    """List each option's keys in a file, its value as text, and where that came from. Secrets are hidden.

    Args:
        resolved: From :func:`resolve`.
        everything: Defaults too.

    >>> found = resolve({"cpu": Given("true", "--cpu")}, {})
    >>> origin_rows(found, everything=False)
    [('cpu', 'true', 'flag --cpu')]
    """
    rows: list[tuple[str, str, str]] = []
    for name, option in OPTIONS.items():
        origin, value = resolved.origins[name], getattr(resolved.config, name)
        if origin.source == "default" and not everything:
            continue
        text = "-" if value is None else hide_in_text(option.kind.write(value)).replace("\n", "; ")
        rows.append((option.path, text, str(origin)))
    return rows
