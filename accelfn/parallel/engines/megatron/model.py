"""The model that Megatron-LM trains, called as the user's own, and its schedule of passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from accelfn.context import Context
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.engines.megatron.build import Core
from accelfn.parallel.engines.megatron.generate import check_options, choose, sequence_length
from accelfn.parallel.engines.megatron.plan import MegatronPlan
from accelfn.parallel.engines.megatron.steps import causal_mask
from accelfn.parallel.strategies.pipeline import SentError
from accelfn.tree import find_batch_size, map_tensors, slice_tensors


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
        core: Core,
        plan: MegatronPlan,
        chunks: Sequence[nn.Module],
        config: Any,
        *,
        returns_logits: bool = False,
    ) -> None:
        """Stand for the user's model."""
        super().__init__()
        self.config = config
        self.plan = plan
        self.chunks: nn.ModuleList = nn.ModuleList(chunks)
        self._core = core
        self._is_gpt = all(isinstance(unwrapped(chunk), core.gpt.GPTModel) for chunk in chunks)
        self._device = ctx.device
        self._returns_logits = returns_logits
        # The part that the schedule runs now, and the output of the call that has run it.
        self._chunk: list[nn.Module] = []  # not a module of this one
        self._outputs: list[Any] = []
        # Runs a call in training, or of another model than GPT; set by the handle.
        self.run_step: Callable[[dict[str, Any], bool], Any] | None = None

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
            named = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
            assert self.run_step is not None  # set by the handle of each model
            return self.run_step(named, trains)
        return self._evaluate(args, kwargs)

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
        chunk: nn.Module,
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
        stage: Any = chunk
        output = stage(input_ids, position_ids, causal_mask(attention_mask))
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
        if labels is None or self._returns_logits:
            if unwrapped(chunk).parallel_output:
                output = self._core.tensor_parallel.gather_from_tensor_model_parallel_region(output)
            logits = output[..., : getattr(self.config, "vocab_size", None)].float()
        return MegatronOutput(loss, logits)

    def run_schedule(
        self,
        pieces: Sequence[Any],
        compute: Callable[[nn.Module, Any], Any],
        to_differentiate: Callable[[Any], torch.Tensor] | None,
    ) -> list[Any]:
        """Run the microbatches of a batch through the stages, in Megatron's schedule.

        Ranks: every rank of the model.

        Args:
            pieces: The microbatches, of one shape.
            compute: ``compute(model, piece)`` calls the model once; its result is that of a microbatch.
            to_differentiate: Returns the tensor to differentiate, of a result; None for no backward pass.

        Returns:
            The results, on the last stage; elsewhere nothing.
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
        return results

    def run_megatron(
        self, pieces: Sequence[Any], run_stage: Callable[[Any, nn.Module], Any], *, trains: bool
    ) -> None:
        """Run Megatron's schedule over microbatches of one shape, with its own kind of step."""
        chunks = list(self.chunks)
        self._core.schedules.get_forward_backward_func()(
            forward_step_func=run_stage,
            data_iterator=[iter(pieces) for _ in chunks] if len(chunks) > 1 else iter(pieces),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(pieces),
            seq_length=_length_of(pieces[0]),
            micro_batch_size=find_batch_size(pieces[0]) or 1,
            forward_only=not trains,
        )

    def from_last(self, value: Any) -> Any:
        """Return the last stage's value on every stage.

        Ranks: those along the stages.
        """
        if self.plan.pp == 1:
            return value
        state = self._core.parallel_state
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
        end = _first(getattr(self.config, "eos_token_id", None))
        tokens = nn.functional.pad(inputs, (0, total - inputs.shape[1]), value=end or 0)
        is_done = torch.zeros_like(lengths, dtype=torch.bool)
        was_training = self.training
        self.eval()
        try:
            for position in range(int(lengths.min()), total):
                logits = self._next_logits(tokens[:, :position]).float()
                chosen = self._agree(choose(logits, temperature, top_k, top_p))
                is_free = (position >= lengths) & ~is_done
                tokens[is_free, position] = chosen[is_free]
                is_done |= is_free & (chosen == (-1 if end is None else end))
                if bool(is_done.all()):
                    return tokens[:, : max(position + 1, inputs.shape[1])]
            return tokens
        finally:
            self.train(was_training)

    def _next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.run_schedule([tokens], lambda model, piece: model(piece).logits[:, -1], None)
        return self.from_last(found[0] if found else None)

    def _agree(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the first rank of the replica: others may draw others."""
        group: Any = self._core.parallel_state.get_model_parallel_group()
        dist.broadcast(tokens, dist.get_process_group_ranks(group)[0], group=group)
        return tokens

    def inner_chunks(self) -> list[Any]:
        """Return this rank's parts without Megatron's wrappers, as the provider has built them."""
        return [unwrapped(chunk) for chunk in self.chunks]

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a batch, on every rank along the stages."""
        if self.plan.pp == 1:
            return self.compute(self.chunks[0], *args, **kwargs)
        with torch.no_grad():
            outputs = self.run_schedule(
                [(args, kwargs)], lambda model, piece: model(*piece[0], **piece[1]), None
            )
        return self.from_last(outputs[0] if outputs else None)


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


def _nothing(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss of a microbatch, and no values to collect."""
    return output, {}


def _first(token: int | Sequence[int] | None) -> int | None:
    return token[0] if isinstance(token, Sequence) else token


def _length_of(piece: Any) -> int:
    """Return the length of the sequences of a microbatch: that of the first tensor with two dimensions."""
    lengths: list[int] = []

    def look(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dim() > 1:
            lengths.append(leaf.shape[1])
        return leaf

    map_tensors(look, piece)
    return lengths[0] if lengths else 1
