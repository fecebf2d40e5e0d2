"""Small models in which nothing agrees by accident: names, shapes, dtypes and values all differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["VOCABULARY", "OddAttention", "OddBlock", "OddFeedForward", "OddTransformer", "TinyMLP",
           "TwinBuffers", "batch", "concatenated", "loss", "points", "three_groups"]

VOCABULARY, _WIDTH, _HEADS, _LENGTH = 37, 21, 3, 11


class OddAttention(nn.Module):
    """Causal attention with a 0-d temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.outward = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (part.reshape(rows, length, _HEADS, -1).transpose(1, 2)
                             for part in self.mixing(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(query * self.temperature, key, value, is_causal=True)
        return self.outward(mixed.transpose(1, 2).reshape(rows, length, _WIDTH))


class OddFeedForward(nn.Module):
    """Two layers with a buffer between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.widen = nn.Linear(_WIDTH, hidden)
        self.narrow = nn.Linear(hidden, _WIDTH)
        self.register_buffer("slope_fp32", torch.full((hidden,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.widen(x)
        return self.narrow(functional.gelu(wide) + self.slope_fp32.to(wide.dtype) * wide)


class OddBlock(nn.Module):
    """The natural unit; its attention and its feed-forward part may be units of their own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(_WIDTH)
        self.attention = OddAttention()
        self.before_feed_forward = nn.LayerNorm(_WIDTH, bias=False)
        self.feed_forward = OddFeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.feed_forward(self.before_feed_forward(x))


class OddTransformer(nn.Module):
    """Tied embedding and head, norms of both kinds, a convolution in channels-last memory, frozen parts,
    an integer parameter, and one buffer of every kind.

    Batch norm sees only its own rank's rows, so a run on concatenated rows must leave it out
    (``batch_norm=False``); a run against DDP need not.
    """

    def __init__(self, *, seed: int = 0, blocks: int = 3, batch_norm: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
            self.positions = nn.Embedding(_LENGTH, _WIDTH)
            self.place = nn.Parameter(torch.randperm(_LENGTH), requires_grad=False)
            self.adapter = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
            self.grain = nn.Conv2d(3, 3, kernel_size=3, padding=1).to(memory_format=torch.channels_last)
            self.steady = nn.BatchNorm1d(_WIDTH) if batch_norm else nn.LayerNorm(_WIDTH)
            self.blocks = nn.ModuleList(OddBlock(45 + 2 * index) for index in range(blocks))
            self.last = nn.LayerNorm(_WIDTH)
            self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight
            self._add_buffers()
            with torch.no_grad():  # norms and biases start at ones and zeros: all alike
                for parameter in self.parameters():
                    if parameter.dim() == 1 and parameter.is_floating_point():
                        parameter.add_(torch.randn_like(parameter), alpha=0.02)

    def _add_buffers(self) -> None:
        """Values that a narrower dtype cannot hold, so that a lost bit shows."""
        self.register_buffer("gain_fp32", torch.rand(_WIDTH) / 3)
        self.register_buffer("table_fp64", torch.rand(5, _WIDTH, dtype=torch.float64) / 7)
        self.register_buffer("tilt_fp16", torch.rand(1, _WIDTH).half())
        self.register_buffer("shift_bf16", torch.rand(2, _WIDTH).bfloat16())
        self.register_buffer("forwards_int64", torch.tensor(2**40 + 1))
        self.register_buffer("keep_bool", torch.arange(_WIDTH) % 4 != 1)
        self.register_buffer("phase_complex", torch.rand(4, _WIDTH, dtype=torch.complex64))
        self.register_buffer("absent", None)
        self.register_buffer("scratch", torch.rand(3, _WIDTH) / 11, persistent=False)

    def units(self) -> list[nn.Module]:
        """The natural units, inner ones first; the root comes on top of them."""
        return [module for block in self.blocks for module in (block.feed_forward, block)]

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.forwards_int64.add_(1)
        x = self.embedding(tokens) + self.positions(self.place[: tokens.shape[1]])
        x = x + self.adapter(x) * self.keep_bool + self._constants(x)
        rows, length, _ = x.shape
        image = x.reshape(rows, length, 3, _WIDTH // 3).permute(0, 2, 1, 3)
        x = x + self.grain(image).permute(0, 2, 1, 3).reshape(rows, length, _WIDTH)
        x = self.steady(x.reshape(-1, _WIDTH)).reshape(rows, length, _WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))

    def _constants(self, x: Tensor) -> Tensor:
        """All floating buffers as one row, in the dtype of ``x``."""
        parts = [self.gain_fp32, self.table_fp64[1], self.tilt_fp16[0], self.shift_bf16[1],
                 self.phase_complex[2].abs(), self.scratch[0]]
        return torch.stack([part.to(x.dtype) for part in parts]).mean(dim=0)


class TinyMLP(nn.Module):
    """Three odd layers: the smallest thing that can be sharded unevenly."""

    def __init__(self, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inward = nn.Linear(5, 7, dtype=dtype)
            self.middle = nn.Linear(7, 3, dtype=dtype)
            self.outward = nn.Linear(3, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(torch.tanh(self.middle(torch.tanh(self.inward(x)))))


class TwinBuffers(nn.Module):
    """Buffers of one local name and three dtypes, at three depths."""

    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        dtype = (torch.float32, torch.float64, torch.bfloat16)[depth]
        self.scale = nn.Parameter(torch.full((3 + depth,), 1.0 + depth))
        self.register_buffer("level", torch.full((2 + depth,), 1 / (3 + depth), dtype=dtype))
        self.inner = TwinBuffers(depth + 1) if depth < 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale.sum() + self.level.sum().to(x.dtype)


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: embeddings, matrices, and the rest without weight decay."""
    embeddings, matrices, rest = [], [], []
    inside = {id(parameter) for module in model.modules() if isinstance(module, nn.Embedding)
              for parameter in module.parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            matrix = matrices if parameter.dim() >= 2 else rest
            (embeddings if id(parameter) in inside else matrix).append(parameter)
    groups = [{"params": embeddings, "lr": 3e-3, "weight_decay": 0.01},
              {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
              {"params": rest, "lr": 2e-2, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def batch(rank: int, step: int, *, rows: int = 2, length: int = 9) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank at one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def points(rank: int, step: int, *, rows: int = 4) -> tuple[Tensor, Tensor]:
    """The same for ``TinyMLP``: inputs and targets."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 1, generator=generator)


def concatenated(world: int, step: int, source: Any = batch, **shape: int) -> tuple[Tensor, Tensor]:
    """What all ranks have at one step, in rank order: the unsharded run's batch.

    The ranks' rows are equally many, so the mean of their losses is the loss of this.
    """
    parts = [source(rank, step, **shape) for rank in range(world)]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy for tokens, mean squared error for points."""
    inputs, targets = data
    output = model(inputs)
    if targets.is_floating_point():
        return functional.mse_loss(output, targets.to(output.dtype))
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
