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
        # By step: its metrics, the names of the score among them, how they were measured.
        self._noted: dict[int, tuple[
            Mapping[str, float], Sequence[str], Mapping[str, str] | None]] = {}

    def note(self, step: int, metrics: Mapping[str, float] | None,
             best_metric: Sequence[str] | None = None,
             measured: Mapping[str, str] | None = None) -> None:
        """Takes the metrics that a step was saved with; None = it was not evaluated.

        Args:
          best_metric: the names when the step was saved; None = those of this ranking.
          measured: the settings by which its score was measured; None = not known.

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
        self._noted[step] = (metrics, names, measured)

    def drop(self, step: int) -> None:
        """Forgets the metrics of a step."""
        self._noted.pop(step, None)

    def clear(self) -> None:
        """Forgets the metrics of all steps."""
        self._noted.clear()

    def best(self, steps: Sequence[int]) -> int | None:
        """The step with the highest score (ties: the later), NaN never; None = none has a score.

        Where the names have changed between steps, those of the last step that has metrics count
        for all: values of different metrics are not compared. Nor are those of different settings:
        only steps that were measured as that one count.
        """
        noted = {step: self._noted[step] for step in steps if step in self._noted}
        if not noted:
            return None
        _, names, measured = noted[max(noted)]
        scores = {step: next((metrics[name] for name in names if name in metrics), math.nan)
                  for step, (metrics, _, how) in noted.items() if how == measured}
        scored = [step for step in scores if not math.isnan(scores[step])]
        return max(scored, key=lambda step: (scores[step], step), default=None)
