"""Run megatron-core on CPU ranks: its CUDA calls are redirected, in a process that is thrown away.

megatron-core creates its tensors on "cuda" by name. Tests call :func:`redirect_cuda` at the start of a rank
of ``run_ranks(on="processes")``, which is forked for one test and ends with it: nothing is restored.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Nothing:
    """A stream or an event that has nothing to wait for."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def _do_nothing(self, *args: Any) -> Any:
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _do_nothing


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return CPU if str(device).startswith("cuda") else device


class _Redirect(TorchFunctionMode):
    """Creates tensors on the CPU instead of "cuda", and says that they are there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], (torch.dtype, torch.Tensor)):
            args = (args[0], _on_cpu(args[1]), *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Its optimizers look for "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _returning(value: Any) -> Callable[..., Any]:
    """Return a function that returns ``value``; one for each use, since torch.compile tells them apart."""

    def give(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return value

    return give


def _first(value: Any, *args: Any) -> Any:
    del args
    return value


def _get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    del args, kwargs
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    torch.set_rng_state(state)


def redirect_cuda() -> None:
    """Redirect this process's calls to CUDA to the CPU, for the rest of its life."""
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "_lazy_init"):
        setattr(cuda, name, _returning(None))
    for name in ("memory_allocated", "max_memory_allocated"):
        setattr(cuda, name, _returning(0))
    cuda.current_device = _returning(CPU)
    cuda.current_stream = cuda.default_stream = cuda.Stream = cuda.Event = _Nothing
    cuda.stream = _returning(contextlib.nullcontext())
    cuda.get_rng_state, cuda.set_rng_state = _get_state, _set_state
    cuda.manual_seed = cast("Any", torch).manual_seed
    torch.compiler.set_stance("force_eager")  # it compiles its activations
    module: Any = torch.nn.Module
    module.cuda = _first
    _Redirect().__enter__()
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it notices that its random state is the CPU's
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state, random._set_cuda_rng_state = _get_state, _set_state
