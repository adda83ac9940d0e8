"""Batches: padding that is masked, answers and passages in the rows where they belong."""

import itertools
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from rag_jax.config import BertConfig, DataConfig
from rag_jax.data import batches, order, packed
from rag_jax.data.batches import ENCODER_TABLE, PASSAGE_TABLE, RagBatcher, input_shape
from rag_jax.data.packed import Groups
from rag_jax.data.question_files import Example
from rag_jax.data.questions import QuestionTokens
from rag_jax.data.text import GeneratorFormat, Joint, Tokenizer, encoder_input
from rag_jax.data.tokenizer_training import train_bart_tokenizer, train_bert_tokenizer
from rag_jax.data.warmup_batches import (
    DenoisingBatcher,
    PairBatcher,
    RetrieverBatcher,
    cloze,
    common_words,
    crops,
    unknown_words,
    words,
)
from rag_jax.retrieval.bm25 import build_bm25
from rag_jax.retrieval.protocol import Passage, RetrievalError
from rag_jax.retrieval.store_writing import write_store

PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text number {i} says " + "very " * i + "little.")
            for i in range(6)]
EXAMPLES = [
    Example("a", "Who is it?", ("Ada", "Bo", "Cy"), ("p0", "p1"), ("p4", "p5")),
    Example("b", "Where in all the wide world does it say so?", ("There",), ("p1",)),
    Example("c", "Without a positive?", ("None",)),
    Example("d", "What?", ("a long answer " * 20,), ("p2",), ("p3",)),
    Example("e", "Again?", ("Yes",), ("p0",), ("p2",)),
]
WIDTH, LONGEST, TARGET = 3, 48, 6


class Index:
    """What a batcher asks of a PassageIndex."""

    def __init__(self, store, division="queries"):
        self.passages, self.division, self.asked = store, division, []
        self.table = np.arange(len(store) * WIDTH, dtype=np.float32).reshape(-1, WIDTH) + 1

    def embeddings(self, ids):
        assert (ids >= 0).all()
        self.asked.append(len(ids))
        return self.table[ids]


@pytest.mark.parametrize("division, packed", [
    ("queries", False), ("passages", True), ("devices", False)])
def test_a_host_makes_its_rows_of_the_batch_that_all_agree_on(made, division, packed):
    """The same draws and padded lengths, whatever passages the other hosts' questions got.

    An index on devices that they share is asked for the same by all.
    """
    questions, store, _, _ = made
    batcher = RagBatcher(questions, 4, WIDTH, groups=Groups(4) if packed else None)
    index = Index(store, division)
    rows = np.array([4, 0, 3, 1])
    for retrieved in (None, np.array([[0, -1], [1, 0], [2, 1], [5, 4]])):
        whole = batcher.batch(rows, retrieved, index, order.generator(0, 4, 1))
        for own in ([0, 1], [2, 3], [1]):
            rng = order.generator(0, 4, 1)
            part = batcher.batch(rows, retrieved, index, rng, own=np.array(own))
            for one, array in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
                assert np.array_equal(one, array[own])
            if retrieved is not None:
                assert index.asked[-1] == (len(rows) if division == "devices" else len(own))


def test_a_host_gets_the_places_of_its_own_devices(made):
    """Of targets that all have packed alike; of devices that hold several groups each."""
    questions = QuestionTokens([EXAMPLES[4]] * 40 + [EXAMPLES[3]], made[3], made[0].format, 10, 12)
    rows, groups = np.arange(32), Groups(2, 4)
    batch = questions.batch(rows, groups=groups)
    assert len(batch.target_places) == 8
    assert batch.target_places.shape[1] < batch.target_mask[:4].size == 48
    for device in range(2):
        own = np.arange(16 * device, 16 * (device + 1))
        part = questions.batch(rows, own=own, groups=groups)
        assert (part.target_places == batch.target_places[4 * device : 4 * device + 4]).all()
    longer = np.array([40] * 32)
    assert questions.batch(longer, groups=groups).target_places is None, "it does not fit"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    texts = [f"{p.title} / {p.text}" for p in PASSAGES] + [e.question for e in EXAMPLES]
    bart, bert = train_bart_tokenizer(texts, 400), train_bert_tokenizer(texts, 200)
    layout = GeneratorFormat(bart, LONGEST)
    store = write_store(tmp_path_factory.mktemp("store") / "s", PASSAGES, {
        PASSAGE_TABLE: lambda ps: layout.passages([p.title for p in ps], [p.text for p in ps]),
        ENCODER_TABLE: lambda ps: encoder_input(
            bert, [p.title for p in ps], [p.text for p in ps], 24)})
    questions = QuestionTokens(EXAMPLES, bert, layout, 10, TARGET)
    return questions, store, bart, bert


@pytest.fixture(scope="module")
def rag(made):
    return RagBatcher(made[0], 8, WIDTH)


def test_tokens_that_the_tokenizer_does_not_have_are_refused(made, rag, tmp_path):
    """An index that somebody else has made was answered from: what lies beyond the model's table
    is read as its last row."""
    store = write_store(tmp_path / "s", PASSAGES, {PASSAGE_TABLE: lambda ps: [[5, 60_000]] * 6})
    with pytest.raises(RetrievalError, match="'generator' has the id 60000, and the tokens"):
        rag.batch(np.array([0]), np.array([[2, 3]]), Index(store))


@pytest.mark.parametrize("length, step, longest, expected", [
    (1, 8, 64, 8), (8, 8, 64, 8), (9, 8, 64, 16), (0, 8, 64, 8), (63, 8, 60, 60), (5, 64, 48, 48)])
def test_bucket_rounds_up_to_a_step_and_never_beyond_the_longest(length, step, longest, expected):
    assert batches.bucket(length, step, longest) == expected


def test_the_generator_can_read_the_question_as_the_retriever_gives_it_back(made):
    """The released RAG was trained so: lower-cased, cut at the query encoder's length."""
    questions, _, bart, bert = made
    raw = [e.question for e in EXAMPLES]
    assert questions.suffixes == questions.format.questions(raw)
    layout = GeneratorFormat(bart, LONGEST, uncased_questions=True)
    again = QuestionTokens(EXAMPLES, bert, layout, 10, TARGET,
                           encoder=BertConfig(query_prefix="query: "))
    read = [bart.decode(row) for row in again.suffixes]
    assert read[0] == "// " + bert.decode(bert.encode(["who is it?"])[0])
    assert read[1].startswith("// where in") and len(read[1]) < len(raw[1])


def test_targets_that_are_cut_are_counted(made):
    """Of each question the first, of which an evaluation tells the likelihood."""
    questions, _, _, bert = made
    long = "a long answer " * 20
    examples = [Example("a", "Who?", (long, "A")), Example("b", "Who?", ("A", long)),
                Example("c", "Who?", (long,), targets=("A",)),
                Example("d", "Who?", ("A",), targets=(long,)), Example("e", "Who?", (long,))]
    for length, cut in ((TARGET, 3), (10**3, 0)):
        assert QuestionTokens(examples, bert, questions.format, 10, length).targets_cut() == cut


def test_an_answer_is_tokenized_as_inside_a_text(made):
    """Without add_prefix_space "Ada" would have other ids than the passage's " Ada"."""
    questions, _, _, bert = made

    class Plain:
        start, end, gap = None, 2, Joint(" ")
        encode_answers, encode_behind = Tokenizer.encode_answers, Tokenizer.encode_behind

        def encode(self, texts):
            return [[ord(c) for c in text] for text in texts]

    layout = GeneratorFormat(Plain(), LONGEST)
    assert QuestionTokens(EXAMPLES[:1], bert, layout, 10, TARGET).target("Ada") == [
        *map(ord, " Ada"), 2]


def test_questions_are_encoder_inputs_padded_to_one_length(made):
    questions, _, _, bert = made
    rows = encoder_input(bert, [e.question for e in EXAMPLES], None, 10)
    assert questions.ids.shape == (5, 10) and len(questions) == 5
    for ids, mask, row in zip(questions.ids, questions.mask, rows, strict=True):
        assert ids[mask].tolist() == row and (ids[~mask] == bert.pad).all()
        assert mask.sum() == len(row)


def test_a_rag_batch_holds_passage_and_question_in_their_rows(made, rag):
    questions, store, bart, _ = made
    retrieved = np.array([[3, 0], [1, 5]], np.int32)
    batch = rag.batch(np.array([1, 3]), retrieved, Index(store))
    table = store.tokens(PASSAGE_TABLE)
    for b, row in enumerate((1, 3)):
        assert (batch.question_ids[b] == questions.ids[row]).all()
        assert (batch.question_mask[b] == questions.mask[row]).all()
        for k in range(2):
            whole = questions.format.join(
                table.row(int(retrieved[b, k])).tolist(), questions.suffixes[row])
            ids, mask = batch.source_ids[b, k], batch.source_mask[b, k]
            assert ids[mask].tolist() == whole and (ids[~mask] == bart.pad).all()
            assert (batch.doc_embeddings[b, k] == Index(store).table[retrieved[b, k]]).all()
    assert batch.doc_mask.all() and (batch.weight == 1).all() and batch.weight.dtype == np.float32
    assert batch.source_ids.dtype == np.int32 and batch.doc_embeddings.dtype == np.float32


def test_inputs_are_padded_to_a_bucket_and_never_beyond_the_longest(made, rag):
    store = made[1]
    lengths = {rag.batch(np.array([row]), np.array([[d]]), Index(store)).source_ids.shape[-1]
               for row in range(5) for d in range(6)}
    assert len(lengths) > 1 and all(n % 8 == 0 and n <= LONGEST for n in lengths)


def test_the_shapes_of_batches_are_few_and_hold_what_they_held(made):
    """Every shape is compiled; a token that was cut, or a mask left behind, would train wrongly."""
    questions, store, _, bert = made
    questions = QuestionTokens(EXAMPLES, bert, questions.format, 10, 16)
    whole, shapes = RagBatcher(questions, LONGEST, WIDTH), set()
    for step in range(60):
        rows = order.batch_indices(5, 2, 0, step)
        retrieved = order.generator(0, 9, step).integers(0, 6, (2, 2))
        batch, padded = (batcher.batch(rows, retrieved, Index(store))
                         for batcher in (RagBatcher(questions, 4, WIDTH), whole))
        shape = []
        for name in ("question", "source", "target"):
            ids, mask, all_ids, all_mask = (getattr(b, f"{name}_{part}") for b in (batch, padded)
                                            for part in ("ids", "mask"))
            length = ids.shape[-1]
            assert (ids == all_ids[..., :length]).all() and (mask == all_mask[..., :length]).all()
            assert not all_mask[..., length:].any()
            shape.append(length)
        shapes.add(tuple(shape))
    questions_, sources, targets_ = map(set, zip(*shapes, strict=True))
    assert questions_ == {5, 10} and targets_ == {4, 8, 16} and all(s % 4 == 0 for s in sources)
    assert 3 < len(shapes) <= 2 * 3 * LONGEST // 4
    assert whole.batch(np.array([0]), None).question_ids.shape == (1, 10)


@pytest.mark.parametrize("longest, given, expected", [
    (256, 0, 32), (300, 0, 40), (64, 0, 16), (1024, 0, 128), (256, 64, 64)])
def test_eight_lengths_of_inputs_are_compiled_unless_the_user_wants_others(
        longest, given, expected):
    """A long input in small steps compiles for an hour."""
    data = DataConfig(max_source_length=longest, length_buckets=given)
    assert data.length_step == expected


def test_padding_passages_are_masked_and_have_zero_embeddings(made, rag):
    """A -1 read as the last row would feed a random passage to the model."""
    store = made[1]
    retrieved = np.array([[2, -1, -1], [0, 1, 2]], np.int32)
    batch = rag.batch(np.array([0, 1]), retrieved, Index(store))
    assert batch.doc_mask.tolist() == [[True, False, False], [True] * 3]
    assert (batch.doc_embeddings[0, 1:] == 0).all() and (batch.doc_embeddings[1] != 0).all()
    full = rag.batch(np.array([0, 1]), np.array([[2, 3, 4], [0, 1, 2]]), Index(store))
    assert (batch.source_ids[0, 0][batch.source_mask[0, 0]]
            == full.source_ids[0, 0][full.source_mask[0, 0]]).all()


@pytest.mark.parametrize("null_document", [False, True])
def test_packed_places_are_those_of_the_tokens_where_that_saves_padding(made, null_document):
    """One that is missing is a token that nobody reads."""
    questions, store, _, _ = made
    batcher, index = RagBatcher(questions, 4, WIDTH, null_document, Groups()), Index(store)
    batch = batcher.batch(np.array([0, 3, 4]), np.array([[0, 1, 5], [0, 5, 1], [1, 0, 2]]), index)
    inputs = 3 + null_document
    assert batch.source_mask.shape[1] == inputs and batch.source_mask.shape[2] % 8 == 0
    (places,), mask = batch.source_places, batch.source_mask
    assert len(places) % {9: 9 * 2, 12: 3 * 8}[3 * inputs] == 0 and len(places) < mask.size
    assert places.tolist() == [*np.flatnonzero(mask), *[mask.size] * (len(places) - mask.sum())]
    plain = RagBatcher(questions, 4, WIDTH, null_document).batch(
        np.array([0, 3, 4]), np.array([[0, 1, 5], [0, 5, 1], [1, 0, 2]]), index)
    assert plain.source_places is None
    assert (plain.source_ids[plain.source_mask] == batch.source_ids[batch.source_mask]).all()
    same = batcher.batch(np.array([0]), np.array([[5, 5]]), index)
    assert null_document or same.source_places is None, "equal lengths have nothing to leave out"
    few = RagBatcher(questions, 13, WIDTH, null_document, Groups()).batch(
        np.array([0, 3, 4]), np.array([[0, 1, 5], [0, 5, 1], [1, 0, 2]]), index)
    assert few.source_places is None, "who wants few lengths wants few shapes"
    assert batcher.batch(np.array([0, 3]), None).source_places is None


@pytest.mark.parametrize("groups", [Groups(2, 2), Groups(4), Groups(1, 4), Groups(2)])
def test_each_group_has_the_places_of_its_own_tokens(made, groups):
    """Of a batch whose groups have different numbers of tokens; a host has those of its devices."""
    questions, store, _, _ = made
    batcher, index = RagBatcher(questions, 4, WIDTH, groups=groups), Index(store)
    rows = np.array([0, 3, 4, 0, 3, 4, 1, 0])
    found = np.array([[0, 1, 5], [0, 5, 1], [1, 0, 2], [5, 5, 0], [0, 0, 1], [5, 0, 5], [5, 1, 0],
                      [0, 5, 5]])
    batch = batcher.batch(rows, found, index)
    masks = groups.rows(batch.source_mask.reshape(8, -1))
    assert len({int(mask.sum()) for mask in masks}) > 1 and len(batch.source_places) == len(masks)
    for places, mask in zip(batch.source_places, masks, strict=True):
        assert places[places < mask.size].tolist() == np.flatnonzero(mask).tolist()
    if groups.devices > 1:
        half = groups.count // 2
        for own, part in ((slice(0, 4), slice(0, half)), (np.arange(4, 8), slice(half, None))):
            of_host = batcher.batch(rows, found, index, own=own)
            assert (of_host.source_places == batch.source_places[part]).all()


def test_inputs_are_not_packed_into_as_many_places_as_they_have():
    """Two of 25 tokens, in places by fours; of 23 they are."""
    assert input_shape(26, 50, 2, 5, 26) == (26, 0)
    assert input_shape(26, 46, 2, 5, 26) == (26, 48)


def test_closed_book_is_one_empty_passage(made, rag):
    questions, _, bart, _ = made
    batch = rag.batch(np.array([0, 3]), None)
    assert batch.doc_mask.tolist() == [[True], [True]]
    assert batch.doc_embeddings.shape == (2, 1, WIDTH) and not batch.doc_embeddings.any()
    for b, row in enumerate((0, 3)):
        ids = batch.source_ids[b, 0][batch.source_mask[b, 0]].tolist()
        assert ids == [bart.start, *questions.suffixes[row], bart.end]


def test_weights_are_passed_through(made, rag):
    weight = np.array([1, 0], np.float32)
    assert (rag.batch(np.array([0, 0]), None, weight=weight).weight == weight).all()


def targets(batch):
    return [ids[mask].tolist() for ids, mask in zip(batch.target_ids, batch.target_mask,
                                                    strict=True)]


def test_targets_are_the_first_answer_or_one_drawn(made, rag):
    _, _, bart, _ = made
    answers = [[*ids, bart.end] for ids in bart.encode(["Ada", "Bo", "Cy"])]
    rows = np.zeros(40, np.int64)
    assert targets(rag.batch(rows, None)) == [answers[0]] * 40
    drawn = targets(rag.batch(rows, None, rng=order.generator(0, 4, 0)))
    assert all(a in drawn for a in answers) and all(d in answers for d in drawn)
    assert drawn == targets(rag.batch(rows, None, rng=order.generator(0, 4, 0)))
    assert drawn != targets(rag.batch(rows, None, rng=order.generator(0, 4, 1)))


def test_targets_of_its_own_train_instead_of_the_answers(made):
    questions, _, bart, bert = made
    pattern = Example("r", "Who?", ("A.*",), targets=("Ada", "Bo"), regex=True)
    tokens = QuestionTokens([pattern], bert, questions.format, 10, TARGET)
    ids, mask = tokens.targets(np.array([0]), None)
    assert bart.decode(ids[0][mask[0]]) == "Ada"
    drawn = {bart.decode(tokens.targets(np.array([0]), order.generator(0, 4, s))[0][0])
             for s in range(9)}
    assert drawn == {"Ada", "Bo"}


def test_a_classifiers_targets_are_numbers_and_its_decoder_reads_the_question(made):
    """<s> question </s>, cut before </s>; an answer that is no class is named with its question."""
    questions, _, bart, bert = made
    labels = ("no", "yes", "perhaps")
    examples = [e._replace(answers=(labels[i % 3],)) for i, e in enumerate(EXAMPLES)]
    classified = QuestionTokens(examples, bert, questions.format, 10, TARGET, labels=labels,
                                classifies=True)
    rows = np.array([4, 1, 2])
    batch = RagBatcher(classified, 8, WIDTH).batch(rows, None, own=np.array([0, 2]))
    assert targets(batch) == [[1], [2]] and batch.target_ids.shape == (2, 1)
    for ids, mask, row in zip(batch.decoder_ids, batch.decoder_mask, rows[[0, 2]], strict=True):
        whole = bart.encode([EXAMPLES[row].question])[0]
        assert ids[mask].tolist() == [bart.start, *whole[:8], bart.end]
        assert ids.shape == (10,) and (ids[~mask] == bart.pad).all()
    long = classified.batch(np.array([1]))
    assert long.decoder_mask.all() and long.decoder_ids[0, -1] == bart.end
    assert len(bart.encode([EXAMPLES[1].question])[0]) > 8
    assert questions.batch(rows).decoder_ids is None
    with pytest.raises(ValueError, match="question 'b': the answer 'There' is no class: .*'no', "):
        QuestionTokens([*examples[:1], EXAMPLES[1]], bert, questions.format, 10, TARGET,
                       labels=labels)


def test_a_label_is_told_by_one_token(made):
    """As the paper's FEVER, and no </s>; a first token that all labels share tells nothing."""
    questions, _, bart, bert = made
    labels = ("no", "yes and", "perhaps")
    examples = [e._replace(answers=(labels[i % 3],)) for i, e in enumerate(EXAMPLES)]
    told = QuestionTokens(examples, bert, questions.format, 10, TARGET, labels=labels)
    batch = told.batch(np.array([4, 2, 3]))
    assert [bart.decode(row) for row in targets(batch)] == ["y", "p", "n"]
    assert batch.target_ids.shape == (3, 1) and batch.decoder_ids is None
    with pytest.raises(ValueError, match="at no place do the tokens of all differ; name other"):
        QuestionTokens(examples, bert, questions.format, 10, TARGET, labels=(*labels, "perhaps"))


def test_a_long_answer_is_cut_before_its_end(made, rag):
    """Without </s> the model would never learn to stop; one token more would not fit."""
    _, _, bart, _ = made
    batch = rag.batch(np.array([3, 0]), None)
    ids = bart.encode([EXAMPLES[3].answers[0]])[0]
    assert targets(batch)[0] == [*ids[: TARGET - 1], bart.end]
    assert batch.target_ids.shape == (2, TARGET)
    assert (batch.target_ids[1][~batch.target_mask[1]] == bart.pad).all()


def retriever_batch(made, step=0, size=4, hard=1, seed=0):
    questions, store, _, bert = made
    batcher = RetrieverBatcher(questions, store, 20, 20, bert.pad, hard)
    return batcher, batcher.batch(step, size, seed)


def passage_rows(made, batch):
    """Which passage each row of the batch holds."""
    questions, store, _, bert = made
    ids, _ = store.tokens(ENCODER_TABLE).padded(np.arange(6), 20, bert.pad)
    return [int(np.flatnonzero((ids == row).all(axis=1))[0]) for row in batch.passage_ids]


def asked(made, batcher, step=0, size=4, seed=0):
    return batcher.rows[order.batch_indices(len(batcher.rows), size, seed, step)]


def test_questions_without_a_positive_are_left_out(made):
    batcher, _ = retriever_batch(made)
    assert batcher.rows.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("hard", [0, 1, 2])
def test_positives_stand_at_their_question_and_hard_negatives_behind(made, hard):
    seen = set()
    for step in range(20):
        batcher, batch = retriever_batch(made, step, hard=hard)
        rows, passages = asked(made, batcher, step), passage_rows(made, batch)
        assert len(passages) == 4 * (1 + hard)
        assert batch.same_passage.shape == (4, len(passages))
        for b, row in enumerate(rows):
            assert (batch.question_ids[b] == made[0].ids[row]).all()
            assert f"p{passages[b]}" in EXAMPLES[row].positive_ids
            if EXAMPLES[row].negative_ids:
                for h in range(hard):
                    assert f"p{passages[4 * (1 + h) + b]}" in EXAMPLES[row].negative_ids
            if row == 0:
                seen.add(passages[b])
    assert seen == {0, 1}, "each positive of a question gets its turn"


def test_same_passage_marks_every_other_place_of_a_positive(made):
    """Unmarked, question "e" would be trained to push away its own positive p0 of question "a"."""
    marked = 0
    for step in range(20):
        batcher, batch = retriever_batch(made, step)
        rows, passages = asked(made, batcher, step), passage_rows(made, batch)
        for b, row in enumerate(rows):
            for place, passage in enumerate(passages):
                expected = place != b and f"p{passage}" in EXAMPLES[row].positive_ids
                assert batch.same_passage[b, place] == expected
                marked += expected
    assert marked > 20


def test_a_passage_of_the_positives_text_is_no_negative(made):
    """Two passages that say the same have one vector: the loss could not fall below log 2."""
    questions, store, _, bert = made
    batcher, marked = RetrieverBatcher(questions, store, 20, 20, bert.pad, 1), 0

    class Copies:
        """A table in which passages 0 and 1 have the tokens of passage 1."""

        def __getattr__(self, name):
            table = store.tokens(ENCODER_TABLE)
            return lambda rows, *how: getattr(table, name)(np.where(rows == 0, 1, rows), *how)

    batcher.table = Copies()
    for step in range(20):
        batch = batcher.batch(step, 4, 0)
        for b, same in enumerate(batch.same_passage):
            equal = (batch.passage_ids == batch.passage_ids[b]).all(axis=1)
            assert same[equal & (np.arange(8) != b)].all() and not same[b]
            marked += equal.sum() - 1
    assert marked > 10


def test_a_retriever_batch_is_a_pure_function_of_seed_and_step(made):
    first, again, other = (retriever_batch(made, step, seed=seed)[1]
                           for step, seed in ((3, 0), (3, 0), (4, 0)))
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (first, again)), strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_passages_of_a_retriever_batch_are_padded_and_masked(made):
    _, batch = retriever_batch(made)
    pad = made[3].pad
    assert batch.passage_ids.shape == batch.passage_mask.shape == (8, 20)
    assert ((batch.passage_ids != pad) == batch.passage_mask).all()
    assert batch.passage_mask[:, 0].all()


TEXTS = ["One two three. Four five six.", "Seven.", "word " * 100]


def denoising(made, ratio=0.3, permute=1.0, length=24, step=24):
    return DenoisingBatcher(TEXTS, made[2], length, step, ratio, 3.0, permute)


def rows_of(ids, mask):
    return [row[m].tolist() for row, m in zip(ids, mask, strict=True)]


def test_a_denoising_target_is_the_text_and_the_source_has_noise(made):
    bart, size = made[2], len(TEXTS)
    for step in range(8):
        batch = denoising(made).batch(step, size, 0)
        rows = order.batch_indices(size, size, 0, step)
        expected = [[*bart.encode([TEXTS[r]])[0][:22], bart.end] for r in rows]
        assert rows_of(batch.target_ids, batch.target_mask) == expected
        for row, source in zip(rows, rows_of(batch.source_ids, batch.source_mask), strict=True):
            assert source[0] == bart.start and source[-1] == bart.end
            assert bart.mask in source or row == 1
            assert len(source) <= 24


def test_without_noise_the_source_is_the_target(made):
    """A source that is cut shorter than its target asks for words that nothing shows."""
    batch = denoising(made, ratio=0.0, permute=0.0).batch(0, 3, 0)
    sources = rows_of(batch.source_ids, batch.source_mask)
    targets = rows_of(batch.target_ids, batch.target_mask)
    assert [s[1:] for s in sources] == targets


def test_a_denoising_batch_is_padded_to_the_next_step_of_its_longest_row(made):
    shapes = set()
    for number in range(12):
        batch = denoising(made, length=28, step=8).batch(number, 1, 0)
        longest = max(batch.source_mask.sum(), batch.target_mask.sum())
        padded = min(28, -(-longest // 8) * 8)
        assert batch.source_ids.shape == batch.target_ids.shape == (1, padded)
        shapes.add(batch.source_ids.shape)
    assert len(shapes) > 1


def test_texts_are_packed_where_their_tokens_are(made):
    """The same texts and noise; a batch that is longer than usual is left as it is."""
    texts = [*(f"word number {i} of some" for i in range(60)), "word " * 20, "word " * 20]
    bart, usual = made[2], np.arange(8)
    packs, plain = (DenoisingBatcher(texts, bart, 32, 32, 0.3, 3.0, 0.0, groups)
                    for groups in (Groups(2, 2), None))
    for step in range(4):
        one, other = (batcher.batch(step, 16, 0) for batcher in (packs, plain))
        for name in ("source", "target"):
            mask, places = getattr(one, f"{name}_mask"), getattr(one, f"{name}_places")
            assert (getattr(one, f"{name}_ids") == getattr(other, f"{name}_ids")).all()
            assert getattr(other, f"{name}_places") is None
            assert len(places) == 4 and places.shape[1] < mask[:4].size
            for device in range(2):
                for piece in range(2):
                    rows = mask[8 * device + piece : 8 * (device + 1) : 2]
                    found = places[2 * device + piece]
                    assert found[: rows.sum()].tolist() == np.flatnonzero(rows).tolist()
                    assert (found[rows.sum():] == rows.size).all()
    groups, room = packed.Groups(), packed.room(np.full(8, 5), len(usual))
    mask = np.arange(32)[None] < np.full((8, 1), 5)
    assert packed.places(mask, groups, room).shape == (1, 48) == (1, room)
    assert packed.places(np.arange(32)[None] < np.full((8, 1), 7), groups, room) is None
    assert packed.places(mask[:, :6], groups, room) is None, "nothing would be saved"


def test_a_long_text_is_cut_before_its_sentences_are_permuted(made):
    """Cut afterwards, the source would show other sentences than the target asks for."""
    text = " ".join(f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyz" * 3)
    batcher = DenoisingBatcher([text], made[2], 24, 24, 0.0, 3.0, 1.0)
    moved = 0
    for step in range(5):
        batch = batcher.batch(step, 1, 0)
        source, = rows_of(batch.source_ids, batch.source_mask)
        target, = rows_of(batch.target_ids, batch.target_mask)
        assert sorted(source[1:]) == sorted(target)
        moved += source[1:] != target
    assert moved


def test_the_share_of_permuted_texts_is_as_configured(made):
    bart = made[2]
    whole = bart.encode([TEXTS[0]])[0]

    def moved(permute):
        batcher = DenoisingBatcher([TEXTS[0]], bart, 64, 64, 0.0, 3.0, permute)
        batch = batcher.batch(0, 200, 0)
        return np.mean([row[1:-1] != whole
                        for row in rows_of(batch.source_ids, batch.source_mask)])

    assert moved(0.0) == 0
    assert 0.4 < moved(1.0) < 0.6  # half of the orders of two sentences
    assert 0.15 < moved(0.5) < 0.35


def test_texts_are_read_when_a_batch_has_them(made):
    """Those of millions of passages were all in memory."""
    class Texts(Sequence):
        read = []

        def __len__(self):
            return 100

        def __getitem__(self, row):
            self.read.append(int(row))
            return TEXTS[0]

    batcher = DenoisingBatcher(Texts(), made[2], 24, 24, 0.3, 3.0, 1.0)
    assert not Texts.read
    batcher.batch(0, 3, 0)
    assert Texts.read == order.batch_indices(100, 3, 0, 0).tolist()


def test_a_denoising_batch_is_a_pure_function_of_seed_and_step(made):
    first, again, other = (jax.tree.leaves(denoising(made).batch(5, 3, seed))
                           for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_a_null_document_is_the_closed_books_input_beside_the_passages(made, rag):
    questions, store, _, _ = made
    rows, retrieved = np.array([1, 3]), np.array([[3, 0], [1, -1]], np.int32)
    batcher = RagBatcher(questions, 8, WIDTH, null_document=True)
    batch, plain = (b.batch(rows, retrieved, Index(store)) for b in (batcher, rag))
    alone = rag.batch(rows, None)
    assert batch.source_ids.shape == (2, 3, plain.source_ids.shape[2])
    assert (batch.source_ids[:, :2] == plain.source_ids).all()
    for b in range(2):
        last, closed = ((x.source_ids[b, -1], x.source_mask[b, -1]) for x in (batch, alone))
        assert last[0][last[1]].tolist() == closed[0][closed[1]].tolist()
    for name in ("doc_ids", "doc_mask", "doc_embeddings", "target_ids"):
        assert (getattr(batch, name) == getattr(plain, name)).all(), name
    assert (batch.doc_ids == retrieved).all() and batch.doc_ids.dtype == np.int32


def test_bm25_scores_of_the_passages_stand_in_for_embeddings(made, rag, tmp_path):
    questions, store, _, _ = made
    index = build_bm25(store, tmp_path / "bm25")
    rows, retrieved = np.array([1, 3, 0]), np.array([[3, 0], [1, -1], [2, 5]], np.int32)
    batch = rag.batch(rows, retrieved, index)
    assert batch.doc_embeddings is None and batch.doc_scores.dtype == np.float32
    asked = [EXAMPLES[row].question for row in rows]
    expected = index.scores(asked, np.maximum(retrieved, 0))
    assert (batch.doc_scores == expected)[batch.doc_mask].all() and expected.any()
    plain = rag.batch(rows, retrieved, Index(store))
    assert (batch.source_ids == plain.source_ids).all()
    own = rag.batch(rows, retrieved, index, own=np.array([2]))
    assert (own.doc_scores == batch.doc_scores[2:]).all()


SEVERAL = "Lima is a port. It never rains! Does it, ever? No."
STORIES = [Passage(f"s{i}", f"City {i % 4}", text) for i, text in enumerate(
    [SEVERAL, "One sentence alone stands on this line", SEVERAL,
     *(f"Town {i} lies at mile {i}. It has {i} gates. So it is said." for i in range(5))])]


@pytest.fixture(scope="module")
def stories(made, tmp_path_factory):
    """A store of passages whose tokens nobody has made, and the tokenizer for them."""
    path = tmp_path_factory.mktemp("stories") / "s"
    return write_store(path, STORIES, {}), train_bert_tokenizer([p.text for p in STORIES], 200)


def test_a_cloze_sentence_is_removed_from_its_text_nine_times_in_ten():
    """One that is always kept would teach to match words alone."""
    rng, removed, drawn = np.random.default_rng(0), 0, set()
    sentences = ["Lima is a port.", "It never rains!", "Does it, ever?", "No."]
    for _ in range(2000):
        query, rest = cloze(STORIES[0], rng)
        assert query in sentences
        drawn.add(query)
        if rest != SEVERAL:
            assert rest == " ".join(s for s in sentences if s != query)
            removed += 1
    assert drawn == set(sentences) and 1740 < removed < 1860
    assert {cloze(Passage("", "", "No. Yes. \n"), rng)[0] for _ in range(50)} == {"No.", "Yes."}


def test_crops_are_two_independent_spans_of_a_tenth_to_half_of_the_words():
    """A span twice would make the task the identity; one that leaves the text would be noise."""
    rng, text, spans = np.random.default_rng(0), [str(i) for i in range(40)], []
    for _ in range(2000):
        for crop in crops(Passage("", "", " ".join(text)), rng):
            first, *_ = own = [int(word) for word in crop.split()]
            assert own == list(range(first, first + len(own)))
            spans.append((first, len(own)))
        assert crops(Passage("", "", "word"), rng) == ("word", "word")
    assert crops(Passage("", "T", " "), rng) == ("", ""), "a passage may be a title alone"
    starts, lengths = np.array(spans).reshape(-1, 2, 2).transpose(2, 0, 1)
    assert set(lengths.ravel()) == set(range(4, 20)) and set(starts.ravel()) == set(range(37))
    for both in (starts, lengths):
        assert abs(np.corrcoef(both.T)[0, 1]) < 0.1


def test_words_are_a_title_with_some_common_words_of_its_passage_or_a_cloze():
    """Without the title, or with rare words, which are answers, it would be no question's likeness.
    """
    passage, rng, counts, last = Passage("", "A title", "one, two (three) rare. Four A five"), (
        np.random.default_rng(0)), [0] * 5, 0
    common = {"one", "two", "three", "Four", "five", "A"}
    for _ in range(2000):
        query, rest = words(passage, rng, common)
        if "A title" not in query:
            assert query in {"one, two (three) rare.", "Four A five"}
            continue
        assert rest == passage.text
        drawn = query.replace("A title", "").split()
        last += query.endswith("A title")
        assert drawn == [w for w in ("one", "two", "three", "Four", "five") if w in drawn]
        counts[len(drawn)] += 1
    assert not counts[0] and 900 < sum(counts) < 1100 and min(counts[1:]) > 0.8 * max(counts)
    assert abs(last / sum(counts) - 0.7) < 0.05
    lone = {words(Passage("", "", "one two"), rng, common)[0] for _ in range(50)}
    assert lone == {"one", "two", "one two"}, "a passage may have no title"
    assert {words(Passage("", "T", "rare"), rng, common)[0] for _ in range(9)} == {"T", "rare"}


def test_words_that_no_passage_has_stand_among_those_of_a_query():
    """A question's words that no passage has should not lead away from what it names."""
    passage, rng, counts, places = Passage("", "A title", "one two"), np.random.default_rng(0), (
        [0] * 4), set()
    unknown = unknown_words({"one", "two", "level", "on", "no"})
    assert unknown == ["eno", "owt"], "backwards, level is itself, and on is another common word"
    for _ in range(2000):
        query, rest = words(passage, rng, {"one", "two"}, unknown)
        drawn = query.replace("A title", "").split()
        if "A title" not in query:
            assert drawn == ["one", "two"], "a cloze has no other words"
            continue
        assert rest == passage.text and "A title" in query
        assert [word for word in drawn if word not in unknown] in (["one"], ["two"], ["one", "two"])
        counts[sum(word in unknown for word in drawn)] += 1
        places |= {(word, place) for place, word in enumerate(drawn)}
    assert min(counts) > 0.8 * max(counts) and places >= set(itertools.product(unknown, range(3)))
    assert unknown_words(set()) == []


def test_common_words_are_those_of_a_hundredth_of_the_passages():
    passages = [Passage("", "", "the end, the end." + " (few)" * (i < 4)) for i in range(300)]
    assert common_words(passages) == {"the", "end", "few"}
    assert common_words([*passages, *[Passage("", "", "the")] * 200]) == {"the", "end"}


@pytest.mark.parametrize("pairs", ["cloze", "crops"])
def test_pairs_come_from_passages_under_their_title_by_seed_and_step_alone(stories, pairs):
    """A resumed stage has made no earlier batch; a query with a title would have to name it."""
    store, bert = stories
    batches_of = [PairBatcher(store, bert, pairs, 8, 30, 10) for _ in range(2)]
    earlier = [batches_of[0].batch(step, 6, 3) for step in range(8)]
    for one, other in zip(earlier[5], batches_of[1].batch(5, 6, 3), strict=True):
        assert np.array_equal(one, other)
    assert any((a.question_ids != earlier[5].question_ids).any()
               for a in (batches_of[1].batch(5, 6, 4), earlier[6])
               if a.question_ids.shape == earlier[5].question_ids.shape)
    for step, batch in enumerate(earlier):
        rows = order.batch_indices(len(STORIES), 6, 3, step)
        for row, query, passage in zip(rows, batch.question_ids, batch.passage_ids, strict=True):
            title = [bert.start, *bert.encode([STORIES[row].title])[0], bert.end]
            assert passage[: len(title)].tolist() == title
            assert query[0] == bert.start and (query == bert.end).sum() == 1
            assert bert.decode(query[1:]) in bert.decode(bert.encode([STORIES[row].text])[0])
        assert (batch.question_mask == (batch.question_ids != bert.pad)).all()
        assert (batch.passage_mask == (batch.passage_ids != bert.pad)).all()


def test_pairs_are_read_as_questions_and_passages_are(stories):
    """An encoder that learnt without its prefixes and joined titles met them in every question."""
    store, bert = stories
    encoder = BertConfig(query_prefix="it ", passage_prefix="no ", titles="joined")
    batcher = PairBatcher([STORIES[0]] * 2, bert, "cloze", 30, 30, 30, encoder)
    batcher.draw = lambda passage, rng: (passage.text, passage.text)
    batch = batcher.batch(0, 2, 0)
    for ids, text in ((batch.question_ids, SEVERAL), (batch.passage_ids, f"City 0 {SEVERAL}")):
        prefixed = ("it " if ids is batch.question_ids else "no ") + text
        expected = [bert.start, *bert.encode([prefixed])[0][:28], bert.end]
        assert ids[0].tolist()[: len(expected)] == expected


def test_passages_of_one_text_are_not_each_others_negatives(stories):
    """Passages 0 and 2 have one text: to push one away would push away the right one."""
    store, bert = stories
    batcher = PairBatcher(store, bert, "cloze", 8, 30, 10)
    for step in range(10):
        rows = order.batch_indices(len(STORIES), 12, 0, step)  # some of the 8 passages twice
        same, texts = batcher.batch(step, 12, 0).same_passage, [STORIES[row].text for row in rows]
        assert same.tolist() == [[b != p and texts[b] == texts[p] for p in range(12)]
                                 for b in range(12)]


def test_passages_of_which_the_same_is_left_are_not_each_others_negatives(stories):
    """No query can tell them apart, though their texts differ, as those of a title alone."""
    store, bert = stories
    batcher = PairBatcher(store, bert, "cloze", 8, 30, 10)
    batcher.draw = lambda passage, rng: (passage.text, "The rest.")
    drawn = [STORIES[row] for row in order.batch_indices(len(STORIES), 8, 0, 0)]
    assert batcher.batch(0, 8, 0).same_passage.tolist() == [
        [p is not q and (p.title == q.title or p.text == q.text) for p in drawn] for q in drawn]


def test_of_a_passage_of_one_sentence_the_title_is_left_or_else_all_of_it(stories):
    """Without a title nothing would be left that a query could find."""
    store, bert = stories
    line = STORIES[1].text
    for title in ("City 1", ""):
        batcher = PairBatcher([Passage("a", title, line)] * 2, bert, "cloze", 8, 30, 10)
        read = {bert.decode(row[mask][1:-1]) for step in range(30)
                for row, mask in zip(*batcher.batch(step, 2, 0)[2:4], strict=True)}
        whole, named = (bert.decode(bert.encode([text])[0]) for text in (line, title))
        assert read == ({named.strip(), f"{named} {whole}"} if title else {whole})
