"""The fast engine: SGLang, in this process or as a separate server, with the interface of all engines."""

from __future__ import annotations

import itertools
import pickle
import queue
import time
from collections.abc import Collection, Coroutine, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from megarl.agents.trajectory import Sample
from megarl.config.schema import Device, SGLangMode
from megarl.config.speculation import draft_folder
from megarl.machine.background import LoopThread
from megarl.machine.errors import EngineDeadError
from megarl.machine.tensor_pickles import pickle_as_torch
from megarl.models.families import read_architecture
from megarl.rollout.interface import (
    EndedRequest,
    EngineLifecycle,
    EngineStateError,
    GenerationRequest,
    LifecycleState,
    RequestFailedError,
    RolloutEngine,
    RolloutEngineSpec,
    check_request,
    end_token_ids,
)
from megarl.rollout.nodes import ONLY_NODE, EngineNode, OtherNodes
from megarl.rollout.sglang.adapters import ADAPTER, empty_adapter, first_request
from megarl.rollout.sglang.backend import Backend, CallRefusedError
from megarl.rollout.sglang.in_process import InProcessBackend
from megarl.rollout.sglang.loader import EngineModel, LoaderClient
from megarl.rollout.sglang.messages import (
    check_prompt_length,
    generation_payload,
    read_sample,
    route_reader,
    with_single_placeholders,
)
from megarl.rollout.sglang.server import ServerBackend
from megarl.rollout.sglang.server_args import (
    START_LIMIT_S,
    WEIGHT_LOADER,
    build_server_args,
    context_length,
    image_token_id,
    needs_tokenizer,
    node_args,
    vocab_size,
)
from megarl.weights.manifest import manifest_of_folder
from megarl.weights.plan import TensorSlices
from megarl.weights.tensors import Manifest, WeightTransferError
from megarl.weights.transfer import TIME_SLICE_S
from megarl.weights.transports.interface import EngineLink

T = TypeVar("T")

_HOST = "127.0.0.1"  # of the server mode: its client is on the same node
_POLL_S = 0.5
_FLUSH_POLL_S = 0.05
_ABORT_POLL_S = 0.02
_NUDGE = -1  # sent instead of a ticket


_CACHE = ["kv_cache", "cuda_graph"]  # SGLang's tags for memory that only generation needs


class SGLangEngine(RolloutEngine):
    """SGLang engine.

    It starts without weights. Raises EngineDeadError with SGLang's last output if it does not start.

    Args:
        spec: The engine.
        node: The first node of the engine, if it spans several (see `SGLangEnginePart`).
    """

    def __init__(self, spec: RolloutEngineSpec, node: EngineNode = ONLY_NODE) -> None:
        server_args = build_server_args(spec)
        self._other_nodes = OtherNodes(node, START_LIMIT_S)
        server_args |= node_args(node, self._other_nodes.ranks_port)
        self._num_ranks = spec.rollout.devices_per_engine
        self.health_limit_s = spec.rollout.health_limit_s
        self._has_tokenizer = needs_tokenizer(spec.rollout, spec.model.path)
        self._image_token_id = image_token_id(spec.model.path)
        self.backend: Backend

        if spec.rollout.sglang.mode is SGLangMode.server:
            self.backend = ServerBackend(server_args, _HOST, START_LIMIT_S)
        else:
            self.backend = InProcessBackend(server_args)

        self._end_token_ids = end_token_ids(spec.model.path)
        self._vocab_size = vocab_size(spec.model.path)
        self._max_length = context_length(spec.model.path, on_cpu=spec.device is Device.cpu)
        self._read_routes = None

        if spec.returns_routes:
            architecture = read_architecture(spec.model.path, spec.model.trust_remote_code)
            self._read_routes = route_reader(architecture)

        self._lifecycle = EngineLifecycle()
        self._loop = LoopThread("sglang", self.backend.start)
        self._finished: queue.SimpleQueue[tuple[int, Sample | Exception | None]] = queue.SimpleQueue()
        # Tickets are never reused, so that a late answer is recognized.
        self._in_flight: dict[int, tuple[GenerationRequest, Future[None]]] = {}
        self._tickets = itertools.count()
        self._session_is_open = self._is_paused = False
        self._has_cache = True
        self._last_sign_s = time.monotonic()
        self._first_round = 0
        self._wait_for(self.backend.open())
        self._loader = LoaderClient(
            self._send_to_loader,
            self._num_ranks,
            spec.rollout.pipeline_parallel_size,
            has_draft=draft_folder(spec.rollout.sglang.server_args) is not None,
        )

        self._lora = spec.lora
        if spec.lora is not None:
            self._call("load_lora_adapter_from_tensors", **empty_adapter(spec.lora, self._num_ranks))
            self._wait_for(self.backend.generate(first_request()), self.health_limit_s)

        if spec.release_memory:
            # The trainer's weights and message buffers come next, and do not fit next to a full cache.
            self._release(_CACHE)

    @property
    def weight_version(self) -> int | None:
        return self._lifecycle.weight_version

    # ---- generation

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._lifecycle.require_ready()
        if requests and not self._has_cache:
            raise EngineStateError(
                "the engine cannot generate: the memory of its cache is released: call wake_cache first"
            )

        self._raise_if_dead()
        # Check all requests first, so that none is queued if one is refused.
        for request in requests:
            check_request(request, self._vocab_size, self._max_length)
            with_single_placeholders(request, self._image_token_id)
            if request.sampling.with_routes and self._read_routes is None:
                raise ValueError("routes are requested, but the engine was started without returns_routes")
            if request.sampling.min_new_tokens and not self._has_tokenizer:
                raise ValueError(
                    "min_new_tokens needs an engine with a tokenizer, from which SGLang takes the end "
                    "tokens that it suppresses: "
                    "start it with rollout.validation.min_new_tokens above 0"
                )

        # An idle engine shows no progress, so the health limit counts from here.
        if not self._in_flight:
            self._last_sign_s = time.monotonic()
        for request in requests:
            ticket = next(self._tickets)
            self._in_flight[ticket] = request, self._loop.submit(self._generate(ticket, request))

    async def _generate(self, ticket: int, request: GenerationRequest) -> None:
        outcome: Sample | Exception

        try:
            answer = await self.backend.generate(
                generation_payload(request, self._end_token_ids, _name(ticket), self._image_token_id)
                | ({} if self._lora is None else {"lora_path": ADAPTER})
            )
            check_prompt_length(answer, request)
            outcome = read_sample(answer, request.sampling, self._read_routes)
        except Exception as error:  # noqa: BLE001  the boundary of the loop's thread: `collect` raises it
            outcome = error

        self._finished.put((ticket, outcome))

    def collect(self, wait_s: float) -> list[EndedRequest]:
        self._lifecycle.require_ready()
        collected: list[EndedRequest] = []
        deadline_s = time.monotonic() + wait_s

        while self._in_flight:
            remaining_s = deadline_s - time.monotonic()
            # Wait only for the first request, then take those that have already finished.
            try:
                ticket, outcome = self._finished.get(
                    timeout=0 if collected else max(0.0, min(_POLL_S, remaining_s))
                )
            except queue.Empty:
                if collected:
                    break
                # Nothing has finished: check that the engine still works before waiting again.
                self._check_health()
                if remaining_s <= 0:
                    break
                continue
            if ticket == _NUDGE:
                deadline_s = 0.0
                continue
            in_flight = self._in_flight.pop(ticket, None)
            if in_flight is None:
                continue  # of a request that was dropped
            self._last_sign_s = time.monotonic()
            if isinstance(outcome, Exception):
                # A dead process is the cause of whatever error its requests end with.
                self._raise_if_dead()
                if not isinstance(outcome, RequestFailedError):
                    raise outcome
            assert outcome is not None
            collected.append((in_flight[0].request_id, outcome))

        return collected

    def interrupt(self) -> None:
        self._finished.put((_NUDGE, None))

    def _check_health(self) -> None:
        """Raise EngineDeadError if a process has ended, or if the model makes no progress.

        The limit for progress is `health_limit_s`.
        """
        self._raise_if_dead()
        limit_s = self.health_limit_s
        if time.monotonic() - self._last_sign_s < limit_s:
            return

        # Without a finished request, the responses may simply be long, so ask before declaring the engine
        # dead.
        if not self._wait_for(self.backend.is_responsive(limit_s), 2 * limit_s):
            raise EngineDeadError(
                f"SGLang has {len(self._in_flight)} requests and has shown no progress for {limit_s:g} s"
            )

        self._last_sign_s = time.monotonic()

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """Abort the requests that SGLang knows.

        A request still in transit to its server is aborted by a later call.
        """
        tickets = [
            ticket
            for ticket, (request, _) in self._in_flight.items()
            if request_ids is None or request.request_id in request_ids
        ]
        futures = {self._in_flight.pop(ticket)[1]: _name(ticket) for ticket in tickets}
        # SGLang can abort all requests at once, but not if others must continue.
        has_others = bool(self._in_flight)
        start_s = time.monotonic()

        while futures:
            self._wait_for(
                self.backend.abort(list(futures.values()) if has_others else None), self.health_limit_s
            )
            if self._is_paused:  # it does not respond to them
                for future in futures:
                    future.cancel()
                return
            # A request that had not arrived yet misses the abort, so repeat it until all have ended.
            futures = {future: futures[future] for future in wait(futures, timeout=_ABORT_POLL_S).not_done}
            if time.monotonic() - start_s > self.health_limit_s:
                raise EngineDeadError(
                    f"SGLang has not aborted {len(futures)} requests within {self.health_limit_s:g} s"
                )

    # ---- weights

    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        self._lifecycle.require(
            "report what it needs", LifecycleState.EMPTY, LifecycleState.UPDATING, LifecycleState.READY
        )
        with self._paused():
            return self._loader.needed_slices(manifest)

    def begin_weight_update(self, manifest: Manifest, first_round: int = 0) -> None:
        self._lifecycle.require(
            "begin a weight update", LifecycleState.EMPTY, LifecycleState.UPDATING, LifecycleState.READY
        )
        was_ready = self._lifecycle.state is LifecycleState.READY
        self._pause()

        try:
            self._loader.prepare(manifest)
        except WeightTransferError:
            # Nothing has been written yet: the engine can continue with its old weights.
            if was_ready:
                self._close_session()
                self._resume()
            raise

        self._lifecycle.begin(manifest, is_partial=first_round > 0)
        self._first_round = first_round

    def receive_weights(self, folder: str | None = None) -> None:
        self._lifecycle.require_update()
        while not self._loader.receive(self._first_round, folder):
            pass
        self._lifecycle.complete()

    def load_folder(self, folder: Path) -> None:
        """Load the weights with SGLang's own loader."""
        self._lifecycle.require_update()
        # Check the headers against the manifest before SGLang loads anything.
        self._lifecycle.record(manifest_of_folder(folder))
        self._close_session()
        self._loader.forget_padding()

        try:
            self._call(
                "update_weights_from_disk",
                model_path=str(folder),
                load_format="auto",
                flush_cache=False,
                abort_all_requests=False,
            )
        except CallRefusedError as error:
            raise WeightTransferError(f"SGLang could not load {folder}: {error}") from error
        finally:
            self._loader.meet()  # the response was the first rank's: the others may still read the folder

    def end_weight_update(self, version: int) -> None:
        self._lifecycle.require("end a weight update", LifecycleState.UPDATING)
        self._close_session()
        self._lifecycle.end(version)

        # Cached prefixes were computed by the old weights. Requests that wait for the end of the update have
        # none, so they do not prevent the flush.
        if not self._wait_for(self._stamp_and_flush(version), self.health_limit_s):
            self._flush()

        self._resume()

    async def _stamp_and_flush(self, version: int) -> bool:
        """Set the version and flush the cache in one coroutine.

        Each wait for the loop's thread takes as long as setting the version. Returns whether the cache could
        be flushed.
        """
        await self.backend.call(
            "update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )
        return await self.backend.flush_cache()

    def join_weights(self, links: Sequence[EngineLink]) -> None:
        with self._paused():
            self._loader.join(links)

    def leave_weights(self) -> None:
        with self._paused():
            self._loader.leave()

    def checksums(self) -> dict[str, int]:
        self._lifecycle.require_ready()
        with self._paused():
            return self._loader.checksums()

    @contextmanager
    def _paused(self) -> Generator[None]:
        # A nested pause must not resume what an outer one has paused.
        was_paused = self._is_paused
        self._pause()

        try:
            yield
        finally:
            self._close_session()
            if not was_paused:
                self._resume()

    def _send_to_loader(
        self, tensors: list[tuple[str, torch.Tensor]], time_limit: bool, model: EngineModel
    ) -> None:
        """Send one message to a model's weight loader in every rank, while generation is paused."""
        assert self._is_paused
        # SGLang accepts weights only inside a session, which is the policy's: a draft model never changes.
        if not self._session_is_open:
            self._call("begin_weight_update", selector="target")
            self._session_is_open = True

        pickle_as_torch()  # also if other code of this process has imported Megatron
        message = pickle.dumps(tensors)
        try:
            self._call(
                "update_weights_from_tensor",
                time_limit_s=self.health_limit_s + TIME_SLICE_S if time_limit else None,
                serialized_named_tensors=[message] * self._num_ranks,
                load_format=WEIGHT_LOADER,
                selector=model,
                flush_cache=False,
                abort_all_requests=False,
            )
        except CallRefusedError as error:
            raise WeightTransferError(f"SGLang did not run megarl's weight loader: {error}") from error

    def _close_session(self) -> None:
        if self._session_is_open:
            self._call("end_weight_update")
            self._session_is_open = False

    def _pause(self) -> None:
        """Pause generation.

        Running requests return to the queue: their tokens are kept, their cache is not.
        """
        if not self._is_paused:
            self._call("pause_generation", mode="retract")
            self._is_paused = True

    def _resume(self) -> None:
        self._call("continue_generation", torch_empty_cache=False)
        self._is_paused = False

    def _flush(self) -> None:
        """Flush the cache once SGLang has processed the pause and the aborts of requests."""
        start_s = time.monotonic()
        while not self._wait_for(self.backend.flush_cache(), self.health_limit_s):
            if time.monotonic() - start_s > self.health_limit_s:
                raise EngineDeadError(
                    f"SGLang has not emptied its cache within {self.health_limit_s:g} s: it still has "
                    "requests that run"
                )
            time.sleep(_FLUSH_POLL_S)

    # ---- memory and end

    def sleep(self) -> None:
        self._lifecycle.require(
            "sleep",
            LifecycleState.EMPTY,
            LifecycleState.UPDATING,
            LifecycleState.READY,
            LifecycleState.ASLEEP,
        )

        if self._lifecycle.state is LifecycleState.ASLEEP:
            return
        self._close_session()

        # A paused engine does not respond to aborts.
        if self._is_paused:
            self._resume()
        self.abort()

        # Nothing may use the cache when its memory is released.
        self._pause()
        self._flush()

        self._lifecycle.leave(LifecycleState.ASLEEP)
        self._loader.forget_padding()
        self._release(["weights", *(_CACHE if self._has_cache else [])])
        self._resume()  # a paused scheduler keeps a core busy; it receives no requests until it is awake

    def wake(self) -> None:
        if not self._lifecycle.must_wake():
            return
        self._call("resume_memory_occupation", tags=["weights"])
        self._lifecycle.leave(LifecycleState.EMPTY)

    def wake_cache(self) -> None:
        if not self._has_cache:
            self._call("resume_memory_occupation", tags=_CACHE)
            self._has_cache = True

    def _release(self, tags: list[str]) -> None:
        """Free the memory of weights or cache, which must be unused.

        SGLang refuses to release a tag twice.
        """
        self._call("release_memory_occupation", tags=tags)
        self._has_cache = False

    def process_ids(self) -> list[int]:
        return self.backend.process_ids()

    def close(self) -> None:
        if self._lifecycle.state is LifecycleState.CLOSED:
            return
        self._lifecycle.leave(LifecycleState.CLOSED)
        self._in_flight.clear()
        self._loader.close()
        self._loop.submit(self.backend.close()).result(_POLL_S * 10)
        self._loop.stop()
        self.backend.stop()
        self._other_nodes.close()

    # ---- calls

    def _call(self, endpoint: str, *, time_limit_s: float | None = 0.0, **values: Any) -> None:
        """Call an endpoint.

        Args:
            time_limit_s: None for no limit; 0 for `health_limit_s`.
        """
        self._wait_for(
            self.backend.call(endpoint, values), self.health_limit_s if time_limit_s == 0 else time_limit_s
        )

    def _wait_for(self, coroutine: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
        """Wait for a coroutine. Raises EngineDeadError if a process ends or the limit is reached first."""
        future = self._loop.submit(coroutine)
        start_s = time.monotonic()

        while True:
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                # The coroutine itself has raised TimeoutError.
                if future.done():
                    raise
                # A dead process never responds, so check for one during the wait.
                self._raise_if_dead()
                if limit_s is not None and time.monotonic() - start_s > limit_s:
                    future.cancel()
                    raise EngineDeadError(f"SGLang has not responded for {limit_s:g} s") from None

    def _raise_if_dead(self) -> None:
        if self._lifecycle.state is LifecycleState.CLOSED:
            return
        # If a node is lost, the processes of this one may end too: the lost node is the cause.
        if (ended := self._other_nodes.lost() or self.backend.dead_process()) is not None:
            raise EngineDeadError(f"SGLang is gone: {ended}")


def _name(ticket: int) -> str:
    """Return the name of a request.

    All names have the same length, because SGLang aborts all requests whose names begin with the given one.
    """
    return f"megarl-{ticket:016d}"
