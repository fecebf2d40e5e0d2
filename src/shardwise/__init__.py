"""Fully Sharded Data Parallel training for PyTorch: every parameter stays itself."""

from __future__ import annotations

from . import api as api
from . import checkpoint as checkpoint
from . import comm_hooks as comm_hooks
from . import errors as errors
from . import fully_sharded_data_parallel as fully_sharded_data_parallel
from . import sharded_grad_scaler as sharded_grad_scaler
from . import wrap as wrap
from .engine.stuck import report_stuck
from .frontend.clip import clip_grad_norm, clip_grad_value
from .frontend.communication import share_comm_ctx
from .frontend.composable import fully_shard
from .frontend.execution import group_by_execution
from .frontend.forecast import Forecast, UnitForecast, forecast
from .frontend.full_precision import full_precision
from .frontend.materialise import materialise
from .frontend.module import FSDPModule, UnshardHandle
from .frontend.numbers import check_numbers, compare_replicas, deterministic
from .frontend.order import check_order
from .frontend.owners import OwnerExchange
from .frontend.report import memory_of, observe, plan_of
from .frontend.scaler import ShardedGradScaler
from .frontend.streamed import streamed_step
from .frontend.summon import iter_units_full, summon_full_params
from .frontend.trace import trace
from .frontend.whole import register_fsdp_forward_method
from .frontend.whole_optimizers import watch_optimizers
from .frontend.wrapper import FullyShardedDataParallel
from .plan.execution import ExecutionGroup, ExecutionGroups
from .plan.options import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from .plan.state_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .storage.sharded_parameter import FlatParameter, ShardedParameter, is_sharded

__version__ = "0.1.0"

watch_optimizers()

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "ExecutionGroup",
    "ExecutionGroups",
    "FSDPModule",
    "FlatParameter",
    "Forecast",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OwnerExchange",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedParameter",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnitForecast",
    "UnshardHandle",
    "check_numbers",
    "check_order",
    "clip_grad_norm",
    "clip_grad_value",
    "compare_replicas",
    "deterministic",
    "forecast",
    "full_precision",
    "fully_shard",
    "group_by_execution",
    "is_sharded",
    "iter_units_full",
    "materialise",
    "memory_of",
    "observe",
    "plan_of",
    "register_fsdp_forward_method",
    "report_stuck",
    "share_comm_ctx",
    "streamed_step",
    "summon_full_params",
    "trace",
]
