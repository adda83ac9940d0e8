"""How varied generated texts are."""

from collections.abc import Iterable, Sequence

from rag_jax.metrics.bleu import ngrams


def distinct_ngram_ratio(texts: Iterable[Sequence[str]], n: int = 3) -> float:
    """Distinct over total n-grams of all texts together, from 0 to 1; 0 where there is no n-gram.

    The ratio falls as texts are added: compare sets of the same size. The paper does not say how
    it tokenizes. Source: the paper, table 5.

    Args:
        texts: tokens of each text.
        n: size of the n-grams; 3 in the paper.
    """
    counts = [ngrams(tokens, n) for tokens in texts]
    total = sum(each.total() for each in counts)
    return len(set().union(*counts)) / total if total else 0.0
