"""Q-BLEU-1 (reimplemented): BLEU-1 of a generated question, and whether it can be answered.

Whether a question can be answered hangs on four kinds of words, each scored by the harmonic mean
of BLEU-1 either way between the prediction's and the reference's words of that kind:

    qt   question words, with the word after "what" and "which"
    ner  capitalised words, but for a question word in front
    imp  the rest that is neither capitalised nor a stop word
    sw   stop words

Source: Nema and Khapra 2018 and their code (Answerability-Metric at ec5cf5e, 2019-11-12, where a
kind of which both questions have no word scores 1). Differs from it: the Stanford tokenizer, which
needs Java, is imitated by `tokens.ptb_tokens`; a question without any word scores 0, where it
fails; the best of several references counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rag_jax.metrics.bleu import sentence_bleu
from rag_jax.metrics.references import checked_references
from rag_jax.metrics.tokens import WORDS, ptb_tokens

QUESTION_WORDS, STOP_WORDS = (frozenset(WORDS[name].split()) for name in ("question", "stop"))


class Weights(NamedTuple):
    """Weights of the four kinds of words, which sum to 1, and of all four against BLEU-1.

    The defaults are those tuned on SQuAD. The README of the reference shows others, as an
    example: ner .6, imp .1, qt .2, sw .1, delta .7.
    """

    ner: float = 0.41
    imp: float = 0.36
    qt: float = 0.20
    sw: float = 0.03
    delta: float = 0.66


class Components(NamedTuple):
    """Scores from 0 to 1 of one question against one reference."""

    ner: float
    imp: float
    qt: float
    sw: float
    bleu_1: float


SQUAD = Weights()


def q_bleu_1(prediction: str, references: Sequence[str], weights: Weights = SQUAD) -> float:
    """Q-BLEU-1 of a question, from 0 to 1: the best over the references.

    delta (w_ner ner + w_imp imp + w_qt qt + w_sw sw) + (1 - delta) BLEU-1.

    Raises:
        ValueError: no references.
        TypeError: `references` is one string.
    """
    return max(_score(prediction, reference, weights)
               for reference in checked_references(references))


def _score(prediction: str, reference: str, weights: Weights) -> float:
    if not prediction.strip() or not reference.strip():
        return 0.0
    *kinds, fluency = components(prediction, reference)
    *shares, delta = weights  # of the same kinds in the same order
    answerability = sum(share * kind for share, kind in zip(shares, kinds, strict=True))
    return delta * answerability + (1 - delta) * fluency


def components(prediction: str, reference: str) -> Components:
    """The four kinds of words and BLEU-1 of a question against one reference."""
    ours, theirs = prediction.split(), reference.split()
    kinds = (_entities, _important, _question_type, _stop_words)
    return Components(*(_either_way(kind(ours), kind(theirs)) for kind in kinds),
                      bleu_1(prediction, [reference]))


def bleu_1(prediction: str, references: Sequence[str]) -> float:
    """Sentence BLEU-1 on the same tokens, from 0 to 1: the fluency that the script prints; errors
    as of `q_bleu_1`."""
    return sentence_bleu(ptb_tokens(prediction),
                         [ptb_tokens(text) for text in checked_references(references)])[0]


def _either_way(one: list[str], other: list[str]) -> float:
    """Harmonic mean of BLEU-1 of one against the other and of the other against one."""
    if not one and not other:
        return 1.0
    forward = bleu_1(" ".join(one), [" ".join(other)])
    backward = bleu_1(" ".join(other), [" ".join(one)])
    return 2 * forward * backward / (forward + backward) if forward + backward else 0.0


# --- kinds of words: parts between spaces, punctuation included ---------------------------------


def _is_question_word(word: str) -> bool:
    """"what" and "What", but not "WHAT"."""
    return word[:1].lower() + word[1:] in QUESTION_WORDS


def _question_type(words: list[str]) -> list[str]:
    typed = []
    for i, word in enumerate(words):
        if _is_question_word(word):
            typed.append(word)
            if word.lower() in ("what", "which"):
                typed += words[i + 1 : i + 2]
    return typed


def _entities(words: list[str]) -> list[str]:
    start = int(bool(words) and words[0].lower() in QUESTION_WORDS)
    return [word for word in words[start:] if word[0].isupper()]


def _important(words: list[str]) -> list[str]:
    of_question = set(_question_type(words))
    return [word for word in words
            if word not in of_question and not word[0].isupper() and word not in STOP_WORDS]


def _stop_words(words: list[str]) -> list[str]:
    return [word.lower() for word in words if word.lower() in STOP_WORDS]
