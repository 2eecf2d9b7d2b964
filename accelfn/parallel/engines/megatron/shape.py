"""What a model of transformers is, for a model of Megatron with its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

from accelfn.context.config import MegatronLMPlugin
from accelfn.errors import NotAvailableError

Family = Literal["gpt2", "llama", "custom"]


class ModelShape(NamedTuple):
    """The sizes of a model that Megatron-LM builds again.

    Attributes:
        family: "gpt2" or "llama"; "custom" for one from ``custom_model_provider_function``.
        num_layers: Blocks; 0 for a custom model, as for the next sizes.
        hidden_size: Width.
        num_heads: Heads of attention.
        num_groups: Heads of keys and values.
        head_size: Width of a head.
        ffn_size: Width inside the feed-forward layers.
        vocab_size: Rows of the embedding.
        max_length: Longest sequence.
        norm_eps: Epsilon of the norms.
        activation: Of the feed-forward layers.
        has_bias: Whether linear layers have a bias.
        is_tied: Whether embedding and output share a weight.
        rope_base: Base of rotary position embeddings; None for learned positions.
        rope_factor: Scaling of rotary positions, as in Llama 3; None for none.
        dropouts: Rates of attention, of hidden states and of the embedding.
    """

    family: Family
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    num_groups: int = 0
    head_size: int = 0
    ffn_size: int = 0
    vocab_size: int = 0
    max_length: int = 0
    norm_eps: float = 1e-5
    activation: str = ""
    has_bias: bool = True
    is_tied: bool = False
    rope_base: float | None = None
    rope_factor: float | None = None
    dropouts: tuple[float, float, float] = (0.0, 0.0, 0.0)


def read_shape(config: object, plugin: MegatronLMPlugin | None = None) -> ModelShape:
    """Return the sizes of a model from its transformers configuration. Pure.

    Args:
        config: The ``config`` of a transformers model.
        plugin: With a provider the model isn't read at all.

    Raises:
        NotAvailableError: Its ``model_type``, or an option of it, is none that can be built with its weights.
    """
    if plugin is not None and plugin.custom_model_provider_function is not None:
        return ModelShape("custom")
    model_type = str(getattr(config, "model_type", type(config).__name__))
    reader = _READERS.get(model_type)
    if reader is None:
        raise NotAvailableError(
            f"Megatron-LM: model_type {model_type!r} has no counterpart whose weights accelfn can fill. It "
            f"builds {', '.join(_READERS)}. For any other pass custom_model_provider_function, which returns "
            "a stage as a module of megatron-core, with its weights."
        )
    return reader(config)


def _read_gpt2(config: Any) -> ModelShape:
    _refuse_options(
        config,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        reorder_and_upcast_attn=False,
        add_cross_attention=False,
    )
    return ModelShape(
        family="gpt2",
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_heads=config.n_head,
        num_groups=config.n_head,
        head_size=config.n_embd // config.n_head,
        ffn_size=config.n_inner or 4 * config.n_embd,
        vocab_size=config.vocab_size,
        max_length=config.n_positions,
        norm_eps=config.layer_norm_epsilon,
        activation=_activation(config.activation_function, ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")),
        is_tied=bool(config.tie_word_embeddings),
        dropouts=(config.attn_pdrop, config.resid_pdrop, config.embd_pdrop),
    )


def _read_llama(config: Any) -> ModelShape:
    bias = bool(getattr(config, "attention_bias", False))
    if bias != bool(getattr(config, "mlp_bias", False)):
        raise NotAvailableError(
            f"Megatron-LM: the model's attention_bias={bias} differs from its mlp_bias, and megatron-core "
            "has biases in both or in neither. Pass custom_model_provider_function."
        )
    base, factor = _rope(config)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        family="llama",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_groups=config.num_key_value_heads or config.num_attention_heads,
        head_size=head_size,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_length=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        activation=_activation(config.hidden_act, ("silu",)),
        has_bias=bias,
        is_tied=bool(config.tie_word_embeddings),
        rope_base=base,
        rope_factor=factor,
        dropouts=(getattr(config, "attention_dropout", 0.0), 0.0, 0.0),
    )


_READERS: Mapping[str, Callable[[Any], ModelShape]] = MappingProxyType(
    {"gpt2": _read_gpt2, "llama": _read_llama}
)


def _refuse_options(config: object, **accepted: object) -> None:
    for name, value in accepted.items():
        if getattr(config, name, value) != value:
            raise NotAvailableError(
                f"Megatron-LM: the model has {name}={getattr(config, name)!r}, which megatron-core computes "
                f"otherwise. It takes {value!r}."
            )


def _activation(name: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise NotAvailableError(
            f"Megatron-LM: the model's activation {name!r} isn't known. It takes {', '.join(known)}."
        )
    return name


def _rope(config: Any) -> tuple[float, float | None]:
    """Return base and factor of rotary positions, in the spelling of transformers 4 or 5."""
    found: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    options = cast("Mapping[str, Any]", found or {})
    base = float(options.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    kind = options.get("rope_type", options.get("type", "default"))
    if kind == "default":
        return base, None
    # megatron-core's own values of Llama 3's scaling, which it doesn't take as arguments
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind != "llama3" or any(float(options[name]) != value for name, value in fixed.items()):
        raise NotAvailableError(
            f"Megatron-LM: the model scales rotary positions by {dict(options)!r}. megatron-core has none, "
            f'or rope_type="llama3" with {", ".join(f"{name}={value:g}" for name, value in fixed.items())}.'
        )
    return base, float(options["factor"])
