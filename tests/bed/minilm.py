"""The sentence encoder all-MiniLM-L6-v2 in plain torch, under the names that its published weights have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MiniLM", "embeddings"]

_WIDTH, _HEADS, _INNER, _LAYERS = 384, 12, 1536, 6
_VOCABULARY, _LENGTH, _KINDS = 30522, 512, 2


class _Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(_VOCABULARY, _WIDTH)
        self.position_embeddings = nn.Embedding(_LENGTH, _WIDTH)
        self.token_type_embeddings = nn.Embedding(_KINDS, _WIDTH)
        self.LayerNorm = nn.LayerNorm(_WIDTH, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(_LENGTH).unsqueeze(0))

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.position_ids[:, : tokens.shape[1]]
        x = self.word_embeddings(tokens) + self.position_embeddings(places)
        return self.LayerNorm(x + self.token_type_embeddings(torch.zeros_like(tokens)))


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def split(value: Tensor) -> Tensor:
            return value.unflatten(-1, (_HEADS, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)))
        return mixed.transpose(1, 2).flatten(-2)


class _Dense(nn.Module):
    """A layer whose result is added to what went in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, _WIDTH), nn.LayerNorm(_WIDTH, eps=1e-12)

    def forward(self, inside: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(inside) + x)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self, self.output = _Heads(), _Dense(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.self(x), x)


class _Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(_WIDTH, _INNER)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.intermediate, self.output = _Attention(), _Intermediate(), _Dense(_INNER)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer() for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class _Pooler(nn.Module):
    """Of the original model; the sentence encoder does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(_WIDTH, _WIDTH)


class MiniLM(nn.Module):
    """From tokens [n, t] to vectors [n, t, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.encoder, self.pooler = _Embeddings(), _Encoder(), _Pooler()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(self.embeddings(tokens))


def embeddings(model: nn.Module, tokens: Tensor) -> Tensor:
    """One vector of length 1 for each row of tokens without padding."""
    return F.normalize(model(tokens).mean(1), dim=-1)
