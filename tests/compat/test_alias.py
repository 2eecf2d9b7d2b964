"""``import accelerate`` gives accelfn where it was asked for, and nowhere else."""

import os
import pathlib
import subprocess
import sys
import types

import pytest

import accelfn.compat
from accelfn.errors import ConfigurationError
from tests.launch.processes import ROOT, environment


def run(code: str, *flags: str, status: int = 0, path: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a program in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=f"{ROOT}{os.pathsep}{path}"),
        timeout=100,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


NAMES = """
import importlib.metadata, importlib.util, pickle, sys
from torch.utils.data import DataLoader
before = [*sys.meta_path]
import accelfn, accelfn.compat
accelfn.init_context
import accelfn.compat.accelerator
accelfn.compat.uninstall()
assert sys.meta_path == before and not accelfn.compat.is_installed()
assert not [name for name in sys.modules if name.partition(".")[0] == "accelerate"]

before = dict(sys.modules)
accelfn.compat.install()
accelfn.compat.install()
assert len([one for one in sys.meta_path if type(one).__name__ == "Alias"]) == 1
assert importlib.util.find_spec("accelerate") is not None
assert importlib.metadata.version("accelerate") == "1.15.0"
assert importlib.metadata.version("pytest") != "1.15.0"
import accelerate, accelerate.utils.tqdm
from accelerate.state import PartialState
from accelerate.utils.dataclasses import DistributedType
assert accelerate.__version__ == "1.15.0"
assert callable(accelerate.utils.tqdm), "importing the module of a name doesn't replace the name"
assert sys.modules["accelerate.state"] is accelerate.state and "gather" in dir(accelerate.utils)
assert PartialState is accelerate.PartialState and PartialState.__module__ == "accelerate.state"
assert pickle.loads(pickle.dumps(accelerate.utils.ProjectConfiguration("here"))).project_dir == "here"

from accelerate.accelerator import AcceleratedOptimizer
from accelerate.commands.config import config_args, default_config_file
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.estimate import calculate_maximum_sizes
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.data_loader import DataLoaderAdapter, DataLoaderStateMixin, IterableDatasetShard, get_sampler
from accelerate.hooks import named_module_tensors, set_module_tensor_to_device
from accelerate.state import SharedDict
loader = accelerate.Accelerator(cpu=True).prepare(DataLoader([1, 2, 3]))
assert isinstance(loader, DataLoaderAdapter) and isinstance(loader, DataLoaderStateMixin)
assert not isinstance(DataLoader([1]), DataLoaderAdapter)
assert type(get_sampler(loader)).__name__ == "SequentialSampler"

for name, error in (("import accelerate.nothing", "accelerate.nothing"),
                    ("from accelerate.utils import save_everything", "save_everything"),
                    ("from accelerate.utils import PrepareForLaunch", "accelfn launch"),
                    ("from accelerate.utils import set_sed", "Did you mean set_seed?"),
                    ("from accelerate.state import ThreadLocalSharedDict", "Use threading.local()"),
                    ("from accelerate.commands.utils import CustomArgumentParser", "argparse.ArgumentParser"),
                    ("from accelerate.commands.estimate import gather_data", "accelfn estimate-memory"),
                    ("from accelerate.commands.config.config_args import ClusterConfig", "accelfn config"),
                    ("import accelerate.commands.tpu", "accelfn --help")):
    try:
        exec(name)
    except ImportError as raised:
        assert error in str(raised) and "accelfn" in str(raised), raised
    else:
        raise AssertionError(name)
assert not hasattr(accelerate, "nothing")
assert importlib.util.find_spec("accelerate.nothing") is None
assert importlib.util.find_spec("accelerate.utils") is not None
from accelerate.data_loader import DataLoader
from accelerate.utils import DeepSpeedSequenceParallelConfig
from accelerate.utils.environment import check_cuda_p2p_ib_support
assert check_cuda_p2p_ib_support() in (True, False)
exec("from accelerate.utils import *", everything := {})
assert everything["gather"] is accelerate.utils.operations.gather
assert getattr(accelerate.utils, "nothing", 1) == 1
accelfn.compat.uninstall()
assert not [name for name in sys.modules if name.partition(".")[0] == "accelerate"]
assert {name: module for name, module in sys.modules.items() if name in before} == before
found = importlib.util.find_spec("accelerate")
assert found is None or "accelfn" not in found.origin.split("site-packages")[-1]
"""


def test_the_alias_has_the_names_of_the_table_and_uninstall_undoes_it() -> None:
    run(NAMES, "-W", "error::UserWarning:__main__")


def test_install_comes_before_the_first_import_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    with pytest.raises(ConfigurationError, match="before any import of accelerate"):
        accelfn.compat.install()
    assert not accelfn.compat.is_installed()


def test_a_python_process_that_a_program_starts_has_the_alias_too(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the environment\\'s own')")
    code = """
import os, subprocess, sys
import accelfn.compat
from accelfn.compat.alias import child_variables
assert child_variables(os.environ) == {}
accelfn.compat.install()
program = "import sys, accelfn.compat as a; print(a.is_installed(), 'torch' in sys.modules)"
child = {**os.environ, **child_variables(os.environ)}
subprocess.run([sys.executable, "-c", program], env=child, check=True)
# Another Python, without accelfn.
folder = child["PYTHONPATH"].split(os.pathsep)[0]
program = f"import sys; sys.path.insert(0, {folder!r}); import sitecustomize"
subprocess.run([sys.executable, "-I", "-S", "-c", program], env=child, check=True)
"""
    said = run(code, "-u", path=str(tmp_path)).stdout.splitlines()
    assert said == ["the environment's own", "the environment's own", "True False"]


@pytest.mark.slow
def test_libraries_import_where_accelerate_is_not_installed(tmp_path: pathlib.Path) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    for path in pathlib.Path(pytest.__file__).parents[1].iterdir():
        if not path.name.startswith(("accelerate", "__editable__", "accelfn")):
            (tmp_path / path.name).symlink_to(path)
    code = """
import importlib.util
assert importlib.util.find_spec("accelerate") is None
import accelfn.compat
accelfn.compat.install()
from transformers import Trainer
from transformers.utils import is_accelerate_available
from peft import get_peft_model
assert is_accelerate_available()
import accelerate
print(Trainer.__name__, get_peft_model.__name__, accelerate.__file__)
"""
    said = run(code, "-S", path=str(tmp_path)).stdout.split()[-3:]
    assert said == ["Trainer", "get_peft_model", str(ROOT / "accelfn/compat/names.py")]


@pytest.mark.slow
@pytest.mark.usefixtures("peer")
def test_the_peers_tests_are_its_own_files_if_it_is_installed() -> None:
    code = """
import sys
import accelfn.compat
accelfn.compat.install()
import accelerate.state
from accelerate.test_utils import training
assert "site-packages" in training.__file__
assert training.DistributedType is accelerate.state.DistributedType
from importlib.metadata import metadata
assert "huggingface" in metadata("accelerate")["Home-page"]
sys.path[:] = [path for path in sys.path if "site-packages" not in path]
del sys.modules["accelerate.test_utils"], accelerate.test_utils
try:
    import accelerate.test_utils
except ModuleNotFoundError as error:
    print(error)
"""
    assert "To run Accelerate's own test files over accelfn, pip install accelerate" in run(code).stdout
