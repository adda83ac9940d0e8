"""A cross-encoder gives p(z|x): against the tokenizers library's own pairs and a naive BERT."""

import dataclasses
import json
import pathlib
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest
from scipy.special import softmax

import rag_jax
from rag_jax import evaluation, parallel
from rag_jax.cli import ingest
from rag_jax.config import BertConfig, Config, ConfigError, MeshConfig, overrides, rules
from rag_jax.conversion import convert
from rag_jax.data.question_files import Example
from rag_jax.data.text import Tokenizer
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.errors import UserError
from rag_jax.hub.config_json import Architecture
from rag_jax.hub.load import abstract, load
from rag_jax.hub.save import save, save_tokenizer
from rag_jax.retrieval.protocol import Passage
from rag_jax.training import pretrained, reranker
from rag_jax.training.reranker import Reranker, open_reranker
from tests import naive
from tests.hub.checkpoints import edit_config, edit_weights
from tests.test_ingestion import SMALL, TEXTS, towers, written  # noqa: F401 (a fixture)

QUESTIONS = ["What is the capital of Norway?", "Lima?"]
BERT = BertConfig(vocab_size=300, max_positions=40, width=16, layers=2, heads=2, mlp_width=24)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    """The folder of a tiny one."""
    folder, rng = tmp_path_factory.mktemp("reranker") / "folder", np.random.default_rng(5)
    boxes = abstract(["reranker"], Architecture(BERT))
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.float32(0.8 * rng.normal(size=leaf.shape) + (
            path[-1].key == "scale")), nn.meta.unbox(boxes))
    save(folder, "BertForSequenceClassification", params, Architecture(BERT), tokenizers={
        "reranker": train_bert_tokenizer(list(TEXTS.values()), 300)})
    return folder


def naive_logits(folder, question, texts):
    """float64[K]: pairs as the tokenizers library makes them, the second cut, read one by one."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(BERT.max_positions, strategy="only_second")
    params, logits = load(folder).params["reranker"], []
    for text in texts:
        pair = backend.encode(question, text)
        states = naive.bert(params["bert"], np.array(pair.ids), np.ones(len(pair.ids), bool),
                            np.array(pair.type_ids), BERT.heads)
        hidden = np.tanh(naive.linear(states[0], params["dense"]))
        logits.append(naive.linear(hidden, params["out"])[0])
    return np.array(logits)


def texts_of(passages):
    return [f"{p.title} {p.text}".strip() for p in passages]


def test_logits_are_those_of_a_naive_bert_on_one_device_and_on_eight(cross_encoder, monkeypatch):
    passages = [Passage(str(n), "Peru" * (n % 2), "Lima is the capital of Peru. " * n)
                for n in range(7)]
    assert len(passages[-1].text.split()) > BERT.max_positions / 2
    monkeypatch.setattr(reranker, "PAIRS", 4)
    monkeypatch.setattr(reranker, "STEP", 16)
    pairs = [(question, p) for question in QUESTIONS for p in passages]
    for devices in (1, 8):
        mesh = parallel.make_mesh(MeshConfig(), jax.devices()[:devices])
        opened = open_reranker(str(cross_encoder), "float32", mesh)
        logits = opened.logits(*zip(*pairs, strict=True)).reshape(2, 7)
        for question, found in zip(QUESTIONS, logits, strict=True):
            expected = naive_logits(cross_encoder, question, texts_of(passages))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert np.ptp(logits) > 0.1


def test_a_folder_that_is_saved_anew_is_read_again(cross_encoder, tmp_path):
    """A cross-encoder that was trained further in one process still gave its logits of before."""
    folder = shutil.copytree(cross_encoder, tmp_path / "saved")
    mesh = parallel.make_mesh(MeshConfig(), jax.devices()[:1])

    def opened():
        return open_reranker(str(folder), "float32", mesh)

    first = opened()
    assert opened() is first, "it stays open"
    edit_weights(folder, lambda tensors: {name: 2 * value for name, value in tensors.items()})
    kernels = [np.asarray(each.params["out"]["kernel"]) for each in (first, opened())]
    np.testing.assert_array_equal(2 * kernels[0], kernels[1])
    assert pretrained.described(str(folder)).longest == 40
    changed(folder, "short")
    assert pretrained.described(str(folder)).longest == 9


@pytest.mark.parametrize("inputs, second_type", [
    (["input_ids", "attention_mask"], 0), (["input_ids", "token_type_ids"], 1), (None, 1)])
def test_token_types_are_an_input_if_the_settings_have_them(
        cross_encoder, tmp_path, inputs, second_type):
    """Of two texts that differ for the tokenizer, transformers gives the model no types then."""
    folder = shutil.copytree(cross_encoder, tmp_path / "saved")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**settings, "model_input_names": inputs}))
    mesh = parallel.make_mesh(MeshConfig(), jax.devices()[:1])
    opened = open_reranker(str(folder), "float32", mesh)
    bare = train_bert_tokenizer(["Lima"], 300)
    assert bare.pair_form is None
    bare.has_types = opened.tokenizer.has_types
    for each in (opened, dataclasses.replace(opened, tokenizer=bare)):
        assert each.form.second_type == second_type


@pytest.mark.parametrize("model_type, make, second_type, says_it", [
    ("bert", train_bert_tokenizer, 1, True), ("bert", train_bert_tokenizer, 1, False),
    ("xlm-roberta", train_bart_tokenizer, 0, True), ("xlm-roberta", train_bart_tokenizer, 0, False),
    ("bert", train_bart_tokenizer, 0, True)])
def test_pairs_are_those_of_their_tokenizers(model_type, make, second_type, says_it, tmp_path):
    """A question is kept up to half of the room, and its passage is cut. A BERT with the tokenizer
    of XLM-R was given the pairs of BERT's; and what was saved had no token types in transformers.
    """
    import tokenizers
    import transformers

    tokenizer = make(["Lima is a town in Peru"] * 9, 300)
    config = BertConfig(model_type=model_type, type_vocab_size=2)
    save_tokenizer(tmp_path, tokenizer, 20, second_type)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(20, strategy="only_second")
    opened = Reranker(config, {}, Tokenizer.load(tmp_path) if says_it else tokenizer, 20, None)
    pair = transformers.AutoTokenizer.from_pretrained(tmp_path)("Lima?", "a town")
    assert max(pair.get("token_type_ids", [0])) == second_type
    questions = ["Lima?", "is Lima a town", "Lima?"]
    texts = ["", "Lima is a town in Peru", "a town " * 30]
    rows, firsts = opened.pairs(questions, [Passage("", "", text) for text in texts])
    for row, first, *pair in zip(rows, firsts, questions, texts, strict=True):
        theirs = backend.encode(*pair)
        assert row == theirs.ids
        types = np.arange(len(row)) >= first
        assert theirs.type_ids == (types * opened.form.second_type).tolist()
    (row,), (first,) = opened.pairs(["town " * 30], [Passage("", "", "Lima " * 30)])
    assert len(row) == 20 and first == 10, "half of it is the passage's"


def best(folder, question, passages, k):
    """(ids, p(z|x)) of the k passages with the highest naive logits."""
    logits = naive_logits(folder, question, texts_of(passages))
    order = np.argsort(-logits, kind="stable")[:k]
    return [passages[i].id for i in order], softmax(logits[order])


@pytest.fixture(scope="module")
def ingested(tmp_path_factory, towers, cross_encoder):  # noqa: F811 (the fixture)
    folder = tmp_path_factory.mktemp("ingested")
    written(folder / "documents", TEXTS)
    config = {**SMALL, **towers, "model.reranker.pretrained": str(cross_encoder),
              "retrieval.reranked": 3}
    rag_jax.ingest(folder / "documents", folder / "run", config=config)
    return folder / "run"


@pytest.mark.parametrize("retriever", ["dpr", "hybrid"])
def test_answers_are_from_the_best_of_the_nominated(ingested, cross_encoder, retriever):
    plain = rag_jax.load(ingested, config={"model.reranker.pretrained": "",
                                           "retrieval.retriever": retriever})
    rag = rag_jax.load(ingested, config={"retrieval.retriever": retriever})
    moved, expected = 0, []
    for found, nominated, question in zip(
            rag.retrieve(QUESTIONS), plain.retrieve(QUESTIONS, 3), QUESTIONS, strict=True):
        ids, prior = best(cross_encoder, question, nominated, 2)
        assert [p.id for p in found] == ids
        np.testing.assert_allclose([p.prior for p in found], prior, rtol=1e-4, atol=1e-5)
        moved += ids != [p.id for p in nominated[:2]]
        expected.append((ids, prior))
    assert moved, "an order that is the retriever's proves nothing"
    every = rag.retrieve(QUESTIONS[0], rag.index.size)[0]
    assert len(every) == rag.index.size > 3, "never fewer than are asked for"
    if retriever == "dpr":
        check_answers(rag, plain, expected, cross_encoder)


def test_without_dev_questions_nothing_is_chosen_by_them(ingested):
    rag = rag_jax.load(ingested, config={"retrieval.retriever": "hybrid"})
    for choose in (rag.choose_k, rag.choose_weight):
        with pytest.raises(ConfigError, match="run has no dev questions, by which it is chosen"):
            choose([1])


def test_the_weight_of_words_is_chosen_by_the_passages_that_the_reranker_leaves(ingested):
    rag, plain = (rag_jax.load(ingested, config={"retrieval.retriever": "hybrid", **other})
                  for other in ({}, {"model.reranker.pretrained": ""}))
    first, question = next(
        (found[0], question) for question in QUESTIONS
        for found, other in zip(rag.retrieve(question), plain.retrieve(question), strict=True)
        if found[0].id != other[0].id)
    for each, best in ((rag, True), (plain, False)):
        dev = {"dev": [Example("1", question, (first.text,))]}
        prepared = dataclasses.replace(each.job.prepared, splits=dev)
        each.job = dataclasses.replace(each.job, prepared=prepared)
        assert (each.choose_weight([0.5])["dev_mrr@2, weight 0.5"] == 100) == best


def check_answers(rag, plain, expected, cross_encoder):
    """Answers, recall of gold passages, likelihoods, and passages of another question."""
    examples = [Example(question, question, ("Lima",), positive_ids=(ids[0],))
                for question, (ids, _) in zip(QUESTIONS, expected, strict=True)]
    found = rag.evaluate(examples, overlap=False)
    for answer, (ids, prior) in zip(found.answers, expected, strict=True):
        assert answer.passage_ids == ids
        np.testing.assert_allclose(answer.prior, prior, rtol=1e-4, atol=1e-5)
    assert found.metrics["gold_recall@1"] == found.metrics["gold_mrr"] == 100
    answerer, tokens = plain.answerer(), plain.job.tokenize(examples)
    rows = answerer.retrieve(plain.params, tokens)
    assert evaluation._gold_metrics(answerer, tokens, rows)["gold_recall@1"] < 100
    log_p = rag.log_likelihood(QUESTIONS, ["Lima"] * 2)
    assert found.metrics["nll"] == pytest.approx(-log_p.mean(), rel=1e-4)
    swapped = rag.evaluate(examples, order=np.array([1, 0]), overlap=False, likelihood=False)
    ids = swapped.answers[0].passage_ids
    assert ids == expected[1][0]
    passages = {p.id: p for p in plain.retrieve(QUESTIONS[0], plain.index.size)[0]}
    prior = softmax(naive_logits(cross_encoder, QUESTIONS[0], texts_of(map(passages.get, ids))))
    np.testing.assert_allclose(swapped.answers[0].prior, prior, rtol=1e-4, atol=1e-5)


def test_words_nominate_too(tmp_path, cross_encoder):
    written(tmp_path / "documents", TEXTS)
    rag_jax.ingest(tmp_path / "documents", tmp_path / "run", config={
        "model.reranker.pretrained": str(cross_encoder), "retrieval.reranked": 4})
    found, = rag_jax.load(tmp_path / "run").retrieve(QUESTIONS[0], 3)
    plain = rag_jax.load(tmp_path / "run", config={"model.reranker.pretrained": ""})
    ids, prior = best(cross_encoder, QUESTIONS[0], plain.retrieve(QUESTIONS[0], 4)[0], 3)
    assert [p.id for p in found] == ids
    np.testing.assert_allclose([p.prior for p in found], prior, rtol=1e-4, atol=1e-5)


def test_a_generator_learns_from_reranked_passages(ingested, cross_encoder, tmp_path):
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(
        {"question": question, "answers": ["Oslo"]}) + "\n" for question in QUESTIONS))
    shutil.copytree(ingested, tmp_path / "run")
    documents = ingested.parent / "documents"
    argv = [str(documents), f"--workdir={tmp_path / 'run'}", "--config.train.steps=2",
            f"--train={tmp_path / 'asked.jsonl'}", f"--dev={tmp_path / 'asked.jsonl'}",
            "--config.train.batch_size=2", "--config.tensorboard=false"]
    with pytest.raises(ConfigError, match="retriever has nothing to learn from"):
        ingest.main(argv)
    ingest.main([*argv, "--config.train.query_encoder_rate=none"])
    rag, before = rag_jax.load(tmp_path / "run"), rag_jax.load(ingested)
    both = [{**opened.params, "document_encoder": opened.encoder("document_encoder")}
            for opened in (rag, before)]
    same = {tower: all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (
        both[0][tower], both[1][tower])), strict=True)) for tower in both[0]}
    assert same == {"query_encoder": True, "document_encoder": True, "generator": False}
    answer, = rag.ask(QUESTIONS[0])
    assert answer.passage_ids == before.ask(QUESTIONS[0])[0].passage_ids
    steps = [json.loads(line) for line in (
        tmp_path / "run" / "trained" / "rag_token" / "metrics.jsonl").read_text().splitlines()]
    assert any("nll" in key or "loss" in key for step in steps for key in step)


def changed(folder: pathlib.Path, name: str) -> None:
    """Makes a folder another than that of a cross-encoder that can be read."""
    if name == "labels":
        edit_config(folder, id2label=None, label2id=None)
    elif name == "many":
        edit_config(folder, id2label={str(n): f"L{n}" for n in range(3)})
    elif name in ("classifier.weight", "bert.pooler.dense.bias"):
        edit_weights(folder, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    elif name == "shape":
        edit_weights(folder, lambda tensors: {
            **tensors, "classifier.weight": np.zeros((2, 16), np.float32)})
    elif name == "more":
        edit_weights(folder, lambda tensors: {**tensors, "score.weight": np.zeros(3, np.float32)})
    elif name == "modules":
        (folder / "modules.json").write_text(json.dumps([
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Dense", "path": "1_Dense"}]))
    elif name == "prompts":
        (folder / "config_sentence_transformers.json").write_text('{"prompts": {"a": "b: "}}')
    elif name == "tokens":
        train_bert_tokenizer([chr(n) for n in range(0x4E00, 0x4E00 + 400)], 900).save(folder)
    elif name == "tokenizer":
        (folder / "tokenizer.json").unlink()
    elif name == "short":
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    elif name == "relative":
        edit_config(folder, position_embedding_type="relative_key")


@pytest.mark.parametrize("name, told", [
    ("labels", r"config.json: a classifier of 2 labels"), ("many", "a classifier of 3 labels"),
    ("classifier.weight", "1 missing tensors: classifier.weight"),
    ("bert.pooler.dense.bias", "1 missing tensors: bert.pooler.dense.bias"),
    ("shape", r"classifier.weight is \(2, 16\), the config asks for \(1, 16\)"),
    ("more", "1 tensors that no parameter takes: score.weight"),
    ("modules", "modules.json: its logits go through Transformer, Dense"),
    ("prompts", "config_sentence_transformers.json: prompts"),
    ("tokens", r"the tokenizer beside it has \d+ tokens, and the model 300 rows"),
    ("tokenizer", "there is no tokenizer beside it"),
    ("short", "it reads 9 tokens; a question and a passage need 16 or more"),
    ("relative", "position_embedding_type = 'relative_key' is another architecture")])
def test_a_folder_that_does_not_fit_is_refused_by_its_part(cross_encoder, tmp_path, name, told):
    folder = shutil.copytree(cross_encoder, tmp_path / "changed")
    changed(folder, name)
    with pytest.raises(UserError, match=told):
        open_reranker(str(folder), "float32", parallel.make_mesh(MeshConfig(), jax.devices()[:1]))


def test_what_is_no_reranker_is_refused_before_anything_is_read(
        ingested, towers, cross_encoder, tmp_path):  # noqa: F811 (the fixture)
    encoder = towers["model.retriever.pretrained"]
    for source, told in ((encoder, "a BertModel, which is no cross-encoder"),
                         (str(ingested), "a workdir, which holds no cross-encoder")):
        with pytest.raises(ConfigError, match=told):
            rag_jax.load(ingested, config={"model.reranker.pretrained": source})
    with pytest.raises(ConfigError, match="with reranker; it has no query_encoder"):
        rag_jax.ingest(ingested.parent / "documents", tmp_path / "run", config={
            "model.retriever.pretrained": str(cross_encoder)})
    with pytest.raises(ConfigError, match="name it as config.model.reranker.pretrained"):
        convert(str(cross_encoder), str(tmp_path / "out"))


@pytest.mark.parametrize("changes, told", [
    ({}, "run 'rag_token' has its p.z.x. from the reranker"),
    ({"runs": ("frozen",), "retrieval.where": "device"}, "where=device: the training step"),
    ({"runs": ("frozen",), "model.null_document": "bias"}, "config.model.null_document=bias")])
def test_what_cannot_train_beside_a_reranker_is_said(changes, told):
    config = overrides.replace(Config(), {"model.reranker.pretrained": "x", **changes})
    with pytest.raises(ConfigError, match=told):
        rules.validate(config, trains=True)
    for allowed in ({"runs": ("frozen",)}, {"runs": ("closed_book",)}, {"train.steps": 0},
                    {"runs": ("bm25",)}):
        rules.validate(overrides.replace(Config(), {
            "model.reranker.pretrained": "x", **allowed}), trains=True)
    rules.validate(overrides.replace(Config(), {"model.reranker.pretrained": "x"}))
