"""Accuracy of generated class labels, as FEVER's."""

from collections import defaultdict
from collections.abc import Sequence

NOT_ENOUGH_INFO = "NOT ENOUGH INFO"


def label_name(text: str) -> str:
    """A label as it is compared: upper case, single spaces, "_" as a space."""
    return " ".join(text.replace("_", " ").upper().split())


def accuracies(predictions: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Accuracy in percent over all claims, over parts of them, and the size of each part.

    Args:
        predictions: the label given to each claim; any other text is wrong.
        labels: the true ones.

    Returns:
        accuracy, over all claims (FEVER 3-way).
        accuracy_2way and its count, over the claims that are not NOT ENOUGH INFO, where a
            predicted NOT ENOUGH INFO is wrong (the paper's FEVER 2-way, for a model that knows
            two classes); where all claims are, it equals `accuracy`.
        accuracy_LABEL and count_LABEL of each true label, in lower case with "_".

    Raises:
        ValueError: no claims, or lists of different lengths.
    """
    if len(predictions) == 0:
        raise ValueError("no predictions: the accuracy over no claims is undefined")
    parts = defaultdict(list)
    for prediction, label in zip(predictions, labels, strict=True):
        label = label_name(label)
        correct = label_name(prediction) == label
        parts[""].append(correct)
        parts["_" + label.lower().replace(" ", "_")].append(correct)
        if label != NOT_ENOUGH_INFO:
            parts["_2way"].append(correct)
    scores = {}
    for part, correct in sorted(parts.items()):
        scores[f"accuracy{part}"] = 100.0 * sum(correct) / len(correct)
        if part:
            scores[f"count{part}"] = len(correct)
    return scores
