"""What a plan knows of a model is read from its source, by several threads at once too."""

import gc
from concurrent.futures import ThreadPoolExecutor
from time import sleep

from torch import nn

from accelfn.parallel.facts import ModelFacts, read_facts


def test_threads_read_models_at_once() -> None:
    model = nn.TransformerEncoderLayer(4, 2)

    def switch_threads(phase: str, info: dict[str, int]) -> None:
        sleep(0.00001)

    def read(depth: int) -> list[ModelFacts]:
        # CPython compares the depth of the stack before a parse and after it.
        return read(depth - 1) if depth else [read_facts(model) for _ in range(3)]

    threshold = gc.get_threshold()
    gc.callbacks.append(switch_threads)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(read, range(0, 20, 5)))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(switch_threads)
    assert found == [[read_facts(model)] * 3] * 4
