"""What Accelerate's test scripts load by name, made here: a tiny model, a data set and a metric."""

import importlib
import json
import pathlib
from typing import Any

WORDS = [f"word{number}" for number in range(40)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SPLITS = {"train": 48, "validation": 20}
CARD = """\
---
configs:
- config_name: mrpc
  data_files: [{split: train, path: train.jsonl}, {split: validation, path: validation.jsonl}]
---
"""
METRIC = """\
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        integer = datasets.Value("int64")
        features = datasets.Features({"predictions": integer, "references": integer})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references))
        return {"accuracy": sum(int(p == r) for p, r in pairs) / len(pairs)}
"""


def write(folder: pathlib.Path) -> pathlib.Path:
    """Write all of it where a script that runs in ``folder`` finds it, and return the model's folder."""
    glue = folder / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    (glue / "README.md").write_text(CARD)
    for split, number in SPLITS.items():
        rows = [sentence_pair(index) for index in range(number)]
        (glue / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)
    return write_model(folder / "bert-base-cased")


def sentence_pair(index: int) -> dict[str, str | int]:
    """Return a pair of sentences that are equal or not."""
    first = " ".join(WORDS[(index * step) % len(WORDS)] for step in range(1, 4 + index % 5))
    same = index % 2
    return {"sentence1": first, "sentence2": first if same else WORDS[index % 7], "label": same, "idx": index}


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """Write a BERT of one small layer, and its tokenizer."""
    transformers: Any = importlib.import_module("transformers")
    folder.mkdir()
    transformers.set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS), max_position_embeddings=64, **sizes
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    transformers.BertTokenizer.from_pretrained(folder, do_lower_case=False).save_pretrained(folder)
    return folder
