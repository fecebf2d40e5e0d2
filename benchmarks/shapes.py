"""Published models as shapes only: every weight is there and is used once, on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["SHAPES", "Decoder", "build"]


def _linear(inward: int, outward: int) -> nn.Linear:
    return nn.Linear(inward, outward, bias=False)


class Feed(nn.Module):
    """A gated feed-forward part."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = _linear(hidden, inner), _linear(hidden, inner), _linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


class Grouped(nn.Module):
    """Attention whose keys and values are shared by groups of heads, without the attending itself."""

    def __init__(self, hidden: int, key_value: int) -> None:
        super().__init__()
        self.q, self.k, self.v = _linear(hidden, hidden), _linear(hidden, key_value), _linear(hidden, key_value)
        self.o = _linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) * (self.k(x) + self.v(x)).mean(-1, keepdim=True))


class Latent(nn.Module):
    """Attention through latent vectors, without the attending itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm, self.q_b = _linear(7168, 1536), nn.RMSNorm(1536), _linear(1536, 24576)
        self.kv_a, self.kv_norm, self.kv_b = _linear(7168, 576), nn.RMSNorm(512), _linear(512, 32768)
        self.o = _linear(16384, 7168)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.q_b(self.q_norm(self.q_a(x))), self.kv_b(self.kv_norm(self.kv_a(x)[..., :512]))
        return self.o(q[..., :16384] * kv[..., :16384])


class Experts(nn.Module):
    """A router and its experts, each with matrices of its own; all are used."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = _linear(7168, experts)
        self.experts = nn.ModuleList(Feed(7168, 2048) for _ in range(experts + 1))  # and the shared one

    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x).mean(-1, keepdim=True)
        return torch.stack([expert(x) for expert in self.experts]).sum(0) * weight


class Layer(nn.Module):
    """One unit."""

    def __init__(self, hidden: int, attention: nn.Module, feed: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.feed = attention, feed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Decoder(nn.Module):
    """Embedding, layers, head: the root is a unit, and each layer."""

    def __init__(self, vocabulary: int, hidden: int, layers: list[Layer]) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(vocabulary, hidden), nn.ModuleList(layers)
        self.norm, self.head = nn.RMSNorm(hidden), _linear(hidden, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _llama_70b(layers: int) -> Decoder:
    return Decoder(128_256, 8192, [Layer(8192, Grouped(8192, 1024), Feed(8192, 28672)) for _ in range(layers)])


def _deepseek_671b(layers: int) -> Decoder:
    return Decoder(129_280, 7168, [
        Layer(7168, Latent(), Feed(7168, 18432) if number < 3 else Experts(256)) for number in range(layers)])


#: name -> (number of layers, how to make the first so many of them)
SHAPES: dict[str, tuple[int, Callable[[int], Decoder]]] = {
    "llama-70b": (80, _llama_70b),
    "deepseek-671b": (61, _deepseek_671b),
}


def build(name: str, layers: int | None = None) -> Decoder:
    """The model ``name`` in bf16 on the meta device, with all its ``layers`` or only the first few."""
    full, make = SHAPES[name]
    with torch.device("meta"):
        return make(layers or full).to(torch.bfloat16)
