"""Pytrees on one rank: take apart, map, pack, slice, join, move."""

from accelfn.tree.abstract import TensorInformation, initialize_tensors, tree_structure
from accelfn.tree.digest import digest_tensors, split_flat
from accelfn.tree.dtensor import is_dtensor, local_of
from accelfn.tree.local import (
    concatenate,
    convert_to_fp32,
    count_rows,
    find_batch_size,
    find_device,
    listify,
    map_tensors,
    pad_input_tensors,
    send_to_device,
    slice_tensors,
)
from accelfn.tree.pack import (
    Buffer,
    Packed,
    PackSpec,
    flatten_group,
    flatten_tensor,
    pack,
    plan_layout,
    require_tensors,
    unpack,
)
from accelfn.tree.structure import TreeSpec, flatten, is_packed_sequence, leaf_paths

__all__ = (
    "Buffer",
    "PackSpec",
    "Packed",
    "TensorInformation",
    "TreeSpec",
    "concatenate",
    "convert_to_fp32",
    "count_rows",
    "digest_tensors",
    "find_batch_size",
    "find_device",
    "flatten",
    "flatten_group",
    "flatten_tensor",
    "initialize_tensors",
    "is_dtensor",
    "is_packed_sequence",
    "leaf_paths",
    "listify",
    "local_of",
    "map_tensors",
    "pack",
    "pad_input_tensors",
    "plan_layout",
    "require_tensors",
    "send_to_device",
    "slice_tensors",
    "split_flat",
    "tree_structure",
    "unpack",
)
