"""What is said of a name of Accelerate that isn't here: which one, and what to use instead."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

from accelfn.launch.kinds import suggest

_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "Pass fsdp_plugin to Accelerator, and save by save_state, save_model or get_state_dict.": """
            save_fsdp_model load_fsdp_model save_fsdp_optimizer load_fsdp_optimizer fsdp2_prepare_model
            fsdp2_load_full_state_dict fsdp2_switch_optimizer_parameters fsdp2_apply_ac
            fsdp2_canonicalize_names get_fsdp2_grad_scaler ensure_weights_retied
        """,
        "Pass deepspeed_plugin to Accelerator.": """
            map_pytorch_optim_to_deepspeed get_active_deepspeed_plugin deepspeed_required
        """,
        "Pass megatron_lm_plugin to Accelerator.": """
            MegatronEngine MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper
            add_model_config_to_megatron_parser
        """,
        "accelfn launch builds the commands and variables of a launch: see --dry_run.": """
            PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_sagemager_args_inputs
            prepare_simple_launcher_cmd_env prepare_tpu
        """,
        "Start a script by launch_command(launch_command_parser().parse_args([...])).": """
            deepspeed_launcher multi_gpu_launcher sagemaker_launcher simple_launcher tpu_launcher
            tpu_pod_launcher
        """,
        "Write the file by write_basic_config or `accelfn config`; load_config_from_file reads it.": """
            BaseConfig ClusterConfig SageMakerConfig config_command_parser default_command_parser
            default_config_command default_json_config_file default_yaml_config_file get_config_parser
            update_command_parser
        """,
        "Use the command `accelfn estimate-memory`.": """
            add_timm_hub_prefix check_has_model create_ascii_table create_empty_model estimate_command
            estimate_command_parser estimate_training_usage gather_data verify_on_hub
        """,
        "Use argparse.ArgumentParser.": """
            CustomArgumentGroup CustomArgumentParser CustomHelpFormatter SubcommandHelpFormatter
        """,
        "Use threading.local().": "ThreadLocalSharedDict",
        "Use accelfn.checkpoint.": """
            load_accelerator_state load_custom_state save_accelerator_state save_custom_state
        """,
        "Use torch.compile, or dynamo_plugin of Accelerator.": """
            compile_regions compile_regions_deepspeed compile_regions_fsdp2 has_compiled_regions
        """,
        "Pass an FP8 recipe in kwargs_handlers of Accelerator.": """
            apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao
            filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers
        """,
    }
)


def refuse(module: str, name: str) -> NoReturn:
    """Raise the error for a name that a module of the mirror doesn't have. Called by its ``__getattr__``.

    Raises:
        ImportError: For ``from accelerate import name``, whose own text would replace an AttributeError's.
        AttributeError: Otherwise.
    """
    place = "accelerate" + module.removeprefix("accelfn.compat.accelerate")
    hints = (hint for hint, names in _INSTEAD.items() if name in names.split())
    near = suggest(name, [one for one in vars(sys.modules[module]) if not one.startswith("_")])
    hint = "See 'Programs written for Accelerate' in accelfn's documentation."
    hint = next(hints, hint if near is None else f"Did you mean {near}?")
    text = f"{place} has no {name!r} here, since accelfn stands in for Accelerate. {hint}"
    caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    is_import = caller.f_code.co_code[caller.f_lasti] == opcode.opmap["IMPORT_FROM"]
    if is_import and not name.startswith("__"):
        raise ImportError(text, name=place)
    raise AttributeError(text)  # without the module, of whose names Python would suggest another one
