"""The score of greedy translations of the validation split, as a criterion of training.

Batches are those of all ranks together, and each rank translates whole batches. So the score does not depend on the number of
ranks.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np

from treenet.data.examples import Examples
from treenet.data.plan import plan_in_order
from treenet.data.splits import read_references
from treenet.layers.backend import computing_in
from treenet.runs.loading import load_processor
from treenet.tasks.base import Task
from treenet.training.ranks import Ranks
from treenet.training.step import TrainStep
from treenet.translation.search import search_batch
from treenet.translation.translate import detokenize
from treeproc.common.settings import UserError
from treeproc.shards.lengths import read_lengths


class DecodedValidation:
    """One rank's part of the translations of a split, and the score of all of them.

    Raises UserError if the data set lacks the lines of its text.
    """

    def __init__(self, task: Task, source: Examples, ranks: Ranks):
        config = task.config
        self._task, self._config, self._source, self._ranks = task, config, source, ranks
        self._decoding = config.decoding.model_copy(update={"method": "beam", "beam_size": 1, "diversity_groups": 1})
        self._processor = load_processor(config.data)
        self._references = read_references(config.data, "valid")
        self._ids = np.sort(read_lengths(config.data / "encoded", "valid")["example_id"]).tolist()

    def is_due(self, step: int) -> bool:
        """Return whether the validation at this step translates."""
        config = self._config
        return step == config.max_steps or step // config.validate_every % config.valid_metric_every == 0

    def score(self, train_step: TrainStep) -> float:
        """Return the metric of all lines, 0 to 100, on all ranks. A line without leaves has an empty translation.

        It uses the moving average of the weights, if there is one. Raises TrainingFailed on all ranks if the model's scores of
        pieces are not finite.
        """
        lines, failure, model, average = {}, None, train_step.model, train_step.average
        model.eval()
        try:
            with average.in_place() if average else nullcontext(), computing_in(train_step.precision, self._ranks.device):
                lines = self._translate(model)
        except UserError as error:
            failure = str(error)
        model.train()
        self._ranks.fail_together(failure)
        found = {number: line for part in self._ranks.gather(lines) for number, line in part.items()}
        hypotheses = [found.get(number, "") for number in self._ids]
        return self._task.score_lines(hypotheses, self._references)

    def _translate(self, model: Any) -> dict[int, str]:
        """Translate this rank's batches: texts by example_id."""
        lengths = self._source.lengths
        lines: dict[int, str] = {}
        for number, rows in enumerate(plan_in_order(lengths, self._decoding.max_tokens)):
            rows = rows[np.asarray(lengths["leaves"][rows]) > 0]
            if number % self._ranks.world_size != self._ranks.rank or not len(rows):
                continue
            batch = self._source.batch(rows).to(self._ranks.device)
            best = search_batch(model, batch, self._decoding)
            texts = [detokenize(self._processor, hypotheses[0]) for hypotheses in best]
            lines.update(zip(batch.example_ids.tolist(), texts, strict=True))
        return lines
