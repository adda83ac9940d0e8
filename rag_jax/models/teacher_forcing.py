"""Teacher forcing: log p of given targets by the generator alone, from its decoder's states."""

from typing import Any

import jax
import jax.numpy as jnp

from rag_jax.config import GeneratorConfig
from rag_jax.models import rag, vocabulary
from rag_jax.models.packing import Packing
from rag_jax.models.rag import RagModel
from rag_jax.types import Params


def shift_right(target_ids: jax.Array, start_id: int) -> jax.Array:
    """The decoder's inputs int32[R, T] for targets int32[R, T]: start_id, y_1, ..., y_{T-1}."""
    return jnp.concatenate(
        [jnp.full_like(target_ids[:, :1], start_id), target_ids[:, :-1]], axis=1)


def score_targets(params: Params, states: jax.Array, targets: jax.Array, config: GeneratorConfig,
                  label_smoothing: float = 0.0, together: int = 1) -> tuple[jax.Array, jax.Array]:
    """log p of the target tokens from decoder states, without keeping logits over V.

    `config.logit_chunk` target positions are computed at a time. Where there are more, the backward
    pass computes their logits again, so that at most [R, chunk, V] exist at a time.

    Args:
      params: the generator's.
      states: dtype[R, T, D];  targets: int32[R, T].
      config: the generator's.
      label_smoothing: as in `marginal.target_log_probs`.
      together: the number of targets packed in a row, which multiplies the chunk.

    Returns:
      log p and its label-smoothed form, which is trained, in nats, float32[R, T] each.
    """
    def score(states: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = vocabulary.log_probs(
            *vocabulary.head(params), states.reshape(-1, states.shape[-1]), targets.reshape(-1),
            label_smoothing, length > chunk, config.logit_cap, config.end_tokens)
        return tuple(each.reshape(targets.shape) for each in found)

    length = targets.shape[1]
    chunk = -(-length // -(-length // (config.logit_chunk * together)))  # of about equal size
    pieces = [score(states[:, t : t + chunk], targets[:, t : t + chunk])
              for t in range(0, length, chunk)]
    log_p, smoothed = (jnp.concatenate(of, axis=1) for of in zip(*pieces, strict=True))
    return log_p, smoothed


def decoder_states(model: RagModel, params: Params, ids: jax.Array, mask: jax.Array,
                   targets: jax.Array, dropout_key: jax.Array | None,
                   mutable: str | bool = False, **packed: jax.Array | None) -> Any:
    """Teacher-forced decoder states dtype[R, T, D] of targets int32[R, T] for sources [R, P, S].

    mutable: a collection of variables, which is then returned too, as in `nn.Module.apply`.
    packed: `places` and `target_places`, as for `Generator.states`; None, and then not passed on,
      where nothing is packed, for not all families take them.
    """
    packed = {name: places for name, places in packed.items() if places is not None}
    return model.generator_module.apply(
        {"params": params}, ids, mask, shift_right(targets, model.start_id), dropout_key is None,
        rngs=rag.rngs(dropout_key), mutable=mutable, method="states", **packed)


def forced_log_probs(model: RagModel, params: Params, ids: jax.Array, mask: jax.Array,
                     targets: jax.Array, dropout_key: jax.Array | None,
                     label_smoothing: float = 0.0, **packed: jax.Array | None
                     ) -> tuple[jax.Array, jax.Array]:
    """log p of targets int32[R, T] for sources [R, P, S], and its label-smoothed form, both
    float32[R, T]; in the padding of packed targets they are 0."""
    states = decoder_states(model, params, ids, mask, targets, dropout_key, **packed)
    if packed.get("target_places") is None:
        return score_targets(params, states, targets, model.generator, label_smoothing)
    packing = Packing.of(packed["target_places"], *targets.shape)
    found = score_targets(params, states, packing.ids(targets), model.generator, label_smoothing,
                          len(targets) // len(states))
    return tuple(map(packing.padded, found))


def seq2seq_log_probs(model: RagModel, params: Params, source_ids: jax.Array,
                      source_mask: jax.Array, target_ids: jax.Array,
                      dropout_key: jax.Array | None = None, **packed: jax.Array | None
                      ) -> jax.Array:
    """log p(y_t | source, y_<t) of a generator alone, in nats, float32[R, T].

    Args:
      params: the generator's.
      source_ids: int32[R, S];  source_mask: bool[R, S];  target_ids: int32[R, T].
      dropout_key: None = no dropout.
      packed: `places` of the sources and `target_places`, as for `Generator.states`, or None.
    """
    return forced_log_probs(model, params, source_ids[:, None], source_mask[:, None], target_ids,
                            dropout_key, **packed)[0]
