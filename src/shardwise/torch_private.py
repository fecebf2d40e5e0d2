"""Every private name of torch that shardwise uses, each with its reason: a new torch release is checked here."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack, temporarily_pop_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operation, with no public name
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "NO_HOOKS", "AgreeingGradScaler", "TorchDispatchMode", "WeakIdKeyDictionary", "Wish", "allow_gradient_dtype",
    "bare_tensor", "base_of", "buffer_table", "foreach_add", "foreach_copy", "foreach_norm",
    "forget_foreach_supported", "gradient_dtype", "gradient_hooks", "group_timeout", "has_levels",
    "hook_gradient", "ignored_by_ddp", "in_backward", "in_tracing", "is_persistent_buffer", "is_view", "levels_of",
    "load_hook_count", "made_after", "mark_foreach_supported", "never_traced", "no_gradients",
    "no_torch_function", "outside_transforms", "passed_through", "queue_after_backward", "quick_gather",
    "quick_reduce_scatter", "run_gradient_hooks", "run_post_accumulate_hooks", "scaler_check", "swap_storage",
    "torch_spreads", "torch_wants_whole", "transform_under_way", "under_way", "without_torch_function",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
Wish = tuple[nn.Module, bool]

_GATHER, _REDUCE_SCATTER = AllgatherOptions(), ReduceScatterOptions()
_GATHER.asyncOp = _REDUCE_SCATTER.asyncOp = True


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has finished, by the engine's queue (no public way)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]


def in_backward() -> bool:
    """Is an autograd backward pass running on this thread? (No public equivalent.)"""
    return torch._C._current_graph_task_id() != -1


#: the dict in which a module keeps its buffers; a wrapper has the same one, which tells them as one
buffer_table: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Does a checkpoint hold buffer ``name`` of ``module``? (Modules tell only by their whole state dict.)"""
    return name not in module._non_persistent_buffers_set


def load_hook_count(module: nn.Module) -> int:
    """How many hooks may change what is loaded into ``module`` itself. (No public list.)"""
    return len(module._load_state_dict_pre_hooks)


#: is a tensor a differentiable view, and of which other one? After an in-place change autograd goes through that
is_view: Callable[[Tensor], bool] = Tensor._is_view
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")


def made_after(node: Any, other: Any) -> bool:
    """Was the graph node ``node`` made later than ``other``? (Nodes have no public number.)"""
    return node._sequence_nr() > other._sequence_nr()


def hook_gradient(tensor: Tensor, node: Any, hook: Callable[[Tensor], None]) -> bool:
    """Call ``hook`` with each gradient of ``tensor``, which came from ``node`` of the graph. False if it has hooks.

    The public ``register_hook`` makes a handle at each call, to take the hook away with, which takes longer.
    """
    if tensor._backward_hooks is not None:
        return False
    hooks: Any = OrderedDict({"shardwise": hook})  # a user's own may join it
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)
    return True


_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
#: the innermost of ``torch.func``'s transforms (vmap, grad …) that runs, or None
transform_under_way: Any = _functorch.peek_interpreter_stack


def outside_transforms(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` outside of transforms (no public pause)."""
    with temporarily_clear_interpreter_stack():
        return function(*args)


def has_levels() -> bool:
    """May a tensor be another one outside of a transform, or have a tangent?"""
    return forward_ad._current_level >= 0 or transform_under_way() is not None


def levels_of(tensor: Tensor) -> list[Tensor]:
    """``tensor``, its tangent, and what they are outside of each transform of ``torch.func``: each has a graph."""
    found, transform = [tensor], transform_under_way()
    forward_mode = transform is None or transform.key() == _functorch.TransformType.Jvp
    if forward_mode and forward_ad._current_level >= 0:
        found += [tangent for tangent in forward_ad.unpack_dual(tensor)[1:] if tangent is not None]
    if transform is not None:
        inner = map(_functorch.get_unwrapped, filter(_functorch.is_functorch_wrapped_tensor, found))
        with temporarily_pop_interpreter_stack():
            found += chain.from_iterable(map(levels_of, [*inner]))
    return found


def under_way(*functions: Callable[..., Any]) -> bool:
    """Is a call of one of ``functions`` under way on this thread? For those that tell nobody what they do."""
    return _frame_of(*[inspect.unwrap(function).__code__ for function in functions]) is not None


def ignored_by_ddp() -> set[str] | None:
    """What a ``DistributedDataParallel`` that is being made on this thread leaves alone; None: there is none."""
    frame = _frame_of(nn.parallel.DistributedDataParallel._build_params_for_reducer.__code__)
    return None if frame is None else frame.f_locals["self"].parameters_to_ignore


def _frame_of(*codes: CodeType) -> FrameType | None:
    """The innermost call of one of ``codes`` on this thread."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def in_tracing() -> bool:
    """Are operations recorded into a graph (``make_fx``), on the tensors that they are run with?"""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def never_traced(function: _Function) -> _Function:
    """Let compiled regions run ``function``, and all that it calls, as it is: the mark is on the code itself, while
    the public ``torch.compiler.disable`` costs a wrapper at every call, compiled or not, and loads the compiler.
    """
    return _marked(function, torch._C._dynamo.eval_frame._FrameAction.SKIP)  # pyright: ignore[reportAttributeAccessIssue]


def passed_through(function: _Function) -> _Function:
    """Compile nothing of ``function`` itself, but what it calls."""
    return _marked(function, torch._C._dynamo.eval_frame._FrameAction.DEFAULT)  # pyright: ignore[reportAttributeAccessIssue]


def _marked(function: _Function, inside: Any) -> _Function:
    machinery: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    skip = machinery._FrameAction.SKIP
    machinery.set_code_exec_strategy(function.__code__, machinery._FrameExecStrategy(skip, inside))
    return function


#: ``a, b``: exchange the memory of two storages, whose views stay valid; None where this torch cannot. Lets a
#: freed storage take memory that another one gave back, without asking the operating system for pages.
swap_storage: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


def mark_foreach_supported(kind: type[Tensor]) -> None:
    """Let torch's optimizers use their foreach and fused forms for ``kind``: they compare exact types with a list."""
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def forget_foreach_supported(kind: type[Tensor]) -> None:
    """The counterpart: no tensor of ``kind`` is made any longer."""
    if kind in _foreach_supported_types:
        _foreach_supported_types.remove(kind)


#: of a parameter: the tables of the user's hooks that are run with its gradient; ``NO_HOOKS`` without any
gradient_hooks: Callable[[nn.Parameter], tuple[Any, Any]] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
NO_HOOKS = (None, None)


def run_gradient_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Call the user's ``parameter.register_hook`` functions (no public list) on a gradient that the engine delivers."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        if changed is not None:
            gradient = changed
    return gradient


def run_post_accumulate_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Call the user's ``register_post_accumulate_grad_hook`` functions (no public list either)."""
    for parameter in parameters:
        for hook in tuple((gradient_hooks(parameter)[1] or {}).values()):
            hook(parameter)


#: of a parameter: the dtype that its ``.grad`` must have; None: any
gradient_dtype: Callable[[nn.Parameter], torch.dtype | None] = attrgetter("grad_dtype")


def allow_gradient_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let ``parameter.grad`` have a dtype other than the parameter's."""
    parameter.grad_dtype = dtype  # pyright: ignore[reportAttributeAccessIssue]


#: a context in which tensor subclasses are treated as plain tensors (cheap, no public name)
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass


def quick_gather(group: Any, out: Tensor, shard: Tensor) -> Any:
    """``group``'s own all-gather, not waited for: the public one checks and logs for tens of microseconds each time."""
    return group._allgather_base(out, shard, _GATHER)


def quick_reduce_scatter(group: Any, out: Tensor, full: Tensor) -> Any:
    """``group``'s own reduce-scatter (sum), for the same reason."""
    return group._reduce_scatter_base(out, full, _REDUCE_SCATTER)


class no_gradients:
    """``torch.no_grad()`` for hot paths: the same switch, at a fifth of the cost."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        if self._before:
            torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        if self._before:
            torch._C._set_grad_enabled(True)


#: ``targets, sources``: copy each source to its target, casts included, in one call (the public form is a loop)
foreach_copy: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
#: the same, added
foreach_add: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_


#: what torch's ``clip_grad_norm_`` calls for a list of gradients
foreach_norm: Any = torch._foreach_norm
#: with what ``torch.amp.GradScaler`` unscales and looks for infinities
scaler_check: Any = torch._amp_foreach_non_finite_check_and_unscale_


def group_timeout(group: Any, device: torch.device) -> float:
    """Seconds that ``group`` waits for a rank. What its maker chose has no public reader."""
    return group._get_backend(device).options._timeout.total_seconds()


def bare_tensor(kind: type[Tensor], like: Tensor, shape: tuple[int, ...], requires_grad: bool) -> Any:
    """A tensor of class ``kind`` without memory: it only states ``shape``, and ``like``'s dtype and device."""
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "requires_grad": requires_grad}
    return Tensor._make_wrapper_subclass(kind, shape, **options)


#: a class with this ``__torch_function__`` sees operations once, in ``__torch_dispatch__``
no_torch_function: Any = torch._C._disabled_torch_function_impl


def torch_wants_whole() -> Wish | None:
    """Of which model ``torch.distributed.checkpoint.state_dict`` makes a full state dict on this thread now, and
    does only rank 0 keep it? It has no place to say so: it calls ``state_dict()`` and gathers ``DTensor``s alone.
    """
    found = _in_helper("_get_model_state_dict", "_get_optim_state_dict")
    return (found["model"], found["info"].cpu_offload) if found and found["info"].full_state_dict else None


def torch_spreads() -> bool:
    """Does ``torch.distributed.checkpoint.state_dict`` load into a model what only rank 0 has?"""
    return (found := _in_helper("_load_model_state_dict")) is not None and found["info"].broadcast_from_rank0


def _in_helper(*names: str) -> dict[str, Any] | None:
    """The variables of one of torch's checkpoint helpers that is under way."""
    helpers = sys.modules.get("torch.distributed.checkpoint.state_dict")
    codes = [inspect.unwrap(getattr(helpers, name)).__code__ for name in names if getattr(helpers, name, None)]
    return frame.f_locals if codes and (frame := _frame_of(*codes)) is not None else None


class AgreeingGradScaler(torch.amp.GradScaler):
    """``GradScaler`` with a say in which infinities were found (no public way); it takes fp16 gradients too."""

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of ``optimizer`` are about to be looked at."""

    def agree(self, found: dict[torch.device, Tensor], device: torch.device) -> None:
        """Change ``found``: for each device of gradients a number that is positive after an infinity."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        self.begin(optimizer)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        self.agree(found, inv_scale.device)
        return found
