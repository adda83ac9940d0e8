"""What an evaluation says of a null document, and of passages retrieved to another depth."""

import types

import numpy as np
import pytest

from rag_jax.data.question_files import Example
from rag_jax.data.text import Cuts
from rag_jax.evaluation import evaluate, given_a_passage
from rag_jax.types import Answer, Evidence

PRIOR = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.0, 0.0, 1.0]])
POSTERIOR = np.array([[0.25, 0.25, 0.5], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0]])
RETRIEVED = np.array([[4, 2], [4, 1], [0, 3]], np.int32)
LOG_P = {"log_p": np.array([-1.0, -2.0, -4.0]), "log_p_null": np.array([-3.0, -1.0, -4.0])}
TEXTS = ["Lima", "Paris", "Rome", "Lima", "Oslo"]


class Stub:
    """An `Answerer` that has answered."""

    def __init__(self, null, prior=PRIOR, posterior=POSTERIOR, log_p=LOG_P):
        self.model = types.SimpleNamespace(null_document=null, lexical=True)
        self.decoding = types.SimpleNamespace(certifies=lambda model: False)
        self.index = types.SimpleNamespace(
            passages=[types.SimpleNamespace(text=text, title="") for text in TEXTS])
        self.log_p = log_p
        texts = [[*(TEXTS[row] for row in rows), ""] for rows in RETRIEVED]
        self.answers = [Answer("Oslo", [1], -1.0, [
            Evidence("", "", *given) for given in zip(read, p, q, strict=False)])
            for read, p, q in zip(texts, prior, posterior, strict=True)]

    def retrieve(self, params, questions):
        return RETRIEVED

    def decode(self, params, questions, retrieved):
        return self.answers

    def reads(self, questions, retrieved):
        cuts = Cuts()
        cuts.count([1], [1])
        return [[self.index.passages[row] for row in rows] for rows in retrieved], cuts

    def log_likelihoods(self, params, questions, retrieved):
        return self.log_p


ANSWERS = ["Oslo", "Paris", "Rome"]
QUESTIONS = types.SimpleNamespace(
    examples=[Example(str(i), "?", (answer,)) for i, answer in enumerate(ANSWERS)],
    targets_cut=lambda: 0)


def test_utility_is_the_likelihood_with_minus_without_documents():
    found = evaluate(Stub("bias"), {}, QUESTIONS).metrics
    assert found["nll"] == pytest.approx((1 + 2 + 4) / 3)
    assert found["retrieval_utility"] == pytest.approx((2 - 1 + 0) / 3)
    assert found["null_prior"] == pytest.approx((0.2 + 0.8 + 1) / 3)
    assert found["null_posterior"] == pytest.approx((0.5 + 0 + 1) / 3)


def entropy(*p):
    return -sum(x * np.log(x) for x in p if x)


def test_the_monitors_are_of_the_passages_alone():
    """Nobody retrieves the null document: it must not look like a passage that all share."""
    found = evaluate(Stub("bias"), {}, QUESTIONS).metrics
    # The third question gives its passages nothing, so that they do not count.
    assert found["unique_passages"] == 3 and found["top_passage_share"] == pytest.approx(2 / 3)
    expected = (entropy(0.5 / 0.8, 0.3 / 0.8) + entropy(0.5, 0.5)) / 2
    assert found["prior_entropy"] == pytest.approx(expected)
    assert found["posterior_entropy"] == pytest.approx((entropy(0.5, 0.5) + entropy(0.9, 0.1)) / 2)
    assert given_a_passage(PRIOR).sum(axis=1) == pytest.approx([1, 1, 0])


def test_without_a_null_document_nothing_is_said_of_it():
    prior = np.full((3, 2), 0.5)
    stub = Stub("none", prior, prior, {"log_p": LOG_P["log_p"]})
    found = evaluate(stub, {}, QUESTIONS).metrics
    assert not {"retrieval_utility", "null_prior", "null_posterior"} & set(found)
    assert found["prior_entropy"] == pytest.approx(np.log(2))


def test_recall_is_told_at_the_depth_that_was_asked_for():
    """A curve over K (figure 3) needs recall@K for every K, not for the usual ones alone."""
    found = evaluate(Stub("bias"), {}, QUESTIONS).metrics
    recall = {name: value for name, value in found.items() if name.startswith("answer_recall")}
    assert recall == pytest.approx({"answer_recall@1": 100 / 3, "answer_recall@2": 200 / 3})


def test_of_questions_that_all_leave_it_to_the_null_document_no_passage_is_told():
    """All was decoded, and then: no passages."""
    null = np.array([[0.0, 0.0, 1.0]] * 3)
    found = evaluate(Stub("bias", null, null), {}, QUESTIONS).metrics
    assert found["null_prior"] == found["null_posterior"] == 1
    assert "effective_passages" not in found and "em" in found
