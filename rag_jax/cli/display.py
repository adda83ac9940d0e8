"""Answers on the terminal."""

import pathlib
import sys
import textwrap

from rag_jax import heatmap
from rag_jax.trained import Trained
from rag_jax.types import Answer
from rag_jax.visible import visible

NO_PASSAGE = "(no passage)"  # the null document


def show(trained: Trained, question: str, answer: Answer, heatmap_to: str | None = None) -> None:
    """Prints the answer, its log-probability and the passages that it was made from.

    Args:
      trained: whose answer it is.
      question: as asked.
      answer: the first and its alternatives.
      heatmap_to: also the document posterior per token: "terminal", or a .html or .png file.
    """
    marks = "".join([", no other answer has a higher probability under the model"
                     * answer.certified,
                     f", another answer may have a higher probability ({answer.expanded} prefixes "
                     "searched)" * (answer.expanded > 0 and not answer.certified),
                     ", cut at the length limit" * (not answer.finished)])
    lines = [f"\n{visible(question)}",
             f"  {visible(answer.text) or '(empty)'}    log p = {answer.log_prob:.3f}{marks}"]
    lines += [f"  {visible(other.text) or '(empty)'}    log p = {other.log_prob:.3f}"
              for other in answer.alternatives]
    if answer.passage_ids:
        lines.append("  p(z|x)  p(z|x,y)  passage")
    store = trained.index.passages if trained.index is not None else None
    for passage_id, prior, posterior in zip(
            answer.passage_ids, answer.prior, answer.posterior, strict=True):
        text = NO_PASSAGE
        if passage_id:
            passage = store[store.row_of(passage_id)]
            text = textwrap.shorten(passage.text, 100, placeholder=" ...")
        lines.append(f"  {prior:6.3f}  {posterior:8.3f}  {visible(passage_id)}  {visible(text)}")
    print("\n".join(lines), flush=True)
    if heatmap_to and answer.token_posterior:
        tokenizer = trained.job.prepared.generator_tokenizer
        cells = ([tokenizer.piece(i) for i in answer.token_ids],
                 [i or NO_PASSAGE for i in answer.passage_ids], answer.token_posterior)
        if heatmap_to == "terminal":
            print(heatmap.terminal(*cells, colour=sys.stdout.isatty()), flush=True)
        else:
            heatmap.write(pathlib.Path(heatmap_to), f"{question} {answer.text}", *cells)
            print(f"  {heatmap_to}", flush=True)
    elif heatmap_to:
        print("  no heat map: nothing says which passage gave which token", flush=True)
