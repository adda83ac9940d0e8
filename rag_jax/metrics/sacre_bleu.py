"""SacreBLEU's BLEU: detokenized texts in, mteval-v13a's tokens, exponential smoothing.

Equals sacrebleu 2.6.0 with `tok:13a|smooth:exp` (Post 2018); for comparison with work that
reports it. The paper's own scores are those of `bleu`.
"""

import math
import re
from collections.abc import Sequence

from rag_jax.metrics.bleu import BleuCounts, add, count

_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
_SPLITS = (
    (re.compile(r"([{-~[-` -&(-+:-@/])"), r" \1 "),  # ASCII symbols, but for ' , - .
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),  # periods and commas, but between digits
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def tokens_13a(text: str) -> list[str]:
    """The tokens of mteval-v13a."""
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in _ENTITIES:
        text = text.replace(entity, character)
    text = f" {text} "
    for pattern, spaced in _SPLITS:
        text = pattern.sub(spaced, text)
    return text.split()


def corpus_sacre_bleu(predictions: Sequence[str], references: Sequence[Sequence[str]],
                      max_order: int = 4, lowercase: bool = False) -> float:
    """BLEU in percent of all predictions together.

    Args:
        predictions: texts.
        references: the reference texts of each.
        max_order: longest n-grams; 4 unless asked otherwise.
        lowercase: `case:lc`.

    Raises:
        ValueError: no predictions, one without references, or different numbers.
    """
    if len(predictions) == 0:
        raise ValueError("no predictions: BLEU over none is undefined")
    counts = [_count(*pair, max_order, lowercase)
              for pair in zip(predictions, references, strict=True)]
    return _score(add(counts), max_order)


def sentence_sacre_bleu(prediction: str, references: Sequence[str], max_order: int = 4,
                        lowercase: bool = False) -> float:
    """BLEU in percent of one prediction, without the orders for which it is too short."""
    counts = _count(prediction, references, max_order, lowercase)
    return _score(counts, sum(total > 0 for total in counts.total))


def _count(prediction: str, references: Sequence[str], max_order: int, lowercase: bool
           ) -> BleuCounts:
    texts = [text.lower() if lowercase else text for text in (prediction, *references)]
    first, *others = map(tokens_13a, texts)
    return count(first, others, max_order)


def _score(counts: BleuCounts, orders: int) -> float:
    if not any(counts.matched) or not all(counts.total[:orders]):
        return 0.0
    log_sum, halves = 0.0, 0
    for matched, total in zip(counts.matched[:orders], counts.total, strict=False):
        if not matched:  # the k-th order without a match counts 1 / 2^k matches
            halves += 1
            matched = 0.5**halves
        log_sum += math.log(100.0 * matched / total)
    brevity = min(0.0, 1 - counts.reference_length / counts.length)
    return math.exp(brevity) * math.exp(log_sum / orders)
