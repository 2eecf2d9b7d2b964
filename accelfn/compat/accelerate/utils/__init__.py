"""Everything below, and the records."""

# ruff: noqa: F403, I001 -- the names of the modules below are those of this one
import typing as _typing

from accelfn.compat.accelerate.utils.bnb import *
from accelfn.compat.accelerate.utils.constants import *
from accelfn.compat.accelerate.utils.dataclasses import *
from accelfn.compat.accelerate.utils.deepspeed import *
from accelfn.compat.accelerate.utils.environment import *
from accelfn.compat.accelerate.utils.fsdp_utils import *
from accelfn.compat.accelerate.utils.imports import *
from accelfn.compat.accelerate.utils.megatron_lm import *
from accelfn.compat.accelerate.utils.memory import *
from accelfn.compat.accelerate.utils.modeling import *
from accelfn.compat.accelerate.utils.offload import *
from accelfn.compat.accelerate.utils.operations import *
from accelfn.compat.accelerate.utils.other import *
from accelfn.compat.accelerate.utils.random import *
from accelfn.compat.accelerate.utils.versions import *
from accelfn.compat.records import (
    ParallelismConfig as ParallelismConfig,
)
from accelfn.compat.accelerate.utils.tqdm import (
    tqdm as tqdm,
)
from accelfn.compat.accelerate.utils import (
    constants as constants,
    dataclasses as dataclasses,
    environment as environment,
    imports as imports,
    memory as memory,
    modeling as modeling,
    offload as offload,
    operations as operations,
    other as other,
    random as random,
    versions as versions,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
