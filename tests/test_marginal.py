"""The marginal likelihoods against enumeration in float64, and their edge cases."""

import itertools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest

from rag_jax import marginal
from rag_jax.marginal import MASKED

VOCAB, LONGEST, DOCS, END = 4, 3, 3, 2
KINDS = ["sequence", "token"]


@pytest.fixture(scope="module")
def world():
    """A random p(z) and p(y_t | z, y_<t) for every prefix, float64."""
    rng = np.random.default_rng(0)
    prefixes = [p for n in range(LONGEST) for p in itertools.product(range(VOCAB), repeat=n)]
    scores = rng.normal(size=DOCS)
    return scores, {p: naive.log_softmax(2 * rng.normal(size=(DOCS, VOCAB))) for p in prefixes}


def complete_sequences():
    """All sequences that stop at END, or at LONGEST tokens without one."""
    for length in range(1, LONGEST + 1):
        for y in itertools.product(range(VOCAB), repeat=length):
            if END not in y[:-1] and (y[-1] == END or length == LONGEST):
                yield y


def enumerated(world, y, kind):
    """p(y) by the paper's formulas, sums of products in float64."""
    scores, table = world
    prior = np.exp(scores) / np.exp(scores).sum()
    p = np.stack([np.exp(table[y[:t]][:, y[t]]) for t in range(len(y))], axis=1)  # [DOCS, T]
    if kind == "sequence":
        return sum(prior[z] * np.prod(p[z]) for z in range(DOCS))
    return np.prod([sum(prior[z] * p[z, t] for z in range(DOCS)) for t in range(len(y))])


def as_batch(world, sequences):
    """The sequences as rows padded to LONGEST, with junk under the padding."""
    scores, table = world
    rows = len(sequences)
    log_p = np.full((rows, DOCS, LONGEST), -77.0, np.float32)
    mask = np.zeros((rows, LONGEST), bool)
    for row, y in enumerate(sequences):
        mask[row, : len(y)] = True
        for t in range(len(y)):
            log_p[row, :, t] = table[y[:t]][:, y[t]]
    prior = marginal.log_prior(
        jnp.broadcast_to(jnp.float32(scores), (rows, DOCS)), jnp.ones((rows, DOCS), bool))
    return prior, jnp.asarray(log_p), jnp.asarray(mask)


@pytest.mark.parametrize("kind", KINDS)
def test_all_sequences_match_enumeration_and_sum_to_one(world, kind):
    sequences = list(complete_sequences())
    assert len({len(y) for y in sequences}) == LONGEST and (END,) in sequences
    p = np.exp(np.float64(marginal.MARGINALS[kind](*as_batch(world, sequences))))
    expected = [enumerated(world, y, kind) for y in sequences]
    np.testing.assert_allclose(sum(expected), 1, rtol=1e-12)
    np.testing.assert_allclose(p, expected, rtol=2e-6)
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-6)


def test_models_agree_on_one_token_and_differ_on_more(world):
    """Answers of one token (EOS alone among them) keep their document prior in both models."""
    one = as_batch(world, [(END,), (0,), (3,)])
    np.testing.assert_allclose(marginal.rag_token(*one), marginal.rag_sequence(*one), rtol=1e-6)
    scores, table = world
    prior = naive.log_softmax(scores)
    np.testing.assert_allclose(
        marginal.rag_token(*one)[0], np.log(np.exp(prior + table[()][:, END]).sum()), rtol=1e-6)
    without_prior = np.log(np.exp(table[()][:, END]).mean())
    assert abs(float(marginal.rag_token(*one)[0]) - without_prior) > 0.01
    two = as_batch(world, [(0, END)])
    assert abs(float(marginal.rag_token(*two)[0] - marginal.rag_sequence(*two)[0])) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_one_document_is_plain_seq2seq(world, kind):
    _, log_p, mask = as_batch(world, [(0, 1, END), (3, END)])
    prior = marginal.log_prior(jnp.full((2, 1), 5.0), jnp.ones((2, 1), bool))
    result = marginal.MARGINALS[kind](prior, log_p[:, :1], mask)
    np.testing.assert_allclose(result, np.where(mask, log_p[:, 0], 0).sum(axis=1), rtol=1e-6)


@pytest.mark.parametrize("of", [
    marginal.rag_token, marginal.rag_sequence, marginal.sequence_posterior,
    marginal.mean_token_posterior])
def test_an_array_without_its_axis_is_refused(of):
    """JAX repeats an axis of size 1, or a missing one: the numbers looked right, and were not."""
    prior, log_p, mask = jnp.zeros((2, 4)), jnp.zeros((2, 4, 5)), jnp.ones((2, 5), bool)
    of(prior, log_p, mask)
    for given, told in (((prior, log_p[0], mask), r"log_p has shape \(4, 5\): must be \[B, K, T"),
                        ((prior[:, :1], log_p, mask), r"log_prior has shape \(2, 1\): must be \(2"),
                        ((prior, log_p, mask[:1]), r"target_mask has shape \(1, 5\): must be \(2")):
        with pytest.raises(ValueError, match=told):
            of(*given)
    with pytest.raises(ValueError, match=r"log_p has shape \(4, 4\): must be \[B, K, T\]"):
        marginal.token_joint(jnp.zeros((4, 4)), jnp.zeros((4, 4)))
    with pytest.raises(ValueError, match=r"evidence has shape \(2, 1\): must be \(2, 4\)"):
        marginal.learn_from(prior[:, :1], "emdr2", prior)
    with pytest.raises(ValueError, match=r"doc_mask has shape \(1, 4\): must be \(2, 4\)"):
        marginal.log_prior(prior, jnp.ones((1, 4), bool))
    whole = {"batch_scores": jnp.zeros((2, 8)), "doc_mask": jnp.ones((2, 4), bool),
             "doc_ids": jnp.zeros((2, 4), int)}
    marginal.log_share(prior, *whole.values())
    for name, array in whole.items():
        with pytest.raises(ValueError, match=rf"{name} has shape \(2, 1\): must be \(2, [48]\)"):
            marginal.log_share(prior, *{**whole, name: array[:, :1]}.values())


def random_inputs(seed=1, rows=4, docs=5, length=3):
    rng = np.random.default_rng(seed)
    scores = jnp.float32(2 * rng.normal(size=(rows, docs)))
    log_p = jnp.float32(-rng.gamma(1.0, size=(rows, docs, length)))
    mask = jnp.asarray(np.arange(length) < np.array([[1], [2], [3], [3]]))
    return scores, log_p, mask


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_documents_is_irrelevant(kind):
    scores, log_p, mask = random_inputs()
    order = np.array([3, 0, 4, 2, 1])
    present = jnp.asarray(np.arange(5) < np.array([[5], [4], [1], [2]]))

    def value(scores, present, log_p):
        return marginal.MARGINALS[kind](marginal.log_prior(scores, present), log_p, mask)

    np.testing.assert_allclose(
        value(scores[:, order], present[:, order], log_p[:, order]),
        value(scores, present, log_p), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_documents_have_no_influence_and_no_gradient(kind):
    scores, log_p, mask = random_inputs()
    present = jnp.broadcast_to(jnp.arange(5) < 3, (4, 5))

    def value(scores, log_p, present=present):
        prior = marginal.log_prior(scores, present)
        return marginal.MARGINALS[kind](prior, log_p, mask)

    expected = value(scores[:, :3], log_p[:, :3], present[:, :3])
    for junk in (0.0, 50.0, -1e4):
        found = value(scores.at[:, 3:].set(junk), log_p.at[:, 3:].set(-abs(junk)))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    grads = jax.grad(lambda s, p: value(s, p).sum(), argnums=(0, 1))(scores, log_p)
    for grad in grads:
        assert not np.asarray(grad[:, 3:]).any()
        assert np.asarray(grad[:, :3]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_padded_target_positions_have_no_influence_and_no_gradient(kind):
    scores, log_p, mask = random_inputs()
    prior = marginal.log_prior(scores, jnp.ones(scores.shape, bool))
    run = marginal.MARGINALS[kind]
    junk = jnp.where(mask[:, None, :], log_p, -123.0)
    np.testing.assert_array_equal(run(prior, junk, mask), run(prior, log_p, mask))
    grad = jax.grad(lambda p: run(prior, p, mask).sum())(log_p)
    assert not np.asarray(jnp.where(mask[:, None, :], 0, grad)).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_what_stands_in_masked_positions_reaches_no_gradient_and_no_posterior(kind, value):
    """As the logit of padding that a checkpoint rules out."""
    prior = marginal.log_prior(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[True, True, False]]))
    log_p = jnp.log(jnp.array([[[0.5, 0.2], [0.3, 0.2], [0.1, 0.1]]]))
    mask = jnp.array([[True, False]])

    def found(log_p):
        run = jax.value_and_grad(lambda *given: marginal.MARGINALS[kind](*given, mask)[0], (0, 1))
        return run(prior, log_p), marginal.POSTERIORS[kind](prior, log_p, mask)

    for one, other in zip(jax.tree.leaves(found(log_p.at[:, :, 1].set(value))),
                          jax.tree.leaves(found(log_p)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()


def test_an_unknown_objective_is_refused_by_name():
    """All names but emdr2 were pdist."""
    with pytest.raises(ValueError, match="objective='emdr': one of emdr2, pdist"):
        marginal.learn_from(jnp.zeros((1, 2)), "emdr", jnp.zeros((1, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_any_document_stay_finite(kind):
    """A question without results is no NaN in value, and has no gradient."""
    scores, log_p, mask = random_inputs()
    present = jnp.zeros(scores.shape, bool).at[0].set(True)

    def value(scores, log_p):
        prior = marginal.log_prior(scores, present)
        return marginal.MARGINALS[kind](prior, log_p, mask)

    assert np.isfinite(value(scores, log_p)).all()
    grads = jax.grad(lambda s, p: value(s, p).sum(), argnums=(0, 1))(scores, log_p)
    for gradient in grads:
        assert np.isfinite(gradient).all()
        assert np.asarray(gradient[0]).any() and not np.asarray(gradient[1:]).any()
    prior = marginal.log_prior(scores, present)
    assert (np.asarray(prior)[1:] <= MASKED / 2).all() and not np.exp(prior[1:]).any()
    for posterior in (marginal.sequence_posterior(prior, log_p, mask),
                      marginal.mean_token_posterior(prior, log_p, mask)):
        np.testing.assert_allclose(posterior[0].sum(), 1, rtol=1e-6)
        assert not np.asarray(posterior)[1:].any(), "no document, no posterior"


@pytest.mark.parametrize("documents", [1, 3])
def test_the_mixture_of_distributions_is_that_of_float64(documents):
    """Also where every p(. | z) is too small for float32, and where a document has no weight."""
    rng = np.random.default_rng(0)
    weights = naive.log_softmax(rng.normal(size=(2, 4, documents)))
    log_p = rng.normal(size=(2, documents, 4, 6)) * 3
    log_p[0] -= 400
    expected = np.logaddexp.reduce(weights.transpose(0, 2, 1)[..., None] + log_p, axis=1)
    found = marginal.mixture(jnp.float32(weights), jnp.float32(log_p))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)
    if documents > 1:
        weights[..., 0] = MASKED
        expected = np.logaddexp.reduce(weights.transpose(0, 2, 1)[..., None] + log_p, axis=1)
        found = marginal.mixture(jnp.float32(weights), jnp.float32(log_p))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)
        assert (marginal.mixture(jnp.full((2, 4, documents), MASKED), jnp.float32(log_p))
                < MASKED / 2).all()


def test_prior_is_a_masked_float64_softmax_at_any_scale():
    rng = np.random.default_rng(0)
    present = np.array([[True, True, True, False], [True, False, False, False]])
    for scale in (1.0, 100.0, 1e4):
        scores = np.float32(scale * rng.normal(size=(2, 4)))
        found = marginal.log_prior(jnp.asarray(scores), jnp.asarray(present))
        expected = naive.log_softmax(np.where(present, np.float64(scores), -np.inf))
        np.testing.assert_allclose(np.where(present, found, 0), np.where(present, expected, 0),
                                   rtol=1e-6, atol=1e-6)
        assert not np.exp(found)[~present].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_target_log_probs_against_naive_label_smoothing(smoothing):
    rng = np.random.default_rng(3)
    logits = np.float32(3 * rng.normal(size=(2, 3, 7)))
    targets = rng.integers(0, 7, (2, 3)).astype(np.int32)
    log_p = naive.log_softmax(np.float64(logits))
    expected = np.zeros((2, 3))
    for b, t in np.ndindex(2, 3):
        wanted = np.full(7, smoothing / 7)
        wanted[targets[b, t]] += 1 - smoothing
        expected[b, t] = (wanted * log_p[b, t]).sum()
    found = marginal.target_log_probs(jnp.asarray(logits), jnp.asarray(targets), smoothing)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_bfloat16_logits_are_normalised_in_float32():
    """A logsumexp in bfloat16 would be wrong in the second digit."""
    logits = jnp.bfloat16(np.random.default_rng(0).normal(size=(4, 500)))
    found = marginal.target_log_probs(logits, jnp.arange(4))
    assert found.dtype == jnp.float32
    expected = naive.log_softmax(np.float64(logits))[np.arange(4), np.arange(4)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_posteriors_are_bayes_in_float64():
    scores, log_p, mask = random_inputs()
    present = jnp.asarray(np.arange(5) < np.array([[5], [4], [1], [2]]))
    prior = marginal.log_prior(scores, present)
    p_z = np.where(present, np.exp(naive.log_softmax(
        np.where(present, np.float64(scores), -np.inf))), 0)
    p_y = np.exp(np.float64(log_p))
    sequence, mean_token = np.zeros((4, 5)), np.zeros((4, 5))
    for b in range(4):
        length = int(mask[b].sum())
        joint = [p_z[b, z] * np.prod(p_y[b, z, :length]) for z in range(5)]
        sequence[b] = np.array(joint) / sum(joint)
        for t in range(length):
            joint = p_z[b] * p_y[b, :, t]
            mean_token[b] += joint / joint.sum() / length
    pairs = [(marginal.sequence_posterior(prior, log_p, mask), sequence),
             (marginal.mean_token_posterior(prior, log_p, mask), mean_token)]
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=1e-7)
        np.testing.assert_allclose(np.sum(found, axis=1), 1, rtol=1e-6)
        assert not np.asarray(found)[~np.asarray(present)].any()
    by_token = marginal.token_posterior(prior, log_p)
    np.testing.assert_allclose(np.sum(by_token, axis=1), 1, rtol=1e-6)


def test_the_prior_over_a_batchs_passages_is_one_softmax_in_float64():
    """A passage that two questions have retrieved counts once, one that is missing not at all; and
    with the share, RAG-Sequence is the sum over all of them, those of others explaining nothing."""
    rng = np.random.default_rng(2)
    ids = np.array([[0, 1, 2], [1, 3, -1], [4, 0, 5], [-1, -1, -1]])
    present, (rows, docs) = ids >= 0, ids.shape
    queries, passages = rng.normal(size=(rows, 4)), 2 * rng.normal(size=(6, 4))
    log_p, mask = rng.normal(size=(rows, docs, 1)) - 2, np.ones((rows, 1), bool)

    def all_of_them(queries, passages):
        total = 0.0
        for b in range(3):
            weights = np.exp(passages @ queries[b])
            joint = sum(weights[ids[b, k]] * np.exp(log_p[b, k, 0])
                        for k in range(docs) if present[b, k])
            total += np.log(joint / weights.sum())
        return total

    def value(queries, passages):
        found = passages[np.where(present, ids, 5)]
        own = jnp.einsum("BE,BKE->BK", queries, found)
        every = queries @ found.reshape(-1, 4).T
        share = marginal.log_share(own, every, jnp.asarray(present), jnp.asarray(ids))
        prior = marginal.log_prior(own, jnp.asarray(present))
        likelihood = marginal.rag_sequence(prior, jnp.float32(log_p), jnp.asarray(mask))
        return (likelihood + share)[:3].sum(), share

    given = jnp.float32(queries), jnp.float32(passages)
    (total, share), grads = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(*given)
    np.testing.assert_allclose(total, all_of_them(queries, passages), rtol=1e-5)
    assert (share[:3] < 0).all() and share[3] == 0
    for which, grad in enumerate(grads):
        for place in np.ndindex(grad.shape):
            step = [np.zeros_like(queries), np.zeros_like(passages)]
            step[which][place] = 1e-6
            ahead, behind = (all_of_them(queries + s * step[0], passages + s * step[1])
                             for s in (1, -1))
            np.testing.assert_allclose(grad[place], (ahead - behind) / 2e-6, rtol=1e-3, atol=1e-5)


OBJECTIVES = ["emdr2", "pdist", "adist", "loop"]


def learnt(objective, scores, evidence, present):
    """The definitions in float64 over lists: the objective [B], and its target [B, K]."""
    values, targets = np.zeros(len(scores)), np.zeros(scores.shape)
    for b in range(len(scores)):
        real = [z for z in range(scores.shape[1]) if present[b, z]]
        total = sum(np.exp(scores[b, z]) for z in real)
        prior = {z: np.exp(scores[b, z]) / total for z in real}
        weights = {z: np.exp(evidence[b, z]) for z in real}
        if objective == "emdr2":
            weights = {z: prior[z] * weights[z] for z in real}
            values[b] = np.log(sum(weights.values()))
        for z in real:
            targets[b, z] = weights[z] / sum(weights.values())
        if objective != "emdr2":
            values[b] = -sum(targets[b, z] * np.log(targets[b, z] / prior[z]) for z in real)
    return values, targets


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_of_the_retriever_are_their_definitions_in_float64(objective):
    """A missing passage, or one with a weight of its own, took a share of the target; a gradient
    to the evidence would train the generator to agree with the retriever."""
    rng = np.random.default_rng(5)
    scores, evidence = 2 * rng.normal(size=(3, 4)), 3 * rng.normal(size=(3, 4))
    present = np.arange(4) < np.array([[4], [2], [1]])
    junk = np.where(present, evidence, 80.0)

    def value(scores, evidence):
        prior = marginal.log_prior(scores, jnp.asarray(present))
        return marginal.learn_from(evidence, objective, prior)

    found, target = value(jnp.float32(scores), jnp.float32(junk))
    expected, expected_target = learnt(objective, scores, evidence, present)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(target, expected_target, rtol=5e-6, atol=1e-7)
    grads = jax.grad(lambda *given: value(*given)[0].sum(), argnums=(0, 1))(
        jnp.float32(scores), jnp.float32(junk))
    assert not np.asarray(grads[1]).any()
    for place in np.ndindex(3, 4):
        step = np.zeros((3, 4))
        step[place] = 1e-6
        ahead, behind = (learnt(objective, scores + s * step, evidence, present)[0].sum()
                         for s in (1, -1))
        np.testing.assert_allclose(grads[0][place], (ahead - behind) / 2e-6, rtol=1e-4, atol=1e-5)
    assert not np.asarray(jax.grad(lambda s: value(s, jnp.float32(junk))[1][0, 0])(
        jnp.float32(scores))).any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_stays_finite_without_any_passage(objective):
    prior = marginal.log_prior(jnp.zeros((2, 3)), jnp.asarray([[True] * 3, [False] * 3]))
    run = jax.value_and_grad(lambda p: marginal.learn_from(
        jnp.full((2, 3), -MASKED), objective, p)[0].sum())
    value, grad = run(prior)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert not np.asarray(marginal.learn_from(prior, objective, prior)[1])[1].any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_passage_of_score_minus_infinity_is_none(objective):
    """The objectives were NaN, and the share of a batch's passages that has no others."""
    scores = jnp.asarray([[1.0, -jnp.inf, 2.0], [-jnp.inf] * 3])
    mask = jnp.asarray([[True, False, True], [False] * 3])
    prior, masked = marginal.log_prior(scores, mask | True), marginal.log_prior(scores, mask)
    np.testing.assert_array_equal(prior, masked)
    evidence = -jnp.arange(6.0).reshape(2, 3)
    expected, target = marginal.learn_from(evidence, objective, masked)
    given = jnp.where(mask, masked, -jnp.inf).at[1].set(masked[1])  # log of a prior of 0
    found, weights = marginal.learn_from(evidence, objective, given)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(weights, target)
    ids = jnp.arange(6).reshape(2, 3)
    every = jnp.stack([scores.reshape(-1), jnp.arange(6.0)])
    share = marginal.log_share(scores, every, mask | True, ids)
    np.testing.assert_array_equal(share, marginal.log_share(scores, every, mask, ids))
    assert jnp.isfinite(share).all() and share[1] == 0
    assert jnp.isnan(marginal.log_prior(scores.at[0, 0].set(jnp.nan), mask))[0].any()
    assert jnp.isnan(marginal.learn_from(evidence, objective, given.at[0, 0].set(jnp.nan))[0][0])


def test_emdr2_has_the_gradient_of_the_sequence_marginal_and_of_its_own_posterior():
    scores, log_p, mask = random_inputs()
    present = jnp.asarray(np.arange(5) < np.array([[5], [4], [1], [2]]))

    def sums(scores):
        prior = marginal.log_prior(scores, present)
        answers = marginal.answer_log_probs(log_p, mask)
        value, target = marginal.learn_from(answers, "emdr2", prior)
        distilled = (jax.lax.stop_gradient(target) * jnp.where(present, prior, 0)).sum()
        return jnp.stack([marginal.rag_sequence(prior, log_p, mask).sum(), value.sum(), distilled])

    expected, *others = jax.jacobian(sums)(scores)
    for found in others:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_likelihood_without_a_passage_is_the_marginal_of_the_others(kind):
    """A prior that is not normalised anew blamed the generator for the retriever's share."""
    scores, log_p, mask = random_inputs()
    present = np.arange(5) < np.array([[5], [4], [3], [1]])
    found = marginal.leave_one_out(
        kind, marginal.log_prior(scores, jnp.asarray(present)), log_p, mask)
    for b, z in np.ndindex(4, 5):
        others = [k for k in range(5) if present[b, k] and k != z]
        if not others:
            assert found[b, z] < MASKED / 2
            continue
        prior = np.exp(naive.log_softmax(np.float64(scores[b])[others]))
        p = np.exp(np.float64(log_p[b])[others][:, np.asarray(mask[b])])
        expected = (np.log((prior * p.prod(axis=1)).sum()) if kind == "sequence"
                    else np.log((prior[:, None] * p).sum(axis=0)).sum())
        np.testing.assert_allclose(found[b, z], expected, rtol=5e-6)


def test_divergence_of_nearly_equal_distributions_keeps_its_digits():
    """Logarithms taken apart leave the difference of their roundings, one digit of four here."""
    rng = np.random.default_rng(0)
    q = rng.dirichlet(np.ones(5), 20).astype(np.float32)
    p = (q * np.exp(0.01 * rng.normal(size=q.shape))).astype(np.float32)
    p /= p.sum(axis=-1, keepdims=True)
    p[0], q[1] = [1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]
    p[1] = [0.25, 0.75, 0, 0, 0]
    exact_p, exact_q = (x.astype(np.float64) for x in (p, q))
    exact_p, exact_q = (x / x.sum(axis=-1, keepdims=True) for x in (exact_p, exact_q))
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(exact_p > 0, exact_p * np.log(exact_p / exact_q), 0.0)
    np.testing.assert_allclose(marginal.divergence(p, q), terms.sum(axis=-1), rtol=2e-4)
