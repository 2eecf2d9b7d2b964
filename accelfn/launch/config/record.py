"""The configuration of a launch: one frozen record, from which flags, variables and file keys derive."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from accelfn.errors import ConfigurationError
from accelfn.launch.config.kinds import (
    COUNT,
    DEVICES,
    ENDPOINT,
    HOST,
    PORT,
    SWITCH,
    TEXT,
    Option,
    choice,
    integer,
    real,
    row,
)
from accelfn.launch.config.sections import (
    DeepSpeedSection,
    DynamoSection,
    Fp8Section,
    FsdpSection,
    MegatronSection,
    MpirunSection,
    ParallelismSection,
    SageMakerSection,
    SlurmSection,
    TpuSection,
)

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

    module: bool = row(
        SWITCH, False, "the script is a module, as in python -m", aliases=("-m",), group="General"
    )
    no_python: bool = row(SWITCH, False, "the script is a program of its own")
    debug: bool = row(
        SWITCH,
        False,
        "compare calls in full before each operation across ranks",
        exports="ACCELERATE_DEBUG_MODE",
    )
    quiet: bool = row(SWITCH, False, "no line at the start, no report after a failure", aliases=("-q",))
    compute_environment: str = row(
        choice("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), "LOCAL_MACHINE", "where the script runs"
    )
    cpu: bool = row(
        SWITCH,
        False,
        "use the CPU even where there is an accelerator",
        exports="ACCELERATE_USE_CPU",
        group="Hardware",
    )
    multi_gpu: bool = row(SWITCH, False, "use several accelerators")
    tpu: bool = row(SWITCH, False, "use TPUs, through torch_xla")
    mixed_precision: str | None = row(
        choice("no", "fp16", "bf16", "fp8"),
        None,
        "precision of contexts that are not given one",
        exports="ACCELERATE_MIXED_PRECISION",
        group="Resources",
    )
    gradient_accumulation_steps: int | None = row(
        COUNT,
        None,
        "accumulation of contexts that are not given one",
        exports="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )
    num_processes: int | None = row(
        COUNT,
        None,
        "processes on all machines together (one for each accelerator; 1 on a CPU)",
        aliases=("-n",),
    )
    num_machines: int = row(COUNT, 1, "machines that take part")
    num_cpu_threads_per_process: int | None = row(
        COUNT, None, "OMP_NUM_THREADS (cores / processes if the variable is not set)"
    )
    enable_cpu_affinity: bool = row(SWITCH, False, "bind each process to cores near its accelerator")
    use_deepspeed: bool = row(
        SWITCH, False, "train with DeepSpeed", exports="ACCELERATE_USE_DEEPSPEED", group="Paradigm"
    )
    use_fsdp: bool = row(SWITCH, False, "train with FSDP", exports="ACCELERATE_USE_FSDP")
    use_megatron_lm: bool = row(SWITCH, False, "train with Megatron-LM", exports="ACCELERATE_USE_MEGATRON_LM")
    use_parallelism_config: bool = row(
        SWITCH, False, "lay the processes out as a mesh", exports="ACCELERATE_USE_PARALLELISM_CONFIG"
    )
    gpu_ids: str = row(DEVICES, "all", "accelerators of this machine to use", group="Machines")
    machine_rank: int | None = row(integer(0), None, "index of this machine, from 0")
    main_process_ip: str | None = row(HOST, None, "address of machine 0")
    main_process_port: int | None = row(PORT, None, "port on machine 0 (29500; on one machine any free port)")
    same_network: bool = row(SWITCH, True, "the machines are in one network; the plan is the same either way")
    rdzv_backend: str | None = row(
        choice("static", "c10d"),
        None,
        "how machines meet: by machine_rank (static), or ranks are given out (c10d)",
    )
    rdzv_endpoint: str | None = row(
        ENDPOINT, None, "HOST:PORT to meet at, for main_process_ip and main_process_port"
    )
    rdzv_id: str | None = row(TEXT, None, "rendezvous ID, the same on every machine")
    rdzv_conf: str | None = row(TEXT, None, "further options of the rendezvous, as key=value,...")
    preflight: bool = row(
        SWITCH, True, "compare the machines before anything starts, and tell them of failures"
    )
    preflight_timeout: float = row(real(0, above=True), 60.0, "seconds to wait for the other machines there")
    max_restarts: int = row(
        integer(0), 0, "start all processes again so many times after one failed", group="Elastic"
    )
    monitor_interval: float = row(real(0, above=True), 0.1, "seconds between looks at the processes")
    shutdown_timeout: int | None = row(
        COUNT, None, "seconds that processes have to end after a signal, before they are killed (30)"
    )
    role: str = row(TEXT, "default", "name of the processes in messages")
    log_dir: str | None = row(TEXT, None, "folder where the output of each process is kept")
    tee: str = row(
        TEXT, "0", "streams to show and keep: 3 is both, 0:1,1:2 differs by process", aliases=("-t",)
    )
    redirects: str = row(TEXT, "0", "streams to keep and not to show, as with tee", aliases=("-r",))
    main_training_function: str = row(
        TEXT, "main", "function of the script that each process of a TPU runs", group="TPU"
    )
    downcast_bf16: bool = row(
        SWITCH, False, "with bf16 on a TPU, double means fp32", exports="ACCELERATE_DOWNCAST_BF16"
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
