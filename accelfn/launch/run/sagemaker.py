"""Hand a script to Amazon SageMaker: ``python -m accelfn.launch.run.sagemaker JSON``."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import sys
from typing import Any

__all__ = ("main", "read_pairs")


def main() -> None:
    """Build the estimator that the plan describes, and run it. Effect: rents machines, and waits for them.

    Raises:
        SystemExit: The sagemaker package is not installed.
    """
    told: dict[str, Any] = json.loads(sys.argv[1])
    if importlib.util.find_spec("sagemaker") is None:
        sys.exit("accelfn launch: error: SageMaker needs its package. Run: pip install sagemaker")
    estimator_type = importlib.import_module("sagemaker.huggingface").HuggingFace
    arguments = {name: value for name, value in told["estimator"].items() if value is not None}
    inputs = dict(read_pairs(told["inputs_file"])) if told["inputs_file"] else None
    if told["metrics_file"]:
        arguments["metric_definitions"] = [
            {"Name": name, "Regex": pattern} for name, pattern in read_pairs(told["metrics_file"])
        ]
    estimator = estimator_type(**arguments)
    estimator.fit(inputs=inputs)
    print(f"the model is at {estimator.model_data}")


def read_pairs(path: str) -> list[tuple[str, str]]:
    """Read a file of two columns with a tab between, without its heading. Effect: reads the disk."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    return [(row[0], row[1]) for row in rows[1:] if len(row) > 1]


if __name__ == "__main__":
    main()
