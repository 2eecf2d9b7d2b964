"""Models and rows of the project's programs. A program is printed with those that it uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 12, 8


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Attention(nn.Module):
    causal, kv_heads = True, HEADS

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, size * self.kv_heads), nn.Linear(WIDTH, size * self.kv_heads)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.kv_heads < HEADS)
        return self.o(y.transpose(1, 2).flatten(2))


class FullAttention(Attention):
    causal = False


class GroupedAttention(Attention):
    kv_heads = HEADS // 2


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.gru(x)[0]


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.line(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.drop(self.line(self.norm(x)).tanh())


class Scaled(nn.Module):
    """A parameter that is a number, as a temperature is."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.line(x).tanh() * self.scale


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.line.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.line(x).tanh()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.line(x).tanh()


class Branch(nn.Module):
    """Rows of different tasks go through different layers: ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return (self.second if int(task[0]) % 2 else self.first)(x).tanh()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        share, choice = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = y.index_put(
                (choice == number).nonzero(as_tuple=True), expert(x[choice == number]).to(y.dtype)
            )
        return y * share.unsqueeze(-1)


class Averages(nn.Module):
    """A buffer that training changes, and that the output depends on."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.5)
        return self.line(x - self.mean.clone()).tanh()


class Normalised(nn.Module):
    """Weight norm: a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.line(x).tanh()


KINDS: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "attention": Attention,
    "full": FullAttention,
    "grouped": GroupedAttention,
    "conv": Conv,
    "gru": Recurrent,
    "batchnorm": Batched,
    "layernorm": Normed,
    "frozen": Frozen,
    "unused": Unused,
    "branch": Branch,
    "experts": Experts,
    "buffers": Averages,
    "weightnorm": Normalised,
    "scalar": Scaled,
}
_HEADS = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
# How ranks along "tp" share a kind of block; others are whole.
SPLIT = {
    "linear": {"up": "colwise", "down": "rowwise"},
    "attention": _HEADS,
    "full": _HEADS,
    "grouped": _HEADS,
    "layernorm": {"norm": "whole"},
}


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x, task)


def initialise(model: nn.Module, seed: int) -> None:
    """Draw weights from a generator of their own; a norm that begins as ones would hide mistakes."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                drawn = 0.3 * (2 * torch.rand(parameter.shape, generator=draw) - 1)
                parameter.copy_(drawn + name.endswith(("norm.weight", "scale")))


def make_rows(number: int, rows_of_a_task: int, ignored: bool) -> list[dict[str, torch.Tensor]]:
    """Make samples: tokens, features, labels of which some may be ignored, and a task by rows of a rank."""
    draw = torch.Generator().manual_seed(3)
    rows: list[dict[str, torch.Tensor]] = []
    for index in range(number):
        ids, labels = torch.randint(0, WORDS, (2, LENGTH), generator=draw)
        if ignored:
            labels[torch.rand(LENGTH, generator=draw) < torch.rand((), generator=draw)] = -100
        x = torch.randn(LENGTH, 3, generator=draw)
        place = {"index": torch.tensor(index), "task": torch.tensor(index // rows_of_a_task)}
        rows.append({**place, "ids": ids, "x": x, "labels": labels, "position": torch.arange(LENGTH)})
    return rows


# --- models of transformers ---------------------------------------------------------------------------------


def build_transformer(kind: str, seed: int = 0) -> nn.Module:
    """Build a tiny model of transformers."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "max_position_embeddings": LENGTH,
        "attn_implementation": "sdpa",
    }
    make: Any = transformers
    if kind == "llama":
        model = make.LlamaForCausalLM(make.LlamaConfig(**sizes))
    elif kind == "bert":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = make.BertForMaskedLM(make.BertConfig(**sizes, **dropout))
    elif kind == "t5":
        own: dict[str, Any] = {
            "d_model": WIDTH,
            "d_kv": WIDTH // HEADS,
            "d_ff": 2 * WIDTH,
            "num_heads": HEADS,
            "num_layers": 2,
        }
        config = make.T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **own)
        model = make.T5ForConditionalGeneration(config)
    elif kind == "mixtral":
        # The grouped matrix product has no float64, which the reference is computed in.
        own = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
        model = make.MixtralForCausalLM(make.MixtralConfig(**sizes, **own))
    else:  # layers with linear attention and with full attention
        own = {
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 0,
            "mlp_only_layers": [0, 1],
            "head_dim": WIDTH // HEADS,
            "rms_norm_eps": 0.1,  # what linear attention returns for a first token can be close to zero
        }
        model = make.Qwen3NextForCausalLM(make.Qwen3NextConfig(**sizes, **own))
    initialise(model, seed)
    return model


TRANSFORMERS = ("llama", "bert", "t5", "mixtral", "hybrid")
