"""Settings of decoding from `config.eval`."""

import pytest
import tiny

from rag_jax.config import EVAL_PRESETS, Config, ConfigError
from rag_jax.config.overrides import replace
from rag_jax.data.text import Joint, Tokenizer
from rag_jax.data.tokenizer_training import train_bart_tokenizer
from rag_jax.decoding.settings import Decoding
from rag_jax.training.answer_settings import decoding_settings

TOKENIZER = train_bart_tokenizer(["Lima is the capital of Peru, and Paris of France."] * 3, 300)


def test_texts_become_the_ids_that_they_have_inside_an_answer():
    """A bad word without the space in front would forbid tokens that no answer has."""
    config = replace(Config(), {"eval.bad_words": ("Lima", "Paris of"), "eval.prefix": "Peru",
                                "eval.num_beams": 3, "data.max_target_length": 9})
    found = decoding_settings(config, TOKENIZER)
    inside = TOKENIZER.encode(["a Lima"])[0]
    assert inside[-len(found.bad_words[0]):] == list(found.bad_words[0])
    assert TOKENIZER.decode(found.bad_words[2]) == "Paris of"
    assert TOKENIZER.decode(found.prefix) == "Peru"
    assert (found.num_beams, found.max_length, found.forced_bos) == (3, 9, None)
    assert decoding_settings(Config(), TOKENIZER) == Decoding()
    classes = decoding_settings(replace(Config(), {"eval.labels": ("Lima", "Peru")}), TOKENIZER)
    assert [TOKENIZER.decode(label) for label in classes.labels] == ["Lima", "Peru"]
    assert {label[-1] for label in classes.labels} == {TOKENIZER.end}, "as targets end"
    told = decoding_settings(replace(Config(), {
        "eval.labels": ("Lima", "Peru"), "model.head": "label_token"}), TOKENIZER)
    at = [a != b for a, b in zip(*classes.labels, strict=False)].index(True)
    assert told.labels == tuple(label[at:at + 1] for label in classes.labels)
    assert told.max_length == 1
    searched = replace(Config(), {"eval.labels": ("Lima", "Peru"), "model.head": "label_token",
                                  "eval.min_length": 5, "eval.forced_bos": True,
                                  "eval.forced_eos": True})
    assert decoding_settings(searched, TOKENIZER).labels == told.labels, "they have no effect"
    forced = decoding_settings(replace(Config(), {"eval.forced_bos": True}), TOKENIZER)
    assert forced.forced_bos == TOKENIZER.start


def test_a_bad_word_is_one_wherever_it_stands_in_an_answer_without_a_space_before_it():
    """After a chat's prompt an answer's first word has no space, and its further ones do: forbidden
    at the start alone, a word came later."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(["Lima is Lima"] * 9, trainers.BpeTrainer(
        special_tokens=["<s>", "</s>", "<pad>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    chat = Tokenizer(backend)
    chat = chat.answering(chat.end, Joint())
    found = decoding_settings(replace(Config(), {"eval.bad_words": ("Lima",)}), chat)
    assert [*map(chat.piece, found.bad_words[0])] == ["Lima"]
    assert [*map(chat.piece, found.bad_words[1])] == [" Lima"] and len(found.bad_words) == 2


def test_a_bad_word_is_one_within_a_word():
    """Its tokens after a space alone were forbidden, which are others: "mmm" stayed an answer."""
    for tokenizer in (TOKENIZER, Tokenizer(tiny.t5_tokenizer(["Lima"]))):
        for text in ("m", "!"):
            found = decoding_settings(replace(Config(), {"eval.bad_words": (text,)}), tokenizer)
            forms = [[*map(tokenizer.piece, word)] for word in found.bad_words]
            assert [text] in forms and len(forms) == 2
            assert "".join(forms[0]) == f" {text}", "the other one is a word of its own"


def test_the_first_token_is_not_forced_where_there_is_none():
    config = replace(Config(), {"eval.forced_bos": True})
    with pytest.raises(ConfigError, match="config.eval: forced_bos: this tokenizer has no <s>"):
        decoding_settings(config, Tokenizer(tiny.t5_tokenizer(["Lima"])))


def test_the_presets_of_the_paper():
    """Appendix A: greedy QA with 15 or 50 documents; generation with 10, beam 4, fast."""
    found = {name: (e.k, e.num_beams, e.strategy) for name, e in EVAL_PRESETS.items()}
    assert found == {"paper-qa-token": (15, 1, "thorough"),
                     "paper-qa-sequence": (50, 1, "thorough"),
                     "paper-generation": (10, 4, "fast")}
    assert replace(Config(), {"eval": "paper-generation"}).eval.num_beams == 4


@pytest.mark.parametrize(("fields", "message"), [
    ({"eval.num_return_sequences": 3}, "num_return_sequences=3: must be at most num_beams=1"),
    ({"eval.temperature": 0.0, "eval.sample": True}, "temperature=0.0"),
    ({"eval.min_length": 40},
     "min_length=40: must be at most config.data.max_target_length=32; "),
    ({"eval.bad_words": ("Lima", "")}, "bad_words: '' has no tokens"),
    ({"eval.labels": ("Yes", "No", "Yes")}, "labels: 'Yes', 'Yes' are equal as tokens"),
    ({"model.head": "label_token", "eval.labels": ("Lima", "Peru", "Lima is")},
     "labels: config.model.head=label_token tells 'Lima', 'Peru', 'Lima is' by one token each"),
])
def test_settings_that_contradict_each_other_name_the_section(fields, message):
    with pytest.raises(ConfigError, match=f"config.eval: {message}"):
        decoding_settings(replace(Config(), fields), TOKENIZER)
