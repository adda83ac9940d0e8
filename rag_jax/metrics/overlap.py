"""What of a test set is already in the training set, and the scores on either part."""

from collections.abc import Iterable, Sequence

import numpy as np

from rag_jax.metrics.answers import normalize_answer


def answer_overlap(answers: Sequence[Sequence[str]], train_answers: Iterable[Sequence[str]]
                   ) -> np.ndarray:
    """Which questions have an accepted answer that is one of the training answers; bool[Q].

    Answers are compared as exact match does. Source: Lewis et al. 2021, "Question and answer
    test-train overlap in open-domain question answering datasets".

    Args:
        answers: the accepted answers of each test question.
        train_answers: the accepted answers of each training question.
    """
    known = {normalize_answer(text) for texts in train_answers for text in texts}
    return np.array([any(normalize_answer(text) in known for text in texts) for texts in answers],
                    bool)


def question_overlap(questions: Sequence[str], train_questions: Iterable[str]) -> np.ndarray:
    """Which questions are training questions, compared as exact match does; bool[Q].

    Differs from Lewis et al. 2021: their overlap is judged by people and holds paraphrases too.
    """
    known = {normalize_answer(text) for text in train_questions}
    return np.array([normalize_answer(text) in known for text in questions], bool)


def slices(correct: Sequence[bool], overlaps: np.ndarray, name: str) -> dict[str, float]:
    """Percent correct of the questions within an overlap and of the others, with their counts.

    Args:
        correct: bool[Q].
        overlaps: bool[Q], from `answer_overlap` or `question_overlap`.
        name: begins the keys: NAME, NAME_count, no_NAME, no_NAME_count.

    Returns:
        Those of the four that are defined: no score over no questions.
    """
    correct, scores = np.asarray(correct, bool), {}
    for key, part in ((name, correct[overlaps]), (f"no_{name}", correct[~overlaps])):
        if part.size:
            scores[key] = 100.0 * float(part.mean())
        scores[f"{key}_count"] = part.size
    return scores
