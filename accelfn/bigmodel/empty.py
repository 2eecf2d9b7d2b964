"""Build a model whose weights take no memory: they have names, shapes and dtypes, and no values yet.

Three modes of torch do it, and modes belong to one thread: nothing of torch is replaced, and another thread
that builds a model at the same time builds an ordinary one.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch

from accelfn.bigmodel.late import LateFills
from accelfn.bigmodel.places import check_device, read_place
from accelfn.bigmodel.registered import FactoriesOn, ParametersOn
from accelfn.context.config.settings import read_settings

__all__ = ("init_empty_weights", "init_on_device")

_VARIABLES = ("ACCELFN_INIT_INCLUDE_BUFFERS", "ACCELERATE_INIT_INCLUDE_BUFFERS")


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Generator[None, None, None]:
    """Build models inside without memory for their weights: every parameter goes to the device ``meta``.

    A parameter of the host keeps its pages untouched until it is given to a module, and is then replaced by
    one without values, so a model of any size is built in the memory of its buffers. Ties that are made
    inside are kept, as are classes of parameters, their attributes and ``requires_grad``.

    Random buffers are drawn in the program's order. Weights draw nothing once a module holds them, nor before
    if they have 1 MiB or more; so seeded buffers are those of the plain construction unless weights before
    them draw there from the host's generator.

    What a module computes from its weights in ``__init__`` is computed on ``meta`` too: shapes come out right
    and there are no values. Code that needs a value, such as ``weight.item()``, gets torch's own error.

    Effect: on the calling thread, until the context is left. Also a decorator of functions that build models.

    Args:
        include_buffers: Whether buffers have no values either: then every tensor that is made inside without
            a device of its own goes to ``meta``. By default they are real, as nothing else may hold their
            values. None reads ``ACCELFN_INIT_INCLUDE_BUFFERS``, then ``ACCELERATE_INIT_INCLUDE_BUFFERS``, and
            is False where neither is set.

    Raises:
        ConfigurationError: The environment variable is set to what is neither true nor false.

    >>> with init_empty_weights():
    ...     model = torch.nn.Linear(100_000, 100_000)
    >>> model.weight.device, model.weight.shape
    (device(type='meta'), torch.Size([100000, 100000]))
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool | None = None
) -> Generator[None, None, None]:
    """Build models inside with their parameters on one device.

    A parameter is moved when a module gets it, so what the module does to initialise it is done there. On the
    CPU all values are, bit for bit, those of the plain construction with the same seed.

    Effect: on the calling thread, until the context is left. Also a decorator of functions that build models.
    Of nested contexts the innermost counts.

    Args:
        device: Where parameters go: ``"meta"``, or what :func:`dispatch_model` takes for a device.
        include_buffers: Whether buffers, and all other tensors that are made inside without a device of their
            own, go there too. None: as :func:`init_empty_weights` has it.

    Raises:
        ValueError: There is no such device here.
        ConfigurationError: The environment variable is set to what is neither true nor false.

    >>> with init_on_device("meta", include_buffers=True):
    ...     norm = torch.nn.BatchNorm1d(3)
    >>> norm.weight.device.type, norm.running_mean.device.type
    ('meta', 'meta')
    """
    target = _device(device)
    with ExitStack() as modes:
        if _with_buffers() if include_buffers is None else include_buffers:
            modes.enter_context(FactoriesOn(target))
        # On a real device the values are wanted, and at the time at which the program asks for them.
        fills = LateFills(delays=target.type == "meta")
        # Called last of all, when no mode is left that could put the filling off once more.
        modes.callback(fills.fill_all)
        modes.enter_context(fills)
        modes.enter_context(ParametersOn(target, fills))
        yield


def _device(device: torch.device | str | int) -> torch.device:
    if str(device) == "meta":
        return torch.device("meta")
    return check_device(read_place(device, "init_on_device"), "init_on_device")


def _with_buffers() -> bool:
    given = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return read_settings(given).init_include_buffers or False
