"""Prepare, compute in mixed precision, accumulate, clip, step."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from types import MappingProxyType as _MappingProxyType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from accelfn.lazy import find_name as _find_name, list_names as _list_names
from accelfn.parallel.strategies.precision import (
    MixedPrecisionForward as MixedPrecisionForward,
    autocast as autocast,
)
from accelfn.training.window import (
    accumulate as accumulate,
    no_sync as no_sync,
    trigger_sync_in_backward as trigger_sync_in_backward,
)
from accelfn.training.backward_pass import (
    backward as backward,
    forward as forward,
    forward_backward as forward_backward,
    lomo_backward as lomo_backward,
)
from accelfn.training.functional_optimizers import (
    FunctionalOptimizer as FunctionalOptimizer,
    clip_by_global_norm as clip_by_global_norm,
    ema_update as ema_update,
    functional as functional,
    masked as masked,
)
from accelfn.training.join import join_uneven_inputs as join_uneven_inputs
from accelfn.training.local_sgd import (
    LocalSGDState as LocalSGDState,
    average_parameters as average_parameters,
    local_sgd_step as local_sgd_step,
)
from accelfn.training.loss import Loss as Loss
from accelfn.training.memory import (
    clear_device_cache as clear_device_cache,
    close_engines as close_engines,
    find_executable_batch_size as find_executable_batch_size,
    is_out_of_memory as is_out_of_memory,
    release_memory as release_memory,
)
from accelfn.training.placement import verify_device_map as verify_device_map
from accelfn.training.preparation import (
    prepare as prepare,
    prepare_model as prepare_model,
    prepare_optimizer as prepare_optimizer,
    prepare_scheduler as prepare_scheduler,
)
from accelfn.training.pure_step import (
    PureOptimizer as PureOptimizer,
    PureTrainState as PureTrainState,
)
from accelfn.training.scaler import (
    StepState as StepState,
    init_scaler as init_scaler,
    rescale_gradients as rescale_gradients,
    step_was_skipped as step_was_skipped,
    unscale_gradients as unscale_gradients,
    update_scaler as update_scaler,
)
from accelfn.training.step import (
    clip_grad_norm_ as clip_grad_norm_,
    clip_grad_value_ as clip_grad_value_,
    optimizer_step as optimizer_step,
    scheduler_step as scheduler_step,
)
from accelfn.training.train_step import (
    TrainState as TrainState,
    init_train_state as init_train_state,
    make_train_step as make_train_step,
)
from accelfn.training.unwrap import unwrap_model as unwrap_model
from accelfn.training.gradients import value_and_grad as value_and_grad
from accelfn.training.metrics import StepMetrics as StepMetrics

if _TYPE_CHECKING:  # loaded when one is asked for
    from accelfn.parallel.engines.megatron import (
        avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
        gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    )
    from accelfn.training.layout_check import (
        LayoutReport as LayoutReport,
        verify_layout as verify_layout,
    )
    from accelfn.training.megatron import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader

_LAZY = _MappingProxyType(
    {
        "accelfn.parallel.engines.megatron": (
            "avg_losses_across_data_parallel_group",
            "gather_across_data_parallel_groups",
        ),
        "accelfn.training.layout_check": ("LayoutReport", "verify_layout"),
        "accelfn.training.megatron": ("MegatronLMDummyDataLoader",),
    }
)


def __getattr__(name: str) -> object:
    return _find_name(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return _list_names(__name__, _LAZY)
