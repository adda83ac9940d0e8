"""Which checkpoint of a run is the best."""

import math
from collections.abc import Mapping, Sequence


class Ranking:
    """The scores of steps, by which the best one is chosen.

    Args:
      best_metric: names of metrics, higher is better: a step's score is the first of them that it
        has. () = no step is the best.
    """

    def __init__(self, best_metric: Sequence[str]):
        self.best_metric = tuple(best_metric)
        self._noted: dict[int, tuple[Mapping[str, float], Sequence[str]]] = {}

    def note(self, step: int, metrics: Mapping[str, float] | None,
             best_metric: Sequence[str] | None = None) -> None:
        """Takes the metrics that a step was saved with; None = it was not evaluated.

        best_metric: the names when the step was saved; None = those of this ranking.

        Raises:
          ValueError: there are metrics, but none of these names.
        """
        if not self.best_metric or metrics is None:
            return
        names = best_metric or self.best_metric
        if not any(name in metrics for name in names):
            raise ValueError(
                f"The best checkpoint is chosen by {' or '.join(map(repr, names))}, "
                f"not among the metrics of step {step}: {', '.join(sorted(metrics)) or 'none'}."
            )
        self._noted[step] = (metrics, names)

    def drop(self, step: int) -> None:
        """Forgets the metrics of a step."""
        self._noted.pop(step, None)

    def clear(self) -> None:
        """Forgets the metrics of all steps."""
        self._noted.clear()

    def best(self, steps: Sequence[int]) -> int | None:
        """The step with the highest score (ties: the later), NaN never; None = none has a score.

        Where the names have changed between steps, those of the last step count for all: values of
        different metrics are not compared.
        """
        noted = {step: self._noted[step] for step in steps if step in self._noted}
        if not noted:
            return None
        _, names = noted[max(noted)]
        scores = {step: next((metrics[name] for name in names if name in metrics), math.nan)
                  for step, (metrics, _) in noted.items()}
        scored = [step for step in scores if not math.isnan(scores[step])]
        return max(scored, key=lambda step: (scores[step], step), default=None)
