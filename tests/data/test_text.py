"""Text and ids: what goes in comes out, and an answer has the ids of the words in its passage."""

import itertools
import json
import logging
import os
import pathlib
import random
import re
import subprocess
import sys
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tokenizers
from tokenizers import normalizers, pre_tokenizers
from transformers.utils import logging as transformers_logging

from rag_jax.config import BertConfig
from rag_jax.countries import prose
from rag_jax.countries.facts import load_countries
from rag_jax.data import tokenizer_file
from rag_jax.data.padding import pad_rows
from rag_jax.data.text import Cuts, GeneratorFormat, Tokenizer, chunks, encoder_input
from rag_jax.data.tokenizer_training import (
    BART_SPECIALS,
    BERT_SPECIALS,
    train_bart_tokenizer,
    train_bert_tokenizer,
)
from rag_jax.errors import DataError

ROOT = pathlib.Path(__file__).parent.parent.parent
REAL = load_countries()
PASSAGES = [p for c in REAL for p in prose.passages(c, "2018")]


@pytest.fixture(scope="module")
def bart():
    return train_bart_tokenizer([f"{p.title} / {p.text}" for p in PASSAGES], 2000)


@pytest.fixture(scope="module")
def bert():
    return train_bert_tokenizer([f"{p.title} {p.text}" for p in PASSAGES], 2000)


def fuzz(seed):
    """A text of any code points but lone surrogates, with the odd run of spaces and marks."""
    rng = random.Random(seed)
    ranges = [(0, 0x7F), (0x20, 0x7E), (0x80, 0x2FF), (0x300, 0x36F), (0x590, 0x6FF),
              (0x2000, 0x206F), (0x3000, 0x9FFF), (0xE000, 0xFFFF), (0x1F300, 0x1FAFF),
              (0x10000, 0x10FFFF)]
    pieces = [chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(0, 30))]
    pieces += rng.choices(["  ", "\n", "\t", ".", "'s", "</s>", "<mask>", "[SEP]", "Ġ", "##a"], k=3)
    rng.shuffle(pieces)
    return "".join(pieces)


def test_bart_writes_any_text_back(bart):
    """A byte lost here is an answer that can never be matched."""
    texts = [fuzz(seed) for seed in range(500)]
    for text, ids in zip(texts, bart.encode(texts), strict=True):
        assert bart.decode(ids) == text.strip(), [hex(ord(c)) for c in text]


def test_bert_reads_any_text_without_special_tokens(bert):
    texts = [fuzz(seed) for seed in range(500)]
    for ids in bert.encode(texts):
        assert not {bert.start, bert.end, bert.pad, bert.mask} & set(ids)


def test_special_tokens_written_in_a_text_are_letters(bart, bert):
    """A passage holding "</s>" must not end the generator's input, nor a mask ask for filling."""
    for tokenizer, names in ((bart, BART_SPECIALS), (bert, BERT_SPECIALS)):
        special = {tokenizer.start, tokenizer.end, tokenizer.pad, tokenizer.mask}
        for ids in tokenizer.encode([f"a {name} b" for name in names]):
            assert not special & set(ids)


def test_bert_is_uncased_and_writes_plain_words_back(bert):
    assert bert.encode(["Lima PERU"]) == bert.encode(["lima peru"])
    assert bert.decode(bert.encode(["The capital of Peru is Lima."])[0]).startswith(
        "the capital of peru is lima")


def test_decode_leaves_special_tokens_out(bart):
    ids = bart.encode(["Lima"])[0]
    assert bart.decode([bart.start, *ids, bart.end, bart.pad, bart.pad]) == "Lima"
    assert bart.decode(np.array(ids, np.int32)) == "Lima"
    assert bart.decode([]) == "" and bart.encode([""]) == [[]] and bart.encode([]) == []


def test_pieces_of_an_answer_are_its_text_with_its_spaces(bart):
    """Tokens of T5 came without the space that begins a word: "Limais" was what they joined to."""
    unigrams = Tokenizer(tiny.t5_tokenizer(["Lima is", "the capital"]))
    for tokenizer in (bart, unigrams):
        ids = [*tokenizer.encode_answers(["Lima is the capital"])[0], tokenizer.end]
        assert "".join(map(tokenizer.piece, ids)).strip() == "Lima is the capital</s>"
    assert [unigrams.piece(i) for i in ids][1] == " is"


def contains(row, part):
    return any(row[i : i + len(part)] == part for i in range(len(row) - len(part) + 1))


@pytest.fixture(scope="module")
def of_bytes():
    """A tokenizer of single letters, with bytes for those that it does not know."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    names = ["<s>", "</s>", "<pad>", "<mask>", "<unk>", "▁", "a", "b",
             *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE(
        {name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                         decoders.Fuse()])
    backend.add_special_tokens(names[:4])
    return Tokenizer(backend)


@pytest.mark.parametrize("name", ["bart", "bert", "of_bytes"])
def test_what_is_settled_of_a_text_stays_whatever_follows(name, request):
    """A stream that gave out half a letter, or a letter that a later byte made nonsense."""
    tokenizer = request.getfixturevalue(name)
    rng = random.Random(4)
    texts = ["ab aé\n b", " Đặng 😀 é", "a  b", "\ufffd a \ufffd"]
    rows = [*tokenizer.encode(texts), *(
        [rng.randrange(tokenizer.vocab_size) for _ in range(12)] for _ in range(300))]
    for row in rows:
        settled = [tokenizer.decode_settled(row[:n]) for n in range(len(row) + 1)]
        for before, after in zip(settled, [*settled[1:], tokenizer.decode(row)], strict=True):
            assert after.startswith(before), (row, settled)
    if name != "bert":  # nothing waits longer than for the next letter
        row = tokenizer.encode(["ab é a"])[0]
        assert tokenizer.decode_settled([*row, *tokenizer.encode([" b"])[0]]) == "ab é a b"


def test_an_answer_has_the_ids_of_the_same_words_inside_the_passage(bart):
    """The generator copies; without the space in front, "Lima" would be other tokens than " Lima".
    """
    layout = GeneratorFormat(bart, 128)
    rows = dict(zip((p.id for p in PASSAGES), layout.passages(
        [p.title for p in PASSAGES], [p.text for p in PASSAGES]), strict=True))
    texts = {p.id: p.text for p in PASSAGES}
    checked = 0
    for country in REAL:
        for question in prose.questions(country, "2018"):
            passage, = question.positive_ids
            for answer in question.answers:
                if re.search(r"(?<!\S)" + re.escape(answer) + r"\b(?!['’])", texts[passage]):
                    ids = bart.encode([answer])[0]
                    assert contains(rows[passage], ids), (answer, passage)
                    checked += 1
    assert checked > 5000


def test_passage_and_question_joined_are_the_ids_of_the_joined_text(bart):
    layout = GeneratorFormat(bart, 1000)
    titles = ["Peru", "", " Côte  d'Ivoire ", "X", "Ünï"]
    texts = ["Lima is  the\ncapital.", "No title", "Yes", "ends in space \u3000", "3.5 / 4 // 5"]
    questions = ["Who is\tthe  President?", "?", " What ", "…", "a // b / c"]
    passages, suffixes = layout.passages(titles, texts), layout.questions(questions)
    for title, text, question, p, q in zip(titles, texts, questions, passages, suffixes,
                                           strict=True):
        whole = " ".join(f"{title} / {text}".split()) if title else " ".join(text.split())
        ids = bart.encode([f"{whole} // {' '.join(question.split())}"])[0]
        assert layout.join(p, q) == [bart.start, *ids, bart.end]


def test_an_input_of_fusion_in_decoder_is_the_tokens_of_its_text():
    """Guards against ids at the seam of question and passage that T5 would not give the text, a
    <s> that T5 lacks, and a long input that loses its question."""
    titles, texts = ["Peru", ""], ["Lima is the  capital.", "No title"]
    question = "Which  city?"
    backend = tiny.t5_tokenizer(["question: title: context: Peru Lima is the capital. city?"])
    t5 = Tokenizer(backend)
    assert (t5.start, t5.end, t5.pad) == (None, 1, 0) and t5.mask == t5.vocab_size - 1
    whole = ["question: Which city? title: Peru context: Lima is the capital.",
             "question: Which city? context: No title"]
    for length in (60, 24):
        layout = GeneratorFormat(t5, length, question_first=True)
        asked = layout.questions([question])[0]
        for title, text, passage, joined in zip(
                titles, texts, layout.passages(titles, texts), whole, strict=True):
            ids = backend.encode(joined).ids  # with </s>
            row = layout.join(passage, asked)
            assert row == [*ids[:-1][: length - 1], 1] and len(row) <= length
            kept = int(layout.kept(np.array(len(passage)), np.array(len(asked))))
            assert len(row) == int(layout.joined_length(
                np.array(len(passage)), np.array(len(asked)))) == len(asked) + kept + 1
            assert " ".join(text.split()).startswith(layout.text_of(title, passage[:kept]))
    assert layout.alone(["Lima"], 9)[0] == [*t5.encode(["Lima"])[0], 1]


def test_title_text_and_question_are_separated(bart):
    layout = GeneratorFormat(bart, 100)
    row = layout.join(layout.passages(["Peru"], ["Lima"])[0], layout.questions(["who"])[0])
    assert bart.decode(row) == "Peru / Lima // who"


def hugging_face_string(title, text, question):
    """RagRetriever.postprocess_docs of transformers, in words."""
    title = title[1:] if title.startswith('"') else title
    title = title[:-1] if title.endswith('"') else title
    return f"{title} / {text} // {question}".replace("  ", " ")


@pytest.mark.parametrize("max_length", [12, 20, 400])
def test_the_format_of_hugging_face_is_its_joined_and_cut_string(bart, max_length):
    layout = GeneratorFormat(bart, max_length, like_hugging_face=True)
    titles = ['"Peru"', "", "X", 'a "b"']
    texts = ["Lima  is the capital.", "No title", "ends in space ", "3.5 / 4 // 5"]
    questions = ["who is  the president?", "?", "what", "a // b / c"]
    passages, suffixes = layout.passages(titles, texts), layout.questions(questions)
    for title, text, question, p, q in zip(titles, texts, questions, passages, suffixes,
                                           strict=True):
        ids = bart.encode([hugging_face_string(title, text, question)])[0]
        assert layout.join(p, q) == [bart.start, *ids[: max_length - 2], bart.end]


@pytest.mark.parametrize("max_length", [16, 17, 24, 40])
def test_a_long_passage_is_cut_and_its_question_never(bart, max_length):
    layout = GeneratorFormat(bart, max_length)
    passage = layout.passages(["Peru"], ["Lima is the capital. " * 50])[0]
    question = layout.questions(["Who is it?"])[0]
    row = layout.join(passage, question)
    assert len(row) == max_length
    assert row[0] == bart.start and row[-1] == bart.end
    assert row[-1 - len(question) : -1] == question
    assert row[1 : -1 - len(question)] == passage[: max_length - 2 - len(question)]


def test_a_short_input_is_not_padded_or_cut(bart):
    layout = GeneratorFormat(bart, 64)
    passage, question = layout.passages(["A"], ["b"])[0], layout.questions(["c"])[0]
    assert layout.join(passage, question) == [bart.start, *passage, *question, bart.end]
    assert layout.join([], question) == [bart.start, *question, bart.end]


def test_an_endless_question_leaves_half_of_the_input_to_the_passage(bart):
    layout = GeneratorFormat(bart, 32)
    question = layout.questions(["why " * 500])[0]
    assert len(question) == 16
    assert len(layout.join(list(range(100)), question)) == 32


@pytest.mark.parametrize("words", [1, 3, 100])
@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 200, 250])
def test_chunks_are_disjoint_complete_and_short(words, count):
    text = " \n".join(f"w{i}" for i in range(count))
    pieces = list(chunks(text, words))
    assert " ".join(pieces).split() == text.split()
    assert all(1 <= len(p.split()) <= words for p in pieces)
    assert all(len(p.split()) == words for p in pieces[:-1])


def test_chunks_have_a_hundred_words_as_in_the_paper():
    assert [len(p.split()) for p in chunks("a " * 230)] == [100, 100, 30]


def test_encoder_input_is_cls_title_sep_text_sep(bert):
    title, text = bert.encode(["Peru"])[0], bert.encode(["Lima is the capital"])[0]
    cls, sep = bert.start, bert.end
    assert encoder_input(bert, ["Peru"], None, 50) == [[cls, *title, sep]]
    row = encoder_input(bert, ["Peru"], ["Lima is the capital"], 50)[0]
    assert row == [cls, *title, sep, *text, sep]


def test_prefixes_and_joined_titles_of_sentence_encoders(bert):
    """They were trained on one text; a passage without a title has no empty one before it."""
    encoder = BertConfig(query_prefix="query: ", passage_prefix="passage: ", titles="joined")

    def rows(firsts, seconds=None):
        return encoder_input(bert, firsts, seconds, 50, encoder=encoder)

    def plain(text):
        return encoder_input(bert, [text], None, 50)[0]

    assert rows(["Who?"]) == [plain("query: Who?")]
    assert rows(["Peru", ""], ["Lima", "Lima"]) == [
        plain("passage: Peru Lima"), plain("passage: Lima")]



@pytest.mark.parametrize("max_length", [4, 8, 20])
def test_a_long_encoder_input_is_cut_before_its_last_sep(bert, max_length):
    whole = encoder_input(bert, ["Peru"], ["Lima " * 60], 500)[0]
    row = encoder_input(bert, ["Peru"], ["Lima " * 60], max_length)[0]
    assert row == [*whole[: max_length - 1], bert.end] and len(row) == max_length


def test_pad_rows_cuts_fills_and_masks():
    ids, mask = pad_rows([[1, 2, 3, 4], [5], []], 3, 9)
    assert ids.tolist() == [[1, 2, 3], [5, 9, 9], [9, 9, 9]]
    assert mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert ids.dtype == np.int32 and mask.dtype == bool


def test_save_and_load_give_the_same_ids(tmp_path, bart, bert):
    texts = [fuzz(seed) for seed in range(20)] + ["Lima </s> Peru"]
    for name, tokenizer in (("g", bart), ("r", bert)):
        tokenizer.save(tmp_path / name)
        for source in (tmp_path / name, tmp_path / name / "tokenizer.json", str(tmp_path / name)):
            loaded = Tokenizer.load(source)
            assert loaded.encode(texts) == tokenizer.encode(texts)
            assert (loaded.start, loaded.end, loaded.pad, loaded.mask, loaded.vocab_size) == (
                tokenizer.start, tokenizer.end, tokenizer.pad, tokenizer.mask,
                tokenizer.vocab_size)
        assert [f.name for f in (tmp_path / name).iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("killed_at", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_was_half_saved_is_none(tmp_path, bart, monkeypatch, killed_at):
    """One whose settings a kill left out was taken for whole, with other special tokens."""
    replace = os.replace

    def kill(path, target):
        if pathlib.Path(target).name == killed_at:
            raise KeyboardInterrupt
        replace(path, target)

    tokenizer = Tokenizer(bart._backend, {"eos_token": "</s>"})
    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.save(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_padding_and_truncation_of_a_saved_tokenizer_are_switched_off(tmp_path, bart):
    """Hugging Face's files often carry both; rows would come cut at 512 and padded together."""
    bart.save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "The capital of Peru is Lima"
    assert Tokenizer.load(tmp_path).encode([text, "a"]) == bart.encode([text, "a"])


def test_training_keeps_to_the_size_and_gives_special_tokens_the_first_ids(bart, bert):
    assert bart.vocab_size <= 2000 and bert.vocab_size <= 2000
    assert (bart.start, bart.pad, bart.end, bart.mask) == (0, 1, 2, 4)  # as in BART
    assert (bert.pad, bert.start, bert.end, bert.mask) == (0, 2, 3, 4)


def test_training_twice_gives_the_same_tokenizer(bart, bert):
    """Otherwise one seed gives other runs each time; an iterator must do as well as a list."""
    again = train_bart_tokenizer((f"{p.title} / {p.text}" for p in PASSAGES), 2000)
    assert again.encode([p.text for p in PASSAGES]) == bart.encode([p.text for p in PASSAGES])
    again = train_bert_tokenizer((f"{p.title} {p.text}" for p in PASSAGES), 2000)
    assert again._backend.to_str() == bert._backend.to_str()


def test_another_process_trains_the_same_wordpiece():
    """Hash tables start differently in each process, and order what is not sorted."""
    code = ("from rag_jax.data.tokenizer_training import train_bert_tokenizer as train\n"
            "texts = ['abcdefg hijklmn opqrstu', 'vwxyz gfedcba nmlkjih']\n"
            "print(train(texts, 100)._backend.to_str())")
    made = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True,
                           env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
                           ).stdout for seed in ("1", "2")}
    assert len(made) == 1 and b"##c" in made.pop()


def test_a_trained_wordpiece_knows_every_word_that_it_was_trained_on(bert):
    unknown = bert.encode(["☃"])[0]
    assert len(unknown) == 1
    assert not any(unknown[0] in ids for ids in bert.encode([p.text for p in PASSAGES]))
    assert len(bert.encode(["country"])[0]) == 1, "frequent words are one piece"


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer at .*nowhere.*expected a tokenizer.json"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tokenizer at .*empty"):
        Tokenizer.load(tmp_path / "empty")


@pytest.mark.parametrize("model", ["bert", "bart", "t5", "qwen2"])
def test_no_class_makes_up_a_vocabulary(tmp_path, model):
    """transformers' classes have one of special tokens alone: every text became no token, a
    training went to its end, and reported scores."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    with pytest.raises(DataError, match="no tokenizer at .*there is none of tokenizer.json, vocab"):
        Tokenizer.load(tmp_path)
    (tmp_path / ("vocab.json" if model == "bert" else "vocab.txt")).write_text("{}")
    for special in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({
            "added_tokens_decoder": {"0": {"content": "<tool_call>", "special": special}}}))
        with pytest.raises(DataError, match="its tokens are added ones alone"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize("field", [
    {"initializer_range": 1}, {"use_cache": None}, {"vocab_size": 400.0},
    {"model_type": "unknown"}])
def test_what_a_configuration_says_else_does_not_matter(tmp_path, bert, field):
    """transformers checks every field of it, and an integer is no float."""
    bert.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **field}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "BertTokenizer", "do_lower_case": False}))
    upper, lower = Tokenizer.load(tmp_path).encode(["THE", "the"])
    assert [lower] == bert.encode(["the"]) != [upper]


DOLMA, TEKKEN = (pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
                 for pattern in tokenizer_file.KNOWN_PATTERNS[2:])


@pytest.mark.parametrize(("made", "before", "settings", "model"), [
    ("bart", pre_tokenizers.Digits(individual_digits=True), {"tokenizer_class": "GPT2Tokenizer"},
     "llama"),  # SmolLM2
    ("bart", DOLMA, {"tokenizer_class": "GPT2Tokenizer"}, None),  # OLMo 2's, in a folder of its own
    ("bart", TEKKEN, {"tokenizer_class": "LlamaTokenizer"}, "mistral"),  # Mistral Nemo's
    ("unigram", None, {"tokenizer_class": "RobertaTokenizer"}, "roberta"),
    ("unigram", None, {"tokenizer_class": "LlamaTokenizer"}, None),
    ("llama", pre_tokenizers.Metaspace(split=True), {"tokenizer_class": "LlamaTokenizer"}, None),
    ("llama without i", None, {"tokenizer_class": "LlamaTokenizer"}, None),
    ("t5", None, {"tokenizer_class": "T5Tokenizer"}, "t5"),
    ("bert", None, {"tokenizer_class": "GPT2Tokenizer"}, None), ("bart", None, {}, "bert"),
    ("bart", None, {"tokenizer_class": "GemmaTokenizer"}, None),
    ("llama", None, {"tokenizer_class": "GPT2Tokenizer"}, None),
    ("merged whole", None, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, None),
    ("bart", None, {"extra_special_tokens": [["a"]]}, "bart"),
    ("bert", None, {"fast_tokenizer_files": ["tokenizer.4.json"], "do_lower_case": False}, "bert")])
def test_a_file_is_taken_as_it_is_where_its_class_would_leave_out_a_step(
        tmp_path, bart, bert, made, before, settings, model):
    """In transformers 5 the digits of SmolLM2 are read together, as no text that it was trained on
    had them."""
    backend = tokenizers.Tokenizer.from_str({
        "bart": bart._backend, "bert": bert._backend, "merged whole": bart._backend,
        "llama": tiny.llama_tokenizer("always"), "llama without i": tiny.llama_tokenizer("always"),
        "unigram": tiny.llama_tokenizer("always", unigram=True),
        "t5": tiny.t5_tokenizer()}[made].to_str())
    if made == "merged whole":
        backend.model.ignore_merges = True
    if made == "llama without i":
        backend.normalizer = normalizers.Replace("i", " ")
    if before is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([before, backend.pre_tokenizer])
    for name in ("tokenizer.json", "tokenizer.4.json"):
        backend.save(str(tmp_path / name))
    if model:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {"eos_token": "</s>", "pad_token": "</s>", **settings}))
    texts = ["In 2016 Lima's</s>it ☃", *WORDS]
    expected = [each.ids for each in backend.encode_batch(texts, add_special_tokens=False)]
    loaded = Tokenizer.load(tmp_path)
    loaded._backend.encode_special_tokens = False
    assert loaded.encode(texts) == expected


def test_tekken_parts_words_where_capitals_begin_them_and_every_digit():
    """As the pattern that transformers puts into tokenizers of Mistral."""
    text = "LimaPERUPeru's 2016  it//\n\n UN Größe 漢Peru"
    assert [piece for piece, _ in TEKKEN.pre_tokenize_str(text)] == [
        "Lima", "PERUPeru", "'s", " ", "2", "0", "1", "6", " ", " it", "//\n\n", " UN", " Größe",
        " 漢Peru"]


def test_nobody_is_told_to_change_the_files_of_a_checkpoint(tmp_path, bart, caplog, monkeypatch):
    """At every command, of those of Mistral Small 3, which are read as they are."""
    bart.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "pad_token": "</s>"}))
    before = transformers_logging.get_verbosity()  # the tests hear of errors alone
    transformers_logging.set_verbosity_warning()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    try:
        assert Tokenizer.load(tmp_path).encode(WORDS) == bart.encode(WORDS)
    finally:
        transformers_logging.set_verbosity(before)
    assert caplog.text == ""


def test_threads_load_the_first_tokenizers_at_once(tmp_path, bart, bert):
    """While one thread imported transformers, the others' module had no classes."""
    for name, tokenizer in (("bart", bart), ("bert", bert)):
        tokenizer.save(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
    (tmp_path / "bert" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    code = ("import sys, threading; from rag_jax.data.text import Tokenizer\n"
            "other = threading.Thread(target=Tokenizer.load, args=sys.argv[1:2]); other.start()\n"
            "while other.is_alive() and 'transformers' not in sys.modules: pass\n"
            "print(Tokenizer.load(sys.argv[2]).encode(['the', 'THE'])); other.join()")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "bart", tmp_path / "bert"],
                          capture_output=True, text=True)
    expected = [*bert.encode(["the"]), *bert.encode(["☃"])]
    assert (done.stdout, done.stderr) == (f"{expected}\n", "")


def test_a_name_is_read_as_its_folder_in_the_cache(tmp_path, bert, monkeypatch):
    """With the limits that hold for folders."""
    bert.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: (
        asked.append((name, {*allow_patterns} >= {"config.json", "tokenizer.json", "vocab.txt"}))
        or str(tmp_path)))
    assert Tokenizer.load("owner/name").encode(WORDS) == bert.encode(WORDS)
    (tmp_path / "additional_chat_templates").mkdir()
    for file in ("chat_template.jinja", "additional_chat_templates/tools.jinja"):
        (tmp_path / file).write_text("a" * 2_000_001)
    with pytest.raises(DataError, match="4000002 bytes of chat templates .* at most 4000000"):
        Tokenizer.load("owner/name")
    assert asked == [("owner/name", True)] * 2


def test_names_of_special_tokens_in_a_text_are_letters(bart, bert):
    """A document with [SEP] in it would end itself."""
    for tokenizer, name in ((bart, "</s>"), (bert, "[SEP]")):
        assert tokenizer.end not in tokenizer.encode([f"Lima {name} Peru"])[0]


def test_a_tokenizer_without_special_tokens_is_refused():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[CLS]": 1}, "a"))
    with pytest.raises(ValueError, match=r"lacks a start, end, padding or mask.*\[CLS\]"):
        Tokenizer(backend)


@pytest.mark.parametrize("own", [("bos_token", "eos_token"), ("cls_token", "sep_token")])
def test_special_tokens_are_those_that_the_settings_name_and_else_the_usual_ones(own):
    """Gemma's vocabulary has HTML's <s> and </s>: targets ended with a tag, and its own end of an
    answer, <eos>, ended none."""
    settings = dict(zip((*own, "pad_token"), ("<bos>", "<eos>", "<pad>"), strict=True))
    named, silent = Tokenizer(tiny.html_tokenizer(), settings), Tokenizer(tiny.html_tokenizer())
    assert [*map(named.piece, (named.start, named.end, named.pad, named.mask))] == [
        "<bos>", "<eos>", "<pad>", "<mask>"]
    assert [*map(silent.piece, (silent.start, silent.end))] == ["<s>", "</s>"]


def test_the_sentinels_of_mt5_are_known_as_those_of_t5():
    """Its pieces begin with a space: every input began with the end token, without a word."""
    written = tiny.t5_tokenizer().to_str().replace("<extra_id_", "▁<extra_id_")
    mt5 = Tokenizer(tokenizers.Tokenizer.from_str(written), {"eos_token": "</s>"})
    assert (mt5.start, mt5.end, mt5.mask) == (None, 1, mt5.vocab_size - 1)


WORDS = ["the capital of Peru is Lima", "naïve café", "Who?"]


def old_form(folder, tokenizer, **settings):
    """A folder without tokenizer.json: vocab.txt, or vocab.json and merges.txt, and settings."""
    model = json.loads(tokenizer._backend.to_str())["model"]
    folder.mkdir()
    if model["type"] == "WordPiece":
        vocab = model["vocab"]
        (folder / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)) + "\n")
    else:
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_folders_that_do_not_say_whose_they_are_are_known_by_their_vocabulary(tmp_path, bart, bert):
    """Those in facebook/rag-token-nq are from 2020: the documented command ended with an error."""
    import transformers

    for own, kind in ((bart, transformers.BartTokenizer), (bert, transformers.BertTokenizer)):
        folder = old_form(tmp_path / kind.__name__, own, model_max_length=512)
        loaded, reference = Tokenizer.load(folder), kind.from_pretrained(str(folder))
        for text in WORDS:
            assert loaded.encode([text])[0] == reference.encode(text, add_special_tokens=False)
        assert (loaded.start, loaded.end) == (own.start, own.end)


def test_settings_beside_vocab_and_merges_are_read(tmp_path):
    """Qwen's folder without a tokenizer.json was refused, as if nothing ended its texts."""
    backend = train_bart_tokenizer(WORDS, 320)._backend
    renamed = json.loads(backend.to_str().replace('"<s>"', '"<1>"').replace('"</s>"', '"<2>"')
                         .replace('"<pad>"', '"<3>"').replace('"<mask>"', '"<4>"'))
    renamed["added_tokens"] = []
    folder = old_form(
        tmp_path / "qwen", SimpleNamespace(_backend=type(backend).from_str(json.dumps(renamed))),
        tokenizer_class="Qwen2Tokenizer", eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        bos_token=None, chat_template="{{ messages }}")
    loaded = Tokenizer.load(folder)
    assert loaded.piece(loaded.end) == loaded.piece(loaded.pad) == "<|endoftext|>"
    assert loaded.config["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("model", [None, "bert", "modernbert", "dpr", {
    "model_type": "roberta", "tokenizer_class": "BertTokenizer"}])
@pytest.mark.parametrize(("kind", "settings"), [
    ("BertTokenizer", {"do_lower_case": False}), ("BertTokenizer", {"do_lower_case": True}),
    ("BertTokenizer", {"do_lower_case": True, "strip_accents": False}),
    ("BertTokenizer", {}), ("BertTokenizerFast", {}), ("PreTrainedTokenizerFast", {}),
    ("", {}), ("BertTokenizer", {"strip_accents": None}), ("DistilBertTokenizer", {}),
    ("PreTrainedTokenizerFast", {"do_lower_case": False}),
    ("RobertaTokenizer", {"add_prefix_space": False}),
    ("RobertaTokenizer", {"add_prefix_space": True})])
def test_a_tokenizer_is_read_by_the_class_that_transformers_takes(
        tmp_path, bart, bert, kind, settings, model):
    """A cased model was asked in lower case, and its vectors were others."""
    (bart if kind == "RobertaTokenizer" else bert).save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"Lima": 2100, "café": 2101}
    content["normalizer"] = content["normalizer"] and {
        **content["normalizer"], "lowercase": not settings.get("do_lower_case", True),
        "strip_accents": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    is_read_alike(tmp_path, ["Lima café", *WORDS], model or ("" if kind else "bert"), **settings,
                  **({"tokenizer_class": kind} if kind else {}))


@pytest.mark.parametrize("model", [None, "llama", "mistral"])
@pytest.mark.parametrize(("written", "kind"), [
    *itertools.product(["prepended", "always", "bytes"],
                       ["LlamaTokenizer", "LlamaTokenizerFast", "TokenizersBackend"]),
    ("prepended", "CodeLlamaTokenizer")])
@pytest.mark.parametrize("settings", [
    {}, {"legacy": False}, {"legacy": True}, {"legacy": None, "add_prefix_space": None},
    {"add_prefix_space": False}, {"add_prefix_space": 0}])
def test_a_llama_tokenizer_writes_spaces_as_its_class_does(
        tmp_path, kind, written, settings, model):
    """In a chat, TinyLlama's read a space after every marker; but byte-level tokenizers, such as
    Llama 3's, and Mistral's are those of their file in any class."""
    backend = tiny.llama_tokenizer(written, ["▁L", "ĠL", "im"])
    backend.save(str(tmp_path / "tokenizer.json"))
    is_read_alike(
        tmp_path, ["Lima", " Lima  or Rome", "<s>Lima</s>\nLima or</s> Rome", "</s>"], model,
        bos_token="<s>", eos_token="</s>", tokenizer_class=kind, **settings)


def is_read_alike(folder, texts, model, **settings):
    """Asserts that a tokenizer gives the ids that it gives in transformers, also saved again."""
    import transformers

    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model:
        config = model if isinstance(model, dict) else {"model_type": model}
        (folder / "config.json").write_text(json.dumps(config))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    ours.save(folder / "kept")
    for one in (ours, Tokenizer.load(folder / "kept")):
        one._backend.encode_special_tokens = False
        for text in texts:
            assert one.encode([text])[0] == theirs.encode(text, add_special_tokens=False)


def test_a_file_of_another_name_is_read_as_it_is(tmp_path, bart):
    """The files beside it are of the tokenizer.json there."""
    small = train_bart_tokenizer(WORDS, 300)
    small.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bart"}))
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    bart._backend.save(str(tmp_path / "bart.json"))
    for name, tokenizer in (("bart.json", bart), ("tokenizer.json", small)):
        assert Tokenizer.load(tmp_path / name).encode(WORDS) == tokenizer.encode(WORDS)
    for inputs in ({}, {"model_input_names": ["input_ids"]}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(inputs))
        assert Tokenizer.load(tmp_path / "bart.json").has_types == (not inputs)


@pytest.mark.parametrize(("file", "content"), [
    ("tokenizer_config.json", {"extra_special_tokens": [f"<{n}>" for n in range(6000)]}),
    ("tokenizer_config.json", {f"a{n}_token": "<a>" for n in range(6000)}),
    ("special_tokens_map.json", {"additional_special_tokens": [f"<{n}>" for n in range(6000)]}),
    ("added_tokens.json", {f"<{n}>": n for n in range(6000)})])
def test_settings_that_would_be_read_for_minutes_are_refused(tmp_path, bart, file, content):
    """300,000 special tokens took transformers 430 seconds."""
    bart.save(tmp_path)
    settings = {"tokenizer_class": "BartTokenizer", "added_tokens_decoder": {
        str(n): {"content": f"<d{n}>"} for n in range(5000)}}
    for name, written in (("tokenizer_config.json", settings), (file, content)):
        known = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        (tmp_path / name).write_text(json.dumps({**known, **written}))
    with pytest.raises(DataError, match="entries in tokenizer_config.json .* has at most 10000"):
        Tokenizer.load(tmp_path)


def test_a_folder_that_needs_sentencepiece_says_so(tmp_path, monkeypatch):
    """transformers asked for tiktoken, which cannot read such a file."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "spiece.model").write_bytes(b"of mT5")
    with pytest.raises(ValueError, match="pip install sentencepiece, which reads .*spiece.model"):
        Tokenizer.load(tmp_path)


def test_a_folder_of_vocab_and_merges_as_bart_has_it_is_loaded(tmp_path, bart):
    """facebook/bart-base in its old form: no tokenizer.json, ids as transformers gives them."""
    import transformers

    folder = old_form(tmp_path / "bart", bart, tokenizer_class="BartTokenizer")
    loaded = Tokenizer.load(folder)
    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    for text in WORDS:
        assert loaded.encode([text])[0] == reference.encode(text, add_special_tokens=False)
        assert unicodedata.normalize("NFC", loaded.decode(loaded.encode([text])[0])) == text
    assert (loaded.start, loaded.end) == (reference.bos_token_id, reference.eos_token_id)


def test_a_folder_saved_by_transformers_as_bert_has_it_is_loaded(tmp_path, bert):
    import transformers

    old = old_form(tmp_path / "old", bert, tokenizer_class="BertTokenizer", do_lower_case=True)
    reference = transformers.AutoTokenizer.from_pretrained(str(old))
    reference.save_pretrained(str(tmp_path / "new"))
    for folder in (old, tmp_path / "new"):
        loaded = Tokenizer.load(folder)
        for text in WORDS:
            assert loaded.encode([text])[0] == reference.encode(text, add_special_tokens=False)
        assert (loaded.start, loaded.end, loaded.pad) == (
            reference.cls_token_id, reference.sep_token_id, reference.pad_token_id)


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("title", ["Peru", "", 'The "Sun"'])
def test_what_is_kept_of_a_passage_is_what_join_reads(bart, like, title):
    """Passages of 255 tokens were cut to inputs of 64 without a word."""
    text = "Lima is the capital of Peru and a town of many people."
    for room in (6, 12, 20, 90):
        layout = GeneratorFormat(bart, room, like_hugging_face=like)
        (passage,), (question,) = layout.passages([title], [text]), layout.questions(["Who is it?"])
        kept = int(layout.kept(np.array(len(passage)), np.array(len(question))))
        joined = layout.join(passage, question)[1:-1]
        assert joined[:kept] == passage[:kept]
        assert joined[kept:] == question[: len(joined) - kept], "and nothing more of the passage"
        read = layout.text_of(title, passage[:kept])
        assert text.startswith(read.rstrip("\ufffd")) and (read == text) == (kept == len(passage))


def test_cuts_are_counted_as_they_are_made(bert):
    texts, cuts = ["one two three four five", "one"], Cuts()
    rows = encoder_input(bert, texts, None, 5, cuts)
    whole = [len(row) for row in bert.encode(texts)]
    assert cuts.tokens == sum(whole) and cuts.lost == sum(whole) - sum(len(r) - 2 for r in rows)
    assert (cuts.texts, cuts.cut) == (2, sum(length > 3 for length in whole))
    assert f"1 of 2 passages are cut, {cuts.lost} of {cuts.tokens} tokens lost" in str(cuts)
