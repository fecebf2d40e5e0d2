"""``FullyShardedDataParallel``: the wrapper front end.

The signature follows ``torch.distributed.fsdp.FullyShardedDataParallel``; changing the import is
the whole migration.

The wrapper is a second face of the module that it wraps, not a level above it: both objects
share the dicts in which a module keeps its parameters, buffers, children and hooks. So names
never carry a prefix, at any depth, in ``named_parameters``, ``named_buffers``, ``state_dict`` or
``load_state_dict``, whoever asks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.model_state import install
from ..checkpoint.model_tensors import clean_name
from ..comm.mesh import transports
from ..engine.build import build_unit
from ..engine.hooks import alias, unit_of
from ..errors import LifecycleError
from ..plan.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from ..plan.state_options import StateDictType
from ..torch_private import passed_through
from .clip import clip_grad_norm
from .comm_hooks import CommHookMethods
from .copying import copy_module, refuse_pickling
from .ignored import ignored_by_states
from .materialise import LeftToOuter, materialise_with
from .module import before_naming, session_at, unit_at
from .nesting import wrap_below
from .placing import all_on_meta, move_to_device, sync_states
from .state_methods import StateDictMethods
from .summon import summon_full_params
from .whole import apply_to_whole
from .wrapper_options import WrapperOptions, check_options, choices_of, groups_of, initialiser_of
from .wrapping import warn_without_forward

__all__ = ["FullyShardedDataParallel"]

# what a module keeps in its own dict, and shares with its wrapper
_SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)


class FullyShardedDataParallel(StateDictMethods, CommHookMethods, nn.Module):
    """Shards ``module`` over the ranks of a process group. The last argument is not torch's.

    Args:
        module: what to shard; its own object stays reachable as ``.module``.
        process_group: a group, or for hybrid strategies a pair (shard group, replicate group).
        sharding_strategy: default ``FULL_SHARD``.
        cpu_offload: keep shards on the host.
        auto_wrap_policy: which submodules become units of their own.
        backward_prefetch: when the next unit's gather starts in backward.
        mixed_precision: dtypes in use, on the wire and of buffers.
        ignored_modules, ignored_states: what is left alone.
        param_init_fn: materialises a module from the meta device; called for each such module.
        device_id: move the module there before sharding.
        sync_module_states: broadcast parameters and buffers from the group's first rank.
        forward_prefetch: start the next unit's gather early in forward too (static graphs).
        limit_all_gathers: bound how many units are gathered ahead.
        use_orig_params: show the user's own parameters (True), or one flat parameter for each
            kind in a unit (False).
        device_mesh: in place of ``process_group``.
        allow_skipped_units: on the root: ranks may run different units, as in a mixture of experts.

    Raises:
        ConfigurationError, OptionTypeError: bad input; nothing was changed.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        allow_skipped_units: bool = False,
    ) -> None:
        options = WrapperOptions(
            process_group, sharding_strategy or ShardingStrategy.FULL_SHARD, cpu_offload, backward_prefetch,
            mixed_precision, param_init_fn, device_id, sync_module_states, forward_prefetch,
            limit_all_gathers, use_orig_params, device_mesh, allow_skipped_units,
        )
        check_options(module, options, auto_wrap_policy)
        ignored, ignored_parameters = ignored_by_states(
            module, ignored_modules, ignored_states, FullyShardedDataParallel)
        if isinstance(module, FullyShardedDataParallel) or unit_of(module) is not None:
            raise LifecycleError("the module is sharded already", unit=type(module).__name__,
                                 remedy="Wrap each module once.")
        warn_without_forward(module)
        if auto_wrap_policy is not None:
            wrap_below(module, options, auto_wrap_policy, (ignored, ignored_parameters),
                       FullyShardedDataParallel)
        self._shard(module, options, (ignored, ignored_parameters))

    def _shard(self, module: nn.Module, options: WrapperOptions,
               ignored: tuple[set[nn.Module], set[nn.Parameter]]) -> None:
        """Make what is left of ``module`` a unit. One that is on meta gets its values after that."""
        device = move_to_device(module, options.device_id, *ignored)
        how = initialiser_of(options, device, *ignored)
        late = not options.sync_module_states and all_on_meta(module, *ignored)
        if not late:
            materialise_with(module, how)
        both = transports(groups_of(options), device)
        if options.sync_module_states:
            sync_states(module, [c for c in both if c is not None], *ignored)
        unit = build_unit([module], choices_of(options, both, device, ignored))
        install(unit, StateDictType.FULL_STATE_DICT, snapshot=True)
        self._adopt(module)
        alias(self, module)
        if late and not isinstance(options.param_init_fn, LeftToOuter):
            materialise_with(self, how)

    def _adopt(self, module: nn.Module) -> None:
        """Become the second face of ``module``."""
        nn.Module.__init__(self)
        for name in _SHARED:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["_wrapped"] = module
        self.training = module.training

    # ------------------------------------------------------------------ the wrapped module
    @property
    def module(self) -> Any:
        """The wrapped module itself."""
        return self.__dict__["_wrapped"]

    @property
    def _fsdp_wrapped_module(self) -> Any:
        """The name under which code written for torch's wrapper looks for the wrapped module."""
        return self.__dict__["_wrapped"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Parameter, nn.Module)) or name in self._buffers or name in self._modules:
            setattr(self.__dict__["_wrapped"], name, value)
        else:
            super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.__dict__["_wrapped"][key]

    def __len__(self) -> int:
        return len(self.__dict__["_wrapped"])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__["_wrapped"])

    def __bool__(self) -> bool:
        return True

    @passed_through
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module; its hooks gather and free."""
        return self.__dict__["_wrapped"](*args, **kwargs)

    def named_modules(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and the wrapped module under one name, then everything below.

        Where duplicates stay, only the wrapped module: both register the same parameters.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
            yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the wrapped module, without checkpoint wrappers; after a failed backward, at rest."""
        before_naming(self.module, kwargs)
        yield from ((clean_name(name), p) for name, p in super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The same for buffers."""
        yield from ((clean_name(name), b) for name, b in super().named_buffers(*args, **kwargs))

    def train(self, mode: bool = True) -> FullyShardedDataParallel:
        """Set the training mode here and below."""
        self.training = mode
        self.module.train(mode)
        return self

    @staticmethod
    def summon_full_params(
        module: nn.Module, recurse: bool = True, writeback: bool = True, rank0_only: bool = False,
        offload_to_cpu: bool = False, with_grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """``shardwise.summon_full_params``, under the name that torch's wrapper has for it."""
        return summon_full_params(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """``nn.Module.apply`` where ``fn`` sees whole parameters, one unit at a time. A collective."""
        apply_to_whole(self.module, fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Another sharded model of the same layout; inside ``summon_full_params`` an unsharded one."""
        module = copy_module(self.module, memo)
        if unit_of(module) is None:
            memo[id(self)] = module
            return module
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied._adopt(module)
        own = {name: value for name, value in self.__dict__.items() if name not in (*_SHARED, "_wrapped")}
        copied.__dict__.update(copy.deepcopy(own, memo))
        alias(copied, module)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_pickling(self.module)

    def _apply(self, fn: Any, recurse: bool = True) -> FullyShardedDataParallel:
        unit = unit_of(self.module)
        if unit is not None and not unit.uses:
            unit.come_to_rest()
        self.module._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.module._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.module._load_from_state_dict(*args)

    def extra_repr(self) -> str:
        return f"wrapping {type(self.module).__name__}"

    # ------------------------------------------------------------------ controls
    def check_is_root(self) -> bool:
        """Is this the outermost sharded module? Starts the session if no forward has run yet."""
        return session_at(self.module).root is unit_at(self.module)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers at and below ``module``; with ``root_only`` those under no other wrapper."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        below = {inner for outer in found for inner in outer.modules() if inner is not outer}
        return [wrapper for wrapper in found if wrapper not in below]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up on each rank, unsent, until the first backward outside."""
        session = session_at(self.module)
        if session.root is not unit_at(self.module):
            raise LifecycleError("no_sync must be called on the root", unit=unit_at(self.module).name,
                                 remedy="Call it on the outermost wrapper.")
        before = [(unit, unit.settings.sync_gradients) for unit in session.units]
        for unit, _ in before:
            unit.settings.sync_gradients = False
        try:
            yield
        finally:
            for unit, sync in before:
                unit.settings.sync_gradients = sync

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``.

        Returns the norm before scaling, 0-d, in the gradients' widest dtype. Every rank must
        call it, on the root. Warns and returns a zero fp32 norm where there are no gradients.
        """
        session = session_at(self.module)
        if session.root is not unit_at(self.module):
            raise LifecycleError("clip_grad_norm_ must be called on the root", unit=unit_at(self.module).name,
                                 remedy="Call it on the outermost wrapper.")
        return clip_grad_norm(self.module.parameters(), max_norm, norm_type,
                              error_if_nonfinite=error_if_nonfinite)
