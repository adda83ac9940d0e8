"""Which checkpoint of a run is the best."""

import math
from collections.abc import Mapping, Sequence


class Ranking:
    """The scores of steps.

    Args:
      best_metric: names of the metric, higher is better, by which the best step is chosen: of
        each step's scores, the first that is there. () = no step is the best.
    """

    def __init__(self, best_metric: Sequence[str]):
        self._best_metric = best_metric
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
