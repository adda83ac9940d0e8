"""Values that the reference implementations computed, where they are at hand."""

import json
import os
from pathlib import Path

import pytest


def golden(section):
    """A section of $RAG_JAX_TEST_DATA/metrics_golden.json; skips the test where there is none."""
    path = Path(os.environ.get("RAG_JAX_TEST_DATA", "")) / "metrics_golden.json"
    if not path.is_file():
        pytest.skip("RAG_JAX_TEST_DATA names no folder with metrics_golden.json")
    return json.loads(path.read_text("utf-8"))[section]


def tokenized(case, tokens):
    """(prediction, references) of a case of "generation", tokens separated by spaces."""
    if tokens == "coco_ptb":
        return case["ptb_prediction"], case["ptb_references"]
    return case["prediction"].lower(), [text.lower() for text in case["references"]]
