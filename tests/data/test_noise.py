"""BART's noise: how much is masked, in which spans, and nothing lost or added."""

import numpy as np
import pytest

from rag_jax.data import noise

MASK = -1


def rng(seed=0):
    return np.random.default_rng(seed)


def spans(noised, size):
    """Lengths of the masked spans of arange(size), by what is missing between its neighbours."""
    lengths, last = [], -1
    for token, following in zip(noised, [*noised[1:], size], strict=True):
        if token == MASK:
            assert following != MASK, "two masks touch: their spans cannot be told apart"
            lengths.append(following - last - 1)
        else:
            last = token
    return lengths


@pytest.mark.parametrize("ratio", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("size", [1, 2, 7, 40, 500])
def test_kept_tokens_stay_in_order_and_the_share_is_near_the_ratio(ratio, size):
    shares = []
    for seed in range(40):
        ids = list(range(size))
        noised = noise.infill(ids, MASK, ratio, 3.0, rng(seed))
        assert ids == list(range(size)), "the target must stay as it is"
        kept = [t for t in noised if t != MASK]
        assert kept == sorted(set(kept)) and set(kept) <= set(ids)
        shares.append(1 - len(kept) / size)
    if size >= 40:
        assert abs(np.mean(shares) - ratio) < 0.02 + 0.1 * ratio
    assert max(shares) <= round(ratio * size) / size + 1e-9


def test_no_two_masks_touch_while_there_is_room():
    """Adjacent masks would tell how many spans were cut, and look unlike one span."""
    for seed in range(200):
        noised = np.array(noise.infill(list(range(30)), MASK, 0.3, 3.0, rng(seed)))
        assert not ((noised[1:] == MASK) & (noised[:-1] == MASK)).any()


def test_span_lengths_are_poisson_and_some_are_zero():
    lengths = []
    for seed in range(20):
        lengths += spans(noise.infill(list(range(1000)), MASK, 0.3, 3.0, rng(seed)), 1000)
    lengths = np.array(lengths)
    assert abs(lengths.mean() - 3.0) < 0.15 and abs(lengths.var() - 3.0) < 0.5
    assert abs((lengths == 0).mean() - np.exp(-3)) < 0.015


def test_spans_lie_all_over_the_text():
    hidden = np.zeros(50)
    for seed in range(400):
        kept = noise.infill(list(range(50)), MASK, 0.3, 3.0, rng(seed))
        hidden += ~np.isin(np.arange(50), kept)
    assert (hidden / 400 > 0.1).all() and (hidden / 400 < 0.45).all()


def test_without_noise_or_text_nothing_changes():
    assert noise.infill([1, 2, 3], MASK, 0.0, 3.0, rng()) == [1, 2, 3]
    assert noise.infill([], MASK, 0.3, 3.0, rng()) == []
    assert noise.infill([], MASK, 1.0, 3.0, rng()) == []


@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_ratio_of_one_leaves_at_most_what_empty_spans_leave(size):
    """With fewer gaps than spans, spans without a place must not leave their tokens readable."""
    shares = []
    for seed in range(20):
        noised = noise.infill(list(range(size)), MASK, 1.0, 3.0, rng(seed))
        shares.append(1 - sum(t != MASK for t in noised) / size)
    assert np.mean(shares) > 0.8


@pytest.mark.parametrize("ratio", [0.8, 0.9, 0.95])
def test_a_high_ratio_masks_as_much_as_a_low_one_promises(ratio):
    shares = [1 - sum(t != MASK for t in noise.infill(list(range(200)), MASK, ratio, 3.0, rng(s)))
              / 200 for s in range(30)]
    assert abs(np.mean(shares) - ratio) < 0.05


def test_spans_of_mean_length_zero_only_insert_masks():
    noised = noise.infill(list(range(10)), MASK, 0.5, 0.0, rng())
    assert [t for t in noised if t != MASK] == list(range(10)) and noised.count(MASK) == 5


def test_the_same_stream_gives_the_same_noise():
    ids = list(range(60))
    assert noise.infill(ids, MASK, 0.3, 3.0, rng(4)) == noise.infill(ids, MASK, 0.3, 3.0, rng(4))
    assert noise.infill(ids, MASK, 0.3, 3.0, rng(4)) != noise.infill(ids, MASK, 0.3, 3.0, rng(5))


TEXT = "Peru lies in South America. Is its capital Lima? It is! 3.5 million live there."


def test_permutation_keeps_the_sentences_and_changes_their_order():
    parts = ["Peru lies in South America.", "Is its capital Lima?", "It is!",
             "3.5 million live there."]
    orders = set()
    for seed in range(50):
        permuted = noise.permute_sentences(TEXT, rng(seed))
        rest, found = permuted, []
        while rest:
            part = next(p for p in parts if rest.startswith(p))
            found.append(part)
            rest = rest[len(part):].lstrip(" ")
        assert sorted(found) == sorted(parts)
        orders.add(tuple(found))
    assert len(orders) > 15


@pytest.mark.parametrize("text, parts", [
    ("Lima is a port. \n", ["Lima is a port."]),
    ("Lima is a port. It never rains! ", ["Lima is a port.", "It never rains!"]),
    (" ", [" "]), ("", [""]),
    ("秘鲁在南美洲。首都是利马！ 是吗？", ["秘鲁在南美洲。", "首都是利马！", "是吗？"]),
    ("「海だ。」と言った。本当？！", ["「海だ。」", "と言った。", "本当？！"]),
])
def test_no_sentence_is_empty_and_chinese_and_japanese_ones_need_no_space(text, parts):
    """A passage that ends in white space had an empty sentence, and a Chinese one was a sentence
    alone: queries of the warm-up were empty, or all that the passage has."""
    assert noise.sentences(text) == parts
    assert noise.joined(parts) == (text.strip().replace("！ 是", "！是") or text)


@pytest.mark.parametrize("text", ["", "No end", "One sentence alone."])
def test_permutation_of_one_sentence_is_itself(text):
    assert noise.permute_sentences(text, rng()) == text
