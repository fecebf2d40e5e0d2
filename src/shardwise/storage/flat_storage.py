"""One flat parameter: the memory of a unit's parameters of one kind, sharded and gathered.

    shard    [S]      this rank's slice, in the stored dtype; always there; the user's own
                      parameters are views of it (whole rows)
    buffer   [N * S]  the gathered parameters, in the compute dtype; 0 bytes unless in use;
                      the *leaves* that forward computes with are views of it

The user's parameter keeps its identity because only its ``.data`` is pointed at the shard
(``_point_at_shard``); nothing else ever changes which memory a parameter object shows, except
``widen``/``narrow`` inside ``summon_full_params``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..plan.layout import FlatLayout, ParameterSpec, plan_layout, row_granule
from ..plan.options import Precision
from ..plan.ownership import OwnedParameter
from .flat_buffer import FlatBuffer
from .global_norm import AllReduces, GradientKind
from .last_seen import LastSeen
from .memory_format import MemoryFormat, format_of
from .optimizer_watch import look_again
from .sharded_parameter import enroll
from .tensor_parallel import as_used, local_part
from .visible import Place, Visible

__all__ = ["FLAT", "FlatStorage", "Place", "Visible"]

#: buffer, its tensor, this rank's slot in it, and the leaves
_InUse = tuple[FlatBuffer | None, Tensor, Tensor, list[nn.Parameter]]

#: the index under which a flat parameter itself is enrolled
FLAT = -1


class FlatStorage:
    """A flat parameter of one unit: same stored dtype and same ``requires_grad`` at wrap time."""

    __slots__ = (
        "__weakref__", "_parked", "buffer", "comm", "compute_device", "edits", "filled_by_hand", "formats",
        "full", "hidden", "kind", "last_seen", "layout", "leaves", "own_slot", "owned", "parameters", "place",
        "policy", "pool", "precision", "shard", "shown_by", "stepped", "unit", "visible", "whole", "widened",
    )

    def __init__(
        self,
        unit: str,
        owned: Sequence[OwnedParameter],
        comm: Collectives,
        precision: Precision,
        place: Place,
        *,
        like: FlatStorage | None = None, norm_comm: AllReduces | None = None,
    ) -> None:
        """``owned`` show whole values; or, as copies of those of ``like``, its rows: no traffic then."""
        self.unit = unit
        self.comm, self.kind = comm, like.kind if like else GradientKind.of(norm_comm or comm)
        self.policy = self.precision = precision  # the second is another one in full precision
        self.compute_device, self.pool, self.place = place.device, place.pool, place
        self.owned = list(owned)
        self.parameters: list[nn.Parameter] = [entry.parameter for entry in owned]
        self.formats: list[MemoryFormat] = like.formats if like else [format_of(p) for p in self.parameters]
        self.layout: FlatLayout = like.layout if like is not None else plan_layout(
            [ParameterSpec(e.fqn, shape := tuple(e.parameter.shape), row_granule(shape)) for e in owned],
            comm.size,
            precision.compute_dtype(self.parameters[0].dtype).itemsize,
        )
        self.widened = False  #: a summon_full_params is open on it
        self.edits = 0  #: changes of values that the version of its first visible parameter does not show
        self.filled_by_hand = False  #: did the user give it memory, by ``to_empty``?
        self.whole = self.world_size == 1  #: do the user's parameters show whole values now?
        self.shown_by: list[Any] = []  #: the ``Showing`` of every slot that shows one of its parameters
        self.visible: list[Visible] = []
        self.hidden: list[Visible] = []  # the user's parameters behind a visible flat parameter
        self.stepped: list[Visible] = []  # those of them that an optimizer holds
        self.shard: Tensor = like.renewed() if like is not None else self._take_in(self.parameters[0].dtype)
        self.buffer: FlatBuffer | None
        self.full: Tensor
        self.leaves: list[nn.Parameter]
        self.last_seen = LastSeen()
        self._parked: _InUse | None = None  #: what was in use before the precision changed
        self._show_rows()
        self._make_leaves()
        look_again()

    # ------------------------------------------------------------------ facts
    @property
    def world_size(self) -> int:
        return self.comm.size

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.shard.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.precision.compute_dtype(self.shard.dtype)

    @property
    def on_meta(self) -> bool:
        """Has the shard no memory yet?"""
        return self.shard.is_meta

    @property
    def trainable(self) -> bool:
        """Does any of its parameters want a gradient now?"""
        return any(v.parameter.requires_grad for v in self.visible)

    def local_geometry(self, index: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Offset in the shard, size and strides of this rank's rows of parameter ``index``."""
        span, shape = self.layout.span(index, self.rank), self.layout.parameters[index].shape
        if self.world_size == 1:
            return span.shard_offset, shape, self.formats[index].strides(shape)
        if not shape:
            return span.shard_offset, (span.numel,), (1,)
        row = row_granule(shape)
        size = (span.numel // row, *shape[1:])
        return span.shard_offset, size, self.formats[index].strides(size)

    # ------------------------------------------------------------------ at rest
    def _take_in(self, dtype: torch.dtype) -> Tensor:
        """A new shard with this rank's slices of the whole parameters."""
        with torch.inference_mode(mode=False), torch.no_grad():
            shard = self.new_shard(dtype, self.parameters[0].device)
            for index, parameter in enumerate(self.parameters):
                span = self.layout.span(index, self.rank)
                flat = self.formats[index].flatten(parameter.data)
                shard[span.shard_offset : span.shard_offset + span.numel] = flat[span.start : span.stop]
        return shard

    def _show_rows(self) -> None:
        for index, entry in enumerate(self.owned):
            offset, size, stride = self.local_geometry(index)
            seen = Visible(entry.parameter, entry.fqn, offset, size, stride, (index,))
            self.visible.append(seen)
            enroll(entry.parameter, self, index)
            self.point_at_shard(seen)

    def new_shard(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros [S] on ``device``, or on the host if shards are offloaded, pinned for an accelerator."""
        if device.type == "meta":
            return torch.empty(self.layout.shard_numel, dtype=dtype, device=device)
        if not self.place.offload:
            return self.comm.zeros(self.layout.shard_numel, dtype, device)
        pinned = self.place.pin_memory and self.compute_device.type != "cpu"
        return torch.zeros(self.layout.shard_numel, dtype=dtype, pin_memory=pinned)

    def local_view(self, seen: Visible, base: Tensor | None = None) -> Tensor:
        """The part of ``base`` (default: the shard) that ``seen`` shows."""
        source = self.shard if base is None else base
        return source.as_strided(seen.size, seen.stride, source.storage_offset() + seen.offset)

    def point_at_shard(self, seen: Visible) -> None:
        """The switch of a variable's storage: the user's object shows its rows of the shard.

        ``.data`` is replaced, the object is not, so optimizers, parameter groups and names keep
        meaning what they meant. The old memory (the full parameter at wrap time) is released.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            seen.parameter.data = self.local_view(seen).data
        seen.remember()
        self.last_seen.forget_places()

    def rehome(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move the shard to another stored dtype or device (``model.to(...)`` after wrapping)."""
        with torch.inference_mode(mode=False), torch.no_grad():
            fresh = self.new_shard(dtype, device)
            for seen in self.visible:
                self.local_view(seen, fresh).copy_(seen.parameter.data)
        self.settle_in(fresh)

    def renewed(self, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of the shard in memory of its own, in ``dtype``; for ``settle_in``."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return self.new_shard(dtype or self.shard.dtype, self.shard.device).copy_(self.shard)

    def settle_in(self, fresh: Tensor) -> None:
        """Let ``fresh`` be the shard. The old memory lives on only where the user holds a view of it."""
        device, stays = fresh.device, (fresh.dtype, fresh.device) == (self.shard.dtype, self.shard.device)
        self.shard, self._parked = fresh, None
        if device != self.compute_device and self.compute_device.type == "cpu":
            self.compute_device = device
        for seen in (*self.visible, *self.hidden):
            self.point_at_shard(seen)
        if self.buffer is None or not stays:
            self._make_leaves()

    def show_flat(self, fqn: str, flat: nn.Parameter | None = None) -> nn.Parameter:
        """Make the whole shard one visible parameter (``flat``, or a new one); hide the user's behind it."""
        if flat is None:
            flat = nn.Parameter(self.shard.data, requires_grad=self.parameters[0].requires_grad)
        everything = tuple(range(len(self.parameters)))
        self.hidden = self.visible
        self.visible = [Visible(flat, fqn, 0, (self.layout.shard_numel,), (1,), everything)]
        self.point_at_shard(self.visible[0])
        enroll(flat, self, FLAT)
        return flat

    # ------------------------------------------------------------------ in use
    @property
    def aliased(self) -> bool:
        """One rank, same dtype, same device: the leaves can be views of the shard itself."""
        return (
            self.world_size == 1
            and self.compute_dtype == self.stored_dtype
            and self.shard.device == self.compute_device
        )

    def set_full_precision(self, full: bool) -> None:
        """Use the parameters in the stored dtype, or again as the policy says; only at rest.

        What was in use before is parked and not thrown away: a graph may need its leaves.
        """
        before, self.precision = self.compute_dtype, Precision() if full else self.policy
        if self.compute_dtype is not before:
            parked, self._parked = self._parked, (self.buffer, self.full, self.own_slot, self.leaves)
            if parked is None:
                self._make_leaves()
            else:
                self.buffer, self.full, self.own_slot, self.leaves = parked
                self._tell_faces()

    def _make_leaves(self) -> None:
        self.buffer = None
        self._tell_faces()
        if not self.aliased:
            self.buffer = FlatBuffer(
                self.layout.flat_numel, self.compute_dtype, self.compute_device, self.pool
            )
            self.buffer.allocate()
        with torch.inference_mode(mode=False), torch.no_grad():
            self.full = self.buffer.tensor if self.buffer is not None else self.shard.data
            size = self.layout.shard_numel
            self.own_slot = self.full[self.rank * size : (self.rank + 1) * size]
            self.leaves = [self._make_leaf(index) for index in range(len(self.parameters))]
        if self.buffer is not None:
            self.buffer.free()

    def _make_leaf(self, index: int) -> nn.Parameter:
        shape = self.layout.parameters[index].shape
        view = self.full.as_strided(shape, self.formats[index].strides(shape), self.layout.offsets[index])
        leaf = nn.Parameter(as_used(self.owned[index], view.data), self.parameters[index].requires_grad)
        leaf.__dict__.update(self.parameters[index].__dict__)  # pyright: ignore[reportAttributeAccessIssue]
        return leaf

    def replace_parameter(self, seen: Visible, found: nn.Parameter) -> None:
        """Let ``found`` be the user's object that ``seen`` stands for."""
        seen.parameter = self.parameters[seen.indices[0]] = found
        self._tell_faces()

    def _tell_faces(self) -> None:
        """There are other objects in ``parameters`` or ``leaves``."""
        for showing in self.shown_by:
            for face in showing.faces:
                face.outdated = True

    def fill_leaves(self) -> None:
        """Give the leaves the values that the user's parameters show (whole, inside a summon)."""
        assert self.buffer is not None
        self.buffer.allocate()
        with torch.no_grad():
            for leaf, parameter in zip(self.leaves, self.parameters, strict=True):
                local_part(leaf.data).copy_(parameter.data)

    # ------------------------------------------------------------------ whole values
    def gather_flat(self, shard: Tensor) -> Tensor:
        """``shard`` [S] of every rank, gathered [N * S], in its own dtype, in new memory."""
        if self.world_size == 1:
            return shard.detach().clone()
        full = torch.empty(self.layout.flat_numel, dtype=shard.dtype, device=shard.device)
        self.comm.all_gather(full, shard.detach()).wait()
        return full

    def pick(self, full: Tensor, index: int) -> Tensor:
        """The view of parameter ``index`` in a gathered flat tensor [N * S]."""
        shape = self.layout.parameters[index].shape
        return full.as_strided(
            shape, self.formats[index].strides(shape), full.storage_offset() + self.layout.offsets[index]
        )

    def rows_of(self, index: int, whole: Tensor) -> Tensor:
        """This rank's part of a ``whole`` value of parameter ``index``, 1-D in memory order."""
        span = self.layout.span(index, self.rank)
        return self.formats[index].flatten(whole)[span.start : span.stop]
