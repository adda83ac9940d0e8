"""Questions joined into batches against slots that are refilled between two tokens.

    python benchmarks/slots.py --workdir runs/quickstart [--run rag_token] [--json FILE]

Greedy answers to the same questions, all waiting from the start, by one jitted decoding of a batch
of so many questions, as the server does, and by a loop over single tokens of as many slots, each
of which takes the next question once its answer has ended. Neither searches nor writes texts: the
passages are found before. What a slot reads is computed for as many questions at a time as
--together says: fewer fill slots sooner and compute rows one by one. Prints answers a second, the
median of --rounds turns of each, and whether the answers are the same.
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measuring import cpu_name, in_turns

import rag_jax
from rag_jax import files
from rag_jax.answering import jit_decode
from rag_jax.data.question_files import Example
from rag_jax.decoding import documents
from rag_jax.decoding.settings import Decoding
from rag_jax.models import rag as models
from rag_jax.models.generator import in_dtype
from rag_jax.serving.indexes import WHOLE
from rag_jax.types import Batch, Params


class Slots(NamedTuple):
    """W searches, each of one hypothesis and at a place of its own."""

    documents: documents.Documents  # leaves [W, K, ...]; prior, log_prior [W, 1, K]; ids [W, 1, N]
    past: documents.Past  # leaves [W, K, ...], lineage [W, 1, 1, T]
    token: jax.Array  # int32[W], the last one
    position: jax.Array  # int32[W]
    tokens: jax.Array  # int32[W, T], the answer so far


def read(model: models.RagModel, length: int, params: Params, batch: Batch) -> Slots:
    """The slots of a batch's questions, before their first token."""
    found = documents.read(model, params, batch)
    count = len(batch.source_ids)

    def by_question(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(count, -1, *leaf.shape[1:])

    past = documents.empty_past(found, count, 1, length)
    return Slots(jax.tree.map(by_question, found), jax.tree.map(by_question, past),
                 jnp.full(count, model.start_id), jnp.zeros(count, jnp.int32),
                 jnp.full((count, length), model.pad_id))


def advance(model: models.RagModel, params: Params, slots: Slots) -> tuple[Slots, jax.Array]:
    """One token more in every slot, and which answers have ended."""
    def one(slot: Slots) -> Slots:
        log_p, past = documents.step(model, params, slot.documents, slot.token[None, None, None],
                                     slot.position, slot.past)
        mixed = jax.nn.logsumexp(slot.documents.log_prior[0, :, None] + log_p[0, :, 0], axis=0)
        token = mixed.argmax().astype(jnp.int32)
        return Slots(slot.documents, past, token, slot.position + 1,
                     slot.tokens.at[slot.position].set(token))

    slots = jax.vmap(one)(slots)
    return slots, (slots.token == model.end_id) | (slots.position == slots.tokens.shape[1])


def placed(slots: Slots, new: Slots, at: jax.Array) -> Slots:
    """With other questions in slots `at` int32[N]; beyond W they are left out."""
    return jax.tree.map(lambda old, one: old.at[at].set(one, mode="drop"), slots, new)


class Sides:
    """Both ways for one model, and its questions with their passages."""

    def __init__(self, rag: rag_jax.Rag, width: int, together: int, split: str):
        self.rag, self.width, self.together = rag, width, together
        self.model, self.length = rag.job.model, rag.config.data.max_target_length
        self.params = {**rag.params, "generator": in_dtype(
            rag.params["generator"], self.model.generator.dtype)}
        self.batches = {size: self._batches(rag.questions(split), size)
                        for size in {width, together}}
        self._decode = jit_decode(self.model, Decoding(max_length=self.length))
        self._read = jax.jit(functools.partial(read, self.model, self.length))
        self._advance = jax.jit(functools.partial(advance, self.model), donate_argnums=1)
        self._placed = jax.jit(placed, donate_argnums=0)

    def _batches(self, examples: Sequence[Example], size: int
                 ) -> list[tuple[np.ndarray, Batch]]:
        """(numbers of its questions, batch), all padded to one length."""
        answerer, batches = self.rag.answerer({}, batch_size=size, length_step=WHOLE), []
        for begin in range(0, len(examples) // self.width * self.width, size):
            questions = self.rag.job.tokenize(examples[begin : begin + size])
            (rows, batch), = answerer.batches(
                questions, answerer.retrieve(self.rag.params, questions), answers=False)
            batches.append((begin + rows, batch))
        return batches

    def joined(self) -> list[list[int]]:
        """Tokens of all answers, batch by batch."""
        answers = {}
        for numbers, batch in self.batches[self.width]:
            found = np.asarray(self._decode(self.params, batch, None, None).ranked.tokens[:, 0])
            answers |= zip(numbers, map(self._ended, found), strict=True)
        return [answers[number] for number in range(len(answers))]

    def slots(self) -> list[list[int]]:
        """The same by slots."""
        waiting = iter(self.batches[self.together])
        # Some questions that nobody asks: what the slots hold before they are filled.
        slots = self._read(self.params, self.batches[self.width][0][1])
        asked = np.full(self.width, -1)
        answers: dict[int, list[int]] = {}
        more = True
        while more or (asked >= 0).any():
            while more and (asked < 0).sum() >= self.together:
                numbers, batch = next(waiting, (None, None))
                if more := batch is not None:
                    free = np.flatnonzero(asked < 0)[:self.together]
                    slots = self._placed(slots, self._read(self.params, batch), free)
                    asked[free] = numbers
            slots, ended = self._advance(self.params, slots)
            done = np.flatnonzero(np.asarray(ended) & (asked >= 0))
            if len(done):
                tokens = np.asarray(slots.tokens)
                for slot in done:
                    answers[asked[slot]] = self._ended(tokens[slot])
                asked[done] = -1
        return [answers[number] for number in range(len(answers))]

    def _ended(self, tokens: np.ndarray) -> list[int]:
        found = tokens.tolist()
        return found[:found.index(self.model.end_id)] if self.model.end_id in found else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--run", default="rag_token")
    parser.add_argument("--split", default="test")
    parser.add_argument("--width", type=int, default=16, help="questions in a batch, and slots")
    parser.add_argument("--together", type=int, nargs="+", default=[1, 2, 4, 8],
                        help="slots that are filled at a time; divisors of --width")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rag = rag_jax.load(options.workdir, options.run, config={"eval.num_beams": None})
    report: dict[str, Any] = {"cpu": cpu_name(), "width": options.width}
    for together in options.together:
        sides = Sides(rag, options.width, together, options.split)
        answers, seconds = in_turns({"joined": sides.joined, "slots": sides.slots}, options.rounds)
        joined = answers["joined"]
        rates = {name: len(joined) / statistics.median(times) for name, times in seconds.items()}
        lengths = [len(tokens) + 1 for tokens in joined]
        longest = [max(lengths[at : at + options.width])
                   for at in range(0, len(lengths), options.width)]
        report[f"together {together}"] = {
            **rates, "slots / joined": rates["slots"] / rates["joined"],
            "same answers": sum(a == b for a, b in zip(*answers.values(), strict=True)),
            "answers": len(joined), "mean length": statistics.mean(lengths),
            "mean longest of a batch": statistics.mean(longest)}
        print(together, report[f"together {together}"], flush=True)
    if options.json:
        files.write_json(options.json, report)


if __name__ == "__main__":
    main()
