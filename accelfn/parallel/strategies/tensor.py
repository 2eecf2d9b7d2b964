"""Tensor parallelism: ranks share each layer, by torch's parallel styles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.config import TorchTensorParallelConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, modules_of, owner_of, table_text
from accelfn.parallel.forward import WrappedForward
from accelfn.parallel.pointers import retie
from accelfn.parallel.strategies.strategy import Application, Planning

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_STYLES = ("colwise", "rowwise", "embedding", "gather", "sequence", "heads", "whole")

STYLE_OF_WORD: Mapping[str, str] = MappingProxyType(
    {
        **{style: style for style in _STYLES},
        # The words of transformers' tp_plan.
        "colwise_gather_output": "gather",
        "colwise_rep": "gather",
        "embedding_colwise": "gather",
        "embedding_rowwise": "embedding",
        "replicate": "whole",
        "replicated_with_grad_allreduce": "heads",
        "rowwise_rep": "embedding",
        "rowwise_split_input": "embedding",
        "sequence_parallel": "sequence",
    }
)
"""Style of each word that a plan may use."""

# Dim of the weight that a style splits, by the kind of layer.
_SPLIT_DIM = MappingProxyType(
    {
        ("colwise", "linear"): 0,
        ("gather", "linear"): 0,
        ("gather", "embedding"): 1,
        ("rowwise", "linear"): 1,
        ("embedding", "linear"): 1,
        ("embedding", "embedding"): 0,
    }
)
_SPLITTING = frozenset(style for style, _ in _SPLIT_DIM)
_PART_OF_LORA = re.compile(r"(base_layer|lora_A|lora_B)\.")
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=[.,:'\s]|$)")


class TensorPlan(NamedTuple):
    """How tensor parallelism splits a model. Prints as a table.

    Attributes:
        size: Ranks that share each layer.
        styles: Style of each module that has parameters of its own, by its name.

            ========= =============================== ================ =================
            style     parameters                      input            output
            ========= =============================== ================ =================
            colwise   outputs split                   replicated       its features
            rowwise   inputs split                    its features     replicated
            embedding vocabulary (or inputs) split    replicated       replicated
            gather    outputs split                   replicated       replicated
            sequence  replicated                      its positions    replicated
            heads     replicated                      its heads        its heads
            whole     replicated                      replicated       replicated
            ========= =============================== ================ =================
        heads: Attributes with numbers of heads, and their values before and on each rank, by the module's
            name and the attribute's.
        logits: Names of the layers whose outputs stay split over the vocabulary for ``loss_parallel``.
        dims: The dim along which each split parameter is split, by its name; the others are replicated.
        follows: Parameters of modules that aren't split, tied to one of a layer that is, by their names: they
            get the layout of that one.
    """

    size: int
    styles: Mapping[str, str]
    heads: Mapping[str, Mapping[str, tuple[int, int]]]
    logits: frozenset[str]
    dims: Mapping[str, int]
    follows: Mapping[str, str]

    @property
    def splits_sequence(self) -> bool:
        """Whether activations between blocks are split along the sequence, dim 1."""
        return "sequence" in self.styles.values()

    def local(self, facts: ModelFacts) -> ModelFacts:
        """Return the facts of one rank's model: the shapes of its shards."""
        shapes = {
            name: tuple(
                size // self.size if dim == self.dims.get(name) else size for dim, size in enumerate(shape)
            )
            for name, shape in facts.shapes.items()
        }
        return facts._replace(shapes=shapes)

    def only(self, facts: ModelFacts) -> TensorPlan:
        """Return the plan of the modules of ``facts``: a pipeline stage's.

        Raises:
            ConfigurationError: A parameter follows one that is on another stage.
        """
        here = facts.kinds
        follows = {name: leader for name, leader in self.follows.items() if name in facts.shapes}
        for name, leader in follows.items():
            if leader not in facts.shapes:
                raise ConfigurationError(
                    f"{name} is tied to {leader}, which is split over ranks and on another stage of the "
                    f"pipeline. Give {name.rpartition('.')[0]} a style of the same layout, or untie them."
                )
        return self._replace(
            styles={name: style for name, style in self.styles.items() if name in here},
            heads={name: counts for name, counts in self.heads.items() if name in here},
            logits=frozenset(name for name in self.logits if name in here),
            follows=follows,
        )

    def rows(self) -> dict[str, str]:
        """Return the lines of a table: modules by style, with stars for numbers."""
        rows = {"layers": f"shared by {self.size} ranks; replicated where no style is named"}
        for style in _STYLES:
            names = dict.fromkeys(_generic(name) for name, one in self.styles.items() if one == style)
            if names and style != "whole":
                rows[style] = ", ".join(names)
        if self.heads:
            changes = dict.fromkeys(
                f"{_generic(name)}.{key} {before} -> {now}"
                for name, counts in self.heads.items()
                for key, (before, now) in counts.items()
            )
            rows["attributes"] = ", ".join(changes)
        if self.logits:
            rows["logits"] = f"of {', '.join(sorted(self.logits))} stay split for the loss"
        return rows

    def __str__(self) -> str:
        """Return the plan as a table."""
        return table_text(self.rows())


def plan_tensor(record: TorchTensorParallelConfig, facts: ModelFacts, tp_size: int) -> TensorPlan:
    """Choose a style for each module with parameters. Pure: no model, no device, no process.

    The patterns are those of ``record.plan``, else the model's own (``facts.tp_plan``). A pattern is a
    module's name, in which ``*`` stands for one part between dots: ``"layers.*.attn.q"``. Where peft has
    wrapped the model, names are those inside of it, and a layer with LoRA is split with its LoRA. A user's
    pattern must match something; a model's need not, since a class has one plan for all its configurations.
    Modules without a pattern are replicated.

    Args:
        record: Has the plan, and whether the logits stay split for the loss.
        facts: Of the model, from :func:`accelfn.parallel.read_facts`.
        tp_size: Ranks that share each layer.

    Raises:
        ConfigurationError: There is no plan, or it doesn't fit the model. The message lists every unknown
            word, pattern without a match, layer that can't be split, dim or number of heads that
            ``tp_size`` doesn't divide, and tied parameters with different layouts.
    """
    is_users = record.plan is not None
    patterns = record.plan if record.plan is not None else facts.tp_plan
    if not patterns:
        raise ConfigurationError(
            f"tp_size={tp_size}: there is no plan for {facts.kinds.get('', 'the model')}, which has no "
            "tp_plan of its own. Pass ParallelismConfig(tp_handler=TorchTensorParallelConfig("
            'plan={"layers.*.attn.q": "colwise", "layers.*.attn.o": "rowwise"})), with the names of your '
            "modules."
        )
    owners = tuple(dict.fromkeys(name.rpartition(".")[0] for name in facts.shapes))
    styles, problems = _match(patterns, facts, owners, is_users)
    problems += _unsplittable(styles, facts, tp_size)
    if is_users:
        problems += _unclear(styles, owners)
    heads, more = _heads(styles, facts, tp_size, is_users)
    problems += more
    full = {name: styles.get(name, "whole") for name in facts.kinds if name in owners or name in styles}
    follows, more = _ties(full, facts)
    problems += more
    logits: frozenset[str] = frozenset()
    if record.loss_parallel:
        blocks = frozenset(facts.blocks)
        logits = frozenset(
            name
            for name, style in full.items()
            if style == "gather" and facts.layers.get(name) == "linear" and owner_of(name, blocks) is None
        )
        if not logits:
            problems.append(
                'loss_parallel=True: no linear layer outside of the blocks has the style "gather". Set it '
                "for the layer that computes the logits."
            )
    if problems:
        count = Counter(map(_generic, problems))  # those of equal layers count as one
        lines = dict.fromkeys(_generic(one) if count[_generic(one)] > 1 else one for one in problems)
        source = "TorchTensorParallelConfig.plan" if is_users else "the model's own tp_plan"
        raise ConfigurationError(
            f"{source} doesn't fit {facts.kinds.get('', 'the model')} with tp_size={tp_size}:\n"
            + "\n".join(f"  - {line}" for line in lines)
        )
    found = {name: _split_dim(follows.get(name, name), full, facts) for name in facts.shapes}
    dims = {name: dim for name, dim in found.items() if dim is not None}
    return TensorPlan(tp_size, full, heads, logits, dims, follows)


# Of the modules in the model itself, in peft's, and in torch's AveragedModel.
_PREFIXES = ("", "base_model.model.", "module.")


def _match(
    patterns: Mapping[str, str], facts: ModelFacts, owners: Sequence[str], is_users: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the style of each matched module, and the problems of the patterns."""
    styles: dict[str, str] = {}
    unmatched: list[str] = []
    problems: list[str] = []
    for pattern, word in patterns.items():
        found = [
            name for name in facts.kinds if any(_matches(name, f"{prefix}{pattern}") for prefix in _PREFIXES)
        ]
        style = STYLE_OF_WORD.get(word)
        if not found:
            unmatched.append(pattern)
            continue
        if style is None:
            known = ", ".join(sorted(STYLE_OF_WORD))
            problems.append(f"{pattern!r}: unknown style {word!r}. Use one of {known}.")
            continue
        if style in _SPLITTING:
            found = [layer for name in found for layer in _layers_of_lora(name, style, facts)]
        elif style != "sequence":  # norms without parameters take their positions too
            found = [name for name in found if name in owners]
        problems += [
            f"{pattern!r}: {name} would be {style!r}, and by another pattern is {styles[name]!r}. Keep one."
            for name in found
            if styles.setdefault(name, style) != style
        ]
    if len(unmatched) == len(patterns):
        problems.append(
            f"none of its patterns matches a module: {', '.join(patterns)}. If it is the plan of another "
            "model, and this one stays whole on each rank: "
            'prepare_model(ctx, model, plan=plan_model(ctx, model, engine="ddp")).'
        )
    elif is_users:
        problems += [f"{pattern!r} matches no module." for pattern in unmatched]
    return styles, problems


def _layers_of_lora(name: str, style: str, facts: ModelFacts) -> list[str]:
    """Return the layers that are split for one that peft has wrapped; for others the layer itself."""
    inside = [shape.removeprefix(f"{name}.") for shape in facts.shapes if shape.startswith(f"{name}.")]
    if f"{name}.base_layer" not in facts.layers or not all(map(_PART_OF_LORA.match, inside)):
        return [name]
    # Of the product of two, the matrix at the dim that is split; the other one is whole, as its result is.
    factor = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style, "base_layer")
    return [
        layer
        for layer in facts.layers
        if layer == f"{name}.base_layer" or layer.startswith(f"{name}.{factor}.")
    ]


def _unsplittable(styles: Mapping[str, str], facts: ModelFacts, tp_size: int) -> Iterator[str]:
    """Yield the layers that can't have their style, and the dims that ``tp_size`` doesn't divide."""
    for name, style in styles.items():
        dim = _SPLIT_DIM.get((style, facts.layers.get(name, "")))
        if dim is None and style in _SPLITTING:
            yield (
                f"{name} is of class {facts.kinds[name]}, which can't be {style!r}: nn.Linear can be "
                "colwise, gather, rowwise or embedding, and nn.Embedding gather or embedding."
            )
        size = 0 if dim is None else facts.shapes[f"{name}.weight" if name else "weight"][dim]
        if size % tp_size:
            yield (
                f"{name} ({style}): dim {dim} of its weight has size {size}, which isn't divisible by "
                f"tp_size={tp_size}. Pad it by {tp_size - size % tp_size}, or use a size that divides."
            )


def _unclear(styles: Mapping[str, str], owners: Sequence[str]) -> Iterator[str]:
    """Yield the modules beside colwise and rowwise layers whose input is ambiguous.

    A norm over each head (as ``q_norm``) gets this rank's heads, one before the projections gets the complete
    input. Its gradient must be summed over ranks in the first case only, and nothing fails where that is
    missed.
    """
    by_parent: dict[str, set[str]] = {}
    for name, style in styles.items():
        by_parent.setdefault(name.rpartition(".")[0], set()).add(style)
    for name in owners:
        parent, dot, _ = name.rpartition(".")
        if dot and name not in styles and {"colwise", "rowwise"} <= by_parent.get(parent, set()):
            yield (
                f"{name} is beside colwise and rowwise layers, but the plan doesn't name it. Use "
                '"heads" if it gets only this rank\'s heads (or features), "whole" if it gets all of them.'
            )


def _heads(
    styles: Mapping[str, str], facts: ModelFacts, tp_size: int, is_users: bool
) -> tuple[dict[str, dict[str, tuple[int, int]]], list[str]]:
    """Return each rank's numbers of heads, and those that ``tp_size`` doesn't divide.

    Models that come with a plan don't need other numbers: they view by -1.
    """
    split: dict[str, list[str]] = {}
    for name, style in styles.items():
        if style == "colwise" and facts.layers.get(name) == "linear":
            split.setdefault(name.rpartition(".")[0], []).append(name)
    heads: dict[str, dict[str, tuple[int, int]]] = {}
    problems: list[str] = []
    for module, layers in split.items():
        stated = facts.heads.get(module)
        if stated is None:
            continue
        for key, count in stated.counts.items():
            if count % tp_size:
                problems.append(f"{module}.{key}={count} isn't divisible by tp_size={tp_size}.")
            elif is_users:
                heads.setdefault(module, {})[key] = (count, count // tp_size)
        if stated.dim is None:
            continue
        for layer in layers:
            outputs = facts.shapes[f"{layer}.weight"][0]
            num_heads, rest = divmod(outputs, stated.dim)
            if not rest and num_heads % tp_size and outputs % tp_size == 0:  # else it is listed already
                problems.append(
                    f"{layer} has {num_heads} heads of {stated.dim}, which tp_size={tp_size} doesn't divide."
                )
    return heads, problems


def _ties(styles: Mapping[str, str], facts: ModelFacts) -> tuple[dict[str, str], list[str]]:
    """Return the tied parameters that follow others, and ties with different layouts."""
    follows: dict[str, str] = {}
    problems: list[str] = []
    for names in facts.ties:
        dims = {name: _split_dim(name, styles, facts) for name in names}
        split = [name for name, dim in dims.items() if dim is not None]
        # Such as a bias that a head's parent holds too; a table of vectors must be split explicitly.
        loose = [name for name in names if dims[name] is None and _owner(name) not in facts.layers]
        if split:
            follows.update(dict.fromkeys(loose, split[0]))
        if len({dim for name, dim in dims.items() if name not in follows}) > 1:
            shown = ", ".join(f"{name} is {styles[_owner(name)]}" for name in names)
            problems.append(
                f"{' and '.join(names)} are one tied parameter, but the plan lays them out differently: "
                f'{shown}. An embedding that is "embedding" fits a head that is "gather"; else untie them.'
            )
    return follows, problems


def _split_dim(name: str, styles: Mapping[str, str], facts: ModelFacts) -> int | None:
    """Return the dim along which a parameter is split; None if it is replicated."""
    module, _, leaf = name.rpartition(".")
    dim = _SPLIT_DIM.get((styles[module], facts.layers.get(module, "")))
    return dim if leaf == "weight" or dim == 0 else None


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _generic(name: str) -> str:
    """Return a text with a star for each number in a name, as in patterns."""
    return _NUMBER.sub("*", name)


def apply_tensor(model: nn.Module, plan: TensorPlan, device_mesh: DeviceMesh) -> None:
    """Distribute a model over the ranks of one axis. Writes into ``model``; names of parameters don't change.

    Every parameter becomes a new ``DTensor``, split or replicated. Each rank takes its shard of its own
    values, which must be equal on all ranks; the parameters may be on the meta device. Tied parameters come
    out untied, with equal layouts.

    Between the layers tensors are plain, with local sizes: modules that view heads must view by -1, or by
    their own attributes, which the plan sets. Only where the plan splits the sequence are they ``DTensor``,
    with global sizes.

    Ranks: every rank of ``device_mesh``; nothing is communicated.

    Args:
        model: The planned model.
        plan: From :func:`accelfn.parallel.plan_tensor`.
        device_mesh: With one dim, of ``plan.size`` ranks.
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
        _replicate(module, device_mesh)
        if style in ("sequence", "heads", "whole") or isinstance(module, nn.Embedding):
            keeps = plan.splits_sequence and isinstance(module, nn.Embedding)
            module.forward = StyledForward(module, device_mesh, style, keeps)
    for name, counts in plan.heads.items():
        for key, (_, local) in counts.items():
            setattr(modules[name], key, local)


def _split(module: nn.Module, mesh: DeviceMesh, style: str, splits_sequence: bool, is_logits: bool) -> None:
    """Split a layer's parameters by torch's styles, and set the layouts of its input and output."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    # Activations between blocks are split along the sequence, or replicated.
    onward = {"output_layouts": Shard(1), "use_local_output": False} if splits_sequence else {}
    if style == "colwise":
        parallel_style: Any = ColwiseParallel()
    elif style == "gather":
        parallel_style = ColwiseParallel(output_layouts=Shard(-1) if is_logits else Replicate())
        parallel_style.use_local_output = not is_logits
    elif style == "rowwise":
        parallel_style = RowwiseParallel(**onward)
    else:
        parallel_style = RowwiseParallel(input_layouts=Replicate(), **onward)
    if style != "rowwise" and not isinstance(module, nn.Embedding):
        module.register_forward_pre_hook(partial(_share_inputs, mesh))
    parallelize_module(module, mesh, parallel_style, src_data_rank=None)
    if is_logits:
        module.register_forward_hook(_gather_without_gradients)


def _share_inputs(mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook before a layer with replicated input, and before torch's own hook: convert to DTensors."""
    return tuple([_shared(value, mesh) if isinstance(value, torch.Tensor) else value for value in args])


def _shared(value: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Return a replicated plain tensor as a DTensor, and a DTensor unchanged."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(value, DTensor):
        return value
    if torch.compiler.is_compiling():  # it has no second derivatives, and supports torch's own conversion
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return cast("Any", _Shared).apply(value, mesh)


class _Shared(torch.autograd.Function):
    """Converts a replicated tensor to a DTensor.

    Torch's own conversion sums gradients in its backward without autograd: a gradient that is differentiated
    again (``create_graph=True``) would lose the part through them.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mesh: DeviceMesh) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        from torch.distributed.tensor import Replicate

        return gradients[0].redistribute(placements=[Replicate()]).to_local(), None


def _gather_without_gradients(module: nn.Module, args: Any, logits: Any) -> Any:
    """Hook after a layer with split logits: gather them where there will be no loss."""
    return logits if torch.is_grad_enabled() else logits.full_tensor()


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace a module's plain parameters by replicated DTensors."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    for owner in _owners(module):
        for name, old in list(owner.named_parameters(recurse=False)):
            if hasattr(old, "device_mesh"):  # split already
                continue
            new = distribute_tensor(old.detach(), mesh, [Replicate()], src_data_rank=None)
            owner.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))


def _owners(module: nn.Module) -> Sequence[nn.Module]:
    """Return the modules whose parameters the forward of ``module`` reads."""
    return tuple(module.modules()) if isinstance(module, nn.MultiheadAttention) else (module,)


class StyledForward(WrappedForward):
    """The ``forward`` of a module with DTensor parameters, which computes on plain tensors.

    Gradients come back in the layout of the parameter: summed over the ranks where each rank had a part of
    the input.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, style: str, keeps_distributed: bool = False
    ) -> None:
        """Wrap the ``forward`` of ``module``.

        Args:
            module: Its parameters are DTensors on ``mesh``.
            mesh: With one dim.
            style: The module's style in the plan.
            keeps_distributed: Whether a plain output becomes a replicated DTensor.
        """
        super().__init__(module.forward)
        self.module = module
        self.mesh = mesh
        self.style = style
        self.keeps_distributed = keeps_distributed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped forward."""
        # Not vars(), which torch.compile can't follow.
        registers: list[dict[str, Any]] = [
            owner._parameters  # pyright: ignore[reportPrivateUsage]
            for owner in _owners(self.module)
        ]
        kept = [dict(register) for register in registers]
        try:
            for register in registers:
                for name, parameter in register.items():
                    if parameter is not None:
                        register[name] = self._inside(parameter)
            entered = {name: self._enter(value) for name, value in kwargs.items()}
            output = self.__wrapped__(*map(self._enter, args), **entered)
        finally:
            for register, parameters in zip(registers, kept, strict=True):
                register.update(parameters)
        return self._leave(output)

    def _inside(self, parameter: Any) -> Any:
        """Return a parameter as the wrapped forward uses it."""
        from torch.distributed.tensor import Partial, Replicate

        if self.style == "whole":
            if parameter.placements != (Replicate(),):  # it follows a split parameter
                parameter = parameter.redistribute(placements=[Replicate()])
            return parameter.to_local()
        # Changes no layout now, but brings the gradient into the parameter's: an embedding's comes
        # replicated, a norm's over positions as partial sums.
        same = parameter.redistribute(placements=parameter.placements)
        return same.to_local(grad_placements=[Partial()]) if self.style == "heads" else same

    def _enter(self, value: Any) -> Any:
        """Return an argument in the style's layout."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not isinstance(value, torch.Tensor):
            return value
        if self.style == "sequence":
            return _shared(value, self.mesh).redistribute(placements=[Shard(1)])
        if self.style == "whole" and isinstance(value, DTensor):
            return value.redistribute(placements=[Replicate()]).to_local()
        return value

    def _leave(self, output: Any) -> Any:
        """Return the result in the style's layout."""
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(output, torch.Tensor):
            return output
        if self.style == "sequence":
            return cast("DTensor", output).redistribute(placements=[Replicate()])
        return _shared(output, self.mesh) if self.keeps_distributed else output


def plan(at: Planning) -> TensorPlan | None:
    """Return how ranks share each layer; None where they don't."""
    if at.engine == "ddp":
        return None
    parallelism = at.ctx.strategy.parallelism
    handler = None if parallelism is None else parallelism.tp_handler
    return plan_tensor(handler or TorchTensorParallelConfig(), at.facts, at.mesh.size("tp"))


def apply(plan: TensorPlan, at: Application) -> None:
    """Split layers over the ranks along "tp"."""
    apply_tensor(at.model, plan, at.device_mesh("tp"))
    retie(at.before, at.model)
