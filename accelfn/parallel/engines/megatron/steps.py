"""The steps of ``model(**batch)``: how a batch of a family becomes arguments, and its output a loss."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from accelfn.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError
from accelfn.tree import map_tensors


class StepArguments(NamedTuple):
    """What a step is made from.

    Attributes:
        plugin: The options.
        config: The configuration of the user's model.
    """

    plugin: MegatronLMPlugin
    config: Any


class AbstractTrainStep(ABC):
    """How ``model(**batch)`` computes the loss of one microbatch.

    A subclass is named by the plugin's ``custom_train_step_class``, and may replace any of the three
    functions. They are those of Megatron's own training scripts.

    Attributes:
        args: What the step is made from.
        get_batch: From :meth:`get_batch_func`, or the plugin's ``custom_get_batch_function``.
        loss_func: From :meth:`get_loss_func`, or the plugin's ``custom_loss_function``.
        forward_step: From :meth:`get_forward_step_func`.
    """

    def __init__(self, args: StepArguments, **kwargs: Any) -> None:
        """Make the three functions.

        Args:
            args: What the step is made from.
            **kwargs: The plugin's ``custom_train_step_kwargs``, for subclasses.
        """
        self.args: StepArguments = args
        self.kwargs: dict[str, Any] = kwargs
        self.get_batch: Callable[[Iterator[Any]], Any] = (
            args.plugin.custom_get_batch_function or self.get_batch_func()
        )
        self.loss_func: Callable[..., Any] = args.plugin.custom_loss_function or self.get_loss_func()
        self.forward_step: Callable[[Iterator[Any], Any], tuple[Any, Callable[..., Any]]] = (
            self.get_forward_step_func()
        )

    @abstractmethod
    def get_batch_func(self) -> Callable[[Iterator[Any]], Any]:
        """Return a function from an iterator over microbatches to the model's arguments."""

    @abstractmethod
    def get_loss_func(self) -> Callable[..., Any]:
        """Return a function from the model's output to a loss.

        It returns the mean and a dict of values to look at; or the sum, the number of tokens, and the dict.
        """

    @abstractmethod
    def get_forward_step_func(self) -> Callable[[Iterator[Any], Any], tuple[Any, Callable[..., Any]]]:
        """Return a function from an iterator and a stage to the stage's output and its loss function."""


def token_sums(loss_mask: torch.Tensor, output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the sum of the losses of tokens that count, their number, and no further values.

    Args:
        loss_mask: Which tokens count.
        output: Of the model: the losses, or first of several outputs.
    """
    losses = cast("torch.Tensor", output[0] if isinstance(output, (tuple, list)) else output)
    counted = loss_mask.to(losses.dtype)
    return (losses.float() * counted).sum(), counted.sum(), {}


class _TokenStep(AbstractTrainStep):
    """A step whose loss is a sum over tokens."""

    def get_loss_func(self) -> Callable[..., Any]:
        """Return :func:`token_sums`."""
        return token_sums


class GPTTrainStep(_TokenStep):
    """The step of models that predict the next token: GPT-2 and Llama.

    Batches have ``input_ids``, and may have ``attention_mask`` and ``labels`` that aren't shifted yet, where
    -100 doesn't count; or ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` of Megatron's datasets.
    """

    def get_batch_func(self) -> Callable[[Iterator[Any]], Any]:
        """Return a function from an iterator to tokens, labels, loss mask, attention mask and positions."""

        def get_batch(data_iterator: Iterator[Mapping[str, torch.Tensor]]) -> tuple[Any, ...]:
            batch = next(data_iterator)
            if "tokens" in batch:
                return (batch["tokens"], batch["labels"], batch["loss_mask"], None, batch["position_ids"])
            tokens, attention_mask = batch["input_ids"], batch.get("attention_mask")
            labels = torch.full_like(tokens, -100)
            labels[:, :-1] = batch.get("labels", tokens)[:, 1:]
            if attention_mask is not None and "labels" not in batch:
                labels[:, :-1].masked_fill_(attention_mask[:, 1:] == 0, -100)
            counted = labels != -100
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return (tokens, labels.masked_fill(~counted, 0), counted, causal_mask(attention_mask), positions)

        return get_batch

    def get_forward_step_func(self) -> Callable[[Iterator[Any], Any], tuple[Any, Callable[..., Any]]]:
        """Return a function that calls the stage with tokens, positions, mask and labels."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, labels, loss_mask, attention_mask, positions = self.get_batch(data_iterator)
            output = model(tokens, positions, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


class BertTrainStep(_TokenStep):
    """The step of BERT's masked language model, for a provider of ``megatron.core.models.bert.BertModel``.

    Batches have ``input_ids``, ``attention_mask``, ``labels`` (-100 where a token isn't masked), and may have
    ``token_type_ids``.
    """

    def get_batch_func(self) -> Callable[[Iterator[Any]], Any]:
        """Return a function from an iterator to tokens, attention mask, types, labels and loss mask."""

        def get_batch(data_iterator: Iterator[Mapping[str, torch.Tensor]]) -> tuple[Any, ...]:
            batch = next(data_iterator)
            tokens = batch["input_ids"]
            counted = batch["labels"] != -100
            mask = batch.get("attention_mask")
            mask = torch.ones_like(tokens) if mask is None else mask
            labels = batch["labels"].masked_fill(~counted, 0)
            return tokens, mask, batch.get("token_type_ids"), labels, counted

        return get_batch

    def get_forward_step_func(self) -> Callable[[Iterator[Any], Any], tuple[Any, Callable[..., Any]]]:
        """Return a function that calls the stage with tokens, mask, types and labels."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, mask, types, labels, loss_mask = self.get_batch(data_iterator)
            output = model(tokens, mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


class T5TrainStep(_TokenStep):
    """The step of T5, for a provider of ``megatron.core.models.T5.T5Model``.

    Batches have ``input_ids``, ``labels`` (-100 where there is none), and may have ``attention_mask`` and
    ``decoder_input_ids``: without, the labels moved by one place, after token 0.
    """

    def get_batch_func(self) -> Callable[[Iterator[Any]], Any]:
        """Return a function from an iterator to both sides' tokens, masks, labels and loss mask."""

        def get_batch(data_iterator: Iterator[Mapping[str, torch.Tensor]]) -> tuple[Any, ...]:
            batch = next(data_iterator)
            tokens, labels = batch["input_ids"], batch["labels"]
            counted = labels != -100
            labels = labels.masked_fill(~counted, 0)
            decoder = batch.get("decoder_input_ids")
            if decoder is None:
                decoder = torch.cat((torch.zeros_like(labels[:, :1]), labels[:, :-1]), 1)
            kept = batch.get("attention_mask")
            hidden = torch.zeros_like(tokens, dtype=torch.bool) if kept is None else kept == 0
            encoder_mask = (hidden[:, None] | hidden[:, :, None])[:, None]
            cross_mask = hidden[:, None, None].expand(-1, 1, decoder.shape[1], -1)
            decoder_mask = _is_future(decoder)[None, None]
            return tokens, decoder, encoder_mask, decoder_mask, cross_mask, labels, counted

        return get_batch

    def get_forward_step_func(self) -> Callable[[Iterator[Any], Any], tuple[Any, Callable[..., Any]]]:
        """Return a function that calls the stage with the tokens, the masks and the labels."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            *arguments, labels, loss_mask = self.get_batch(data_iterator)
            return model(*arguments, lm_labels=labels), partial(self.loss_func, loss_mask)

        return forward_step


def causal_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return Megatron's mask, True where attention isn't allowed; None for a causal one without padding.

    Args:
        attention_mask: 1 for tokens and 0 for padding, shape (rows, tokens).
    """
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return _is_future(attention_mask)[None, None] | (attention_mask == 0)[:, None, None]


def _is_future(rows: torch.Tensor) -> torch.Tensor:
    """Return which tokens come after each token of a row."""
    length = rows.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=rows.device).triu(1)


def step_of(plugin: MegatronLMPlugin, config: Any) -> AbstractTrainStep:
    """Return the step of a model.

    Args:
        plugin: May name another class.
        config: The configuration of the user's model, whose ``model_type`` names the family.

    Raises:
        ConfigurationError: The class isn't a step.
    """
    kind = plugin.custom_train_step_class
    if kind is None:
        model_type = str(getattr(config, "model_type", ""))
        kind = BertTrainStep if "bert" in model_type else T5TrainStep if "t5" in model_type else GPTTrainStep
    if not issubclass(kind, AbstractTrainStep):
        raise ConfigurationError(
            f"MegatronLMPlugin.custom_train_step_class must be a subclass of "
            f"accelfn.engines.AbstractTrainStep, got "
            f"{kind.__name__}."
        )
    return kind(StepArguments(plugin, config), **(plugin.custom_train_step_kwargs or {}))


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the means of losses over Megatron's replicas.

    Ranks: those with the same place in the model; after ``prepare`` with a ``megatron_lm_plugin``.

    Args:
        losses: Tensors of one element.
    """
    group: Any = _data_parallel_group()
    joined = torch.cat([loss.detach().reshape(1).float() for loss in losses])
    cast("Any", dist).all_reduce(joined, group=group)
    return joined / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Return the rows of all of Megatron's replicas, of each tensor of a tree.

    Ranks: those with the same place in the model; after ``prepare`` with a ``megatron_lm_plugin``.
    """
    group: Any = _data_parallel_group()

    def gather(leaf: torch.Tensor) -> torch.Tensor:
        rows = leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach().contiguous()
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        cast("Any", dist).all_gather(parts, rows, group=group)
        return torch.cat(parts)

    return map_tensors(gather, tensor)


def _data_parallel_group() -> Any:
    state: Any = importlib.import_module("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        raise ConfigurationError(
            "Megatron-LM has no process groups yet. Prepare a model with a megatron_lm_plugin first."
        )
    return state.get_data_parallel_group()
