from . import RANK, SIZE

# What a test sets: the type of device, devices of this process and of the host, SPMD mode, hosts.
state = {"type": "TPU", "devices": 1, "host_devices": 4, "spmd": False, "hosts": 1}


def device_type() -> str:
    return str(state["type"])


def world_size() -> int:
    return SIZE


def global_ordinal() -> int:
    return RANK


def addressable_device_count() -> int:
    return int(state["devices"])


def global_runtime_device_count() -> int:
    return int(state["host_devices"])


def process_count() -> int:
    return int(state["hosts"])


def is_spmd() -> bool:
    return bool(state["spmd"])


def use_spmd(auto: bool | None = False) -> None:
    state["spmd"] = True
