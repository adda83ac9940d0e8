"""BART's denoising noise (arXiv 1910.13461, section 2.2): sentence permutation, text infilling."""

import re
from collections.abc import Sequence

import numpy as np

# After the marks of Chinese and Japanese, and the quotation marks that close behind them.
_UNSPACED = "(?:(?<=[。！？])(?![。！？」』”])|(?<=[。！？][」』”]))"
_SENTENCE_END = re.compile(rf"(?<=[.!?])\s+|{_UNSPACED}\s*")


def sentences(text: str) -> list[str]:
    """What `text` has up to each full stop, question or exclamation mark before white space; no
    white space is needed after those of Chinese and Japanese. None is empty, unless `text` is."""
    return list(filter(None, _SENTENCE_END.split(text))) or [text]


def joined(parts: Sequence[str]) -> str:
    """Sentences as one text, with spaces between them where their language has some."""
    return re.sub(f"{_UNSPACED} ", "", " ".join(parts))


def permute_sentences(text: str, rng: np.random.Generator) -> str:
    """The sentences of `text` in random order."""
    parts = sentences(text)
    return joined([parts[i] for i in rng.permutation(len(parts))])


def infill(ids: list[int], mask_id: int, ratio: float, span_length: float,
           rng: np.random.Generator) -> list[int]:
    """Replaces spans of tokens by one mask each; a span of length 0 inserts a mask.

    Args:
      ids: tokens without special tokens.
      mask_id: id of the mask token.
      ratio: share of tokens that fall into spans, at most: a span of length 0 counts as one token,
        so it is 0.295 of 0.3 with spans of 3 tokens in the mean, and 0.218 with spans of 1. The
        span that is cut to what is left of it stands last.
      span_length: mean span length, Poisson distributed.
      rng: random stream; consumed by a varying number of draws.

    Returns:
      The noised tokens; the target is `ids` itself.
    """
    budget = int(round(ratio * len(ids)))
    spans: list[int] = []
    while budget > 0:
        span = min(int(rng.poisson(span_length)), budget)
        spans.append(span)
        budget -= max(span, 1)
    kept = len(ids) - sum(spans)
    # Spans stand at distinct gaps between kept tokens, so that no two masks touch; where there
    # are more spans than gaps, several become one.
    spans = [sum(spans[i :: kept + 1]) for i in range(min(len(spans), kept + 1))]
    places = np.sort(rng.choice(kept + 1, size=len(spans), replace=False))
    noised, position, taken = [], 0, 0
    for span, place in zip(spans, places, strict=True):
        noised += ids[position : position + (place - taken)]
        position += place - taken + span
        taken = place
        noised.append(mask_id)
    return noised + ids[position:]
