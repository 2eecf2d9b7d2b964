"""The table of all fields: what flags, variables, file keys, questions and the reference are made from."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accelfn.launch.config.kinds import Kind, Option
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.config.secrets import hide_in_text


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the configuration that is a record of its own.

    Attributes:
        name: Field of :class:`LaunchConfig`, and key in a file.
        prefix: What stands in front of its fields in flags.
        title: Heading in the help.
        switch: Field that makes the section active; ``"sbatch"`` for the flag of that name; empty if the
            section always is.
        on: The switch's value that does; None for any but ``no``.
        exports: Prefix of its options' names in the variables of Accelerate; empty if there are none.
    """

    name: str
    prefix: str
    title: str
    switch: str = ""
    on: object = True
    exports: str = ""

    @property
    def needs(self) -> str:
        """What a user types to make it active."""
        if self.on is True:
            return f"--{self.switch}"
        return f"--{self.switch} {'NAME' if self.on is None else self.on}"


#: Keys of Accelerate, of any version, that are called otherwise here.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "use_cpu": "cpu",
        "tpu_use_cluster": "tpu_cluster",
        "tpu_env": "env",
        "tpu_vm": "vm",
        "fp8_amax_history_length": "fp8_amax_history_len",
        "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
        "fp8_optimization_level": "fp8_opt_level",
        "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
        "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
        "profile": "sagemaker_profile",
        "region": "sagemaker_region",
        "ec2_instance_type": "sagemaker_ec2_instance_type",
        "iam_role_name": "sagemaker_iam_role_name",
        "image_uri": "sagemaker_image_uri",
        "base_job_name": "sagemaker_base_job_name",
        "pytorch_version": "sagemaker_pytorch_version",
        "transformers_version": "sagemaker_transformers_version",
        "py_version": "sagemaker_py_version",
    }
)

#: What the table has for engines to come: the field, the value that asks for one (None: any but the default),
#: and its name. A launch refuses it, and the questionnaire does not ask.
NOT_YET: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "use_deepspeed": (True, "DeepSpeed"),
        "use_megatron_lm": (True, "Megatron-LM"),
        "mixed_precision": ("fp8", "fp8"),
    }
)
_ENGINES_TO_COME = frozenset((name, on) for name, (on, _) in NOT_YET.items())
# Where the variable of scripts isn't called as Accelerate's.
_OWN_NAMES: Mapping[str, str] = MappingProxyType({"debug": "ACCELFN_DEBUG"})
_LATER = " (not supported yet)"

#: Sections in the order of the help.
SECTIONS: tuple[Section, ...] = (
    Section("fsdp", "fsdp_", "FSDP", "use_fsdp", True, "FSDP_"),
    Section("deepspeed", "deepspeed_", "DeepSpeed", "use_deepspeed", True, "ACCELERATE_DEEPSPEED_"),
    Section("megatron_lm", "megatron_lm_", "Megatron-LM", "use_megatron_lm", True, "MEGATRON_LM_"),
    Section(
        "parallelism",
        "parallelism_config_",
        "Parallelism",
        "use_parallelism_config",
        True,
        "PARALLELISM_CONFIG_",
    ),
    Section("dynamo", "dynamo_", "torch.compile", "dynamo_backend", None, "ACCELERATE_DYNAMO_"),
    Section("fp8", "fp8_", "FP8", "mixed_precision", "fp8", "ACCELERATE_FP8_"),
    Section("mpirun", "mpirun_", "MPI", "", True, ""),
    Section("tpu_options", "tpu_", "TPU", "tpu", True, ""),
    Section("slurm", "slurm_", "SLURM", "sbatch", "FILE", ""),
    Section("sagemaker", "sagemaker_", "Amazon SageMaker", "compute_environment", "AMAZON_SAGEMAKER", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of the configuration, under all its names.

    Attributes:
        name: Its unique name: the flag's without dashes, such as ``fsdp_version``.
        section: Name of its section, or "" at the top.
        key: Name in the record and in a file, such as ``version``.
        kind: How its value is written.
        default: Value where no source gives one.
        about: Help in a few words.
        group: Heading in the help.
        flags: Spellings that set it, the long one first.
        no_flag: Spelling that sets it to false; empty if it isn't a yes or no.
        variables: Variables that give it to the launcher, in the order in which they are looked for.
        exports: Variables that the started processes read it from.
        secret: Whether its value is never printed.
    """

    name: str
    section: str
    key: str
    kind: Kind
    default: object
    about: str
    group: str
    flags: tuple[str, ...]
    no_flag: str
    variables: tuple[str, ...]
    exports: tuple[str, ...]
    secret: bool

    @property
    def path(self) -> str:
        """The field's place in a file, such as ``fsdp.version``."""
        return f"{self.section}.{self.key}" if self.section else self.key


def _fields_of(record: type[Any], section: Section | None) -> Iterable[Field]:
    group = ""
    if section is not None:
        group = section.title + _LATER * ((section.switch, section.on) in _ENGINES_TO_COME)
    for one in dataclasses.fields(record):
        if "option" not in one.metadata:
            continue
        option: Option = one.metadata["option"]
        name = option.flag or (section.prefix if section else "") + one.name
        group = option.group or group
        is_later = NOT_YET.get(name, ("", ""))[0] in (True, None)
        theirs = option.exports
        if theirs is None:
            theirs = section.exports + one.name.upper() if section and section.exports else ""
        own, ours = (
            f"ACCELFN_{name.upper()}",
            _OWN_NAMES.get(name, f"ACCELFN_{theirs.removeprefix('ACCELERATE_')}"),
        )
        yield Field(
            name=name,
            section=section.name if section else "",
            key=one.name,
            kind=option.kind,
            default=one.default,
            about=option.about + _LATER if is_later else option.about,
            group=group,
            flags=(f"--{name}", *option.aliases),
            no_flag=f"--no_{name}" if option.kind.is_bool else "",
            variables=tuple(dict.fromkeys((own, ours) if theirs else (own,))),
            exports=(ours, theirs) if theirs else (),
            secret=option.secret,
        )


def _all_fields() -> tuple[Field, ...]:
    base = LaunchConfig()
    found = list(_fields_of(LaunchConfig, None))
    for section in SECTIONS:
        record: object = getattr(base, section.name)
        found += _fields_of(type(record), section)
    return tuple(found)


#: Every field, in the order of the help.
FIELDS: tuple[Field, ...] = _all_fields()
#: Every field by its name.
FIELD_OF: Mapping[str, Field] = MappingProxyType({field.name: field for field in FIELDS})


def read_value(field: Field, text: str) -> object:
    """Read a field's value from its text. ``none`` is no value, for a field that may have none.

    Args:
        field: Which field.
        text: From a flag, a variable or a file.

    Raises:
        ValueError: The text is not of the field's kind; the message says what is.

    >>> read_value(FIELD_OF["num_processes"], "4"), read_value(FIELD_OF["fsdp_offload_params"], "yes")
    (4, True)
    """
    if field.default is None and text.strip().lower() == "none" and "none" not in field.kind.choices:
        return None
    try:
        return field.kind.read(text)
    except ValueError:
        hint = ""
        if field.kind.choices:
            close = suggest(text, field.kind.choices)
            hint = f" Did you mean {close}?" if close else ""
        shown = hide_in_text(text)
        raise ValueError(f"it must be {field.kind.accepts}, got {shown!r}.{hint}") from None


def suggest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of ``words`` that ``word`` was probably meant to be, if there is any.

    >>> suggest("num_proceses", ["num_machines", "num_processes"])
    'num_processes'
    """
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)
    return found[0] if found else None


def value_of(config: LaunchConfig, field: Field) -> Any:
    """Look a field up in a configuration, whichever section it is in."""
    return getattr(getattr(config, field.section) if field.section else config, field.key)


def is_active(config: LaunchConfig, field: Field, *, writes_sbatch: bool = False) -> bool:
    """Whether a field is read, or stands in a section that is switched off. Pure.

    Args:
        config: The whole configuration.
        field: Which field.
        writes_sbatch: Whether ``--sbatch`` is given, which reads the options of SLURM.

    >>> is_active(LaunchConfig(), FIELD_OF["zero_stage"])
    False
    >>> is_active(LaunchConfig(use_deepspeed=True), FIELD_OF["zero_stage"])
    True
    """
    section = section_of(field)
    if section is None or not section.switch or field.name == section.switch:
        return True
    if section.switch == "sbatch":
        return writes_sbatch
    value: object = value_of(config, FIELD_OF[section.switch])
    return value not in (None, "no") if section.on is None else value == section.on


def list_not_yet(config: LaunchConfig) -> tuple[tuple[Field, str], ...]:
    """List what a configuration asks for that accelfn doesn't have yet: the field, and its name. Pure.

    >>> list_not_yet(LaunchConfig(use_deepspeed=True))[0][1]
    'DeepSpeed'
    """
    found: list[tuple[Field, str]] = []
    for name, (on, what) in NOT_YET.items():
        field = FIELD_OF[name]
        value = value_of(config, field)
        if is_active(config, field) and (value != field.default if on is None else value == on):
            found.append((field, what))
    return tuple(found)


def section_of(field: Field) -> Section | None:
    """Find the section under whose heading a field stands, if it is one that can be switched off."""
    return next((one for one in SECTIONS if field.section == one.name or field.group == one.title), None)


def build_config(values: Mapping[str, object]) -> LaunchConfig:
    """Build a configuration from values by the fields' names; the others have their defaults.

    Raises:
        ConfigurationError: The values contradict each other.

    >>> build_config({"num_processes": 2, "fsdp_version": 2}).fsdp.version
    2
    """
    top: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        field = FIELD_OF[name]
        (parts.setdefault(field.section, {}) if field.section else top)[field.key] = value
    base = LaunchConfig()
    sections = {name: dataclasses.replace(getattr(base, name), **part) for name, part in parts.items()}
    return LaunchConfig(**top, **sections)
