"""Beam search with options once more, over python lists, as the documentation (and Hugging Face's
of the same names) describes it: no early exit, no arrays of hypotheses, float64."""

import numpy as np


def next_scores(log_p, tokens, settings, end):
    """Scores of the next token [V]; -inf is forbidden, a forced token costs nothing."""
    scores, place = np.array(log_p, np.float64), len(tokens)
    size = settings.no_repeat_ngram_size
    if size:
        for token in range(len(scores)):
            grown = [*tokens, token]
            grams = [tuple(grown[i : i + size]) for i in range(len(grown) - size + 1)]
            if grams and grams[-1] in grams[:-1]:
                scores[token] = -np.inf
    for word in settings.bad_words:
        if tuple(tokens[place - len(word) + 1 :] if len(word) > 1 else ()) == word[:-1]:
            scores[word[-1]] = -np.inf
    if place + 1 < settings.min_length:
        scores[end] = -np.inf
    forced = list(settings.prefix or ())
    if settings.forced_bos is not None:
        forced = [settings.forced_bos]
    wanted = forced[place] if place < len(forced) else None
    if settings.forced_eos and place + 1 == settings.max_length:
        wanted = end
    if wanted is not None:
        scores[:] = -np.inf
        scores[wanted] = 0.0
    return scores


def beam_search(log_p, settings, end):
    """[(score, tokens)], best first: ended hypotheses by rank, then the cut ones.

    log_p: prefix (a tuple) -> [V] log-probabilities of its next token.
    """
    width = settings.num_beams
    penalty = settings.length_penalty if width > 1 else 0.0

    def rank(found):
        return found[0] / max(len(found[1]) - len(settings.prefix or ()), 1) ** penalty

    live, ended = [(0.0, ())], []
    for _ in range(settings.max_length):
        grown = [(score + step, (*tokens, token)) for score, tokens in live
                 for token, step in enumerate(next_scores(log_p(tokens), tokens, settings, end))]
        grown = sorted((found for found in grown if found[0] > -np.inf), reverse=True)
        ended += [found for found in grown[:width] if found[1][-1] == end]
        live = [found for found in grown if found[1][-1] != end][:width]
        ended = sorted(ended, key=rank, reverse=True)[:width]
    return (ended + live)[:width]
