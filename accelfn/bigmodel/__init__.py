"""Models that don't fit: a plan of where every tensor lies, loading, offloading, and running."""

from accelfn.bigmodel.offload.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    read_offload,
    undispatch,
)
from accelfn.bigmodel.offload.stream import StreamFacts
from accelfn.bigmodel.places import Place, PlaceLike
from accelfn.bigmodel.plan.budgets import (
    MaxMemory,
    convert_file_size_to_int,
    get_balanced_memory,
    get_max_memory,
)
from accelfn.bigmodel.plan.clean import clean_device_map
from accelfn.bigmodel.plan.maps import (
    DeviceMap,
    check_device_map,
    infer_auto_device_map,
    plan_named_map,
    resolve_device_map,
)
from accelfn.bigmodel.plan.picture import draw_device_plan, draw_device_plan_html, draw_device_plan_svg
from accelfn.bigmodel.plan.plan import (
    DevicePlan,
    PlacedLeaf,
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
from accelfn.bigmodel.plan.steps import fallback_allocate, get_module_size_with_ties
from accelfn.bigmodel.plan.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from accelfn.bigmodel.source import read_source

__all__ = (
    "AnyDtype",
    "CustomDtype",
    "DeviceMap",
    "DevicePlan",
    "LeafKind",
    "LeafShape",
    "MaxMemory",
    "ModelShape",
    "ModuleShape",
    "Place",
    "PlaceLike",
    "PlacePlan",
    "PlacedLeaf",
    "PlanOptions",
    "StreamFacts",
    "TensorCopy",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "cpu_offload",
    "disk_offload",
    "dispatch_model",
    "draw_device_plan",
    "draw_device_plan_html",
    "draw_device_plan_svg",
    "dtype_byte_size",
    "fallback_allocate",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "infer_auto_device_map",
    "plan_device_map",
    "plan_named_map",
    "read_offload",
    "read_shape",
    "read_source",
    "resolve_device_map",
    "retie_parameters",
    "shape_from_leaves",
    "undispatch",
)
