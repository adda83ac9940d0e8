"""Values that the reference implementations computed, where they are at hand."""

import json
import os
from pathlib import Path

import pytest


def golden(section):
    """A section of `all_goldens`."""
    return all_goldens()[section]


def all_goldens():
    """$RAG_JAX_TEST_DATA/metrics_golden.json; skips the test where there is none."""
    path = Path(os.environ.get("RAG_JAX_TEST_DATA", "")) / "metrics_golden.json"
    if not path.is_file():
        pytest.skip("RAG_JAX_TEST_DATA names no folder with metrics_golden.json")
    return json.loads(path.read_text("utf-8"))


def tokenized(case, tokens):
    """(prediction, references) of a case of "generation", tokens separated by spaces."""
    if tokens == "coco_ptb":
        return case["ptb_prediction"], case["ptb_references"]
    return case["prediction"].lower(), [text.lower() for text in case["references"]]


# What the tests of this folder compare, by section; and what they do not, and why.
COMPARED = {
    "qa_em_f1": {"squad_v11_em", "squad_v11_f1", "normalized_prediction", "normalized_references",
                 "drqa_pipeline_em", "dpr_em", "kilt_em", "kilt_f1"},
    "regex_pairs": {"drqa_match_raw", "drqa_pipeline_match_nfd", "dpr_search_nfd"},
    "has_answer": {"dpr_string", "dpr_regex", "kilt", "dpr_tokens"},
    "generation": {"ptb_prediction", "ptb_references", "coco_ptb", "coco_whitespace_lower",
                   "sacrebleu_sentence", "sacrebleu_sentence_lc", "sacrebleu_bleu1_sentence"},
    "qbleu": {"pairs", "repo_unit_tests"},
}
INPUTS = {"prediction", "references", "patterns", "text", "answers"}
NOT_COMPARED = {
    "meta": "says what computed the values",
    "generation.rouge_score": "another ROUGE (its own tokens, F1 in place of beta 1.2, with and "
                              "without a stemmer), which neither the paper nor MS-MARCO uses",
    "generation.pltrdy_rouge_l_f_first_ref": "another ROUGE-L (F1, first reference alone), which "
                                             "neither the paper nor MS-MARCO uses",
    "qbleu.means": "cannot be: of pairs that the file does not hold. Its own components of the 63 "
                   "pairs that it holds have another mean, also without any run of them",
    "qbleu.repo_unit_tests_note": "a remark; what the stale tests expect is not what the code does",
    "qbleu.squad_tsv_human_correlation": "needs annotated-questions/squad.tsv, which is not there",
}
