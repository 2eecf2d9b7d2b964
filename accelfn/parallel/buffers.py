"""Buffers that forward passes change, such as running statistics: every rank goes on with those of rank 0."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.comm import Call, check, gather_bytes
from accelfn.comm.agreement import as_bytes
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import Handle
from accelfn.parallel.values import is_made_of_others
from accelfn.tree import digest_tensors, is_dtensor, pack, unpack

# Attribute that torch reads: names of a model's tensors that its DistributedDataParallel ignores.
IGNORED = "_ddp_params_and_buffers_to_ignore"

# Buffers that torch's batch normalisation changes without counting it. Its backward pass doesn't use them.
_STATISTICS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"


class _Seen(NamedTuple):
    """A buffer at the last look.

    Attributes:
        name: Its name in the model.
        owner: All buffers of its module.
        own_name: Its name in the module.
        is_saved: Whether it is in the state dict.
        tensor: The buffer.
        version: Torch's count of its changes in place.
    """

    name: str
    owner: dict[str, torch.Tensor | None]
    own_name: str
    is_saved: bool
    tensor: torch.Tensor | None = None
    version: int = 0


class BufferWatch:
    """Knows which buffers of a model have changed, from torch's counts of changes: it reads no values.

    A buffer that isn't saved (``persistent=False``) doesn't change when another tensor replaces it: it is a
    cache, such as the frequencies of rotary embeddings for the longest sequence that a rank has seen.
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch the buffers that ``model`` has now."""
        self._seen: list[_Seen] = []
        self._uncounted: list[nn.Module] = []  # modules with statistics and no counter beside them
        ignored = frozenset[str](getattr(model, IGNORED, ()))
        for prefix, module in cast("Any", model).named_modules():
            owner: dict[str, torch.Tensor | None] = module._buffers
            for own_name, tensor in owner.items():
                name = f"{prefix}.{own_name}" if prefix else own_name
                if tensor is not None and name not in ignored:
                    is_saved = own_name not in module._non_persistent_buffers_set
                    self._seen.append(_Seen(name, owner, own_name, is_saved))
            if owner.get(_STATISTICS[0]) is not None and owner.get(_COUNTER) is None:
                self._uncounted.append(module)
        self.look()

    def look(self) -> None:
        """Compare with the present state from now on."""
        self._was_trained = any(module.training for module in self._uncounted)
        for index, seen in enumerate(self._seen):
            tensor = seen.owner.get(seen.own_name)
            self._seen[index] = seen._replace(tensor=tensor, version=_version_of(tensor))

    def changed(self) -> list[str]:
        """Return the names of the buffers that have changed since the last look."""
        return [
            name
            for name, owner, own_name, is_saved, tensor, version in self._seen
            if (
                tensor is not None and not tensor.is_inference() and tensor._version != version
                if owner.get(own_name) is tensor
                else is_saved
            )
        ]

    def may_have_changed(self) -> bool:
        """Return whether a buffer has changed since the last look, or a module may have changed some."""
        if self._uncounted and (self._was_trained or any(module.training for module in self._uncounted)):
            return True
        return bool(self.changed())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the buffers that can be sent, by name: dense ones with values. To be written in place."""
        found: dict[str, torch.Tensor] = {}
        for name, owner, own_name, *_ in self._seen:
            tensor = owner.get(own_name)
            if tensor is not None and _has_values(tensor):
                # Torch doesn't count writes to statistics either.
                found[name] = tensor.data if own_name in _STATISTICS else tensor
        return found


class _Kept(NamedTuple):
    """A buffer as it was, and its copy from then."""

    owner: dict[str, torch.Tensor | None]  # the buffers of its module
    name: str
    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None


class KeptBuffers:
    """Copies of buffers, with which modules compute inside; changes inside are lost. May be entered again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Copy the buffers that ``modules`` have now."""
        self._kept = [
            _Kept(owner, name, one, _version_of(one), None if one is None else one.clone())
            for owner in [
                cast("dict[str, torch.Tensor | None]", vars(module)["_buffers"]) for module in modules
            ]
            for name, one in owner.items()
        ]
        self._now: list[torch.Tensor | None] = []

    def drop_unchanged(self) -> None:
        """Free the copies of buffers that have not changed since."""
        self._kept = [
            one
            for one in self._kept
            if one.owner.get(one.name) is not one.tensor
            or one.name in _STATISTICS
            or _version_of(one.tensor) != one.version
        ]

    def __enter__(self) -> None:
        self._now = [one.owner.get(one.name) for one in self._kept]
        for one in self._kept:
            one.owner[one.name] = None if one.copy is None else one.copy.clone()

    def __exit__(self, *error: object) -> None:
        for one, tensor in zip(self._kept, self._now, strict=True):
            one.owner[one.name] = tensor


def _version_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _has_values(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_inference()
    return is_dense and not is_dtensor(tensor) and not is_made_of_others(tensor)


class BufferSync:
    """Sends rank 0's buffers at each step and before a forward pass, if they have changed since the last.

    So all ranks compute with what is saved, in evaluations too, also of one rank alone after a step. A model
    whose buffers are constant communicates nothing. Copies of the model keep their own buffers.
    """

    def __init__(self, ctx: Context, model: nn.Module, handle: Handle) -> None:
        """Keep the buffers of ``model`` equal along "loss": on the ranks that have the same layers."""
        self._ctx = ctx.along("loss").tagged("buffers of a model")
        self._seq = ctx.along("seq").tagged("buffers of a model")
        self._watch = BufferWatch(model)
        self._model = weakref.ref(model)
        self._handle = weakref.ref(handle)
        self.is_announced: bool = False  # by the agreement on a forward pass
        handle.buffers = self
        hooks = [model.register_forward_pre_hook(self._before)]
        if self._seq.world.size > 1:
            hooks.append(model.register_forward_hook(self._after))
        handle.hold(hooks)

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferSync:
        """Return this object, which does nothing in passes of a copy."""
        return self

    def __reduce__(self) -> tuple[Callable[[], BufferSync], tuple[()]]:
        """Pickle without the world: a loaded model belongs to none."""
        return _dead, ()

    def is_due(self) -> bool:
        """Return whether the next forward pass sends buffers."""
        handle = self._handle()
        return handle is not None and not handle.is_joined and self._watch.may_have_changed()

    # Compiled code would not look again.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    def _before(self, model: nn.Module, args: Any) -> None:
        """Hook before a forward pass."""
        del args
        if model is self._model() and self.is_due():
            self.send()

    def send(self) -> None:
        """Overwrite the buffers of all ranks by those of rank 0."""
        is_announced, self.is_announced = self.is_announced, False
        if not is_announced:  # a method of the model calls it
            check(self._ctx, Call("forward", "buffers"))
        with torch.no_grad():
            tensors = [*self._watch.tensors().values()]
            packed = pack(tensors)
            for buffer in packed.buffers:
                self._ctx.collectives.broadcast(buffer.view(torch.uint8), 0)
            if self._ctx.rank > 0:
                for tensor, value in zip(tensors, unpack(packed), strict=True):
                    tensor.copy_(value)
        self._watch.look()

    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Hook after a forward pass of ranks that share sequences: refuse what each computed from its part.

        Raises:
            ConfigurationError: A buffer got different values on these ranks.
        """
        del args, output
        if model is not self._model() or not model.training or not self.is_due():
            return
        tensors = self._watch.tensors()
        digests = {
            name: as_bytes(digest.view(torch.uint8)).hex()
            for name, digest in zip(tensors, digest_tensors([*tensors.values()]), strict=True)
        }
        blob = json.dumps(digests).encode()
        others = map(json.loads, gather_bytes(self._seq, Call("forward", "changed buffers"), blob))
        different = {name for other in others for name, digest in other.items() if digests[name] != digest}
        if different:
            raise ConfigurationError(
                f"forward: {min(different)} is computed from the positions of a sequence, of which "
                f"{self._seq.world.size} ranks have a part each: it would differ from the one of complete "
                "sequences. Use a norm over features (LayerNorm, RMSNorm), freeze the module with eval(), or "
                "train without cp and sp."
            )


def _dead() -> BufferSync:
    """Return an object without a model."""
    sync = object.__new__(BufferSync)
    vars(sync)["_model"] = weakref.ref(nn.Module())  # dead at once
    return sync


def sync_buffers(ctx: Context, model: nn.Module, handle: Handle) -> None:
    """Keep buffers that forward passes change equal on all ranks, unless ``broadcast_buffers`` is off.

    Ranks: every rank of ``ctx``; they have equal buffers.

    Args:
        ctx: The world.
        model: Whose passes are hooked; without buffers it isn't.
        handle: Of the prepared model.
    """
    has_buffers = any(True for _ in model.buffers())
    if has_buffers and ctx.strategy.ddp.broadcast_buffers and ctx.along("loss").world.size > 1:
        BufferSync(ctx, model, handle)
