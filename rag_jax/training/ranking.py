"""Which checkpoints of a run stay on disk, and which of them is the best."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Ranking:
    """The scores of steps, and an Orbax preservation policy: the latest steps and the best stay.

    Orbax's own BestN reads its metrics from a file whose damage keeps the manager from opening,
    and never deletes a step that was saved without metrics; its LatestN counts an empty directory
    with a high number as the latest step and deletes real ones in its favour.

    Args:
      keep: how many of the latest steps stay.
      best_metric: names of the metric, higher is better, by which the best step is chosen: of
        each step's scores, the first that is there. () = no step is the best.
      is_complete: whether all of a step is on disk.
    """

    def __init__(self, keep: int, best_metric: Sequence[str], is_complete: Callable[[int], bool]):
        self._keep, self._best_metric, self._is_complete = keep, best_metric, is_complete
        self.scores: dict[int, float] = {}

    def note(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Takes the metrics that a step was saved with, if any.

        Raises:
          ValueError: there are metrics, but none to choose the best step by.
        """
        if not self._best_metric or metrics is None:
            return
        named = [name for name in self._best_metric if name in metrics]
        if not named:
            raise ValueError(
                f"The best checkpoint is chosen by {' or '.join(map(repr, self._best_metric))}, "
                f"not among the metrics of step {step}: {', '.join(sorted(metrics)) or 'none'}."
            )
        self.scores[step] = metrics[named[0]]

    def best(self, steps: Sequence[int]) -> int | None:
        """The step with the highest score (ties: the later), NaN never; None = none has a score."""
        scored = [step for step in steps if not math.isnan(self.scores.get(step, math.nan))]
        return max(scored, key=lambda step: (self.scores[step], step), default=None)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """As Orbax asks: for each checkpoint, in their order, whether it stays."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        saving = steps[-1]  # not complete on disk yet
        complete = sorted(step for step in steps if step == saving or self._is_complete(step))
        dropped = set(complete) - {*complete[-self._keep :], self.best(complete), saving}
        return [step not in dropped for step in steps]
