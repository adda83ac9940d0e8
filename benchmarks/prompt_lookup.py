"""How many steps the answers of a trained model take with guesses (config.eval.prompt_lookup).

    python benchmarks/prompt_lookup.py --workdir runs/quickstart [--run rag_token] [--questions 200]

The first questions of the test split, one at a time, greedily. Prints for each number of guesses
the tokens and the generator's steps of an answer, in the mean, and how many answers differ from
those with the first number. What a step costs depends on the model and the machine: see
decoder_only.py.
"""

import argparse

import jax

import rag_jax
from rag_jax.decoding import documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--run", default="rag_token")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--guesses", type=int, nargs="+", default=[0, 1, 3, 5, 7])
    options = parser.parse_args()
    steps = counted()
    rag = rag_jax.load(options.workdir, run=options.run)
    questions = [example.question for example in rag.questions("test")][: options.questions]
    plain = None
    for guesses in options.guesses:
        steps.clear()
        answers = [rag.ask(question, num_beams=1, prompt_lookup=guesses)[0]
                   for question in questions]
        jax.effects_barrier()
        tokens = [answer.token_ids for answer in answers]
        plain = plain or tokens
        differ = sum(map(list.__ne__, tokens, plain))
        print(f"{guesses} guesses: {sum(map(len, tokens)) / len(tokens):.2f} tokens and "
              f"{len(steps) / len(tokens):.2f} steps an answer; {differ} of {len(tokens)} differ")


def counted() -> list[None]:
    """A list to which every step of a generator adds one entry from now on."""
    steps, step = [], documents.step

    def counting(*given):
        jax.debug.callback(lambda: steps.append(None))
        return step(*given)

    documents.step = counting
    return steps


if __name__ == "__main__":
    main()
