"""Sizes, device maps and loading of big models."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.bigmodel import (
    align_module_device as align_module_device,
    calculate_maximum_sizes as calculate_maximum_sizes,
    check_device_map as check_device_map,
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    clean_device_map as clean_device_map,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    convert_file_size_to_int as convert_file_size_to_int,
    dtype_byte_size as dtype_byte_size,
    find_tied_parameters as find_tied_parameters,
    get_balanced_memory as get_balanced_memory,
    get_max_layer_size as get_max_layer_size,
    get_max_memory as get_max_memory,
    get_module_leaves as get_module_leaves,
    get_non_persistent_buffers as get_non_persistent_buffers,
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    has_offloaded_params as has_offloaded_params,
    id_tensor_storage as id_tensor_storage,
    infer_auto_device_map as infer_auto_device_map,
    load_checkpoint_in_model as load_checkpoint_in_model,
    load_offloaded_weights as load_offloaded_weights,
    load_state_dict as load_state_dict,
    named_module_tensors as named_module_tensors,
    retie_parameters as retie_parameters,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from accelfn.compat.helpers import (
    is_peft_model as is_peft_model,
)
from accelfn.compat.constants import (
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
