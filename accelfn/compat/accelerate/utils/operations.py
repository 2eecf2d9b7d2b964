"""Trees of tensors, on one rank and across ranks."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import collections.abc as _abc
import typing as _typing

from accelfn.compat.operations import (
    copy_tensor_to_devices as copy_tensor_to_devices,
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    DistributedOperationException as DistributedOperationException,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    gather as gather,
    gather_object as gather_object,
    get_shape as get_shape,
    honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size,
    is_namedtuple as is_namedtuple,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    pad_across_processes as pad_across_processes,
    recursively_apply as recursively_apply,
    reduce as reduce,
    slice_tensors as slice_tensors,
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
)
from accelfn.tree import (
    TensorInformation as TensorInformation,
    concatenate as concatenate,
    convert_to_fp32 as convert_to_fp32,
    find_batch_size as find_batch_size,
    find_device as find_device,
    initialize_tensors as initialize_tensors,
    listify as listify,
    pad_input_tensors as pad_input_tensors,
    send_to_device as send_to_device,
)
import accelfn.tree as _tree
import accelfn.parallel.engines as _engines
from accelfn.compat.missing import refuse as _refuse

get_data_structure: _abc.Callable[..., _typing.Any] = _tree.tree_structure
GatheredParameters: _abc.Callable[..., _typing.Any] = _engines.gathered_parameters


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
