"""The model that Megatron-LM trains, called as the user's own, and its schedule of passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from accelfn.config import MegatronLMPlugin
from accelfn.context import Context
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.engines.megatron.generate import check_options, choose, sequence_length
from accelfn.parallel.engines.megatron.plan import MegatronPlan
from accelfn.parallel.engines.megatron.steps import causal_mask, step_of
from accelfn.parallel.strategies.pipeline import SentError
from accelfn.tree import find_batch_size, flatten, map_tensors, slice_tensors


def _only(results: list[Any]) -> Any:
    """Return the result of a batch of one microbatch."""
    return results[0]


def _nothing(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss of a microbatch, and no values to collect."""
    return output, {}


class MegatronOutput(NamedTuple):
    """What a model returns, with the names of transformers.

    Attributes:
        loss: With ``labels``: the mean over the tokens whose label isn't -100.
        logits: Of each token, in float32, shape (rows, tokens, vocabulary). None with ``labels``, unless the
            plugin's ``return_logits`` is set.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __getitem__(self, key: Any) -> Any:
        """Return a value by its name or position."""
        return getattr(self, key) if isinstance(key, str) else cast("Any", tuple).__getitem__(self, key)


class MegatronModel(nn.Module):
    """A model in parts: this rank's stages, and within them its part of each layer.

    Inside of :func:`accelfn.forward_backward` a call is the forward pass of one microbatch. In training any
    other call is a whole step but the optimizer's: forward and backward passes of all microbatches. In
    evaluation it is a forward pass, whose output every rank along the stages gets.

    A ``GPTModel`` of megatron-core takes and returns what a model of transformers does; or what its own
    ``forward`` does, with three positional arguments. Other models take their own arguments in a loss
    function, and their step's elsewhere.

    Attributes:
        config: The configuration of the user's model.
        chunks: This rank's parts, wrapped by Megatron.
        plan: How the model is trained.
    """

    def __init__(
        self,
        ctx: Context,
        core: Any,
        plan: MegatronPlan,
        plugin: MegatronLMPlugin,
        chunks: Sequence[nn.Module],
        config: Any,
    ) -> None:
        """Stand for the user's model."""
        super().__init__()
        self.config = config
        self.plan = plan
        self.chunks: nn.ModuleList = nn.ModuleList(chunks)
        self.core = core
        self._is_gpt = all(isinstance(unwrapped(chunk), core.models.gpt.GPTModel) for chunk in chunks)
        self._device = ctx.device
        self._plugin = plugin
        self._steps = step_of(plugin, config)
        # The part that the schedule runs now, and the output of the call that has run it.
        self._chunk: list[nn.Module] = []  # not a module of this one
        self._outputs: list[Any] = []
        # Sum of the weights of whole steps since the last update, on this replica.
        self._weight: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of one microbatch, or of a whole batch; see the class.

        Args:
            *args: ``input_ids`` and ``attention_mask``, as of a model of transformers.
            **kwargs: ``input_ids``, ``attention_mask``, ``position_ids`` and ``labels``; for another model
                than GPT, what its module takes, or its step.
        """
        if self._chunk:
            return self._call_scheduled(self._chunk[0], args, kwargs)
        trains = self.training and torch.is_grad_enabled()
        if trains or not self._is_gpt:
            return self.run_step(
                dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs, trains
            )
        if self.plan.pp == 1:
            return self.compute(self.chunks[0], *args, **kwargs)
        with torch.no_grad():
            return self.run_schedule([(args, kwargs)], lambda model, piece: model(*piece[0], **piece[1]))

    def _call_scheduled(self, chunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._outputs:
            raise ConfigurationError(
                "the loss function called the model twice, but Megatron-LM runs one forward pass per "
                "microbatch. Call the model once, on the rows of both calls."
            )
        is_own = not self._is_gpt or len(args) > 2
        self._outputs.append(chunk(*args, **kwargs) if is_own else self.compute(chunk, *args, **kwargs))
        if not is_last(chunk):
            raise SentError
        return self._outputs[0]

    def compute(
        self,
        chunk: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Run one part of a GPT: the tensor to send, or the output after the last stage."""
        unused = [name for name, value in others.items() if value is not None and value is not False]
        if unused:
            raise ConfigurationError(
                f"Megatron-LM: the model doesn't take {', '.join(unused)}. It takes input_ids, "
                "attention_mask, position_ids and labels."
            )
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        output = chunk(input_ids, position_ids, causal_mask(attention_mask))
        if not is_last(chunk):
            return output
        # Logits are sharded along the vocabulary, which may be padded.
        loss = logits = None
        if labels is not None:
            targets = labels[:, 1:]
            counted = targets != -100
            losses = unwrapped(chunk).compute_language_model_loss(
                targets.masked_fill(~counted, 0).contiguous(), output[:, :-1].transpose(0, 1).contiguous()
            )
            loss = (losses * counted).sum() / counted.sum()
        if labels is None or self._plugin.return_logits:
            if unwrapped(chunk).parallel_output:
                output = self.core.tensor_parallel.gather_from_tensor_model_parallel_region(output)
            logits = output[..., : getattr(self.config, "vocab_size", None)].float()
        return MegatronOutput(loss, logits)

    def run_schedule(
        self,
        pieces: Sequence[Any],
        compute: Callable[[nn.Module, Any], Any],
        to_differentiate: Callable[[Any], torch.Tensor] | None = None,
        join: Callable[[list[Any]], Any] = _only,
    ) -> Any:
        """Run the microbatches of a batch through the stages, in Megatron's schedule.

        Ranks: every rank of the model.

        Args:
            pieces: The microbatches, of one shape.
            compute: ``compute(model, piece)`` calls the model once; its result is that of a microbatch.
            to_differentiate: Returns the tensor to differentiate, of a result; None for no backward pass.
            join: Returns the result of the batch from those of the microbatches.

        Returns:
            The result of the batch, on every stage.
        """
        results: list[Any] = []

        def run_stage(iterator: Any, chunk: nn.Module) -> tuple[Any, Callable[..., Any]]:
            piece = next(iterator)
            self._chunk, self._outputs = [chunk], []
            try:
                result = compute(self, piece)
            except SentError:
                return self._outputs[0], _nothing
            finally:
                self._chunk = []
            if not self._outputs or not is_last(chunk):
                raise ConfigurationError(
                    "the loss function must call the model that it was passed exactly once, and let through "
                    "the exception that ends it on other stages, which is no Exception."
                )
            results.append(result)
            if to_differentiate is None:
                return torch.zeros((), device=self._device), _nothing
            # Megatron divides by the number of microbatches, in place.
            return to_differentiate(result) * len(pieces), _nothing

        self.run_megatron(pieces, run_stage, trains=to_differentiate is not None)
        return self.from_last(join(results) if results else None)

    def run_megatron(
        self, pieces: Sequence[Any], run_stage: Callable[[Any, nn.Module], Any], *, trains: bool
    ) -> None:
        """Run Megatron's schedule over microbatches of one shape, with its own kind of step."""
        leaves: list[Any] = flatten(pieces[0])[0]
        lengths = (leaf.shape[1] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 1)
        self.core.pipeline_parallel.get_forward_backward_func()(
            forward_step_func=run_stage,
            data_iterator=[iter(pieces) for _ in self.chunks],
            model=list(self.chunks),
            num_microbatches=len(pieces),
            seq_length=next(lengths, 1),
            micro_batch_size=find_batch_size(pieces[0]) or 1,
            forward_only=not trains,
        )

    def run_step(self, named: dict[str, Any], trains: bool) -> Any:
        """Run a call of the model outside of a loss function: all microbatches, and both passes in training.

        Ranks: every rank of the context.

        Returns:
            The mean loss over all replicas; as the output of transformers if the model's config says so. Its
            backward pass does nothing more.

        Raises:
            NotAvailableError: The context scales losses for float16, with a scale that isn't known here.
        """
        if trains and self.plan.precision == "fp16":
            raise NotAvailableError(
                "Megatron-LM: model(**batch) runs the backward pass at once, and float16 needs the loss "
                'scale before. Use accelfn.forward_backward, or mixed_precision="bf16".'
            )
        number = self.plan.num_micro_batches if trains else 1
        sums: list[torch.Tensor] = []  # of losses and of weights, by microbatch

        def count(loss_func: Callable[[Any], Any], output: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            first, *middle, _ = loss_func(output)
            if middle and self._plugin.calculate_per_token_loss:
                sums.append(torch.stack((first.detach().double(), middle[0].double())))
                return first * self.plan.num_micro_batches, {}  # Megatron divides by the number
            mean = first / middle[0].clamp(min=1) if middle else first
            sums.append(torch.stack((mean.detach().double(), torch.ones_like(mean, dtype=torch.float64))))
            return mean.clone(), {}

        def run_stage(iterator: Any, chunk: nn.Module) -> tuple[Any, Callable[..., Any]]:
            output, loss_func = self._steps.forward_step(iterator, chunk)
            return output, partial(count, loss_func)

        with torch.set_grad_enabled(trains):
            self.run_megatron(split(named, number), run_stage, trains=trains)
        totals: torch.Tensor = self.from_last(torch.stack(sums).sum(0) if sums else None)
        if trains and self._plugin.calculate_per_token_loss:
            self._weight = totals[1] if self._weight is None else self._weight + totals[1]
        totals = self._sum_over_replicas(totals.clone())
        loss = (totals[0] / totals[1]).float()
        if trains:
            loss = loss.requires_grad_().clone()
            cast("Any", loss).register_hook(_check_factor)
        return MegatronOutput(loss) if getattr(self.config, "return_dict", False) else loss

    def take_divisor(self) -> float:
        """Return what averaged gradients of whole steps are divided by, and forget it."""
        weight, self._weight = self._weight, None
        if weight is None:
            return 1.0
        # Without any token there is nothing to learn from.
        return float(self._sum_over_replicas(weight)) / self.plan.dp or math.inf

    def _sum_over_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over Megatron's replicas, in place."""
        group = self.core.parallel_state.get_data_parallel_group()
        cast("Any", dist).all_reduce(tensor, group=group)
        return tensor

    def from_last(self, value: Any) -> Any:
        """Return the last stage's value on every stage.

        Ranks: those along the stages.
        """
        if self.plan.pp == 1:
            return value
        state = self.core.parallel_state
        box = [map_tensors(lambda leaf: leaf.detach().cpu(), value)]
        source = state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, source, group=state.get_pipeline_model_parallel_group())
        return map_tensors(lambda leaf: leaf.to(self._device), box[0])

    @torch.no_grad()
    def megatron_generate(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return sequences that begin with ``inputs``: the most probable tokens, or drawn ones.

        It computes all tokens again for each new one, so it is for looking at a model in training.

        Ranks: those of one replica, with the same arguments.

        Args:
            inputs: Prompts, shape (rows, tokens).
            attention_mask: 0 for padding at the ends of prompts.
            max_length: Tokens in the result.
            max_new_tokens: Tokens after the longest prompt, instead.
            temperature: Draw tokens, from logits divided by it.
            top_k: Draw tokens, from this many.
            top_p: Draw tokens, from the most probable ones with this total probability.
            **options: ``num_beams=1`` and ``length_penalty=1.0``, for programs that pass them.

        Returns:
            The sequences, shape (rows, tokens). After the config's ``eos_token_id``, that token is
            repeated.

        Raises:
            ConfigurationError: Prompts are padded at their beginning, the result would be too long, or an
                option isn't in its range.
            NotAvailableError: Another option, or the model is no ``GPTModel`` of megatron-core.
        """
        if not self._is_gpt:
            raise NotAvailableError("megatron_generate: the provider's model isn't megatron-core's GPTModel.")
        check_options(temperature, top_k, top_p, options)
        longest = self.inner_chunks()[0].max_sequence_length
        lengths, total = sequence_length(inputs, attention_mask, longest, max_length, max_new_tokens)
        end: int | Sequence[int] | None = getattr(self.config, "eos_token_id", None)
        end = end[0] if isinstance(end, Sequence) else end
        tokens = nn.functional.pad(inputs, (0, total - inputs.shape[1]), value=end or 0)
        is_done = torch.zeros_like(lengths, dtype=torch.bool)
        group: Any = self.core.parallel_state.get_model_parallel_group()
        was_training = self.training
        self.eval()
        try:
            for position in range(int(lengths.min()), total):
                logits = self.run_schedule(
                    [tokens[:, :position]], lambda model, piece: model(piece).logits[:, -1]
                )
                chosen = choose(logits.float(), temperature, top_k, top_p)
                dist.broadcast(chosen, group=group, group_src=0)  # other ranks may draw others
                is_free = (position >= lengths) & ~is_done
                tokens[is_free, position] = chosen[is_free]
                is_done |= is_free & (chosen == (-1 if end is None else end))
                if bool(is_done.all()):
                    return tokens[:, : max(position + 1, inputs.shape[1])]
            return tokens
        finally:
            self.train(was_training)

    def inner_chunks(self) -> list[Any]:
        """Return this rank's parts without Megatron's wrappers, as the provider has built them."""
        return [unwrapped(chunk) for chunk in self.chunks]


def split(batch: Any, number: int) -> list[Any]:
    """Split a batch into microbatches of equally many rows.

    Raises:
        ValueError: The rows can't be split.
    """
    if number == 1:
        return [batch]
    rows = find_batch_size(batch)
    if not rows or rows % number:
        raise ValueError(
            f"Megatron-LM: a batch of {rows or 0} rows can't be split into num_micro_batches={number} equal "
            "microbatches. Use drop_last=True, or a batch size that num_micro_batches divides."
        )
    size = rows // number
    return [slice_tensors(batch, slice(start, start + size)) for start in range(0, rows, size)]


def unwrapped(chunk: nn.Module) -> Any:
    """Return the module of Megatron inside of its wrappers."""
    while isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = cast("nn.Module", chunk.module)
    return chunk


def is_last(chunk: nn.Module) -> bool:
    """Return whether a part of the model is the last one."""
    return bool(unwrapped(chunk).post_process)


def _check_factor(grad: torch.Tensor) -> None:
    """Refuse to multiply the gradients of a loss that were computed already."""
    if float(grad) != 1.0:
        raise ConfigurationError(
            "Megatron-LM: model(**batch) has computed the gradients of its loss already, and they can't "
            f"be multiplied by {float(grad):g} afterwards. Accumulate by num_micro_batches instead of "
            "gradient_accumulation_steps, or use accelfn.forward_backward."
        )
