"""The jitted programs of the three training stages: loss, gradient, update.

A loss function returns sums over its batch, (sum of losses, sum of weights, sums of metrics), so
that gradient accumulation adds micro-batches up exactly; but in-batch negatives are those of a
micro-batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rag_jax import parallel
from rag_jax.marginal import MASKED
from rag_jax.models import rag, teacher_forcing
from rag_jax.models.likelihood import log_likelihood
from rag_jax.training.optim import Optimizer, vectors_joined
from rag_jax.types import Batch, Params, RetrieverBatch, Seq2SeqBatch

Sums = tuple[jax.Array, jax.Array, dict[str, jax.Array]]
LossFunction = Callable[[Params, Any, jax.Array | None], Sums]


INFORMATION = "retriever_information"  # the metric by which a retriever's update is scaled


class Completion(NamedTuple):
    """How a step makes the batch of its loss from the batch that it is given.

    Attributes:
      batch: (parameters, given batch) -> the loss's batch.
      shardings: of the given batch.
      packed: the loss's batch -> the same batch with less padding. The host computes it, so that
        `batch` is a program of its own; None = `batch` runs inside the step.
    """

    batch: Callable[[Params, Any], Any]
    shardings: Any
    packed: Callable[[Any], Any] | None = None


class DropoutKeys(NamedTuple):
    """Seed of the dropout masks, and the implementation of jax.random's keys that draws them."""

    seed: int
    implementation: str = "threefry2x32"


class TrainState(NamedTuple):
    """Parameters of all towers of a stage, and the optimiser's state for those that train."""

    params: Params
    opt_state: Any


def rag_loss(model: rag.RagModel, label_smoothing: float = 0.0,
             retriever_objective: str = "marginal", weigh_explained: bool = False,
             in_batch_negatives: bool = False) -> LossFunction:
    """- log p(y | x) by the model's kind (section 2.4), summed over questions; and, unless
    retriever_objective is "marginal", the retriever's own loss (`marginal.learn_from`).

    weigh_explained, in_batch_negatives: as for `likelihood.log_likelihood`.

    The arguments change the loss alone: "nll", "prior_entropy" and "posterior_entropy" are of the
    likelihood itself, but Fusion-in-Decoder's "posterior_entropy" is of the distribution that its
    retriever learns from. A question without retrieved passages has no likelihood and counts in
    none of them.
    """

    def loss(params: Params, batch: Batch, key: jax.Array | None) -> Sums:
        out = log_likelihood(model, params, batch, label_smoothing, key,
                             retriever_objective, weigh_explained, in_batch_negatives)
        weight = batch.weight * (out["prior"] > 0).any(axis=-1)

        def entropy(p: jax.Array) -> jax.Array:
            return -(weight * jnp.sum(p * jnp.log(jnp.maximum(p, 1e-30)), axis=-1)).sum()

        def total(log_p: jax.Array) -> jax.Array:
            return -(jnp.where(weight > 0, log_p, 0.0) * weight).sum()

        smoothed_nll = total(out["objective"])
        metrics = {
            "nll": total(out["log_p"]),
            "loss": smoothed_nll,
            "prior_entropy": entropy(out["prior"]),
            "posterior_entropy": entropy(out["posterior"]),
            INFORMATION: (weight * out["explained"] * out["information"]).sum(),
        }
        if "retriever_objective" in out:
            metrics["retriever_loss"] = total(out["retriever_objective"])
        if rag.FUSION in params:
            metrics["hybrid_weight"] = weight.sum() * rag.word_weight(model, params)
        if batch.passage_age is not None:
            count = jnp.maximum(batch.doc_mask.sum(axis=-1), 1)
            metrics["staleness"] = (weight * batch.passage_age.sum(axis=-1) / count).sum()
        return smoothed_nll, weight.sum(), metrics

    return loss


def retriever_loss(model: rag.RagModel) -> LossFunction:
    """DPR's loss: - log softmax of the positive among all passages of the batch (section 3.2)."""

    def loss(params: Params, batch: RetrieverBatch, key: jax.Array | None) -> Sums:
        keys = (None, None) if key is None else jax.random.split(key)
        queries = rag.embed_queries(
            model, params["query_encoder"], batch.question_ids, batch.question_mask, keys[0]
        )
        passages = rag.embed(
            model, params["document_encoder"], batch.passage_ids, batch.passage_mask, keys[1]
        )
        scores = jnp.where(batch.same_passage, MASKED, jnp.einsum("BE,PE->BP", queries, passages))
        rows = jnp.arange(scores.shape[0])
        log_p = jax.nn.log_softmax(scores, axis=-1)[rows, rows]
        right = (scores.argmax(axis=-1) == rows).sum().astype(jnp.float32)
        count = jnp.float32(scores.shape[0])
        return -log_p.sum(), count, {"nll": -log_p.sum(), "accuracy": right}

    return loss


def seq2seq_loss(model: rag.RagModel) -> LossFunction:
    """- log p(target | source) summed over target tokens."""

    def loss(params: Params, batch: Seq2SeqBatch, key: jax.Array | None) -> Sums:
        log_p = teacher_forcing.seq2seq_log_probs(
            model,
            params["generator"],
            batch.source_ids,
            batch.source_mask,
            batch.target_ids,
            dropout_key=key,
            places=batch.source_places,
            target_places=batch.target_places,
        )
        nll = -jnp.where(batch.target_mask, log_p, 0.0).sum()
        return nll, batch.target_mask.sum().astype(jnp.float32), {"nll": nll}

    return loss


def accumulated_gradients(loss: LossFunction, trained: Params, frozen: Params, batch: Any,
                          key: jax.Array | None, pieces: int
                         ) -> tuple[Params, dict[str, jax.Array]]:
    """Gradient of the mean loss over `batch`, worked through in `pieces` micro-batches.

    Returns:
      The gradient with respect to `trained`, and the metrics' means.
    """

    def value(trained: Params, batch: Any, key: jax.Array | None):
        total, weight, metrics = loss({**frozen, **trained}, batch, key)
        # The whole batch's mean is differentiated: to scale its gradient would be one pass more.
        return total * mean(weight) if pieces == 1 else total, (weight, metrics)

    def mean(weight: jax.Array) -> jax.Array:
        return 1.0 / jnp.maximum(weight, 1e-9)

    gradient = jax.value_and_grad(value, has_aux=True)
    if pieces == 1:
        (_, (weight, metrics)), grads = gradient(trained, batch, key)
    else:
        split = parallel.micro_batches(batch, pieces)

        def one(sums: Any, piece: tuple[jax.Array, Any]) -> tuple[Any, None]:
            number, micro = piece
            micro_key = None if key is None else jax.random.fold_in(key, number)
            (_, aux), grads = gradient(trained, micro, micro_key)
            return jax.tree.map(jnp.add, sums, (grads, aux)), None

        shapes = jax.eval_shape(lambda: gradient(trained, jax.tree.map(lambda x: x[0], split), key))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[1], shapes[0][1]))
        (grads, (weight, metrics)), _ = jax.lax.scan(one, zeros, (jnp.arange(pieces), split))
        grads = jax.tree.map(lambda x: x * mean(weight), grads)
    return grads, jax.tree.map(lambda x: x * mean(weight), metrics)


def make_train_step(loss: LossFunction, optimizer: Optimizer, shardings: TrainState,
                    pieces: int = 1, dropout: DropoutKeys | None = None,
                    complete: Completion | None = None, frozen: tuple[str, ...] = (),
                    show: Callable[[Any], dict[str, jax.Array]] | None = None) -> Callable:
    """The step (state, batch, step) -> (state, metrics), jitted; the state is donated.

    Args:
      loss: what is minimised, summed over a batch.
      optimizer: trains its towers; the others are constants.
      shardings: where each part of the state lies; the batch is split over the same mesh.
      pieces: micro-batches per step.
      dropout: how its masks are drawn; None = no dropout anywhere.
      complete: makes the loss's batch from the given one; None = it is given.
      frozen: towers of the optimiser that this step leaves as they are; the structure of the state
        stays the same, and the other towers train as if these were constants.
      show: the loss's batch -> arrays to return among the metrics, split as the batch is.

    Returns:
      The step. Its metrics are the loss's, float32[], and those that `log.MetricWriter` lists.
    """
    training = tuple(t for t in optimizer.towers if t not in frozen)
    mesh = jax.tree.leaves(shardings)[0].mesh
    whole, rows = parallel.replicated(mesh), parallel.batch_sharding(mesh)
    inside = complete if complete is not None and complete.packed is None else None

    def step(state: TrainState, batch: Any, number: jax.Array):
        trained = {t: state.params[t] for t in training}
        constant = {t: p for t, p in state.params.items() if t not in training}
        key = (
            None
            if dropout is None
            else jax.random.fold_in(jax.random.key(dropout.seed, impl=dropout.implementation),
                                    number)
        )
        if inside is not None:
            batch = inside.batch(state.params, batch)
        grads, metrics = accumulated_gradients(loss, trained, constant, batch, key, pieces)
        kept = {t: state.params[t] for t in frozen}
        all_grads = {**grads, **jax.tree.map(jnp.zeros_like, kept)}
        scales = optimizer.scales(metrics)
        updates, opt_state = optimizer.update(
            all_grads, state.opt_state, {**trained, **kept}, scales)
        updates = {t: updates[t] for t in training}
        moved = optax.apply_updates(trained, updates)
        rates = {t: jnp.where(t in frozen, 0.0, rate * scales.get(t, 1.0))
                 for t, rate in optimizer.learning_rates(number).items()}
        metrics |= {**_batch_metrics(batch), **_gradient_norms(grads),
                    **{f"learning_rate/{tower}": rate for tower, rate in rates.items()}}
        if optimizer.measured is not None:
            metrics |= _update_ratios(optimizer, number, moved, opt_state, scales)
        metrics = jax.lax.with_sharding_constraint(metrics, whole)
        if show is not None:
            metrics |= jax.lax.with_sharding_constraint(show(batch), rows)
        return TrainState({**state.params, **moved}, opt_state), metrics

    jitted = jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(shardings, None),  # the metrics' are above
        in_shardings=(shardings, rows if inside is None else inside.shardings, whole),
    )
    if inside is complete:
        return jitted
    make_batch = jax.jit(complete.batch, in_shardings=(shardings.params, complete.shardings))
    return lambda state, given, number: jitted(
        state, complete.packed(make_batch(state.params, given)), number)


def _gradient_norms(grads: Params) -> dict[str, jax.Array]:
    """Norms of the whole gradient and of each tower's."""
    return {"grad_norm": optax.global_norm(grads),
            **{f"grad_norm/{tower}": optax.global_norm(grad) for tower, grad in grads.items()}}


def _update_ratios(optimizer: Optimizer, number: jax.Array, moved: Params, opt_state: Any,
                   scales: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """|update| / |parameters| of each tower; 0 in steps where it is not measured, and where the
    parameters were 0.

    Both are computed from the updated parameters: XLA would have to keep the old parameters or the
    update until they are read here.
    """
    def ratios(moved: Params, opt_state: Any) -> dict[str, jax.Array]:
        moved, opt_state = vectors_joined((moved, opt_state))
        old = optimizer.before(moved, opt_state, scales)
        return {tower: ratio(moved[tower], old[tower]) for tower in moved}

    def ratio(moved: Params, old: Params) -> jax.Array:
        update = optax.global_norm(jax.tree.map(jnp.subtract, moved, old))
        size = optax.global_norm(old)
        was_0 = size <= 1e-6 * update  # up to rounding
        return jnp.where(was_0, 0.0, update / jnp.where(was_0, 1.0, size))

    def nothing(moved: Params, opt_state: Any) -> dict[str, jax.Array]:
        return {tower: jnp.float32(0) for tower in moved}

    by_tower = jax.lax.cond(optimizer.measured(number), ratios, nothing, moved, opt_state)
    return {f"update_ratio/{tower}": ratio for tower, ratio in by_tower.items()}


def _batch_metrics(batch: Any) -> dict[str, jax.Array]:
    """How many tokens the towers read, the share of padding among their positions, and how many
    questions have no passage. They are counted in the batch's masks; without masks they are left
    out.
    """
    fields = batch._asdict() if hasattr(batch, "_asdict") else {}
    masks = {name: mask for name, mask in fields.items()
             if name.endswith("_mask") and name != "doc_mask" and mask is not None}
    if not masks:
        return {}
    tokens = sum(jnp.sum(mask, dtype=jnp.int32) for mask in masks.values()).astype(jnp.float32)
    computed = {name.removesuffix("_places") + "_mask": places for name, places in fields.items()
                if name.endswith("_places") and places is not None}
    places = sum(mask.size for mask in {**masks, **computed}.values())
    metrics = {"tokens": tokens, "padding_share": 1 - tokens / places}
    if "doc_mask" in fields:
        empty = (batch.weight > 0) & ~batch.doc_mask.any(axis=-1)
        metrics["without_passages"] = jnp.sum(empty, dtype=jnp.float32)
    return metrics


def _initial(model: rag.RagModel, towers: Sequence[str], seed: int, mesh: Mesh
             ) -> tuple[Callable[[], Params], Params]:
    """How to draw the towers' parameters, and their shapes with shardings."""
    boxed = model.shapes(tuple(towers))
    abstract = _sharded(nn.meta.unbox(boxed), parallel.param_shardings(boxed, mesh))
    return lambda: nn.meta.unbox(model.init(jax.random.key(seed), tuple(towers))), abstract


def _sharded(shapes: Any, shardings: Any) -> Any:
    """A tree of jax.ShapeDtypeStruct with shardings."""
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes, shardings)


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def init_state(model: rag.RagModel, towers: tuple[str, ...], optimizer: Optimizer, seed: int,
               mesh: Mesh) -> tuple[Callable[[], TrainState], TrainState, TrainState]:
    """How to make a stage's first state, its shapes, and its shardings.

    Returns:
      (make, abstract, shardings): make() initialises directly into the shardings, no device ever
      holding more than its part; abstract is the same tree of ShapeDtypeStructs with shardings.
    """
    make_params, params = _initial(model, towers, seed, mesh)
    trained = {t: params[t] for t in optimizer.towers}
    opt_state = jax.eval_shape(optimizer.init, trained)
    structure = jax.tree.structure(trained)

    def is_params(node: Any) -> bool:
        return jax.tree.structure(node) == structure and isinstance(node, dict)

    whole = parallel.replicated(mesh)

    def split_alike(state: Any) -> Any:
        """As the parameters, but for what has another shape, as Adafactor's sums of rows."""
        return jax.tree.map(
            lambda own, param: param.sharding if own.shape == param.shape else whole,
            state, trained)

    opt_shardings = jax.tree.map(lambda node: split_alike(node) if is_params(node) else whole,
                                 opt_state, is_leaf=is_params)
    abstract = TrainState(params, _sharded(opt_state, opt_shardings))

    def make() -> TrainState:
        params = make_params()
        return TrainState(params, optimizer.init({t: params[t] for t in optimizer.towers}))

    shardings = _shardings(abstract)
    return _drawing(make, shardings, mesh), abstract, shardings


def fresh_params(model: rag.RagModel, towers: tuple[str, ...], seed: int, mesh: Mesh) -> Params:
    """Initial parameters of towers, in their shardings."""
    make, abstract = _initial(model, towers, seed, mesh)
    return _drawing(make, _shardings(abstract), mesh)()


def _drawing(make: Callable[[], Any], shardings: Any, mesh: Mesh) -> Callable[[], Any]:
    """`make`, which draws parameters, jitted: one after the other, directly into the shardings."""
    return jax.jit(make, out_shardings=shardings, compiler_options=parallel.of_least_memory(mesh))


def abstract_params(model: rag.RagModel, towers: Sequence[str], mesh: Mesh) -> Params:
    """Shapes, dtypes and shardings of the towers' parameters, for restoring them."""
    return _initial(model, towers, 0, mesh)[1]


def uses_dropout(model: rag.RagModel) -> bool:
    """Whether any tower has a dropout rate above 0."""
    rates = ("dropout", "attention_dropout", "activation_dropout")
    return any(getattr(tower, rate, 0) for tower in (model.retriever, model.generator)
               for rate in rates)
