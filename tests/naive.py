"""BERT and BART once more, in numpy float64, written from the papers: slow, plain, no sharing of
code with the package. Parameters are the package's trees of looped (unscanned) layers.
"""

import numpy as np
from scipy.special import erf

ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
}


def f64(x):
    return np.asarray(x, np.float64)


def log_softmax(x):
    """Over the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def layer_norm(x, p, eps):
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * f64(p["norm"]["scale"]) + f64(p["norm"]["bias"])


def linear(x, p):
    return x @ f64(p["kernel"]) + f64(p["bias"])


def attention(x, source, p, heads, allowed):
    """x [T, D] looks at source [S, D] where allowed bool[T, S]; one head at a time."""
    q, k, v = linear(x, p["query"]), linear(source, p["key"]), linear(source, p["value"])
    size, contexts = x.shape[-1] // heads, []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = q[:, part] @ k[:, part].T / np.sqrt(size)
        weights = np.exp(log_softmax(np.where(allowed, scores, -np.inf)))
        contexts.append(weights @ v[:, part])
    return linear(np.concatenate(contexts, axis=-1), p["out"])


def feed_forward(x, p, activation):
    return linear(ACTIVATIONS[activation](linear(x, p["wi"])), p["wo"])


def layers(params):
    return [params[f"layer_{i}"] for i in range(len(params))]


def encoder_layer(x, mask, p, heads, eps, activation):
    everywhere = np.broadcast_to(mask, (len(x), len(x)))
    x = layer_norm(x + attention(x, x, p["attention"], heads, everywhere),
                   p["attention_norm"], eps)
    return layer_norm(x + feed_forward(x, p["mlp"], activation), p["mlp_norm"], eps)


def bert(params, ids, mask, types, heads, activation="gelu", eps=1e-12):
    """One sequence: ids [L] -> states [L, D]."""
    x = (f64(params["token_embedding"])[ids]
         + f64(params["position_embedding"])[: len(ids)]
         + f64(params["type_embedding"])[types])
    x = layer_norm(x, params["embedding_norm"], eps)
    for p in layers(params["encoder"]):
        x = encoder_layer(x, mask, p, heads, eps, activation)
    return x


def bart_encode(params, ids, mask, heads, activation="gelu", scale=1.0, eps=1e-5):
    """One sequence: ids [S] -> states [S, D]. Position p has row p + 2."""
    x = f64(params["embedding"])[ids] * scale
    x = x + f64(params["encoder_positions"])[2 : 2 + len(ids)]
    x = layer_norm(x, params["encoder_embedding_norm"], eps)
    for p in layers(params["encoder"]):
        x = encoder_layer(x, mask, p, heads, eps, activation)
    return x


def bart_decode(params, encoded, mask, decoder_ids, heads, activation="gelu", scale=1.0, eps=1e-5,
                watched=None):
    """One sequence: states [T, D] of decoder_ids [T] about encoder states [S, D]. `watched` gets
    every layer's input of its cross-attention, with that one's parameters."""
    length = len(decoder_ids)
    x = f64(params["embedding"])[decoder_ids] * scale
    x = x + f64(params["decoder_positions"])[2 : 2 + length]
    x = layer_norm(x, params["decoder_embedding_norm"], eps)
    causal = np.arange(length)[None, :] <= np.arange(length)[:, None]
    source = np.broadcast_to(mask, (length, len(encoded)))
    for p in layers(params["decoder"]):
        x = layer_norm(x + attention(x, x, p["self_attention"], heads, causal),
                       p["self_norm"], eps)
        if watched is not None:
            watched.append((x, p["cross_attention"]))
        x = layer_norm(x + attention(x, encoded, p["cross_attention"], heads, source),
                       p["cross_norm"], eps)
        x = layer_norm(x + feed_forward(x, p["mlp"], activation), p["mlp_norm"], eps)
    return x


def bart_output(params, states):
    """States [..., D] -> logits [..., V]."""
    return states @ f64(params["embedding"]).T + f64(params["final_logits_bias"])


def bart_logits(params, ids, mask, decoder_ids, heads, activation="gelu", scale=1.0, eps=1e-5):
    """One sequence: ids [S] and decoder_ids [T] -> logits [T, V]."""
    encoded = bart_encode(params, ids, mask, heads, activation, scale, eps)
    return bart_output(params, bart_decode(
        params, encoded, mask, decoder_ids, heads, activation, scale, eps))


def fused(params, sources, masks, heads):
    """Fusion-in-Decoder: encoder states [K*S, D] and mask [K*S] of K sources encoded alone."""
    encoded = [bart_encode(params, ids, mask, heads) for ids, mask in
               zip(sources, masks, strict=True)]
    return np.concatenate(encoded), np.concatenate(masks)


def classify(params, head, encoded, mask, question, start, heads):
    """log p of the classes [C]: the decoder reads start and all of `question` but its last token,
    and the head its last state."""
    state = bart_decode(params, encoded, mask, [start, *question[:-1]], heads)[-1]
    return log_softmax(linear(np.tanh(linear(state, head["dense"])), head["out"]))


def beam_search(log_p, width, longest, end):
    """The beam search that the package documents, over python lists.

    Args:
      log_p: prefix (a tuple) -> [V] log-probabilities of its next token.

    Returns:
      [(log-probability, tokens)], best first: ended hypotheses, then the cut ones; `width` at most.
    """
    live, ended = [(0.0, ())], []
    for _ in range(longest):
        grown = [(score + step, (*prefix, token))
                 for score, prefix in live for token, step in enumerate(log_p(prefix))]
        grown.sort(reverse=True)
        ended += [found for found in grown[:width] if found[1][-1] == end]
        live = [found for found in grown if found[1][-1] != end][:width]
        ended = sorted(ended, reverse=True)[:width]
    return (ended + live)[:width]
