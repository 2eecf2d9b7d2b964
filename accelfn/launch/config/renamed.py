"""What Accelerate calls otherwise."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ("RENAMED",)

#: Keys of Accelerate, of any version, that are called otherwise here.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "use_cpu": "cpu",
        "tpu_use_cluster": "tpu_cluster",
        "tpu_env": "env",
        "tpu_vm": "vm",
        "fp8_amax_history_length": "fp8_amax_history_len",
        "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
        "fp8_optimization_level": "fp8_opt_level",
        "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
        "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
        "profile": "sagemaker_profile",
        "region": "sagemaker_region",
        "ec2_instance_type": "sagemaker_ec2_instance_type",
        "iam_role_name": "sagemaker_iam_role_name",
        "image_uri": "sagemaker_image_uri",
        "base_job_name": "sagemaker_base_job_name",
        "pytorch_version": "sagemaker_pytorch_version",
        "transformers_version": "sagemaker_transformers_version",
        "py_version": "sagemaker_py_version",
    }
)
