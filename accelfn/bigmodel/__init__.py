"""Models that don't fit: a plan of where every tensor lies, loading, offloading, and running."""

from accelfn.bigmodel.empty import (
    init_empty_weights,
    init_on_device,
)
from accelfn.bigmodel.estimate import (
    DtypeEstimate,
    MemoryEstimate,
    TrainingEstimate,
    estimate_memory,
)
from accelfn.bigmodel.estimate_picture import (
    draw_estimate,
    draw_estimate_html,
    draw_estimate_svg,
)
from accelfn.bigmodel.hooks.align import (
    AlignDevicesHook,
)
from accelfn.bigmodel.hooks.aligned import (
    align_module_device,
    has_offloaded_params,
)
from accelfn.bigmodel.hooks.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from accelfn.bigmodel.hooks.casting import (
    LayerwiseCastingHook,
    attach_layerwise_casting_hooks,
)
from accelfn.bigmodel.hooks.cpu_offload import (
    CpuOffload,
    UserCpuOffloadHook,
    cpu_offload_with_hook,
)
from accelfn.bigmodel.hooks.model_hook import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelfn.bigmodel.hooks.real_state import (
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
)
from accelfn.bigmodel.load.checkpoint import (
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_state_dict,
)
from accelfn.bigmodel.load.offload_files import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accelfn.bigmodel.load.placing import (
    id_tensor_storage,
    named_module_tensors,
    set_module_tensor_to_device,
)
from accelfn.bigmodel.offload.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    read_offload,
    undispatch,
)
from accelfn.bigmodel.offload.stream import (
    StreamFacts,
)
from accelfn.bigmodel.pipeline.pippy import (
    prepare_pippy,
)
from accelfn.bigmodel.pipeline.prepare import (
    plan_pipeline,
    prepare_pipeline,
)
from accelfn.bigmodel.pipeline.run import (
    Pipeline,
)
from accelfn.bigmodel.places import (
    Place,
    PlaceLike,
)
from accelfn.bigmodel.plan.budgets import (
    MaxMemory,
    convert_file_size_to_int,
    get_balanced_memory,
    get_max_memory,
)
from accelfn.bigmodel.plan.clean import (
    clean_device_map,
)
from accelfn.bigmodel.plan.maps import (
    DeviceMap,
    check_device_map,
    infer_auto_device_map,
    plan_named_map,
    resolve_device_map,
)
from accelfn.bigmodel.plan.picture import (
    draw_device_plan,
    draw_device_plan_html,
    draw_device_plan_svg,
)
from accelfn.bigmodel.plan.plan import (
    DevicePlan,
    PlacePlan,
    PlanOptions,
    TensorCopy,
    plan_device_map,
)
from accelfn.bigmodel.plan.shape import (
    LeafKind,
    LeafShape,
    ModelShape,
    ModuleShape,
    read_shape,
    shape_from_leaves,
)
from accelfn.bigmodel.plan.sizes import (
    AnyDtype,
    CustomDtype,
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_max_layer_size,
    get_module_leaves,
    get_non_persistent_buffers,
)
from accelfn.bigmodel.plan.steps import (
    fallback_allocate,
    get_module_size_with_ties,
)
from accelfn.bigmodel.plan.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from accelfn.bigmodel.quantize.bnb import (
    has_4bit_bnb_layers,
)
from accelfn.bigmodel.quantize.config import (
    BnbQuantizationConfig,
    TorchaoQuantizationConfig,
)
from accelfn.bigmodel.quantize.load import (
    load_and_quantize_model,
)
from accelfn.bigmodel.source import (
    read_source,
)

__all__ = (
    "AlignDevicesHook",
    "AnyDtype",
    "BnbQuantizationConfig",
    "CpuOffload",
    "CustomDtype",
    "DeviceMap",
    "DevicePlan",
    "DtypeEstimate",
    "LayerwiseCastingHook",
    "LeafKind",
    "LeafShape",
    "MaxMemory",
    "MemoryEstimate",
    "ModelHook",
    "ModelShape",
    "ModuleShape",
    "OffloadedWeightsLoader",
    "Pipeline",
    "Place",
    "PlaceLike",
    "PlacePlan",
    "PlanOptions",
    "PrefixedDataset",
    "SequentialHook",
    "StreamFacts",
    "TensorCopy",
    "TorchaoQuantizationConfig",
    "TrainingEstimate",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "draw_device_plan",
    "draw_device_plan_html",
    "draw_device_plan_svg",
    "draw_estimate",
    "draw_estimate_html",
    "draw_estimate_svg",
    "dtype_byte_size",
    "estimate_memory",
    "extract_submodules_state_dict",
    "fallback_allocate",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_4bit_bnb_layers",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "plan_device_map",
    "plan_named_map",
    "plan_pipeline",
    "prepare_pipeline",
    "prepare_pippy",
    "read_offload",
    "read_shape",
    "read_source",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "resolve_device_map",
    "retie_parameters",
    "save_offload_index",
    "set_module_tensor_to_device",
    "shape_from_leaves",
    "undispatch",
)
