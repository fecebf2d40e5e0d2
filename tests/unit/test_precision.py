"""What the precision options mean, and how inputs and outputs are cast: rows A38, C18, U27-U31, U35."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shardwise import MixedPrecision, MixedPrecisionPolicy
from shardwise.engine.precision import cast_floating, cast_up, kept_modules, move
from shardwise.errors import OptionTypeError
from shardwise.plan.options import Precision

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Pair = namedtuple("Pair", "x k")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    note: str = "n"


class Output(OrderedDict[str, Any]):
    """As the outputs of many model libraries."""


def test_defaults_of_both_options() -> None:
    wrapper, policy = Precision.of_wrapper(MixedPrecision()), Precision.of_policy(MixedPrecisionPolicy())
    assert (wrapper.cast_inputs, wrapper.cast_root_inputs) == (False, True)
    assert (policy.cast_inputs, policy.cast_root_inputs) == (True, True)
    assert Precision.of_wrapper(None) == Precision.of_policy(None) == Precision()
    assert wrapper.kept_classes == policy.kept_classes == (nn.modules.batchnorm._BatchNorm,)
    assert policy.buffer is None


@pytest.mark.parametrize(
    ("given", "stored", "dtypes"),  # compute, wire, accumulation, final
    [
        ({}, FP32, (FP32, FP32, FP32, FP32)),
        ({}, BF16, (BF16, BF16, FP32, BF16)),
        ({}, FP64, (FP64, FP64, FP64, FP64)),
        ({"param_dtype": BF16}, FP32, (BF16, BF16, FP32, FP32)),
        ({"param_dtype": BF16, "reduce_dtype": FP32}, FP32, (BF16, FP32, FP32, FP32)),
        ({"reduce_dtype": FP16}, FP32, (FP32, FP16, FP32, FP32)),
        ({"param_dtype": BF16, "reduce_dtype": FP16, "accumulate_dtype": FP64, "grad_dtype": BF16}, FP32,
         (BF16, FP16, FP64, BF16)),
        ({"param_dtype": BF16, "accumulate_dtype": BF16}, FP32, (BF16, BF16, BF16, FP32)),
    ],
)
def test_C18_four_gradient_dtypes(given: dict[str, Any], stored: torch.dtype, dtypes: Any) -> None:
    for precision in (Precision.of_wrapper(MixedPrecision(**given)),
                      Precision.of_policy(MixedPrecisionPolicy(**given))):
        wire = precision.wire_dtype(stored)
        assert (precision.compute_dtype(stored), wire, precision.accumulation_dtype(wire),
                precision.final_dtype(stored, wire)) == dtypes


@pytest.mark.parametrize("option", [MixedPrecision, MixedPrecisionPolicy])
@pytest.mark.parametrize("dtype", ["bf16", torch.int8, torch.complex64])
def test_bad_dtypes_are_refused_at_construction(option: Any, dtype: Any) -> None:
    text = rf"{option.__name__}.reduce_dtype is no dtype to compute in.*got"
    with pytest.raises(OptionTypeError, match=text):
        option(reduce_dtype=dtype)


def test_U30_low_precision_gradients_are_those_of_the_wire() -> None:
    keep = Precision.of_wrapper(MixedPrecision(BF16, FP16, keep_low_precision_grads=True))
    assert keep.final_dtype(FP32, FP16) is FP16
    chosen = dataclasses.replace(keep, grad=FP32)
    assert chosen.final_dtype(FP32, FP16) is FP32


def test_integer_parameters_keep_their_dtype() -> None:
    assert Precision(param=BF16).compute_dtype(torch.int64) is torch.int64


def test_U31_kept_parameters() -> None:
    kept = Precision(param=BF16, reduce=None).for_kept()
    assert (kept.compute_dtype(FP32), kept.wire_dtype(FP32)) == (FP32, FP32)
    assert Precision(param=BF16, reduce=FP16).for_kept().wire_dtype(FP32) is FP16


def test_U31_kept_modules_are_those_of_a_class_and_all_below() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.ModuleList([nn.LayerNorm(2)]))
    modules = list(model.modules())
    assert kept_modules(modules, Precision(param=BF16, kept_classes=(nn.BatchNorm1d,))) == {model[1][0]}
    lists = Precision(param=BF16, kept_classes=(nn.ModuleList,))
    assert kept_modules(modules, lists) == {model[2], model[2][0]}
    assert kept_modules(modules, Precision(param=BF16)) == set()
    assert kept_modules(modules, Precision(reduce=BF16, kept_classes=(nn.LayerNorm,))) == set()
    assert kept_modules(modules, Precision(buffer=BF16, kept_classes=(nn.LayerNorm,))) == {model[2][0]}


def _tensors() -> tuple[Tensor, Tensor]:
    return torch.arange(3.0), torch.tensor([301, 2])


def test_A38_nested_inputs_are_cast_in_every_container() -> None:
    x, k = _tensors()
    value = {"a": [x, (k, x)], "b": Pair(x, k), "c": Frozen(x), "d": OrderedDict(x=x), "e": "text", "f": None}
    cast = cast_floating(BF16, value)
    found = [cast["a"][0], cast["a"][1][1], cast["b"].x, cast["c"].x, cast["d"]["x"]]
    assert {t.dtype for t in found} == {BF16}
    assert cast["a"][1][0] is k
    assert cast["b"].k is k
    assert type(cast["b"]) is Pair
    assert type(cast["c"]) is Frozen
    assert type(cast["d"]) is OrderedDict
    assert (cast["c"].note, cast["e"], cast["f"]) == ("n", "text", None)
    assert value["a"][0] is x  # the caller's containers are not changed
    assert value["c"].x is x


def test_A38_subclasses_of_dicts_keep_their_class() -> None:
    cast = cast_floating(BF16, Output(x=torch.ones(2)))
    assert type(cast) is Output
    assert cast["x"].dtype is BF16


def test_A38_packed_sequences() -> None:
    packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    cast = cast_floating(BF16, packed)
    assert isinstance(cast, PackedSequence)
    assert cast.data.dtype is BF16
    assert cast.batch_sizes is packed.batch_sizes
    assert torch.equal(cast.sorted_indices, packed.sorted_indices)
    moved = move(torch.device("meta"), packed)
    assert moved.data.is_meta
    assert moved.sorted_indices.is_meta
    assert moved.unsorted_indices.is_meta
    assert not moved.batch_sizes.is_meta  # kernels read it on the host


def test_nothing_to_cast_gives_the_same_object() -> None:
    x, k = _tensors()
    value = [x.bfloat16(), {"k": k, "complex": torch.ones(1, dtype=torch.complex64)}]
    assert cast_floating(BF16, value) is value


def test_A38_inputs_are_moved_with_their_containers() -> None:
    x, k = _tensors()
    moved = move(torch.device("meta"), {"p": Pair(x, k), "l": [x]})
    assert moved["p"].x.is_meta
    assert moved["p"].k.is_meta
    assert moved["l"][0].is_meta


def test_gradients_of_cast_inputs_come_back_in_their_dtype() -> None:
    x = torch.ones(2, requires_grad=True)
    cast_floating(BF16, [x])[0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is FP32


def test_U31_inputs_of_a_kept_module_in_its_own_dtype() -> None:
    norm = nn.LayerNorm(2)
    args = (torch.ones(1, 2, dtype=BF16), torch.tensor(3))
    (x, k), kwargs, given = cast_up(norm, args, {"y": torch.ones(2)})
    assert (x.dtype, k.dtype, kwargs["y"].dtype, given) == (FP32, torch.int64, FP32, BF16)
    assert cast_up(norm, (torch.ones(1, 2),), {})[2] is None
    assert cast_up(norm.double(), (torch.ones(1, 2),), {})[2] is FP32
    assert cast_up(nn.Identity(), (torch.ones(2, dtype=BF16),), {})[0][0].dtype is FP32
