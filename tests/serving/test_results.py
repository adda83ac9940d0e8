"""Answers as JSON: cut where the request says, with the probabilities of what is left."""

import itertools

import numpy as np
import pytest

from rag_jax.config import EvalConfig
from rag_jax.serving.asking import asked
from rag_jax.serving.fields import Fields
from rag_jax.serving.results import Ask, Completion, Pieces, choices, citations, vector
from rag_jax.serving.settings import Settings
from rag_jax.types import Answer, Evidence

WORDS = {1: "Mar", 2: "tín", 3: " Viz", 4: "car", 5: "ra", 9: ""}  # 9 is </s>


class Tokenizer:
    end = 9

    def decode(self, ids):
        return "".join(WORDS[i] for i in ids).strip()

    def decode_settled(self, ids):
        return self.decode(ids).rstrip("\ufffd").rstrip()

    def piece(self, token):
        return WORDS[token] or "</s>"


def answer(kind="token"):
    rows = np.array([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.6, 0.4], [0.3, 0.7], [1.0, 0.0]])
    last = rows.mean(axis=0) if kind == "token" else rows[-1]
    evidence = [Evidence(name, "", "text", 0.5, p) for name, p in zip("ab", last, strict=True)]
    logs = [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]
    return Answer("Martín Vizcarra", [1, 2, 3, 4, 5, 9], sum(logs), evidence, logs, rows.tolist(),
                  certified=True, tokens=["Mar", "tín", " Viz", "car", "ra", "</s>"],
                  alternatives=[Answer("Mar", [1, 9], -3.0, [
                      Evidence(name, "", "text", 0.5, p) for name, p in zip(
                          "ab", [0.4, 0.6], strict=True)], [-1.0, -2.0], [[0.4, 0.6]] * 2,
                      tokens=["Mar", "</s>"])])


@pytest.mark.parametrize("ask, text, reason, count", [
    (Ask(), "Martín Vizcarra", "stop", 6), (Ask(max_tokens=6), "Martín Vizcarra", "stop", 6),
    (Ask(max_tokens=5), "Martín Vizcarra", "stop", 6), (Ask(max_tokens=2), "Martín", "length", 2),
    (Ask(stop=("zc", "rr")), "Martín Vi", "stop", 3), (Ask(stop=("M",)), "", "stop", 1),
    (Ask(stop=("Lima",)), "Martín Vizcarra", "stop", 6),
    (Ask(max_tokens=3, stop=("zc",)), "Martín Viz", "length", 3),
])
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_an_answer_is_cut_with_its_probabilities(ask, text, reason, count, kind):
    whole = answer(kind)
    choice, = choices(ask, [whole], Tokenizer(), kind)
    found = choice.answer
    assert (found.text, choice.reason, len(found.token_ids)) == (text, reason, count)
    assert len(found.tokens) == len(found.token_posterior) == count
    np.testing.assert_allclose(found.log_prob, sum(whole.token_log_probs[:count]), rtol=1e-6)
    rows = np.array(whole.token_posterior[:count])
    np.testing.assert_allclose(found.posterior, rows.mean(axis=0) if kind == "token" else rows[-1])
    assert found.certified == (count == 6)  # nothing is proved of a part
    for told in (0, 3, 5):  # of its tokens, before the answer is whole
        growing = Pieces(ask, Tokenizer())
        begun = (growing.more(whole.token_ids[:n]) for n in range(1, told + 1))
        given = [*itertools.chain(*begun), *growing.rest(choice)]
        assert "".join(piece for piece, _ in given) == text
        assert [n for _, tokens in given for n in range(choice.end)[tokens]] == list(
            range(choice.end))


@pytest.mark.parametrize("most, text", [(None, "Martín Vizcarra"), (1, "Mar"), (2, "Martín")])
def test_a_start_token_that_is_forced_is_no_text(monkeypatch, most, text):
    """It was the first of "logprobs", and all that there was with max_tokens=1."""
    monkeypatch.setitem(WORDS, 0, "")
    whole = answer()
    whole = whole._replace(token_ids=[0, *whole.token_ids], tokens=["<s>", *whole.tokens],
                           token_log_probs=[-0.0, *whole.token_log_probs],
                           token_posterior=[[0.5, 0.5], *whole.token_posterior])
    fields = Fields("request", {"max_tokens": most})
    ask = asked(fields, "Who?", Settings("rag_token"), EvalConfig(forced_bos=True)).ask
    choice, = choices(ask, [whole], Tokenizer(), "token")
    assert choice.answer.text == text
    spent = min(most or 5, 5)
    made = Completion("rag_token", "2018:1", 3, True, True, Tokenizer(), lambda answer: [])
    done = made.whole([choice])
    assert done["usage"]["completion_tokens"] == spent
    assert [each["token"] for each in done["choices"][0]["logprobs"]["content"]] == [
        WORDS[token] for token in range(1, spent + 1)]
    for told in (0, 1, 4):
        growing = Pieces(ask, Tokenizer())
        given = [*growing.more(whole.token_ids[:told]), *growing.rest(choice)]
        assert "".join(piece for piece, _ in given) == text
        assert [n for _, tokens in given for n in range(7)[tokens]] == list(range(1, spent + 1))


def test_alternatives_come_with_their_own_posteriors():
    first, second = choices(Ask(n=2), [answer()], Tokenizer(), "token")
    assert second.answer.text == "Mar" and second.answer.posterior == [0.4, 0.6]
    assert second.answer.log_prob == -3.0 and not second.answer.certified and first.answer.certified
    assert second.answer.tokens == ["Mar", "</s>"] and second.end == 1
    assert len(choices(Ask(n=2), [answer()] * 3, Tokenizer(), "token")) == 2


def test_a_letter_of_two_tokens_is_streamed_whole(monkeypatch):
    """Half a letter was sent as U+FFFD, and could not be taken back."""
    monkeypatch.setitem(WORDS, 2, "t")
    whole = answer()._replace(text="Martín Vizcarra")
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: {
        2: "Mart\ufffd", 3: "Martín Viz"}.get(len(ids)) or decode(self, ids).replace("rt", "rtín"))
    choice, = choices(Ask(), [whole], Tokenizer(), "token")
    told, growing = Pieces(Ask(), Tokenizer()), Pieces(Ask(), Tokenizer())
    for given in (list(told.rest(choice)), [piece for n in range(6) for piece in growing.more(
            whole.token_ids[:n])]):
        assert given == [("Mar", slice(0, 1)), ("t", slice(1, 2)), ("ín Viz", slice(2, 3)),
                         ("car", slice(3, 4)), ("ra", slice(4, 5))]


def test_what_may_be_the_beginning_of_a_stop_waits():
    """The first letters of a stop text were sent, as those that make it one had not come."""
    for stop, given in ((("zc",), ["Mar", "tín", " Vi"]), (("zq",), ["Mar", "tín", " Vi", "zcar"]),
                        (("rtínX", "tín Vizca"), ["Ma", "r"])):
        growing = Pieces(Ask(stop=stop), Tokenizer())
        assert [piece for n in range(1, 5) for piece, _ in growing.more([1, 2, 3, 4][:n])] == given


def test_tokens_before_a_stop_are_counted_where_letters_have_several(monkeypatch):
    """Halves of letters that are not text yet made up the length of the text before the stop."""
    texts = {0: "", 1: "\ufffd", 2: "\ufffd\ufffd", 3: "東", 4: "東京", 5: "東京 X", 9: "東京 X"}
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: texts[ids[-1]] if ids else "")
    whole = answer()._replace(text="東京 X")
    choice, = choices(Ask(stop=("京",)), [whole], Tokenizer(), "token")
    assert choice.answer.text == "東" and len(choice.answer.token_ids) == 4
    texts.update({3: "東", 4: "東 \ufffd", 5: "東 京", 9: "東 京"})  # of the stop, not of the text
    choice, = choices(Ask(stop=("京",)), [whole._replace(text="東 京")], Tokenizer(), "token")
    assert choice.answer.text == "東 " and len(choice.answer.token_ids) == 5


def test_a_class_whose_token_is_a_part_of_its_name_is_given_whole():
    """It was said to be cut at the length limit, as no </s> ends it."""
    label = answer()._replace(text="REFUTES", token_ids=[1], token_log_probs=[-0.1])
    choice, = choices(Ask(), [label], Tokenizer(), "token")
    assert choice[:3] == (label, "stop", 1)
    assert list(Pieces(Ask(), Tokenizer()).rest(choice)) == [("REFUTES", slice(0, 1))]


def test_a_class_is_never_cut():
    """A part of its name is no class, and had another probability than the class."""
    fields = Fields("request", {"n": 2, "max_tokens": 1, "stop": "F"})
    for labels, ask in ((("SUPPORTS", "REFUTES"), Ask(2)), ((), Ask(2, 1, ("F",)))):
        run = EvalConfig(labels=labels, num_beams=2)
        assert asked(fields, "Is it?", Settings("fever"), run).ask == ask


def test_citations_name_passages_by_addresses_that_hold_anything():
    odd = answer()._replace(passages=[Evidence("a/b?c#d é", "", "", 0.2, 0.1),
                                      Evidence("", "", "", 0.5, 0.5),  # the null document
                                      Evidence("x", "<b>", "", 0.3, 0.4)])
    first, second = (each["url_citation"] for each in citations(odd, "http://h/", "20 18"))
    assert first["title"] == "<b>" and first["end_index"] == len("Martín Vizcarra")
    assert second["url"] == "http://h/passages/20%2018/a%2Fb%3Fc%23d%20%C3%A9"


def test_vectors_are_little_endian_float32():
    values = np.array([1.0, -2.5], np.float32)
    assert vector(values, "float") == [1.0, -2.5]
    assert vector(values, "base64") == "AACAPwAAIMA="
