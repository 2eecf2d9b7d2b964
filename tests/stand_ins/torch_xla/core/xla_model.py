from .. import calls

_seed = [0]


def get_rng_state(device: object = None) -> int:
    return _seed[0]


def set_rng_state(seed: int, device: object = None) -> None:
    assert type(seed) is int
    _seed[0] = seed


def get_memory_info(device: object = None) -> dict[str, int]:
    assert str(device) == "xla:0"
    return {"bytes_used": 3, "bytes_limit": 10}


def wait_device_ops(devices: object = ()) -> None:
    calls.append(("wait_device_ops",))
