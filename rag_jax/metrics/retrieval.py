"""Answer recall of retrieved passages as DPR measures it, and monitors of retrieval collapse."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import regex as regex_module

from rag_jax.metrics.patterns import pattern_match
from rag_jax.metrics.references import refuse_string

_TOKEN = regex_module.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_ASCII_TOKEN = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")  # the same, and quicker


def has_answer(text: str, answers: Sequence[str], regex: bool = False) -> bool:
    """Whether the tokens of one of the answers occur, contiguously, in the text.

    A token is a run of letters, digits and marks, or any other single visible character; both
    sides are canonically decomposed (NFD) and lower-cased. So "Rome" is not in "Romeo", "U.S." is
    in "the U.S. Senate", and "café" is not in "cafe".

    With `regex` the answers are regular expressions, searched in the decomposed text as it is.

    Source: DPR's `has_answer` with DrQA's `SimpleTokenizer`. Differs from DPR: an answer without
    any token (an empty one) is nowhere, where DPR finds it everywhere.

    Raises:
        TypeError: `answers` is one string.
    """
    return answer_rank([text], answers, regex) == 0


def answer_rank(texts: Sequence[str], answers: Sequence[str], regex: bool = False) -> float:
    """Rank from 0 of the first text that has an answer, as `has_answer` tells; infinity if none.

    Raises:
        TypeError: the texts or the answers are one string.
    """
    refuse_string(texts, "passages of a question are", "a list")
    refuse_string(answers, "answers is")
    wanted = [joined for joined in map(_joined_tokens, answers) if joined.strip()]

    def holds(text: str) -> bool:
        if regex:
            return pattern_match(text, answers, "search", nfd=True)
        tokens = _joined_tokens(text)
        return any(answer in tokens for answer in wanted)

    return next((i for i, text in enumerate(texts) if holds(text)), float("inf"))


def recall_at(ranks: Sequence[float], ks: Iterable[int]) -> dict[int, float]:
    """Percentage of questions whose `answer_rank` is among the first k, for each k."""
    return {k: 100.0 * float(np.mean(np.asarray(ranks) < k)) for k in ks}


def gold_metrics(retrieved: Sequence[Sequence[str]], gold: Sequence[Collection[str]],
                 ks: Iterable[int]) -> dict[str, float]:
    """How well the passages that are known to hold the answers are ranked, in percent.

    Args:
        retrieved: per question the ids of its passages, best first, each once.
        gold: per question the ids of its gold passages, at least one.
        ks: depths, 1 or more.

    Returns:
        Means over the questions: gold_recall@K, the share of a question's gold passages that are
        among its first K; gold_mrr, 1 / rank of the first one, 0 where none is retrieved; and
        gold_ndcg@K, with gain 1 for each and the discount 1 / log2(1 + rank), over the best that
        K places can have.

    Raises:
        ValueError: no questions, different numbers of them, or one without a gold passage.
    """
    if not gold or len(gold) != len(retrieved) or not all(map(len, gold)):
        raise ValueError(f"{len(retrieved)} questions with passages, {len(gold)} with gold ones: "
                         "expected as many of both, one or more, and a gold passage for each")
    ks = list(ks)
    gold = list(map(set, gold))  # an id that is named twice is one passage
    hits = [np.array([i in right for i in ids], bool)
            for ids, right in zip(retrieved, gold, strict=True)]
    counts = np.array(list(map(len, gold)))
    metrics = {f"gold_recall@{k}": [hit[:k].sum() / count for hit, count in zip(
        hits, counts, strict=True)] for k in ks}
    metrics["gold_mrr"] = [1 / (hit.argmax() + 1) if hit.any() else 0.0 for hit in hits]
    for k in ks:
        discount = 1 / np.log2(2 + np.arange(k))
        metrics[f"gold_ndcg@{k}"] = [
            discount[: len(hit[:k])][hit[:k]].sum() / discount[:count].sum()
            for hit, count in zip(hits, counts, strict=True)]
    return {name: 100.0 * float(np.mean(values)) for name, values in metrics.items()}


def title_precision(titles: Sequence[str], gold_titles: Iterable[str], k: int) -> float:
    """Share of the first k places that hold a gold title, each title once; above 0 if any does.

    That any does is the paper's title overlap (section 4.4: 71 % of FEVER's claims in the first,
    90 % in the first 10). The share is precision@k of Hugging Face's eval_rag.

    Args:
        titles: those of a question's passages, best first.
        gold_titles: those of the pages that hold the answer, or the evidence.
        k: depth, 1 or more.
    """
    return len(set(titles[:k]) & set(gold_titles)) / k


def retrieval_monitors(
    ids: np.ndarray, prior: np.ndarray, posterior: np.ndarray | None = None
) -> dict[str, float | int]:
    """Tells whether retrieval has collapsed onto a few passages, or the prior onto one of them.

    A slot counts if its id is not negative and its prior is above zero; the others are the
    padding of short result lists. Questions without any such slot count in `top_passage_share`
    (as not retrieving it) and are left out of the two mean entropies.

    Args:
        ids: int[B, K], passage ids per question; negative where there is none.
        prior: float[B, K], p(z|x); each row sums to 1, or to 0 where nothing was retrieved.
        posterior: float[B, K], p(z|x,y), likewise.

    Returns:
        unique_passages: number of different passages retrieved over the whole set.
        unique_passage_share: that number over the number of slots that count, in (0, 1].
        retrieved_id_entropy: nats, of the distribution of ids over all slots that count.
        top_passage_share: share of questions that retrieve the commonest passage, in (0, 1].
        prior_entropy: mean over questions, nats per question.
        posterior_entropy: likewise, if `posterior` is given.

    Raises:
        ValueError: other shapes, negative or non-finite probabilities, rows that do not sum to 1,
            or no passage at all.
    """
    ids = np.asarray(ids)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids is {ids.dtype}{list(ids.shape)}: expected int[B, K]")
    prior = _probabilities("prior", prior, ids)
    counted = (ids >= 0) & (prior > 0)
    if not counted.any():
        raise ValueError("no passages: all ids are negative or have prior 0")
    _, slot_counts = np.unique(ids[counted], return_counts=True)
    rows = np.nonzero(counted)[0]
    # A question counts once for a passage, even if an index returned it twice.
    pairs = np.unique(np.stack([rows, ids[counted]]), axis=1)
    _, question_counts = np.unique(pairs[1], return_counts=True)
    monitors = {
        "unique_passages": len(slot_counts),
        "unique_passage_share": len(slot_counts) / int(slot_counts.sum()),
        "retrieved_id_entropy": float(_entropy(slot_counts / slot_counts.sum())),
        "top_passage_share": int(question_counts.max()) / len(ids),
        "prior_entropy": _mean_entropy(prior, counted),
    }
    if posterior is not None:
        posterior = _probabilities("posterior", posterior, ids)
        monitors["posterior_entropy"] = _mean_entropy(posterior, counted)
    return monitors


def effective_passages(ids: np.ndarray) -> float:
    """exp(entropy) of the passages retrieved, integers[...] (negative: none): so many passages,
    all retrieved equally often, would be as varied. 0 where there are none."""
    _, counts = np.unique(ids[ids >= 0], return_counts=True)
    return float(np.exp(_entropy(counts / counts.sum()))) if len(counts) else 0.0


# --- answers in texts ---------------------------------------------------------------------------


def _joined_tokens(text: str) -> str:
    """Tokens, each between single spaces, so that a contiguous run of them is a substring."""
    if text.isascii():
        tokens = _ASCII_TOKEN.findall(text)
    else:
        tokens = _TOKEN.findall(unicodedata.normalize("NFD", text))
    return f" {' '.join(tokens)} ".lower()


# --- entropies ----------------------------------------------------------------------------------


def _probabilities(name: str, values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns float64[B, K], checked: finite, not negative, rows summing to 1 or to 0."""
    p = np.asarray(values, dtype=np.float64)
    if p.shape != ids.shape:
        raise ValueError(f"{name} has shape {list(p.shape)}: expected that of ids, {ids.shape}")
    if not np.isfinite(p).all() or (p < 0).any():
        raise ValueError(f"{name} holds negative or non-finite values: expected probabilities")
    sums = p.sum(axis=1)
    wrong = (np.abs(sums - 1) > 1e-2) & (sums != 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{name}[{row}] sums to {sums[row]:.4g}: expected 1 (probabilities, not scores or "
            "log-probabilities), or 0 where nothing was retrieved"
        )
    return p


def _entropy(p: np.ndarray) -> np.ndarray:
    """Entropy in nats along the last axis; 0 log 0 is 0."""
    return -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)


def _mean_entropy(p: np.ndarray, counted: np.ndarray) -> float:
    """Mean in nats over the rows with a counted slot, uncounted slots left out."""
    return float(_entropy(np.where(counted, p, 0.0))[counted.any(axis=1)].mean())
