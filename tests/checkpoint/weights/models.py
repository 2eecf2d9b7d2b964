"""Small models whose weights are saved and loaded."""

import importlib
from typing import Any

import torch
from torch import nn


class Bag(nn.Module):
    """Holds the given tensors as buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Extra(nn.Module):
    """Has something else than tensors in its state dict."""

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}


class Wrapped(torch.Tensor):
    """A tensor that consists of others, like those of quantised models."""

    part: torch.Tensor

    @staticmethod
    def __new__(cls: type["Wrapped"], part: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        tensor = make(cls, part.shape, dtype=part.dtype)
        tensor.part = part
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].part)
        raise NotImplementedError(function)


def sized(*sizes: int) -> dict[str, torch.Tensor]:
    """Return tensors of some numbers of bytes."""
    return {f"t{number}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}


def tied(bias: bool = False) -> nn.ModuleDict:
    """Return two layers with one weight."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=bias) for name in "ab"})
    model["b"].weight = model["a"].weight
    return model


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model as it is now."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def zero(model: nn.Module) -> None:
    """Set the state of a model to zero."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()


def of_transformers(kind: str, seed: int = 0) -> Any:
    """Return a small language model of transformers."""
    transformers: Any = importlib.import_module("transformers")
    options: dict[str, Any] = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 16}
    options |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 12}
    if kind == "MixtralForCausalLM":
        options |= {"num_key_value_heads": 2, "num_local_experts": 4}
    if kind == "LlamaForCausalLM":
        options["tie_word_embeddings"] = True
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    make = getattr(transformers, kind)
    return make(make.config_class(**options)).eval()
