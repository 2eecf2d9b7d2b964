"""``import accelerate`` gives accelfn where it was asked for, and nowhere else."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(code: str, *flags: str, **variables: str) -> str:
    """Run a program in a fresh interpreter, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, env=environment, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_install_no_module_of_the_process_is_touched() -> None:
    code = """
import sys
before = [*sys.meta_path]
import accelfn, accelfn.compat
accelfn.init_context  # which imports torch, and all of accelfn that programs use
import accelfn.compat.accelerator, accelfn.compat.accelerate
accelfn.compat.uninstall()
assert [type(one) for one in sys.meta_path][-len(before):] == [type(one) for one in before]
assert not accelfn.compat.is_installed()
assert not [name for name in sys.modules if name.partition(".")[0] == "accelerate"]
import accelerate
print(accelerate.__file__)
"""
    assert "accelfn" not in run(code).replace(str(ROOT), "")


def test_the_alias_is_the_mirror_and_uninstall_undoes_it() -> None:
    code = """
import importlib.metadata, importlib.util, pickle, sys
import accelfn.compat
before = dict(sys.modules)
accelfn.compat.install()
accelfn.compat.install("accelfn")  # sets the arithmetic only
assert len([one for one in sys.meta_path if type(one).__name__ == "Alias"]) == 1
assert importlib.util.find_spec("accelerate") is not None
assert importlib.metadata.version("accelerate") == "1.15.0"
assert importlib.metadata.version("pytest") != "1.15.0"
import accelerate, accelerate.utils.tqdm
from accelerate.state import PartialState
from accelerate.utils.dataclasses import DistributedType
assert accelerate.__version__ == "1.15.0"
assert callable(accelerate.utils.tqdm), "importing the module of a name doesn't replace the name"
import accelfn.compat.accelerate.state
assert accelfn.compat.accelerate.state is sys.modules["accelerate.state"]
assert PartialState is accelerate.PartialState and PartialState.__module__ == "accelerate.state"
assert pickle.loads(pickle.dumps(accelerate.utils.ProjectConfiguration("here"))).project_dir == "here"
assert accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2).compat is None
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
accelfn.compat.uninstall()
assert not [name for name in sys.modules if name.partition(".")[0] == "accelerate"]
assert {name: module for name, module in sys.modules.items() if name in before} == before
import accelerate
print(accelerate.__file__)
"""
    assert "accelfn" not in run(code, "-W", "error::UserWarning").replace(str(ROOT), "")


def test_install_comes_before_the_first_import_of_accelerate() -> None:
    code = """
import sys, types
import accelfn.compat
from accelfn.errors import ConfigurationError
sys.modules["accelerate"] = types.ModuleType("accelerate")
try:
    accelfn.compat.install()
except ConfigurationError as error:
    print(error)
assert not accelfn.compat.is_installed()
"""
    assert "before any import of accelerate" in run(code)


def test_a_python_process_that_a_program_starts_has_the_alias_too(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the environment\\'s own')")
    code = """
import os, subprocess, sys
import accelfn.compat
from accelfn.compat.alias import child_variables
assert child_variables(os.environ) == {}
accelfn.compat.install("accelfn")
program = "import sys, accelfn.compat.alias as a; print(a.find_alias().arithmetic, 'torch' in sys.modules)"
subprocess.run([sys.executable, "-c", program], env={**os.environ, **child_variables(os.environ)}, check=True)
"""
    said = run(code, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert said.splitlines() == ["the environment's own", "the environment's own", "accelfn False"]


@pytest.mark.slow
def test_libraries_import_where_accelerate_is_not_installed(tmp_path: pathlib.Path) -> None:
    site = pathlib.Path(pytest.__file__).parents[1]
    for path in site.iterdir():
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
    said = run(code, "-S", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert said.split()[-3:] == [
        "Trainer",
        "get_peft_model",
        str(ROOT / "accelfn/compat/accelerate/__init__.py"),
    ]


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
    assert "To run Accelerate's own test files over accelfn, pip install accelerate" in run(code)


def test_names_that_programs_import_are_there() -> None:
    code = """
import accelfn.compat
accelfn.compat.install()
from accelerate.accelerator import AcceleratedOptimizer
from accelerate.commands.config import config_args, default_config_file
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.estimate import calculate_maximum_sizes
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.data_loader import DataLoaderAdapter, DataLoaderStateMixin, IterableDatasetShard, get_sampler
from accelerate.hooks import named_module_tensors, set_module_tensor_to_device
from accelerate.state import SharedDict
from accelerate.utils import prepare_nothing_at_all
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "no 'prepare_nothing_at_all' here" in done.stderr, "the others are there"


def test_loaders_are_what_programs_ask_for() -> None:
    code = """
import accelfn.compat
accelfn.compat.install()
from torch.utils.data import DataLoader, SequentialSampler
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderAdapter, DataLoaderStateMixin, get_sampler
loader = Accelerator(cpu=True).prepare(DataLoader([1, 2, 3]))
assert isinstance(loader, DataLoaderAdapter) and isinstance(loader, DataLoaderStateMixin)
assert not isinstance(DataLoader([1]), DataLoaderAdapter)
print(type(get_sampler(loader)).__name__)
"""
    assert run(code) == "SequentialSampler\n"


def test_a_traceback_begins_at_the_program(tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken.py").write_text("def fail():\n    1 / 0\nfail()\n")
    done = subprocess.run(
        [sys.executable, "-m", "accelfn.compat", "broken.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('broken.py", line 3, in <module>')
    assert "accelfn" not in done.stderr
    assert lines[-1] == "ZeroDivisionError: division by zero"
