"""Curricula: prompts are sampled by what the scores of earlier samples say about them.

A sampler chooses rows, and learns from their scores between two steps. LearnabilitySampler is built in; users
write their own as a class with the methods of Sampler.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Protocol

import numpy as np

from megarl.batch.data_proto import DataProto
from megarl.config.schema import CurriculumConfig, CurriculumKind, DataConfig
from megarl.data.loader import RowLoader, RowSource, epoch_order, train_loader
from megarl.data.prompts import Prompt, PromptDataset
from megarl.machine.errors import counted
from megarl.machine.user_functions import Expected, UserFunctionError, last_line, load_name

KEY = "data.curriculum.sampler"
_METHODS = ("sample", "update", "state_dict", "load_state_dict")
_EXAMPLE = "class MySampler:  # __init__(prompts, seed), " + ", ".join(_METHODS)


class Sampler(Protocol):
    """Chooses the rows of a data set.

    A user's class is created with the prompts and `data.seed`. It may also have a method `metrics`, which
    returns numbers by name; they are logged as `curriculum/NAME`.
    """

    def sample(self, count: int) -> Sequence[int]:
        """Return the numbers of the next `count` rows, from 0. Rows may repeat."""
        ...

    def update(self, rows: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        """Learn from a step's samples, after it was trained.

        With asynchronous rollout, rows of later steps have been sampled before.

        Args:
            rows: The row of each prompt, in the order in which they were sampled.
            scores: The scores of the samples of each prompt, at least one.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values, from which `load_state_dict` continues with the same rows."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LearnabilitySampler:
    """Samples prompts by the variance of their scores, which is p (1 - p) at a success rate p.

    A prompt whose samples score the same teaches a group-relative estimator nothing; the expected gradient is
    largest where half of the samples succeed (Foster et al. 2025, arXiv 2502.12272; Rutherford et al. 2024,
    arXiv 2408.15099).

    A share of the rows, `epoch_share`, is taken in epochs. After k rows, each of the N rows of the data has
    therefore been sampled at least floor(k * epoch_share / N) times. The others are sampled with
    probabilities proportional to the variances. Rows without scores have the mean variance of those with
    scores; if all variances are 0, all rows are taken in epochs. A call returns a row twice only where an
    epoch ends, or if too few rows have a variance.
    """

    def __init__(self, num_rows: int, config: CurriculumConfig, *, shuffle: bool, seed: int) -> None:
        self._config = config
        self._shuffle = shuffle
        self._seed = seed
        self._num_sampled = 0
        self._num_in_epochs = 0
        self._epoch: tuple[int, list[int]] = (-1, [])  # an epoch and its order
        # (2, num_rows) float64: mean and variance of the scores of each row, NaN without scores
        self._estimates = np.full((2, num_rows), np.nan)

    def sample(self, count: int) -> list[int]:
        share = self._config.epoch_share
        chance = np.random.default_rng([self._seed, self._num_sampled, 1])
        # Rounded up, so that the share is never less.
        num_due = math.ceil((self._num_sampled + count) * share) - math.ceil(self._num_sampled * share)
        self._num_sampled += count
        rows = [self._next_in_epoch() for _ in range(num_due)]

        # No row twice, as long as there are others with a signal.
        weights = self._weights()
        weights[rows] = 0.0
        if (total := weights.sum()) > 0:
            weights /= total
            num_weighted = min(count - num_due, np.count_nonzero(weights))
            rows += chance.choice(len(weights), num_weighted, replace=False, p=weights).tolist()

        rows += [self._next_in_epoch() for _ in range(count - len(rows))]
        # The order decides which mini-batch a row is in.
        return chance.permutation(rows).tolist()

    def update(self, rows: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        rate = self._config.update_rate
        for row, of_row in zip(rows, scores, strict=True):
            # These are exact for equal scores, whose variance must be 0.
            mean = fmean(of_row) if min(of_row) < max(of_row) else of_row[0]
            variance = float(pvariance(of_row))
            if not np.isnan(self._estimates[0, row]):
                # Mean and variance of the mixture of the earlier and the new scores.
                earlier_mean, earlier_variance = self._estimates[:, row].tolist()
                shift = mean - earlier_mean
                mean = earlier_mean + rate * shift
                variance = (1 - rate) * (earlier_variance + rate * shift**2) + rate * variance
            self._estimates[:, row] = mean, variance

    @property
    def probabilities(self) -> np.ndarray:
        """(num_rows,) float64: the share of the rows that each row will be, if no scores follow."""
        weights = self._weights()
        total = weights.sum()
        uniform = np.full(len(weights), 1 / len(weights))
        if total == 0:
            return uniform
        return self._config.epoch_share * uniform + (1 - self._config.epoch_share) * weights / total

    def metrics(self) -> dict[str, float]:
        """Return metrics of the estimates from which the next rows are sampled.

        - `seen`: share of the rows that have scores;
        - `low_weight`: share of these whose variance is at most a tenth of the mean variance;
        - `score_mean`: mean over these of their estimated score;
        - `effective_share`: the number of rows among which sampling evenly would repeat them as
          often, 1 / sum of P^2, as a share of the rows.
        """
        means, variances = self._estimates[:, ~np.isnan(self._estimates[0])]
        metrics = {
            "seen": len(means) / self._estimates.shape[1],
            "effective_share": 1 / float(np.square(self.probabilities).sum()) / self._estimates.shape[1],
        }
        if len(means):
            metrics |= {
                "low_weight": float((variances <= 0.1 * variances.mean()).mean()),
                "score_mean": float(means.mean()),
            }
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_sampled": self._num_sampled,
            "num_in_epochs": self._num_in_epochs,
            # One string, because a list of all rows would make the file large and slow to write.
            "estimates": base64.b64encode(self._estimates.astype("<f8").tobytes()).decode(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_sampled = state["num_sampled"]
        self._num_in_epochs = state["num_in_epochs"]
        estimates = np.frombuffer(base64.b64decode(state["estimates"]), "<f8")
        self._estimates = estimates.astype(np.float64).reshape(self._estimates.shape)

    def _weights(self) -> np.ndarray:
        """Return the variance of each row, (num_rows,) float64; rows without scores have the mean."""
        variances = self._estimates[1]
        is_new = np.isnan(variances)
        return np.where(is_new, 0.0 if is_new.all() else variances[~is_new].mean(), variances)

    def _next_in_epoch(self) -> int:
        epoch, place = divmod(self._num_in_epochs, self._estimates.shape[1])
        self._num_in_epochs += 1
        if self._epoch[0] != epoch:
            self._epoch = epoch, epoch_order(self._estimates.shape[1], [self._seed, epoch], self._shuffle)
        return self._epoch[1][place]


class CurriculumLoader(RowLoader):
    """Serves the rows that a sampler chooses.

    Rows that were served, but whose step was not taken, are part of the state, because the sampler would not
    choose them again after an update. The uid of a row is `serial-row`, with its position among all rows
    served.

    Args:
        order: What the sampler is called in the state and in errors.
        settings: What else decides the order, by name. A resumed run must have the same.
    """

    reads_scores = True

    def __init__(
        self,
        dataset: RowSource,
        batch_size: int,
        sampler: Sampler,
        order: str,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dataset, batch_size)
        self._sampler = sampler
        self.order = order
        self._settings = dict(settings or {})
        self._num_before = 0  # rows served before the run was resumed
        self._served = array("q")  # the rows that were served since, in order, of 8 bytes each
        self._again: deque[int] = deque()  # rows of the interrupted run, to be served again
        self._sampler_state()  # a state that cannot be saved is refused before the first step

    def take(self, num_wanted: int) -> DataProto:
        rows = [self._again.popleft() for _ in range(min(num_wanted, len(self._again)))]
        if len(rows) < num_wanted:
            rows += self._sample(num_wanted - len(rows))

        serial = self.num_served
        self._served.extend(rows)
        return self._dataset.batch(rows, [f"{serial + place}-{row}" for place, row in enumerate(rows)])

    def check_uids(self, uids: Iterable[str]) -> None:
        for uid in uids:
            # `take` makes uids from the serial number of a row and its index.
            serial, _, row = uid.partition("-")
            is_served = serial.isdecimal() and row.isdecimal() and int(serial) < self.num_served
            if not (is_served and int(row) < len(self._dataset)):
                raise ValueError(
                    f"the batch has scores for the uid {uid!r}, which is not that of a training prompt, so "
                    f"data.curriculum ({self.order}) cannot learn from them; keep the `uid` of the prompts "
                    "from run.prompts, or remove data.curriculum"
                )

    def update(self, scores: Mapping[str, Sequence[float]]) -> None:
        # In the order in which the rows were served, whatever the order of the batch.
        uids = sorted(scores, key=lambda uid: int(uid.partition("-")[0]))
        rows = [int(uid.partition("-")[2]) for uid in uids]
        self._sampler.update(rows, [list(scores[uid]) for uid in uids])

    def metrics(self) -> dict[str, float]:
        of_sampler = getattr(self._sampler, "metrics", dict)()
        try:
            return {f"curriculum/{name}": float(value) for name, value in of_sampler.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserFunctionError(
                f"{self.order}: metrics() must return a dict of numbers by name, but {error}"
            ) from error

    @property
    def num_served(self) -> int:
        return self._num_before + len(self._served)

    @property
    def position(self) -> int:
        return self.num_served

    def state_at(self, position: int, num_rows: int = 0) -> dict[str, Any]:
        num_served = position + num_rows
        return {
            "num_served": num_served,
            "served": [*self._served[num_served - self._num_before :], *self._again],
            "sampler": self._sampler_state(),
            "order": self.order,
            **self._identity(),
            **self._chat_state(),
        }

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), **self._settings}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._num_before = state["num_served"]
        self._served = array("q")
        self._again = deque(state["served"])
        self._sampler.load_state_dict(dict(state["sampler"]))

    def _sample(self, count: int) -> list[int]:
        """Return rows of the sampler, which may be a user's. Raises UserFunctionError for unusable ones."""
        given = self._sampler.sample(count)
        num_rows = len(self._dataset)

        try:
            # operator.index accepts the integers of NumPy and torch, but no floats.
            rows = [operator.index(row) for row in given]
        except TypeError as error:
            raise UserFunctionError(
                f"{self.order}: sample({count}) must return the numbers of {counted(count, 'row')}, but "
                f"{error}"
            ) from error

        if len(rows) != count:
            raise UserFunctionError(
                f"{self.order}: sample({count}) returned {counted(len(rows), 'row')}; return as many as it "
                "is asked for"
            )
        if wrong := [row for row in rows if not 0 <= row < num_rows]:
            raise UserFunctionError(
                f"{self.order}: sample({count}) returned row {wrong[0]}, but the rows are 0 to {num_rows - 1}"
            )

        return rows

    def _sampler_state(self) -> dict[str, Any]:
        """Return the sampler's state. Raises UserFunctionError if JSON would change it."""
        state = self._sampler.state_dict()

        try:
            written = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserFunctionError(
                f"{self.order}: state_dict() must return JSON values, but {error}"
            ) from error

        if not isinstance(state, dict) or json.loads(written) != state:
            raise UserFunctionError(
                f"{self.order}: state_dict() must return a dict that JSON does not change: use lists instead "
                f"of tuples, and strings as keys"
            )

        # A copy, which the sampler does not change.
        return json.loads(written)


def prompt_loader(dataset: PromptDataset, data: DataConfig, prompts_per_step: int) -> RowLoader:
    """Build the loader of the prompts of an RL run.

    Raises:
        DataError: A step has more prompts than the data set, or no prompt of a file is left.
        UserFunctionError: The user's sampler cannot be used.
    """
    curriculum = data.curriculum

    # This checks the number of prompts, whatever their order.
    epochs = train_loader(dataset, data, prompts_per_step, "trainer.prompts_per_step")

    if curriculum.sampler is not None:
        sampler = _create(curriculum.sampler, dataset, data.seed)
        # Without folders, because a submitted job has its files elsewhere.
        return CurriculumLoader(
            dataset, prompts_per_step, sampler, Path(curriculum.sampler).name, {"seed": data.seed}
        )
    if curriculum.kind is CurriculumKind.epochs:
        return epochs

    learnability = LearnabilitySampler(len(dataset), curriculum, shuffle=data.shuffle, seed=data.seed)
    settings = {"shuffle": data.shuffle, "seed": data.seed}
    return CurriculumLoader(dataset, prompts_per_step, learnability, curriculum.kind.value, settings)


def load_sampler(reference: str) -> Callable[[Sequence[Prompt], int], Sampler]:
    """Return a user's class of samplers.

    Args:
        reference: `FILE.py:CLASS`.

    Raises:
        UserFunctionError: It cannot be loaded, lacks a method, or cannot be created with prompts and a seed.
    """
    path, _, name = reference.rpartition(":")
    found: Callable[..., Sampler] = load_name(path, name, Expected("curriculum sampler", KEY, _EXAMPLE))
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]

    if not inspect.isclass(found) or missing:
        methods = ", ".join(f"`{method}`" for method in missing or _METHODS)
        raise UserFunctionError(f"curriculum sampler {name!r} in {path!r} is not a class with {methods}")
    try:
        inspect.signature(found).bind([], 0)
    except TypeError as error:
        raise UserFunctionError(
            f"curriculum sampler {name!r} in {path!r} cannot be created with the prompts and a seed "
            f"({error}); write `def __init__(self, prompts, seed)`"
        ) from error
    return found


def _create(reference: str, dataset: PromptDataset, seed: int) -> Sampler:
    make = load_sampler(reference)
    prompts = [dataset[index] for index in range(len(dataset))]
    try:
        return make(prompts, seed)
    except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
        raise UserFunctionError(f"{reference}: cannot be created: {last_line(error)}") from error
