"""ROUGE-L of token lists, as MS-MARCO's scorer computes it."""

from collections.abc import Sequence

from rag_jax.metrics.references import check_tokens

Tokens = Sequence[str]
BETA = 1.2  # weight of recall against precision


def rouge_l(prediction: Tokens, references: Sequence[Tokens]) -> float:
    """ROUGE-L of one prediction, from 0 to 1.

    The longest common subsequence with each reference gives a precision and a recall; F_beta
    takes the largest precision and the largest recall, be they of the same reference or not. A
    text without tokens counts as one empty token.

    Raises:
        ValueError: no references.
        TypeError: a string in the place of tokens, or of the references.

    Source: MSMARCO-Question-Answering, Evaluation/rouge (coco-caption).
    """
    check_tokens(prediction, references)
    prediction = prediction or [""]
    precision = recall = 0.0
    for reference in references:
        reference = reference or [""]
        common = longest_common_subsequence(prediction, reference)
        precision = max(precision, common / len(prediction))
        recall = max(recall, common / len(reference))
    if not precision:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def longest_common_subsequence(one: Tokens, other: Tokens) -> int:
    """Its length."""
    row = [0] * (len(other) + 1)
    for token in one:
        diagonal = 0
        for j, candidate in enumerate(other, start=1):
            above = row[j]
            row[j] = diagonal + 1 if token == candidate else max(above, row[j - 1])
            diagonal = above
    return row[-1]
