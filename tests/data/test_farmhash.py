"""The hash that divides ORQA's training files: one bit off, and train and dev would be mixed."""

import farmhash
import pytest

from rag_jax.data.task_sources import held_out

# Of the first n bytes 3, 10, 17, ... modulo 256.
GOLDENS = {
    0: 11160318154034397263, 1: 13745158429558087051, 3: 4662423180930907492,
    4: 17566270577251613586, 7: 5759834791111993764, 8: 907454142650066470,
    16: 9140634717936656744, 17: 14506534093795057959, 32: 11907377154618496232,
    33: 14001582926318596329, 64: 389040666157116578, 65: 8638051931306504420,
    128: 7379187116787024497, 129: 10961879714037014659, 300: 16122021424968347411,
}


@pytest.mark.parametrize("size", GOLDENS)
def test_fingerprints_are_googles(size):
    assert farmhash.Fingerprint64(bytes((i * 7 + 3) % 256 for i in range(size))) == GOLDENS[size]


def test_one_question_in_ten_is_held_out():
    share = sum(held_out(f"who wrote the book number {n}?") for n in range(5000)) / 5000
    assert 0.08 < share < 0.12


@pytest.mark.parametrize("question, dev", [
    ("How many Great Lakes are there?", True), ("where does lena river begin and end?", True),
    ("how old is sacha baron cohen?", False), ("When is Fashion week in NYC?", False)])
def test_questions_of_curated_trec_and_web_questions(question, dev):
    """By Google's fingerprint modulo 10."""
    assert held_out(question) is dev
