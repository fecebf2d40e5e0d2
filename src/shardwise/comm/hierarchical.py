"""Collectives for CPU ranks of several hosts: shared memory inside a host, the network across.

Ranks of one host are neighbours in the group, equally many on each. Rank ``(h, l)``, the ``l``-th
of host ``h``, belongs to two small groups: its *host*, and its *column*, the ``l``-th rank of
every host. So the network carries each byte to a host once, and not to each of its ranks::

    gather           column: the shards of (0, l) (1, l) ...    then host by host in shared memory
    reduce-scatter   a chain through the column: host 0 adds up its ranks' contributions to the
                     slots of column l, host 1 goes on from there ..., the last host has the totals

The chain keeps the order of the ranks, so a sum has the bits that every other transport gives. It
passes slot by slot, so hosts work at the same time. Adding up inside each host first and the
hosts' sums afterwards would save one of its messages and give other bits on other numbers of hosts.

All ranks first compare what they are about to run, as over gloo alone. Work is done when a call
returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError, DivergenceError, LeftPassError
from .agreement import NO_UNIT, Call, Kind, gather_call, require_reducible, scatter_call, tensor_call
from .arena import Arena
from .collectives import COMBINE, DONE, VARIANT, Collectives, Handle, Reduction
from .exchanges import Messages, Steps
from .failures import explained
from .matched import MatchedCollectives
from .passes import Standing
from .rendezvous import SharedMemoryUnavailable
from .shared_memory import SharedMemoryCollectives

__all__ = ["HierarchicalCollectives", "hosts_in_order"]

#: up to this many bytes an all-reduce gathers all contributions, which is fewer messages
_SMALL = 64 << 10


def hosts_in_order(hosts: Sequence[str]) -> int | None:
    """The number of hosts, where each has equally many ranks, next to each other; else None."""
    lengths = [len(list(ranks)) for _, ranks in groupby(hosts)]
    return len(lengths) if len(lengths) == len(set(hosts)) and len(set(lengths)) == 1 else None


class HierarchicalCollectives(Collectives):
    """Collectives of ``group``, all ranks there are, on ``hosts`` hosts. Making it is collective.

    ``arena``, ``timeout_s``: as for shared memory. Raises ``SharedMemoryUnavailable``, on all ranks
    or on none.
    """

    overlaps = False

    def __init__(self, group: dist.ProcessGroup, hosts: int, arena: Arena | None = None, *,
                 timeout_s: float = dist.default_pg_timeout.total_seconds()) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self._hosts, self._width = hosts, self.size // hosts
        self._host, lane = divmod(self.rank, self._width)
        if self.size != dist.get_world_size():
            raise SharedMemoryUnavailable("the group has only some of the ranks", one_host=False)
        small = _small_groups(group, hosts, self._host, lane, timeout_s)
        self._small = weakref.ref(small)
        inside = _inside(small.host, group, arena, timeout_s)
        if inside is None:
            raise SharedMemoryUnavailable("a host's ranks could not share memory", one_host=False)
        self._inside = inside
        self._across = MatchedCollectives(small.column)

    @property
    def arena(self) -> Arena:
        """The shared memory of this process."""
        return self._inside.arena

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that peers on this host read in place."""
        return self._inside.allocate(numel, dtype, device)

    def all_gather(self, out: Tensor, shard: Tensor, *, tag: int = NO_UNIT) -> Handle:
        call = gather_call(out, shard, self.size, tag)
        with self._attending(call):
            self._agree(call)
            if call.numel:
                self._gather(out.view(-1), shard.view(-1), tag)
        return DONE

    def reduce_scatter(self, out: Tensor, full: Tensor, *, tag: int = NO_UNIT) -> Handle:
        call = scatter_call(out, full, self.size, tag)
        require_reducible("reduce_scatter", full)
        with self._attending(call):
            self._agree(call)
            if call.numel:
                self._chain(call, out.view(-1), full.view(-1), Reduction.SUM)
        return DONE

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM, *, tag: int = NO_UNIT) -> Handle:
        require_reducible("all_reduce", tensor)
        call = tensor_call(Kind.ALL_REDUCE, tensor, tag, VARIANT[reduction])
        with self._attending(call):
            self._agree(call)
            if call.numel * tensor.itemsize > _SMALL:
                self._combine_shares(call, tensor.view(-1), reduction)
            elif call.numel:
                self._combine_whole(call, tensor.view(-1), reduction)
        return DONE

    def broadcast(self, tensor: Tensor, source: int, *, tag: int = NO_UNIT) -> Handle:
        call = tensor_call(Kind.BROADCAST, tensor, tag, source)
        host, lane = divmod(source, self._width)
        with self._attending(call):
            self._agree(call)
            if call.numel and self.rank % self._width == lane:
                self._across.broadcast(tensor, host, tag=tag).wait()
            if call.numel:
                self._inside.broadcast(tensor, lane, tag=tag).wait()
        return DONE

    def barrier(self) -> None:
        call = Call(Kind.BARRIER)
        with self._attending(call):
            self._agree(call)

    def close(self, why: str = "it was closed") -> None:
        self._inside.close(why)
        self._across.close(why)

    def _agree(self, call: Call) -> None:
        self._inside.describe_tag = self._across.describe_tag = self.describe_tag
        while not self._agreed(call):
            continue

    def _agreed(self, call: Call) -> bool:
        """Every rank sees all calls: those of its host, then those of the other hosts."""
        mine = torch.tensor((*call, *self.passes.standing), dtype=torch.int64)
        table = torch.empty(self.size * len(mine), dtype=torch.int64)
        host = torch.empty(self._width * len(mine), dtype=torch.int64)
        self._inside.all_gather(host, mine).wait()
        self._across.all_gather(table, host).wait()
        rows = table.view(self.size, len(mine)).tolist()
        return all(row == rows[0] for row in rows) or self.passes.agreed(
            [Call(*row[: len(call)]) for row in rows], [Standing(*row[len(call) :]) for row in rows], self.rank,
            self.members, self.describe_tag)

    def _gather(self, out: Tensor, shard: Tensor, tag: int) -> None:
        rows = out.view(self._hosts, -1)
        column = self._inside.allocate(self._hosts * shard.numel(), shard.dtype, shard.device)
        arriving = self._across.all_gather(column, shard, tag=tag)
        self._inside.all_gather(rows[self._host], shard, tag=tag)  # meanwhile
        arriving.wait()
        for host, part in enumerate(column.view(self._hosts, -1)):
            if host != self._host:
                self._inside.all_gather(rows[host], part, tag=tag)

    def _combine_whole(self, call: Call, flat: Tensor, reduction: Reduction) -> None:
        parts = flat.new_empty(self.size * call.numel)
        self._gather(parts, flat, call.tag)
        first, *rest = parts.view(self.size, -1)
        flat.copy_(first)
        for part in rest:
            COMBINE[reduction](flat, part, out=flat)

    def _combine_shares(self, call: Call, flat: Tensor, reduction: Reduction) -> None:
        """Each rank combines one share for all, then all gather them."""
        share = -(-call.numel // self.size)
        padded, mine = flat.new_zeros(self.size * share), flat.new_empty(share)
        padded[: call.numel] = flat
        self._chain(call, mine, padded, reduction)
        self._gather(padded, mine, call.tag)
        flat.copy_(padded[: call.numel])

    def _chain(self, call: Call, out: Tensor, full: Tensor, reduction: Reduction) -> None:
        self._across.run(call, partial(self._chain_steps, call.tag, out, full, reduction)).wait()

    def _chain_steps(self, tag: int, out: Tensor, full: Tensor, reduction: Reduction, post: Messages) -> Steps:
        """Each slot of the column, host by host in their order; then its total to whom it belongs."""
        last, totals = self._hosts - 1, full.new_empty(self._hosts, out.numel())
        sent: list[Any] = []
        for place, slot in enumerate(full.view(self._hosts, -1)):
            before = None
            if self._host:
                before = torch.empty_like(out)
                yield post.receive(before, self._host - 1, place)
            self._inside.reduce_after(before, totals[place], slot, reduction, tag=tag)
            towards = place if self._host == last else self._host + 1
            if towards != self._host:
                sent.append(post.send(totals[place], towards, place))
        if self._host == last:
            out.copy_(totals[last])
        else:
            yield post.receive(out, last, self._host)
        yield from sent

    @contextmanager
    def _attending(self, call: Call) -> Iterator[None]:
        """Whoever fails in the middle leaves both its groups, so that nobody waits for it."""
        try:
            yield
        except (DivergenceError, LeftPassError):
            raise  # all ranks have it at the same place, and may go on
        except BaseException as error:
            self._inside.close()
            self._across.leave()
            if (small := self._small()) is not None:
                small.leave()
            if isinstance(error, CommunicationError) or not isinstance(error, RuntimeError):
                raise
            raise explained(error, call, self) from error


class _SmallGroups:
    """The gloo groups of this rank's host and of its column.

    All ranks make all of them, in one order. Making only one's own (``use_local_synchronization``)
    hangs where ranks belong to different numbers of groups, since torch names a group after that number.
    """

    def __init__(self, hosts: int, host: int, lane: int, timeout_s: float) -> None:
        ranks = torch.arange(dist.get_world_size()).view(hosts, -1)
        every = [[_new_group(row, timeout_s) for row in table.tolist()] for table in (ranks, ranks.T)]
        self._groups = [every[0][host], every[1][lane]]

    @property
    def host(self) -> dist.ProcessGroup:
        """The ranks of this host."""
        return self._one(0)

    @property
    def column(self) -> dist.ProcessGroup:
        """The rank at this one's place on every host."""
        return self._one(1)

    def leave(self) -> None:
        """Close the connections: peers in the middle of something hear of it at once."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def _one(self, place: int) -> dist.ProcessGroup:
        if not self._groups:
            raise CommunicationError("this rank left the group after a failure",
                                     remedy="After a lost rank, start the job again.")
        return self._groups[place]


def _new_group(ranks: Sequence[int], timeout_s: float) -> Any:
    """Without a time limit of its own it would wait for half an hour, whatever the job's own limit is."""
    return dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=timeout_s))


# Kept as long as their group: c10d would give a second small group of the same ranks the name, and
# the addresses, of one that was destroyed.
_SMALL_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, _SmallGroups] = weakref.WeakKeyDictionary()


def _small_groups(group: dist.ProcessGroup, hosts: int, host: int, lane: int, timeout_s: float) -> _SmallGroups:
    if group not in _SMALL_GROUPS:
        _SMALL_GROUPS[group] = _SmallGroups(hosts, host, lane, timeout_s)
    return _SMALL_GROUPS[group]


def _inside(host: dist.ProcessGroup, group: dist.ProcessGroup, arena: Arena | None,
            timeout_s: float) -> SharedMemoryCollectives | None:
    """Shared memory of this host's ranks, if that of every host could be set up."""
    made = None
    with suppress(SharedMemoryUnavailable):
        made = SharedMemoryCollectives(host, arena, timeout_s=timeout_s)
    verdicts: list[bool | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(verdicts, made is not None, group=group)
    if all(verdicts):
        return made
    if made is not None:
        made.close()
    return None
