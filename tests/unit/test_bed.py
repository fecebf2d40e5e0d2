"""The test bed tells the truth: about ranks, about tensors, about traffic."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.collectives import DONE, Collectives, Reduction
from tests.bed import models, parity, ranks, samples, state
from tests.bed.job import Job
from tests.bed.pool import Bed, describe
from tests.bed.traffic import CountingCollectives, count_collectives


@ranks(2, 3)
@pytest.mark.parametrize("offset", [0, 5])
def test_runs_on_every_rank(rank: int, world: int, offset: int, tmp_path) -> None:
    assert (rank, world) == (dist.get_rank(), dist.get_world_size())
    everyone = [None] * world
    dist.all_gather_object(everyone, (rank + offset, tmp_path))
    assert everyone == [(other + offset, tmp_path) for other in range(world)]
    assert torch.get_num_threads() == 1


class TestMethods:
    @ranks(2)
    def test_runs_too(self, world: int) -> None:
        assert dist.get_world_size() == world


@ranks(2)
@pytest.mark.filterwarnings("ignore:something odd")
def test_filters_reach_the_ranks() -> None:
    samples.warns()


def _run(bed: Bed, function: Callable[..., object], **arguments: int) -> list:
    return bed.run(2, _job(function, **arguments), timeout=60.0, grace=60.0)


def _job(function: Callable[..., object], **arguments: int) -> Job:
    taken = {name: None for name in inspect.signature(function).parameters} | arguments
    return Job.of(function, taken, ["error"])


def test_pool_is_reused(bed: Bed) -> None:
    for extra in range(3):
        assert [report.outcome for report in _run(bed, samples.passes, extra=extra)] == ["passed", "passed"]


def test_every_test_is_seeded(bed: Bed) -> None:
    for _ in range(2):
        assert [report.outcome for report in _run(bed, samples.is_seeded)] == ["passed", "passed"]


def test_a_failing_rank_is_named_with_its_traceback(bed: Bed) -> None:
    text = describe(_run(bed, samples.rank_one_fails))
    assert text.startswith("=== rank 1 failed: Traceback")
    assert "the secret is off" in text
    assert "secret = 41" in text
    assert "printed by rank 1" in text
    assert text.endswith("=== passed on rank 0")
    assert "worker.py" not in text


def test_ranks_left_waiting_are_named_with_their_stacks(bed: Bed) -> None:
    gone, waiting = bed.run(2, _job(samples.leaves_others_waiting), timeout=60.0, grace=0.3)
    assert gone.outcome == "failed" and "rank 0 went away" in gone.text
    assert waiting.outcome == "stuck" and "in leaves_others_waiting" in waiting.text
    assert "other ranks gave one" in waiting.text


def test_a_hung_rank_is_named_with_its_stack_and_replaced(bed: Bed) -> None:
    gone, hung = bed.run(2, _job(samples.hangs), timeout=60.0, grace=0.3)
    assert gone.outcome == "failed"
    assert hung.outcome == "stuck" and "in hangs" in hung.text
    assert [report.outcome for report in _run(bed, samples.passes, extra=0)] == ["passed", "passed"]


def test_a_dead_rank_is_named_with_its_exit_code(bed: Bed) -> None:
    fine, dead = _run(bed, samples.dies)
    assert fine.outcome == "passed"
    assert dead.outcome == "died" and "exit code 7" in dead.text


@pytest.mark.parametrize(("function", "text"), [
    (samples.warns, "UserWarning: something odd"),
    (samples.changes_dtype, "default dtype: was torch.float32, is torch.float64"),
    (samples.fails_in_thread, "in thread quiet: ValueError('nobody hears this')"),
])
def test_what_a_rank_must_not_leave_behind(bed: Bed, function: Callable[..., object], text: str) -> None:
    reports = _run(bed, function)
    assert [report.outcome for report in reports] == ["failed", "failed"]
    assert text in describe(reports)
    assert describe(reports).startswith("=== rank 0, 1 failed")  # said once for both


def test_a_skip_on_the_ranks_is_a_skip(bed: Bed) -> None:
    for report in _run(bed, samples.skips):
        assert (report.outcome, report.text) == ("skipped", "not here")


def test_an_argument_that_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match=r"argument 'lock' of passes cannot be sent to the ranks"):
        Job.of(samples.passes, {"lock": threading.Lock()})


def test_ranks_wants_world_sizes() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ranks()


def test_state_changes_are_listed() -> None:
    before = state.snapshot()
    with torch.no_grad():
        assert state.changes(before, state.snapshot()) == ["grad mode: was True, is False"]
    assert state.changes(before, state.snapshot()) == []


def test_parity_lists_every_difference() -> None:
    ours = {"a": torch.ones(3), "b": torch.zeros(2, 2), "c": torch.ones(2).half(), "extra": torch.ones(1)}
    theirs = {"a": torch.ones(3), "b": torch.tensor([[0.0, 0.0], [0.5, 1.0]]), "c": torch.ones(2),
              "gone": torch.ones(1)}
    with pytest.raises(AssertionError) as caught:
        parity.assert_same_parameters(ours, theirs)
    assert str(caught.value) == (
        "4 parameter faults among 4:\n"
        "  gone: missing\n"
        "  extra: unexpected\n"
        "  b: 2 of 4 elements differ, by at most 1; first at [1, 0]: 0.0, expected 0.5\n"
        "  c: is torch.float16 of shape (2,), expected torch.float32 of shape (2,)")


def test_parity_bitwise_sees_the_sign_of_zero_and_accepts_nan() -> None:
    nan = {"x": torch.tensor([float("nan"), 1.0])}
    parity.assert_same_tensors(nan, {"x": nan["x"].clone()}, bitwise=True)
    parity.assert_same_tensors({"x": torch.tensor(-0.0)}, {"x": torch.tensor(0.0)})
    with pytest.raises(AssertionError, match=r"first at \[\]: -0.0, expected 0.0"):
        parity.assert_same_tensors({"x": torch.tensor(-0.0)}, {"x": torch.tensor(0.0)}, bitwise=True)


def test_parity_of_gradients() -> None:
    ours, theirs = models.TinyMLP(), models.TinyMLP()
    models.loss(theirs, models.points(0, 0)).backward()
    with pytest.raises(AssertionError, match=r"inward\.weight: is None, expected torch\.float32"):
        parity.assert_same_gradients(ours.named_parameters(), theirs.named_parameters())
    models.loss(ours, models.points(0, 0)).backward()
    parity.assert_same_gradients(ours.named_parameters(), theirs.named_parameters(), bitwise=True)


def test_parity_refuses_to_compare_nothing() -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        parity.assert_same_parameters({}, {})


class _Silent(Collectives):
    """A transport of four ranks that moves nothing."""

    rank, size, members = 1, 4, (0, 1, 2, 3)

    def all_gather(self, out, shard, *, tag=0):
        return DONE

    def reduce_scatter(self, out, full, *, tag=0):
        return DONE

    def all_reduce(self, tensor, reduction=Reduction.SUM, *, tag=0):
        return DONE

    def broadcast(self, tensor, source, *, tag=0):
        return DONE

    def barrier(self):
        return None


def test_counting_transport() -> None:
    counting = CountingCollectives(_Silent())
    full, shard = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
    counting.all_gather(full, shard, tag=3)
    counting.reduce_scatter(shard.float(), full.float())
    counting.all_reduce(shard)
    counting.broadcast(shard, 0)
    counting.barrier()
    traffic = counting.traffic
    assert traffic.operations == ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"]
    assert [call.wire_bytes for call in traffic.calls] == [12, 24, 6, 3, 0]
    assert (traffic.calls[0].tag, traffic.calls[0].dtype, traffic.calls[0].numel) == (3, torch.bfloat16, 8)
    assert traffic.count() == 5 and traffic.wire_bytes("all_gather", "reduce_scatter") == 36
    assert (counting.rank, counting.size, counting.members) == (1, 4, (0, 1, 2, 3))


def test_counting_transport_passes_every_method_on() -> None:
    public = {name for name, _ in inspect.getmembers(Collectives, inspect.isfunction) if name[0] != "_"}
    assert public - vars(CountingCollectives).keys() == set()


early = dist.all_reduce


@ranks(2)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # older torch lacks the new names
def test_collectives_are_counted() -> None:
    with count_collectives() as traffic:
        early(torch.ones(6))
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3))
        dist.all_to_all_single(torch.empty(4).half(), torch.ones(4).half())
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
        dist.broadcast(torch.ones(5), src=1)
        dist.barrier()
    dist.all_reduce(torch.ones(1))
    assert traffic.operations == ["all_reduce", "all_gather", "all_gather", "all_to_all", "reduce_scatter",
                                  "broadcast", "barrier"]
    assert [call.numel for call in traffic.calls] == [6, 4, 6, 4, 4, 5, 0]
    assert [call.wire_bytes for call in traffic.calls] == [24, 8, 12, 4, 8, 10, 0]


def test_odd_transformer_is_odd() -> None:
    model = models.OddTransformer()
    kinds = {buffer.dtype for buffer in model.buffers()}
    assert kinds == {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool,
                     torch.complex64}
    assert model.absent is None and "scratch" not in model.state_dict()
    assert model.head.weight is model.embedding.weight
    assert not model.grain.weight.is_contiguous()
    assert model.grain.weight.is_contiguous(memory_format=torch.channels_last)
    assert any(parameter.dim() == 0 for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.int64}
    values = [buffer.reshape(-1)[0].item() for name, buffer in model.named_buffers()
              if buffer.is_floating_point() and "running" not in name and "slope" not in name]
    assert len(set(values)) == len(values)


def test_every_trainable_parameter_gets_a_gradient_and_every_batch_differs() -> None:
    model = models.OddTransformer(seed=1)
    models.loss(model, models.batch(0, 0)).backward()
    assert [name for name, parameter in model.named_parameters()
            if parameter.requires_grad != (parameter.grad is not None)] == []
    assert not torch.equal(models.batch(0, 1)[0], models.batch(1, 0)[0])
    grouped = [id(parameter) for group in models.three_groups(model) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len(models.three_groups(model)) == 3


@pytest.mark.parametrize("source", [models.batch, models.points])
def test_mean_over_ranks_is_the_concatenated_batch(source) -> None:
    model: nn.Module = models.OddTransformer(batch_norm=False) if source is models.batch else models.TinyMLP()
    apart = torch.stack([models.loss(model, source(rank, 4)) for rank in range(3)]).mean()
    torch.testing.assert_close(apart, models.loss(model, models.concatenated(3, 4, source)))


def test_models_are_the_same_every_time() -> None:
    for make in (models.OddTransformer, models.TinyMLP):
        torch.rand(1)  # the surrounding random state must not matter
        parity.assert_same_tensors(make().state_dict(), make().state_dict(), bitwise=True)
    assert {name: buffer.dtype for name, buffer in models.TwinBuffers().named_buffers()} == {
        "level": torch.float32, "inner.level": torch.float64, "inner.inner.level": torch.bfloat16}
