"""The configuration of a launch: one frozen record, from which flags, variables and file keys derive."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from accelfn.errors import ConfigurationError
from accelfn.launch.config.engines import DeepSpeedSection, FsdpSection, MegatronSection
from accelfn.launch.config.kinds import (
    COUNT,
    DEVICES,
    ENDPOINT,
    HOST,
    PORT,
    SWITCH,
    TEXT,
    choice,
    integer,
    real,
)
from accelfn.launch.config.option import Option, accelerate_names, option
from accelfn.launch.config.sections import (
    DynamoSection,
    Fp8Section,
    MpirunSection,
    ParallelismSection,
    SageMakerSection,
    SlurmSection,
    TpuSection,
)

__all__ = ("EXCLUSIVE", "LaunchConfig")

#: Fields of which at most one may be true; one from a stronger source puts out those of weaker ones.
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("cpu", "multi_gpu", "tpu"),
    ("use_deepspeed", "use_fsdp", "use_megatron_lm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """All that ``accelfn launch`` can be told but the script. ``None`` means: not given.

    What each field means stands beside it; [the command line](../reference/cli.md) lists them. An impossible
    configuration cannot be built.

    Raises:
        ConfigurationError: The fields contradict each other.

    >>> LaunchConfig(num_processes=3, num_machines=2, main_process_ip="10.0.0.1", machine_rank=0)
    Traceback (most recent call last):
        ...
    accelfn.errors.ConfigurationError: --num_processes counts all machines, so --num_machines must divide \
it: got 3 processes on 2 machines. Use 2 or 4 processes.
    """

    module: bool = field(
        default=False,
        metadata=option(SWITCH, "the script is a module, as in python -m", group="General", aliases=("-m",)),
    )
    no_python: bool = field(
        default=False,
        metadata=option(SWITCH, "the script is a program of its own", group="General"),
    )
    debug: bool = field(
        default=False,
        metadata=option(
            SWITCH,
            "compare calls in full before each operation across ranks",
            group="General",
            exports=("ACCELFN_DEBUG", "ACCELERATE_DEBUG_MODE"),
        ),
    )
    quiet: bool = field(
        default=False,
        metadata=option(
            SWITCH, "no line at the start, no report after a failure", group="General", aliases=("-q",)
        ),
    )
    compute_environment: str = field(
        default="LOCAL_MACHINE",
        metadata=option(
            choice("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), "where the script runs", group="General"
        ),
    )
    cpu: bool = field(
        default=False,
        metadata=option(
            SWITCH,
            "use the CPU even where there is an accelerator",
            group="Hardware",
            exports=accelerate_names("USE_CPU"),
        ),
    )
    multi_gpu: bool = field(
        default=False,
        metadata=option(SWITCH, "use several accelerators", group="Hardware"),
    )
    tpu: bool = field(
        default=False,
        metadata=option(SWITCH, "use TPUs, through torch_xla", group="Hardware"),
    )
    mixed_precision: str | None = field(
        default=None,
        metadata=option(
            choice("no", "fp16", "bf16", "fp8"),
            "precision of contexts that are not given one",
            group="Resources",
            exports=accelerate_names("MIXED_PRECISION"),
        ),
    )
    gradient_accumulation_steps: int | None = field(
        default=None,
        metadata=option(
            COUNT,
            "accumulation of contexts that are not given one",
            group="Resources",
            exports=accelerate_names("GRADIENT_ACCUMULATION_STEPS"),
        ),
    )
    num_processes: int | None = field(
        default=None,
        metadata=option(
            COUNT,
            "processes on all machines together (one for each accelerator; 1 on a CPU)",
            group="Resources",
            aliases=("-n",),
        ),
    )
    num_machines: int = field(
        default=1,
        metadata=option(COUNT, "machines that take part", group="Resources"),
    )
    num_cpu_threads_per_process: int | None = field(
        default=None,
        metadata=option(
            COUNT, "OMP_NUM_THREADS (cores / processes if the variable is not set)", group="Resources"
        ),
    )
    enable_cpu_affinity: bool = field(
        default=False,
        metadata=option(SWITCH, "bind each process to cores near its accelerator", group="Resources"),
    )
    use_deepspeed: bool = field(
        default=False,
        metadata=option(
            SWITCH, "train with DeepSpeed", group="Paradigm", exports=accelerate_names("USE_DEEPSPEED")
        ),
    )
    use_fsdp: bool = field(
        default=False,
        metadata=option(SWITCH, "train with FSDP", group="Paradigm", exports=accelerate_names("USE_FSDP")),
    )
    use_megatron_lm: bool = field(
        default=False,
        metadata=option(
            SWITCH, "train with Megatron-LM", group="Paradigm", exports=accelerate_names("USE_MEGATRON_LM")
        ),
    )
    use_parallelism_config: bool = field(
        default=False,
        metadata=option(
            SWITCH,
            "lay the processes out as a mesh",
            group="Paradigm",
            exports=accelerate_names("USE_PARALLELISM_CONFIG"),
        ),
    )
    gpu_ids: str = field(
        default="all",
        metadata=option(DEVICES, "accelerators of this machine to use", group="Machines"),
    )
    machine_rank: int | None = field(
        default=None,
        metadata=option(integer(0), "index of this machine, from 0", group="Machines"),
    )
    main_process_ip: str | None = field(
        default=None,
        metadata=option(HOST, "address of machine 0", group="Machines"),
    )
    main_process_port: int | None = field(
        default=None,
        metadata=option(PORT, "port on machine 0 (29500; on one machine any free port)", group="Machines"),
    )
    same_network: bool = field(
        default=True,
        metadata=option(
            SWITCH, "the machines are in one network; the plan is the same either way", group="Machines"
        ),
    )
    rdzv_backend: str | None = field(
        default=None,
        metadata=option(
            choice("static", "c10d"),
            "how machines meet: by machine_rank (static), or ranks are given out (c10d)",
            group="Machines",
        ),
    )
    rdzv_endpoint: str | None = field(
        default=None,
        metadata=option(
            ENDPOINT, "HOST:PORT to meet at, for main_process_ip and main_process_port", group="Machines"
        ),
    )
    rdzv_id: str | None = field(
        default=None,
        metadata=option(TEXT, "name of the meeting, the same on all machines", group="Machines"),
    )
    rdzv_conf: str | None = field(
        default=None,
        metadata=option(TEXT, "further options of the meeting, as key=value,...", group="Machines"),
    )
    preflight: bool = field(
        default=True,
        metadata=option(
            SWITCH, "compare the machines before anything starts, and tell them of failures", group="Machines"
        ),
    )
    preflight_timeout: float = field(
        default=60.0,
        metadata=option(
            real(0, above=True), "seconds to wait for the other machines there", group="Machines"
        ),
    )
    max_restarts: int = field(
        default=0,
        metadata=option(
            integer(0), "start all processes again so many times after one failed", group="Elastic"
        ),
    )
    monitor_interval: float = field(
        default=0.1,
        metadata=option(real(0, above=True), "seconds between looks at the processes", group="Elastic"),
    )
    shutdown_timeout: int | None = field(
        default=None,
        metadata=option(
            COUNT,
            "seconds that processes have to end after a signal, before they are killed (30)",
            group="Elastic",
        ),
    )
    role: str = field(
        default="default",
        metadata=option(TEXT, "name of the processes in messages", group="Elastic"),
    )
    log_dir: str | None = field(
        default=None,
        metadata=option(TEXT, "folder where the output of each process is kept", group="Elastic"),
    )
    tee: str = field(
        default="0",
        metadata=option(
            TEXT,
            "streams to show and keep: 3 is both, 0:1,1:2 differs by process",
            group="Elastic",
            aliases=("-t",),
        ),
    )
    redirects: str = field(
        default="0",
        metadata=option(
            TEXT, "streams to keep and not to show, as with tee", group="Elastic", aliases=("-r",)
        ),
    )
    main_training_function: str = field(
        default="main",
        metadata=option(TEXT, "function of the script that each process of a TPU runs", group="TPU"),
    )
    downcast_bf16: bool = field(
        default=False,
        metadata=option(
            SWITCH,
            "with bf16 on a TPU, double means fp32",
            group="TPU",
            exports=accelerate_names("DOWNCAST_BF16"),
        ),
    )
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    deepspeed: DeepSpeedSection = field(default_factory=DeepSpeedSection)
    megatron_lm: MegatronSection = field(default_factory=MegatronSection)
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    dynamo: DynamoSection = field(default_factory=DynamoSection)
    fp8: Fp8Section = field(default_factory=Fp8Section)
    mpirun: MpirunSection = field(default_factory=MpirunSection)
    tpu_options: TpuSection = field(default_factory=TpuSection)
    slurm: SlurmSection = field(default_factory=SlurmSection)
    sagemaker: SageMakerSection = field(default_factory=SageMakerSection)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for part in (
            self,
            *(getattr(self, one.name) for one in fields(self) if "option" not in one.metadata),
        ):
            _check_kinds(part)
        for group in EXCLUSIVE:
            chosen = [name for name in group if getattr(self, name)]
            if len(chosen) > 1:
                raise ConfigurationError(
                    f"{' and '.join(f'--{name}' for name in chosen)} exclude each other. Give one of them."
                )
        if self.module and self.no_python:
            raise ConfigurationError(
                "--module runs a Python module and --no_python runs without Python. Give one of the two."
            )
        if self.no_python and self.tpu:
            raise ConfigurationError("--tpu starts a function of a Python script. Leave --no_python out.")
        fsdp = self.fsdp
        if (
            self.use_fsdp
            and fsdp.version == 1
            and fsdp.cpu_ram_efficient_loading
            and not fsdp.sync_module_states
        ):
            raise ConfigurationError(
                "--fsdp_cpu_ram_efficient_loading needs --fsdp_sync_module_states: otherwise all processes "
                "but one train without the weights. Switch the first off or the second on."
            )
        if (
            self.use_fsdp
            and fsdp.activation_checkpointing_offload
            and not (fsdp.version == 2 and fsdp.activation_checkpointing)
        ):
            raise ConfigurationError(
                "--fsdp_activation_checkpointing_offload needs --fsdp_version 2 and "
                "--fsdp_activation_checkpointing. Give both, or leave it out."
            )
        self._check_devices()
        self._check_machines()

    def _check_devices(self) -> None:
        ids = () if self.gpu_ids == "all" else tuple(self.gpu_ids.split(","))
        if len(set(ids)) < len(ids):
            raise ConfigurationError(f"--gpu_ids names an accelerator twice: got {self.gpu_ids}.")
        if self.multi_gpu:
            if self.num_processes == 1:
                raise ConfigurationError(
                    "--multi_gpu needs at least two processes: got --num_processes 1. Leave --multi_gpu out."
                )
            if len(ids) == 1 and self.num_machines == 1:
                raise ConfigurationError(
                    f"--multi_gpu with --gpu_ids {self.gpu_ids} has one accelerator. Name several, or leave "
                    "--multi_gpu out."
                )

    def _check_machines(self) -> None:
        if self.machine_rank is not None and self.machine_rank >= self.num_machines:
            raise ConfigurationError(
                f"--machine_rank must be 0 to {self.num_machines - 1} with "
                f"--num_machines {self.num_machines}, got {self.machine_rank}."
            )
        if self.num_processes is not None and self.num_processes % self.num_machines:
            fewer = self.num_processes // self.num_machines * self.num_machines
            choices = " or ".join(str(n) for n in (fewer, fewer + self.num_machines) if n)
            raise ConfigurationError(
                "--num_processes counts all machines, so --num_machines must divide it: "
                f"got {self.num_processes} processes on {self.num_machines} machines. "
                f"Use {choices} processes."
            )
        if self.rdzv_endpoint is not None and (
            self.main_process_ip is not None or self.main_process_port is not None
        ):
            raise ConfigurationError(
                "--rdzv_endpoint says the same as --main_process_ip with --main_process_port. "
                "Give one of the two."
            )
        if self.rdzv_backend == "static" and self.max_restarts:
            raise ConfigurationError(
                f"--max_restarts {self.max_restarts} needs --rdzv_backend c10d: a static meeting is held "
                "once, and processes can't come together again for another attempt."
            )
        if self.num_machines > 1 and self.compute_environment == "LOCAL_MACHINE" and not self.tpu:
            self._check_several_machines()

    def _check_several_machines(self) -> None:
        if self.mpirun.hostfile is not None:
            return  # mpirun starts the processes of every machine itself
        if self.main_process_ip is None and self.rdzv_endpoint is None:
            raise ConfigurationError(
                f"--num_machines {self.num_machines} needs --main_process_ip: the address of machine 0, "
                "the same on every machine."
            )
        if self.main_process_port == 0:
            raise ConfigurationError(
                "--main_process_port 0 means any free port, and the other machines could not know which. "
                "Give one number on every machine, or leave it out for 29500."
            )
        deepspeed_starts = self.use_deepspeed and self.deepspeed.multinode_launcher not in (
            "standard",
            "nossh",
        )
        if self.machine_rank is None and self.rdzv_backend != "c10d" and not deepspeed_starts:
            raise ConfigurationError(
                f"--num_machines {self.num_machines} needs --machine_rank (0 to {self.num_machines - 1}, "
                "different on every machine). To have ranks given out, use --rdzv_backend c10d."
            )


def _check_kinds(record: Any) -> None:
    """Refuse values that no text could have given."""
    for one in fields(record):
        value = getattr(record, one.name)
        if "option" not in one.metadata or (value is None and one.default is None):
            continue
        option: Option = one.metadata["option"]
        try:
            same = value is not None and option.kind.read(option.kind.write(value)) == value
        except ValueError:
            same = False
        if not same:
            raise ConfigurationError(
                f"{type(record).__name__}.{one.name} must be {option.kind.accepts}, got {value!r}."
            )
