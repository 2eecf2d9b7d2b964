"""Models that don't fit: a plan of where every tensor lies, loading, offloading, and running."""

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
from accelfn.bigmodel.places import Place, PlaceLike

__all__ = (
    "OffloadedWeightsLoader",
    "Place",
    "PlaceLike",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "id_tensor_storage",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
    "set_module_tensor_to_device",
)
