"""The memory budget in numbers."""

import pytest
import tiny

from rag_jax.config import BartConfig
from rag_jax.decoding.memory import candidates_at_once, question_bytes, questions_at_once
from rag_jax.decoding.settings import Decoding

BASE = tiny.rag_model(generator=vars(BartConfig()))


def test_no_budget_means_all_at_once():
    assert questions_at_once(BASE, Decoding(num_beams=4, memory_mib=0), 64, 50, 256) == 64
    assert candidates_at_once(BASE, 0, 4, 200, 8, 256) == 32
    assert candidates_at_once(BASE, 0, 4, 20, 8, 256) == 20


@pytest.mark.parametrize("budget", [512, 2048, 8192, 65536])
def test_groups_divide_the_batch_and_fit_half_the_budget(budget):
    settings = Decoding(num_beams=4, memory_mib=budget)
    at_once = questions_at_once(BASE, settings, 24, 5, 256)
    assert 24 % at_once == 0
    each = question_bytes(BASE, settings, 5, 256)
    assert at_once == 1 or at_once * each <= budget * 2**20 / 2
    larger = [n for n in range(at_once + 1, 25) if 24 % n == 0]
    assert not larger or larger[0] * each > budget * 2**20 / 2
    assert 1 <= candidates_at_once(BASE, budget, 120, 20, 32, 256) <= 20


def test_a_fused_question_searches_once_for_all_passages():
    """Encoding is that of K passages; hypotheses and logits are there once, not K times."""
    fused = tiny.rag_model("fid", generator=vars(BartConfig()))
    def of(model, beams, passages):
        return question_bytes(model, Decoding(num_beams=beams), passages, 256)

    assert of(fused, 8, 1) == of(BASE, 8, 1)
    assert of(fused, 8, 5) - of(fused, 1, 5) == of(BASE, 8, 1) - of(BASE, 1, 1)
    assert of(fused, 8, 5) - of(fused, 8, 4) == of(fused, 1, 5) - of(fused, 1, 4) > 0


def test_every_hypothesis_is_compared_with_the_tokens_of_all():
    """6,000 samples of each of four questions were drawn at once, whatever the budget."""
    def of(beams):
        return question_bytes(BASE, Decoding(num_beams=beams, max_length=4), 5, 256)

    more_than_linear = of(3000) - 2 * of(2000) + of(1000)
    assert more_than_linear == 5 * 4 * 12 * 4 * (3000**2 - 2 * 2000**2 + 1000**2)


def test_guesses_have_logits_and_a_past_of_their_own():
    """Where nothing is guessed, they take no memory, and groups are as large as without."""
    def of(**how):
        return question_bytes(BASE, Decoding(num_beams=1, **how), 5, 256)

    three = of(prompt_lookup=3) - of()
    assert three == 3 * (of(prompt_lookup=1) - of()) and three > 3 * 5 * 4 * BartConfig().vocab_size
    assert of(prompt_lookup=3, labels=((1,),)) == of(labels=((1,),))


def test_a_larger_budget_never_means_smaller_groups():
    sizes = [questions_at_once(BASE, Decoding(num_beams=4, memory_mib=m), 16, 50, 256)
             for m in (1, 1024, 4096, 16384, 10**6)]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 16
    pairs = [candidates_at_once(BASE, m, 1, 200, 32, 256) for m in (1, 128, 512, 10**6)]
    assert pairs == sorted(pairs) and pairs[0] == 1 < pairs[1] < pairs[-1] == 32
