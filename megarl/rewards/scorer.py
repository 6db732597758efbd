"""Scores a batch of samples with the user's functions and judges, in processes that can be killed.

Judges reply first; the processes read their replies.

A function may hang, raise, exit or crash. Each failure is reported for its sample and ends the run above an
allowed rate. A failure never silently becomes a score of 0, and never affects other samples.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children
from types import TracebackType
from typing import NamedTuple

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from megarl.config.schema import JudgeConfig, RewardFunctionConfig, RewardSandboxConfig
from megarl.machine.errors import RunError, counted
from megarl.machine.processors import waited_for_core_s
from megarl.machine.reaper import OWNER
from megarl.machine.spawn import BareContext, FreshContext
from megarl.machine.user_functions import UserFunctionError
from megarl.rewards import process
from megarl.rewards.judge_reply import JudgeReply, judge_label
from megarl.rewards.judges import JudgeEndpoint, JudgePanel
from megarl.rewards.process import (
    FIX_THE_FUNCTION,
    LET_SAMPLES_FAIL,
    Outcome,
    RewardFunctionError,
    ScoreRequest,
)

START_TIME_LIMIT_S = 120.0  # for a reward file's imports
_LOOK_S = 0.2
MAX_POOL_RESTARTS = 3  # in a row without a scored sample in between
NUM_SHOWN_MESSAGES = 5
_ALWAYS_GIVEN = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", OWNER)


class BegunScore(NamedTuple):
    """A sample that waits for judges or a process of the pool, is being scored, or has been scored."""

    request: ScoreRequest
    outcome: Future[Outcome]
    pool: ProcessPool

    @property
    def is_lost(self) -> bool:
        """Whether its pool broke, so that it must be scored again."""
        if not self.outcome.done():
            return not self.pool.active
        return isinstance(self.outcome.exception(), BrokenProcessPool)


class RewardError(RunError):
    """More samples of a batch failed than `reward.max_error_rate` allows.

    The message shows the first of them.
    """

    hint = FIX_THE_FUNCTION


def _context(
    functions: Sequence[RewardFunctionConfig], sandbox: RewardSandboxConfig
) -> FreshContext | BareContext:
    if not any(function.sandbox for function in functions):
        return FreshContext()
    names = (*_ALWAYS_GIVEN, *sandbox.environment)
    try:
        return BareContext({name: os.environ[name] for name in names if name in os.environ})
    except PermissionError as error:
        raise RewardFunctionError(f"reward.functions' sandbox: {error}") from error


class RewardScorer:
    """A pool of `num_processes` processes that score samples.

    A sample may take `time_limit_s` seconds for all functions together, measured from when its process starts
    on it. The processes are fresh, so the owner may have threads and a GPU; none outlives the owner, however
    it ends. The time in which judges reply does not count.

    Args:
        scored_elsewhere: Whether a reward model, or judges that are not asked here, score the samples too. No
            function then needs to have an opinion on a sample.

    Raises:
        RewardFunctionError: The functions or judges cannot be loaded, or not within `start_time_limit_s`.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunctionConfig],
        time_limit_s: float,
        max_error_rate: float,
        num_processes: int,
        start_time_limit_s: float = START_TIME_LIMIT_S,
        sandbox: RewardSandboxConfig = RewardSandboxConfig(),  # noqa: B008  (frozen)
        judges: Sequence[JudgeConfig] = (),
        scored_elsewhere: bool = False,
    ) -> None:
        if not functions and not judges:
            raise RewardFunctionError("reward.functions is empty; give at least one {path: FILE.py:NAME}")
        self._functions = list(functions)
        self._judges = list(judges)
        self._failed = Outcome(0.0, {}, parts=(0.0,) * (len(functions) + len(judges)))
        self.time_limit_s = time_limit_s
        self._max_error_rate = max_error_rate
        self._num_processes = num_processes
        self._start_time_limit_s = start_time_limit_s
        self._sandbox = sandbox
        self._scored_elsewhere = scored_elsewhere
        self._context = _context(functions, sandbox)

        # Data source -> whether each function returns the key "answer"; None before it has had an opinion.
        self._has_answer: dict[str, tuple[bool | None, ...]] = {}

        # The kernel ends a process with the *thread* that started it (PR_SET_PDEATHSIG), so a thread that
        # lives as long as the scorer starts the pool. Later processes are started by the pool's own thread.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward_pool_starter")
        self._pool = self._starter.submit(self._start).result()
        try:
            self._panel = JudgePanel(judges) if judges else None
        except UserFunctionError as error:
            self._stop()
            self._starter.shutdown()
            raise RewardFunctionError(str(error)) from error

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and requests, including those that are scoring a sample."""
        if self._panel is not None:
            self._panel.close()
        self._stop()
        self._starter.shutdown()

    def use_judges(self, endpoints: Mapping[str, Sequence[JudgeEndpoint]]) -> None:
        """Set the servers of the judges that the run serves, by the judge's name."""
        assert self._panel is not None
        self._panel.use(endpoints)

    def begin(self, requests: Sequence[ScoreRequest]) -> list[BegunScore]:
        """Start scoring and return immediately; `score` waits for the results."""
        self._ensure_pool()
        pool = self._pool
        limit_s = self.time_limit_s

        def score(request: ScoreRequest, *replies: Sequence[JudgeReply]) -> Future[Outcome]:
            try:
                return pool.schedule(process.score, args=[request, *replies], timeout=limit_s)
            except RuntimeError as error:  # it broke while the judges replied
                raise BrokenProcessPool(str(error)) from error

        ask = score if self._panel is None else partial(self._panel.ask, score)
        return [BegunScore(request, ask(request), pool) for request in requests]

    def run[Result](
        self, function: Callable[[ScoreRequest], Result], request: ScoreRequest
    ) -> Future[Result]:
        """Call a function of megarl in a process that has loaded the reward functions.

        The call has the time limit of a sample.

        The future raises TimeoutError if the call takes too long, and ProcessExpired if its process dies.
        """
        self._ensure_pool()
        future: Future[Result] = self._pool.schedule(function, args=[request], timeout=self.time_limit_s)
        return future

    def score(self, samples: Sequence[ScoreRequest | BegunScore]) -> list[Outcome]:
        """Score samples, or wait for those that have begun.

        Returns:
            The outcomes, in order. A sample with an `error` scores 0, also for each function and judge. Where
            a function has no opinion on a sample, `has_answer` is what it declared for other samples of the
            data source.

        Raises:
            RewardError: The fraction of failed samples exceeds `max_error_rate`. The remaining samples are
                then not scored.
        """
        outcomes: dict[int, Outcome] = {}
        requests = [sample.request if isinstance(sample, BegunScore) else sample for sample in samples]
        begun = {index: sample for index, sample in enumerate(samples) if isinstance(sample, BegunScore)}
        waiting = list(range(len(requests)))
        num_fruitless = 0

        while waiting:
            unscored = self._score_some(requests, waiting, begun, outcomes)
            begun = {}  # samples left by a broken pool start again
            # Only attempts without any progress count towards the limit.
            num_fruitless = num_fruitless + 1 if len(unscored) == len(waiting) else 0
            refuse_fruitless(num_fruitless, len(waiting), "a sample")
            waiting = unscored

        rows = [outcomes[index] for index in range(len(requests))]
        return [
            row._replace(has_answer=self._has_answer[request.data_source]) if None in row.has_answer else row
            for request, row in zip(requests, rows, strict=True)
        ]

    def _start(self) -> ProcessPool:
        """Start the processes, and wait until one of them has loaded the functions."""
        initial = [self._functions, self._judges, self._sandbox, self.time_limit_s, self._scored_elsewhere]
        pool = ProcessPool(
            max_workers=self._num_processes,
            initializer=process.start,
            initargs=initial,
            context=self._context,
        )
        # The first job completes once a process has run the initializer.
        loading = pool.schedule(process.load_error)

        problem: str | None
        if not self._is_done_in_time(loading):
            parsers = [judge.parse.file for judge in self._judges if judge.parse.file is not None]
            files = ", ".join([*(function.file for function in self._functions), *parsers])
            problem = (
                f"loading the reward function file(s) {files} takes more than "
                f"{self._start_time_limit_s:g} s; move slow work out of them"
            )
        else:
            problem = loading.result()

        # Stop the processes, or they would outlive the error.
        if problem is not None:
            pool.stop()
            pool.join()
            raise RewardFunctionError(problem)

        return pool

    def _is_done_in_time(self, loading: Future[str | None]) -> bool:
        """Wait for the first load, for at most `start_time_limit_s` seconds.

        Time in which no process could get a core does not count.
        """
        start_s = time.monotonic()
        while not wait([loading], timeout=_LOOK_S).done:
            workers = [
                child.pid
                for child in active_children()
                if child.name == WORKERS_NAME and child.pid is not None
            ]
            # Use the smallest wait, because one process that had a core is enough.
            waited_s = min(map(waited_for_core_s, workers), default=0.0)
            if time.monotonic() - start_s - waited_s > self._start_time_limit_s:
                return False

        return True

    def _score_some(
        self,
        requests: Sequence[ScoreRequest],
        waiting: Sequence[int],
        begun: Mapping[int, BegunScore],
        outcomes: dict[int, Outcome],
    ) -> list[int]:
        """Fill in outcomes.

        Returns the samples that the pool did not reach because it broke, for example because an idle process
        was killed.
        """
        new = [index for index in waiting if index not in begun]
        futures = {**begun, **dict(zip(new, self.begin([requests[index] for index in new]), strict=True))}
        unscored = []

        for index in waiting:
            # Results are collected in the order of the samples, but a later one may have failed already.
            while not self._is_over(futures[index]):
                self._refuse_failures(requests, futures, outcomes)
            outcome = self.outcome(futures[index])
            if outcome is None:
                unscored.append(index)
                continue
            outcomes[index] = self._consistent(requests[index], outcome)
            if outcomes[index].error is not None:
                # Later successes cannot change this, so the rest need not be scored.
                self._refuse_failures(requests, futures, outcomes)

        return unscored

    def _consistent(self, request: ScoreRequest, outcome: Outcome) -> Outcome:
        """Return the outcome, or a failure if its `answer` is inconsistent within its data source.

        A function must return an answer for all samples of a data source or for none. `maj@k` is computed for
        functions that return answers, so this must not depend on the sample.
        """
        if outcome.error is not None:
            return outcome
        # The first sample of a data source decides for all of them.
        declared = self._has_answer.get(request.data_source, (None,) * len(outcome.has_answer))
        pairs = list(zip(outcome.has_answer, declared, strict=True))
        index = next(
            (number for number, pair in enumerate(pairs) if None not in pair and pair[0] != pair[1]), None
        )
        # A function without an opinion declares nothing about its answers.
        if index is None:
            self._has_answer[request.data_source] = tuple(
                before if has is None else has for has, before in pairs
            )
            return outcome
        this, others = ("an", "none") if outcome.has_answer[index] else ("no", "one")

        return self._failed._replace(
            error=f"{process.function_labels(self._functions)[index]} returned {this} 'answer' for it, but "
            f"{others} for other samples of {request.data_source!r}; return this key for all samples or for "
            "none, with None for a sample without an answer",
        )

    def _ensure_pool(self) -> None:
        if not self._pool.active:
            self._stop()
            self._pool = self._starter.submit(self._start).result()

    def _stop(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _refuse_failures(
        self,
        requests: Sequence[ScoreRequest],
        futures: Mapping[int, BegunScore],
        found: Mapping[int, Outcome],
    ) -> None:
        """Raise RewardError if more samples have failed than allowed, in whatever order they ended.

        `found` are the outcomes that were noticed so far.
        """
        ended = {**{index: self.outcome(begun) for index, begun in futures.items()}, **found}
        failed = {
            index: outcome.error
            for index, outcome in ended.items()
            if outcome is not None and outcome.error is not None
        }
        if len(failed) > self._max_error_rate * len(requests):
            self._stop()  # the pool is restarted by the next call
            raise RewardError(self._too_many(failed, requests), hint=self._hint(set(failed.values())))

    def _is_over(self, begun: BegunScore) -> bool:
        """Wait at most a second for the sample. It is never completed if its pool is broken."""
        return bool(wait([begun.outcome], timeout=1.0).done) or begun.is_lost

    def outcome(self, begun: BegunScore) -> Outcome | None:
        """Return the outcome of a sample, or None if it has none yet or its pool broke."""
        if not begun.outcome.done():
            return None
        try:
            outcome = begun.outcome.result()
        except (TimeoutError, ProcessExpired) as error:
            return self._failed._replace(error=self.failure(error))
        except BrokenProcessPool:
            return None
        if outcome.error is None:
            return outcome
        return self._failed._replace(numbers=outcome.numbers, error=outcome.error)

    def failure(self, error: TimeoutError | ProcessExpired) -> str:
        """Return why a call in a process has no result."""
        if isinstance(error, ProcessExpired):
            return f"its process died while scoring it (exit code {error.exitcode})"
        return f"it took more than reward.time_limit_s={self.time_limit_s:g} s and was killed"

    def _hint(self, messages: Collection[str]) -> list[str]:
        """Return what to do about failures: about the judges that failed, and the functions if any did."""
        lines = []
        left = list(messages)
        for index, judge in enumerate(self._judges):
            if any(judge_label(judge.name) in message for message in messages):
                lines += _judge_remedies(judge, f"reward.judges[{index}]")
                left = [message for message in left if judge_label(judge.name) not in message]

        return [*lines, *(FIX_THE_FUNCTION if left else [LET_SAMPLES_FAIL])]

    def _too_many(self, failed: Mapping[int, str], requests: Sequence[ScoreRequest]) -> str:
        # A function usually fails for one reason, which is shown once.
        by_message: dict[str, list[int]] = {}
        for index in sorted(failed):
            by_message.setdefault(failed[index], []).append(index)
        lines = []
        for message, places in list(by_message.items())[:NUM_SHOWN_MESSAGES]:
            how_many = f"{counted(len(places), 'sample')}, such as " if len(places) > 1 else ""
            lines.append(f"  {how_many}{described_failure(places[0], requests[places[0]].uid, message)}")
        shown = "\n".join(lines)
        sources = [*(["reward function"] if self._functions else []), *(["judge"] if self._judges else [])]
        return (
            f"scoring failed for at least {len(failed)} of {len(requests)} samples, more than "
            f"reward.max_error_rate={self._max_error_rate:g} allows:\n{shown}\n"
            f"Fix the {' or '.join(sources)}, or raise reward.max_error_rate to score such samples as 0"
        )


def _judge_remedies(judge: JudgeConfig, key: str) -> list[str]:
    """Return what to do about a judge without a reply, or without a score in it."""
    server = "its server of the run: see its log" if judge.url is None else f"its server at {judge.url}"
    asks = "" if judge.url is None else ", which `megarl check CONFIG` asks"
    return [
        f"if judge {judge.name} did not reply, it is {server}{asks}; for a slow one raise {key}.time_limit_s "
        f"(now {judge.time_limit_s:g}), or lower {key}.max_concurrency (now {judge.max_concurrency})",
        f"if its reply has no score, change {key}.prompt, {key}.parse or {key}.request",
    ]


def refuse_fruitless(num_fruitless: int, num_waiting: int, what: str) -> None:
    """Raise RewardError if the pool broke too often before it completed anything, of which `what` is one."""
    if num_fruitless == MAX_POOL_RESTARTS:
        raise RewardError(
            f"the reward processes died {num_fruitless} times before they scored {what}, and left "
            f"{counted(num_waiting, 'sample')}. Find out what kills them: the kernel's log shows processes "
            "that ran out of memory"
        )


def described_failure(index: int, uid: str, message: str) -> str:
    """Name a sample that has no score, by its place in the batch, and say why."""
    return f"sample {index} (uid {uid}): {message}"
