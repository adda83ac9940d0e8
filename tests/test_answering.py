"""Batches of questions to answers with their evidence."""

import dataclasses
import operator
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny

from rag_jax import answering, parallel
from rag_jax.citation import Citation
from rag_jax.config import CausalConfig, ConfigError, MeshConfig
from rag_jax.data.question_files import Example
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import GeneratorFormat
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.decoding import prefixes
from rag_jax.decoding.results import DecodingError
from rag_jax.decoding.settings import Decoding
from rag_jax.models.generator import in_dtype
from rag_jax.retrieval.protocol import Passage

QUESTIONS = SimpleNamespace(format=SimpleNamespace(tokenizer=SimpleNamespace(
    decode=lambda ids: " ".join(map(str, ids)), piece=str)))
REAL = 2
CAUSAL = CausalConfig(
    variant="gemma3", vocab_size=300, max_positions=64, width=12, decoder_layers=2, heads=4,
    kv_heads=2, head_size=4, mlp_width=10, init_std=0.3, window=5, global_every=2)


class Questions(SimpleNamespace):
    def __len__(self):
        return len(self.ids)


class Store(list):
    """Passages, each cited by its row."""

    path = "passages"

    def source(self, row):
        return Citation(f"{row}.txt", (0, 1))


class Index:
    passages = Store(Passage(name, "", "") for name in "abc")


def answers(monkeypatch, nodes=0, kind="token", **settings):
    """Of two questions in a batch of three, each about passages a, b and c."""
    model = tiny.rag_model(kind)
    answerer = answering.Answerer(
        model, parallel.make_mesh(MeshConfig(), jax.devices()[:1]), Index(),
        answering.Settings(3, 3, 1, Decoding(**{"max_length": 3, "num_beams": 1, **settings}),
                           node_budget=nodes))
    batch = tiny.rag_batch(model=model)
    batch = batch._replace(weight=np.array([1] * REAL + [0], np.float32))
    monkeypatch.setattr(answerer, "batches", lambda *_, **__: iter([(np.arange(REAL), batch)]))
    return answerer.decode(tiny.rag_params(model, seed=4), QUESTIONS,
                           np.tile(np.arange(3), (REAL, 1)))


def test_answers_say_where_their_passages_stand(monkeypatch):
    """A citation of another passage is worse than none."""
    for answer in answers(monkeypatch):
        assert [(p.id, p.source.file) for p in answer.passages] == [
            ("a", "0.txt"), ("b", "1.txt"), ("c", "2.txt")]
        assert answer.record()["sources"] == [p.source.record() for p in answer.passages]
        unsaid = [p._replace(source=None) for p in answer.passages]
        assert "sources" not in answer._replace(passages=unsaid).record()


def test_exact_nodes_reach_the_answers(monkeypatch):
    """Enough of them prove every answer, too few are told, and none is no search."""
    guess, short, whole = (answers(monkeypatch, nodes) for nodes in (0, 1, 100_000))
    assert len(guess) == len(short) == len(whole) == REAL
    assert not all(a.certified for a in guess) and not any(a.expanded for a in guess)
    assert all(a.finished for a in whole), "what was proved is the answer, not the guess"
    assert all(a.certified for a in whole) and max(a.expanded for a in whole) > 1
    assert any(a.expanded == 1 and not a.certified for a in short)
    assert all(w.log_prob >= g.log_prob - 1e-5 for w, g in zip(whole, guess, strict=True)
               if g.finished)


def test_a_sample_that_is_no_answer_keeps_no_other_from_being_returned(monkeypatch):
    """The question was refused, for rules that forbid every token, where the first sample alone had
    met its dead end."""
    sampled = {"sample": True, "num_return_sequences": 3}
    every, jit_decode = answers(monkeypatch, **sampled), answering.jit_decode

    def first_is_none(model, settings):
        def run(*arguments):
            decoded = jit_decode(model, settings)(*arguments)
            valid = decoded.ranked.valid.at[:, 0].set(False)
            return decoded._replace(ranked=decoded.ranked._replace(valid=valid))

        return run

    monkeypatch.setattr(answering, "jit_decode", first_is_none)
    for all_of_them, others in zip(every, answers(monkeypatch, **sampled), strict=True):
        assert [a.token_ids for a in all_of_them.alternatives] == [
            a.token_ids for a in (others, *others.alternatives)]


def test_another_temperature_is_not_compiled_anew(monkeypatch):
    made, jit_decode = [], answering.jit_decode
    monkeypatch.setattr(answering, "jit_decode", lambda model, settings: made.append(
        jit_decode(model, settings)) or made[-1])
    cold, hot = (answers(monkeypatch, sample=True, temperature=t) for t in (1e-4, 50.0))
    assert made[0] is made[1] and made[0]._cache_size() == 1
    greedy = [a.token_ids for a in answers(monkeypatch)]
    assert [a.token_ids for a in cold] == greedy != [a.token_ids for a in hot]


@pytest.mark.parametrize("seeds", [7, np.array([7, 8], np.uint32)])
def test_samples_are_drawn_alike_whatever_generator_is_jaxs_default(seeds):
    """By rbg under vmap, a question's sample was drawn with the key of the batch's first."""
    with jax.transfer_guard("disallow"):
        usual = answering.keys_of(seeds, np.arange(2))
    answering._keys.clear_cache()  # jax.default_prng_impl is no part of what is cached by
    with jax.default_prng_impl("rbg"):
        keys = answering.keys_of(seeds, np.arange(2))
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(usual))


def test_nodes_are_refused_where_nothing_can_be_proved(monkeypatch):
    with pytest.raises(ConfigError, match="config.eval.exact_nodes=5: .*length_penalty=0"):
        answers(monkeypatch, 5, length_penalty=1.0, num_beams=2)


@pytest.mark.parametrize("kind", ["sequence", "fid"])
def test_alternatives_carry_what_the_answer_carries(monkeypatch, kind):
    for answer in answers(monkeypatch, kind=kind, num_beams=3, num_return_sequences=3):
        assert len(answer.alternatives) == 2
        for other in (answer, *answer.alternatives):
            assert other.text == " ".join(map(str, other.token_ids))
            assert sum(other.token_log_probs) == pytest.approx(other.log_prob, abs=1e-4)
            assert len(other.token_log_probs) == len(other.token_ids)
            assert sum(other.posterior) == pytest.approx(1, abs=1e-4)
            assert other.finished == (other.token_ids[-1] == tiny.END)
            assert len(other.token_posterior) == (0 if kind == "fid" else len(other.token_ids))
        assert answer.record()["alternatives"][0]["text"] == answer.alternatives[0].text


@pytest.mark.parametrize("tower", ["generator", "query_encoder"])
def test_scores_that_are_not_finite_are_errors_that_name_the_question(monkeypatch, tower):
    """Answers, likelihoods and query vectors: none of them may come from a NaN."""
    model = tiny.rag_model()
    answerer = answering.Answerer(
        model, parallel.make_mesh(MeshConfig(), jax.devices()[:1]), Index(),
        answering.Settings(3, 3, 1, Decoding(max_length=3, num_beams=1)))
    monkeypatch.setattr(answerer, "batches",
                        lambda *_, **__: iter([(np.arange(REAL), tiny.rag_batch())]))
    params = jax.tree.map(np.array, tiny.rag_params(model, seed=4))
    jax.tree.leaves(params[tower])[0].flat[0] = np.nan
    questions = Questions(
        ids=np.ones((REAL, 6), np.int32), mask=np.ones((REAL, 6), bool),
        examples=[SimpleNamespace(id="7", question="Who?"), SimpleNamespace(id="8", question="?")])
    calls = [answerer.decode, answerer.log_likelihoods]
    calls += [lambda params, *_: answerer.embed_questions(params, questions)
              ] * (tower == "query_encoder")
    for call in calls:
        with pytest.raises(DecodingError, match=r"question '7' \('Who\?'\): .*not finite"):
            call(params, questions, np.tile(np.arange(3), (REAL, 1)))


def test_what_is_read_of_passages_is_what_their_inputs_hold():
    """An answer in the part that is cut counted as if the generator could read it."""
    tokenizer = train_bart_tokenizer(["Lima is a town in Peru"] * 9, 300)
    layout = GeneratorFormat(tokenizer, 16)
    passages = [Passage("1", "Peru", "A land with many hills, and Lima is a town there"),
                Passage("2", "", "Lima")]
    rows = layout.passages(*zip(*[(p.title, p.text) for p in passages], strict=True))
    table = SimpleNamespace(row=lambda row: rows[row], lengths_of=lambda ids: np.array(
        [[len(rows[i]) for i in row] for row in ids]))
    store = type("Store", (list,), {"tokens": lambda self, name: table})(passages)
    asked = SimpleNamespace(format=layout, suffixes=layout.questions(["Lima?", "Peru"]))
    retrieved = np.array([[0, 1], [1, 0]])
    read, cuts = answering.Answerer.reads(
        SimpleNamespace(index=SimpleNamespace(passages=store)), asked, retrieved)
    assert read[0][1] is passages[1] and read[1][0] is passages[1]
    assert (cuts.texts, cuts.cut) == (4, 2) and cuts.lost == sum(
        len(rows[0]) - (14 - len(suffix)) for suffix in asked.suffixes)
    for short, suffix in ((read[0][0], asked.suffixes[0]), (read[1][1], asked.suffixes[1])):
        joined = tokenizer.decode(layout.join(rows[0], suffix)[1 : -1 - len(suffix)])
        assert joined == f"Peru / {short.text}".strip() and "Lima" not in short.text


@pytest.fixture(scope="module")
def library():
    return shelf()


def shelf(longest=64):
    """Nine questions of one to nine words, their passages, and a model for their tokens."""
    words = ["Lima is a town in Peru"] * 9
    bart, bert = train_bart_tokenizer(words, 300), train_bert_tokenizer(words, 100)
    layout = GeneratorFormat(bart, longest)
    texts = [" ".join(["Lima is"] * n) for n in (9, 1, 7, 3, 5, 2, 8, 4, 6)]
    examples = [Example(str(n), text, ("Peru " * (n % 4 + 1),)) for n, text in enumerate(texts)]
    rows = layout.passages([""] * 9, texts)
    table = SimpleNamespace(row=lambda row: rows[row], lengths_of=lambda ids: np.array(
        [[len(rows[i]) for i in row] for row in ids]))
    store = type("Store", (Store,), {"tokens": lambda self, name: table})(
        Passage(str(n), "", text) for n, text in enumerate(texts))
    model = tiny.rag_model(retriever={"vocab_size": bert.vocab_size, "max_positions": 32},
                           generator={"vocab_size": bart.vocab_size, "max_positions": 64})
    vectors = np.random.default_rng(0).normal(size=(9, model.embedding_width)).astype(np.float32)
    index = SimpleNamespace(passages=store, division="queries",
                            embeddings=lambda ids: vectors[ids])
    return (dataclasses.replace(model, start_id=bart.end, end_id=bart.end, pad_id=bart.pad), index,
            QuestionTokens(examples, bert, layout, 32, 16))


@pytest.mark.parametrize("sample", [False, True])
def test_sorted_by_length_and_padded_to_few_lengths_questions_get_the_same_answers(
        library, sample, monkeypatch):
    """In another order than the questions', or with other draws, answers would be other ones."""
    model, index, questions = library
    monkeypatch.setattr(answering, "SORTED", 4)
    monkeypatch.setattr(answering, "ALIKE", 2)
    params = tiny.rag_params(model, seed=4)
    retrieved = np.array([[n, (n + 1) % 9] for n in range(9)])
    results, shapes = [], []
    for size, step in ((9, 64), (2, 8)):
        answerer = answering.Answerer(
            model, parallel.make_mesh(MeshConfig(), jax.devices()[:1]), index,
            answering.Settings(2, size, step, Decoding(max_length=4, num_beams=1, sample=sample)))
        results.append((answerer.decode(params, questions, retrieved),
                        answerer.log_likelihoods(params, questions, retrieved)["log_p"],
                        answerer.embed_questions(params, questions)))
        shapes.append([(batch.question_ids.shape[1], batch.source_ids.shape[2],
                        batch.target_ids.shape[1])
                       for _, batch in answerer.batches(questions, retrieved)])
    (plain, *values), (ours, *ours_values) = results
    assert [a.token_ids for a in ours] == [a.token_ids for a in plain]
    assert [a.passage_ids for a in ours] == [[str(n), str((n + 1) % 9)] for n in range(9)]
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one.log_prob, other.log_prob, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(one.prior, other.prior, rtol=1e-5, atol=1e-6)
    for one, other in zip(ours_values, values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert len(set(map(tuple, np.round(values[1], 4)))) == 9
    assert shapes[0] == [(32, 64, 16)], "one length for all"
    assert len(shapes[1]) == 5 and 1 < len(set(shapes[1])) <= 3, "two batches of each, and the rest"
    assert 2 * np.prod(shapes[1], axis=1).sum() < 9 * np.prod(shapes[0]) / 2


def test_passages_that_are_kept_change_no_bit_of_an_answer(monkeypatch):
    """Neither whether a passage was met before, nor whether there was room for it. What is read in
    two parts is what is read at once, passages that a question cuts among them."""
    model, index, questions = shelf(longest=22)
    model = dataclasses.replace(model, generator=CAUSAL)
    params, runs = tiny.rag_params(model, seed=4), []
    retrieved = np.array([[n, (n + 1) % 9] for n in range(9)])
    program = prefixes._program(model.generator)
    monkeypatch.setattr(prefixes, "_program", lambda _: lambda params, ids, mask: (
        runs.append(int(mask.sum())), program(params, ids, mask))[1])

    def answers(mib, kept=None):
        runs.clear()
        answerer = answering.Answerer(
            model, parallel.make_mesh(MeshConfig(), jax.devices()[:1]), index, answering.Settings(
                2, 2, 8, Decoding(max_length=4, num_beams=2), prefix_mib=mib), kept)
        return answerer.decode(params, questions, retrieved), len(runs)

    kept = prefixes.KeptPrefixes()
    (first, new), (again, none) = answers(1, kept), answers(1, kept)
    assert (new, none, max(runs, default=0)) == (9, 0, 0), "each passage is read once"
    monkeypatch.setattr(prefixes, "MIB", 0)
    without_room, most = answers(1)
    assert 9 < most <= 18 and first == again == without_room
    lengths = index.passages.tokens("").lengths_of(retrieved)
    asked = np.array([[len(suffix)] for suffix in questions.suffixes])
    assert (questions.format.kept(lengths, asked) < lengths).any()
    for one, other in zip(first, answers(0)[0], strict=True):
        assert one.token_ids == other.token_ids
        for name in ("token_log_probs", "token_posterior"):
            np.testing.assert_allclose(
                getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-5)


def test_what_is_read_in_two_parts_has_the_tokens_of_both():
    """Guesses are looked up among them, also among those that were read before."""
    model, index, questions = shelf(longest=22)
    answerer = answering.Answerer(
        dataclasses.replace(model, generator=CAUSAL),
        parallel.make_mesh(MeshConfig(), jax.devices()[:1]), index,
        answering.Settings(2, 2, 8, Decoding(max_length=2)))
    retrieved = np.array([[n, (n + 1) % 9] for n in range(9)])

    def read(rows, padded):
        keys = np.zeros((len(rows), 2, 2, 4, max(padded)), np.float32)
        return keys, keys.swapaxes(3, 4)

    whole, parts = (list(answerer.batches(questions, retrieved, answers=False, read=reader))
                    for reader in (None, read))
    for (_, batch), (_, two) in zip(whole, parts, strict=True):
        for place in np.ndindex(batch.source_ids.shape[:2]):
            kept = two.prefixes.ids[place][: two.prefixes.lengths[place]]
            rest = two.source_ids[place][two.source_mask[place]]
            assert [*kept, *rest] == batch.source_ids[place][batch.source_mask[place]].tolist()
            assert len(kept) and len(rest)


def test_passages_are_read_with_matrices_that_are_converted_once(monkeypatch):
    """Each new passage converted all of the model's again."""
    model, index, questions = shelf(longest=22)
    model = dataclasses.replace(model, generator=dataclasses.replace(CAUSAL, dtype="bfloat16"))
    read, program = [], prefixes._program(model.generator)
    monkeypatch.setattr(prefixes, "_program", lambda _: lambda params, ids, mask: (
        read.append(jax.tree.leaves(params)), program(params, ids, mask))[1])
    answerer = answering.Answerer(
        model, parallel.make_mesh(MeshConfig(), jax.devices()[:1]), index,
        answering.Settings(2, 2, 8, Decoding(max_length=2), prefix_mib=1))
    params, retrieved = tiny.rag_params(model, seed=4), np.array([[n, n] for n in range(9)])
    first, second = (answerer.decode(params, questions, retrieved) for _ in range(2))
    assert first == second and len(read) == 9, "what is kept is known by the given parameters"
    assert {str(leaf.dtype) for leaf in read[0]} == {"bfloat16", "float32"}
    assert all(map(operator.is_, leaves, read[0]) for leaves in read)


def test_what_is_compiled_ahead_is_the_program_that_decodes(monkeypatch):
    """Of parameters in float32 another one was compiled, and the first question waited again."""
    model, index, questions = shelf(longest=22)
    model = dataclasses.replace(model, generator=dataclasses.replace(CAUSAL, dtype="bfloat16"))
    answerer = answering.Answerer(
        model, parallel.make_mesh(MeshConfig(), jax.devices()[:1]), index,
        answering.Settings(2, 9, 8, Decoding(max_length=2, num_beams=1)))
    dtypes = []

    def begin(params, *_):
        dtypes.append({str(leaf.dtype) for leaf in jax.tree.leaves(params["generator"])})
        return None, None

    for name, instead in (("_begin", begin), ("_go_on", lambda *_: (None, None)),
                          ("retrieve", lambda *_: np.array([[n, n] for n in range(9)]))):
        monkeypatch.setattr(answerer, name, instead)
    answerer.compile(tiny.rag_params(model, seed=4), questions)
    assert dtypes and all(each == {"bfloat16", "float32"} for each in dtypes)


@pytest.mark.parametrize("generator", [tiny.BART, tiny.T5, CAUSAL])
def test_matrices_that_are_kept_in_bfloat16_give_the_same_bits(generator, monkeypatch):
    """Rounded at another place than where they are multiplied, they would be another model."""
    model = tiny.rag_model(generator=dataclasses.replace(
        generator, vocab_size=38, dtype="bfloat16"))
    params, batch = tiny.rag_params(model, seed=4), tiny.rag_batch(model=tiny.rag_model())
    kept = {**params, "generator": in_dtype(params["generator"], "bfloat16")}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(kept["generator"])} == {
        "bfloat16", "float32"}
    answerer = answering.Answerer(
        model, parallel.make_mesh(MeshConfig(), jax.devices()[:1]), Index(),
        answering.Settings(3, 3, 1, Decoding(max_length=3, num_beams=2)))
    monkeypatch.setattr(answerer, "batches", lambda *_, **__: iter([(np.arange(REAL), batch)]))
    questions = Questions(ids=np.ones(REAL), format=QUESTIONS.format, examples=[None] * REAL)
    retrieved = np.tile(np.arange(3), (REAL, 1))
    whole, halved = ((answerer.decode(each, questions, retrieved),
                      answerer.log_likelihoods(each, questions, retrieved)["log_p"].tolist())
                     for each in (params, kept))
    assert halved == whole
