"""Tensor parallelism: ranks share each layer. Torch's parallel styles do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accelfn.parallel.facts import modules_of
from accelfn.parallel.tensor_plans import TensorPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ("StyledForward", "apply_tensor")


def apply_tensor(model: nn.Module, plan: TensorPlan, device_mesh: DeviceMesh) -> None:
    """Distribute a model over the ranks of one axis. Writes into ``model``; names of parameters stay.

    Every parameter becomes a new one, a ``DTensor``; those that no rank shares are whole on each. Each rank
    takes its part of the values that it has, which must be equal on all of them. Nothing is communicated, and
    the parameters may be on the meta device. Parameters that were tied come out untied, with equal layouts.

    Between the layers tensors are plain, with local sizes: what computes heads has to view by -1, or by the
    counts of the module's own attributes, which the plan sets. Only where the plan splits the sequence are
    they ``DTensor``, whose sizes are those of the whole.

    Ranks: every rank of ``device_mesh``; nothing is communicated.

    Args:
        model: As ``plan`` was made for.
        plan: From :func:`accelfn.parallel.plan_tensor`.
        device_mesh: Of one dim, of ``plan.size`` ranks.
    """
    modules = modules_of(model)
    for name, style in plan.styles.items():
        if style in ("colwise", "rowwise", "gather", "embedding"):
            _split(modules[name], device_mesh, style, plan.splits_sequence, name in plan.logits)
    for name, leader in plan.follows.items():
        owner, _, leaf = name.rpartition(".")
        modules[owner].register_parameter(leaf, model.get_parameter(leader))
    for name, style in plan.styles.items():
        module = modules[name]
        _make_whole(module, device_mesh)
        if style in ("sequence", "heads", "whole") or isinstance(module, nn.Embedding):
            keeps = plan.splits_sequence and isinstance(module, nn.Embedding)
            module.forward = StyledForward(module, device_mesh, style, keeps)
    for name, counts in plan.heads.items():
        for key, (_, local) in counts.items():
            setattr(modules[name], key, local)


def _split(module: nn.Module, mesh: DeviceMesh, style: str, splits_sequence: bool, is_logits: bool) -> None:
    """Let torch split the parameters of a layer, and lay out what goes in and out."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    # What runs from block to block is split along the sequence, or whole.
    onward = {"output_layouts": Shard(1), "use_local_output": False} if splits_sequence else {}
    if style == "colwise":
        torchs: Any = ColwiseParallel()
    elif style == "gather":
        torchs = ColwiseParallel(output_layouts=Shard(-1) if is_logits else Replicate())
        torchs.use_local_output = not is_logits
    elif style == "rowwise":
        torchs = RowwiseParallel(**onward)
    else:
        torchs = RowwiseParallel(input_layouts=Replicate(), **onward)
    if style != "rowwise" and not isinstance(module, nn.Embedding):
        module.register_forward_pre_hook(partial(_share_inputs, mesh))
    parallelize_module(module, mesh, torchs, src_data_rank=None)
    if is_logits:
        module.register_forward_hook(_whole_without_gradients)


def _share_inputs(mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook before a layer that takes the whole on each rank, and before torch's own, which takes DTensors."""
    return tuple([_shared(value, mesh) if isinstance(value, torch.Tensor) else value for value in args])


def _shared(value: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Return a plain tensor, whole on each rank, as a DTensor. A DTensor stays."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(value, DTensor):
        return value
    if torch.compiler.is_compiling():  # which has no second derivatives, and knows torch's own conversion
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return cast("Any", _Shared).apply(value, mesh)


class _Shared(torch.autograd.Function):
    """A tensor that is whole on each rank becomes a DTensor.

    Torch's own conversion sums gradients in its backward where autograd doesn't see it: of a gradient that is
    differentiated again (``create_graph=True``) nothing would come back through them.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mesh: DeviceMesh) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        from torch.distributed.tensor import Replicate

        return gradients[0].redistribute(placements=[Replicate()]).to_local(), None


def _whole_without_gradients(module: nn.Module, args: Any, logits: Any) -> Any:
    """Hook after the layer whose logits stay split: only a loss wants them so."""
    return logits if torch.is_grad_enabled() else logits.full_tensor()


def _make_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter of a module by one that every rank holds whole."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    for owner in _owners(module):
        for name, old in list(owner.named_parameters(recurse=False)):
            if hasattr(old, "device_mesh"):  # of a layer that is split
                continue
            whole = distribute_tensor(old.detach(), mesh, [Replicate()], src_data_rank=None)
            owner.register_parameter(name, nn.Parameter(whole, requires_grad=old.requires_grad))


def _owners(module: nn.Module) -> Sequence[nn.Module]:
    """List the modules whose parameters the forward of ``module`` reads."""
    return tuple(module.modules()) if isinstance(module, nn.MultiheadAttention) else (module,)


def _register(module: nn.Module) -> dict[str, Any]:
    """Return where a module keeps its own parameters, in which others can be put for a while."""
    return module._parameters  # pyright: ignore[reportPrivateUsage]


class StyledForward:
    """Stands in for the ``forward`` of a module: it meets plain tensors where its parameters are DTensors.

    Gradients come back in the layout of the parameter: summed over the ranks where each rank saw a part of
    the input.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, style: str, keeps_distributed: bool = False
    ) -> None:
        """Wrap the ``forward`` of ``module``.

        Args:
            module: Its parameters are DTensors on ``mesh``.
            mesh: Of one dim.
            style: Of the plan.
            keeps_distributed: Whether a plain output becomes a DTensor that is whole on each rank.
        """
        self.__wrapped__: Callable[..., Any] = module.forward
        self.module = module
        self.mesh = mesh
        self.style = style
        self.keeps_distributed = keeps_distributed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is wrapped."""
        registers = [_register(owner) for owner in _owners(self.module)]
        kept = [dict(register) for register in registers]
        try:
            for register in registers:
                for name, parameter in register.items():
                    if parameter is not None:
                        register[name] = self._inside(parameter)
            output = self.__wrapped__(*map(self._enter, args), **dict(self._entering(kwargs)))
        finally:
            for register, parameters in zip(registers, kept, strict=True):
                register.update(parameters)
        return self._leave(output)

    def _inside(self, parameter: Any) -> Any:
        """Return a parameter as the forward meets it."""
        from torch.distributed.tensor import Partial, Replicate

        if self.style == "whole":
            if parameter.placements != (Replicate(),):  # one that follows another
                parameter = parameter.redistribute(placements=[Replicate()])
            return parameter.to_local()
        # The same layout, but on the way back: a gradient in another one, as the vocabulary's comes whole
        # and a norm's of positions as summands, is brought into it.
        same = parameter.redistribute(placements=parameter.placements)
        return same.to_local(grad_placements=[Partial()]) if self.style == "heads" else same

    def _entering(self, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in kwargs.items():
            yield name, self._enter(value)

    def _enter(self, value: Any) -> Any:
        """Return an argument in the layout of the style."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not isinstance(value, torch.Tensor):
            return value
        if self.style == "sequence":
            return _shared(value, self.mesh).redistribute(placements=[Shard(1)])
        if self.style == "whole" and isinstance(value, DTensor):
            return value.redistribute(placements=[Replicate()]).to_local()
        return value

    def _leave(self, output: Any) -> Any:
        """Return the result in the layout of the style."""
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(output, torch.Tensor):
            return output
        if self.style == "sequence":
            return cast("DTensor", output).redistribute(placements=[Replicate()])
        return _shared(output, self.mesh) if self.keeps_distributed else output
