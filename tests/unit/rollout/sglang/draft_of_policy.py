"""Build SGLang's own policy and draft models, and send weights through SGLang's own updater to them. Runs in
a separate process.

    python draft_of_policy.py EAGLE|EAGLE3 RENDEZVOUS POLICY_FOLDER DRAFT_FOLDER

Prints one JSON object.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.rollout.sglang import cpu_adaptations, environment

environment.prepare("cpu")

import torch  # noqa: E402

from megarl.rollout.sglang.loader import EngineModel, LoaderClient  # noqa: E402
from megarl.rollout.sglang.server_args import WEIGHT_LOADER  # noqa: E402
from megarl.weights.checksum import checksum  # noqa: E402
from megarl.weights.tensors import WeightTransferError  # noqa: E402
from tests.unit.rollout.sglang.plans_of_models import build_model  # noqa: E402
from tests.unit.rollout.test_weight_loader import trainer_of  # noqa: E402


def share(algorithm: str, policy: Any, draft: Any) -> None:
    """Give the policy's embedding and head to the draft model, as SGLang's worker does at its start."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    worker = object.__new__(EagleDraftWorker)
    worker.speculative_algorithm = SpeculativeAlgorithm[algorithm]
    config = SimpleNamespace(model_path="", revision=None)
    runner = SimpleNamespace(model=policy, model_config=config, load_config=None)
    worker.target_worker = SimpleNamespace(model_runner=runner)
    worker.draft_runner = SimpleNamespace(model=draft)
    worker.init_token_map()
    worker.init_lm_head()


def updater_of(policy: Any, draft: Any) -> Any:
    """Return SGLang's manager of weight updates, for both models."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    def runner(model: Any) -> Any:
        return SimpleNamespace(
            weight_updater=WeightUpdater(
                tp_rank=0,
                device="cpu",
                gpu_id=0,
                model_config=None,
                custom_weight_loaders=[WEIGHT_LOADER],
                get_model=lambda: model,
                update_model_fields=None,
                recapture_cuda_graph=None,
                get_model_runner=None,
            )
        )

    class Worker(EAGLEWorkerV2):
        draft_worker = SimpleNamespace(draft_runners=[runner(draft)])

    target = SimpleNamespace(
        weight_update_runners=lambda: [("target", runner(policy))],
        deserialize_own_rank=lambda pickled: TpModelWorker.deserialize_own_rank(target, pickled),
    )
    return SchedulerWeightUpdaterManager(
        tp_worker=target,
        draft_worker=object.__new__(Worker),
        memory_saver_adapter=None,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
        scheduler=SimpleNamespace(record_weight_version_change=lambda new_version: None),
    )


def client_of(updater: Any) -> LoaderClient:
    from sglang.srt.managers import io_struct

    def send(tensors: list[tuple[str, torch.Tensor]], time_limit: bool, model: EngineModel) -> None:
        requests = (
            (updater.begin_weight_update, io_struct.BeginWeightUpdateReqInput(selector="target")),
            (
                updater.update_weights_from_tensor,
                io_struct.UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=[pickle.dumps(tensors)],
                    load_format=WEIGHT_LOADER,
                    selector=model,
                    flush_cache=False,
                ),
            ),
            (updater.end_weight_update, io_struct.EndWeightUpdateReqInput()),
        )
        for method, request in requests:
            answer = method(request)
            assert answer.success, answer.message

    return LoaderClient(send, 1, has_draft=True)


def verified_log_probs(temperature: float | None) -> dict[str, list[float]]:
    """Return the log-probs that SGLang records of two requests' accepted tokens, and log_softmax(logits /
    temperature) of these tokens in float64. Without a temperature, sampling is greedy.

    Each request verifies three positions: of the first request it accepts two, of the second one three.
    """
    from sglang.srt.layers.logprob_processor import compute_spec_logprobs

    logits = torch.randn((6, 11), generator=torch.Generator().manual_seed(3)) * 4
    predicted = torch.tensor([3, 7, 0, 10, 2, 5], dtype=torch.int32)
    accepted = torch.tensor([[0, 1, -1], [3, 4, 5]], dtype=torch.int32)
    output = SimpleNamespace(next_token_logits=logits.clone())
    batch = SimpleNamespace(
        seq_lens=torch.tensor([5, 9]),
        sampling_info=SimpleNamespace(
            is_all_greedy=temperature is None, temperatures=torch.full((2, 1), temperature or 1.0)
        ),
        top_logprobs_nums=None,
        token_ids_logprobs=None,
    )
    compute_spec_logprobs(batch, output, predicted, accept_index=accepted)
    rows = accepted[accepted >= 0].long()
    expected = (logits.double() / (temperature or 1.0)).log_softmax(-1)[rows, predicted[rows].long()]
    recorded = output.next_token_logprobs[accepted >= 0]
    return {"recorded": recorded.tolist(), "expected": expected.tolist()}


def main(algorithm: str, rendezvous: str, folders: list[Path]) -> None:
    cpu_adaptations.install_in_arguments()
    cpu_adaptations.name_the_cpu_as_device()
    policy, draft = (
        build_model(folder, 0, 1, 1, 1, rendezvous, is_first=number == 0)
        for number, folder in enumerate(folders)
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in draft.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    share(algorithm, policy, draft)
    shared = {id(parameter) for parameter in policy.parameters()}
    own = {name: each.detach().clone() for name, each in draft.named_parameters() if id(each) not in shared}

    shapes = json.loads((folders[0] / "manifest.json").read_text())
    client = client_of(updater_of(policy, draft))
    tokens = torch.arange(5)
    trainer = None
    embeds = []
    for version in (1, 2):
        weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        trainer = trainer or trainer_of(client, weights)
        trainer.push(weights, version)
        assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
        embeds.append(torch.equal(draft.model.embed_tokens(tokens), weights["model.embed_tokens.weight"][:5]))
        head = draft.lm_head.weight[: len(weights["lm_head.weight"])]
        embeds.append(torch.equal(head, weights["lm_head.weight"]))

    unchanged = {name: torch.equal(draft.get_parameter(name), before) for name, before in own.items()}
    draft.model.fc.weight.data[0, 0] += 1
    try:
        client.checksums()
    except WeightTransferError as error:
        failure = str(error)
    log_probs = [verified_log_probs(temperature) for temperature in (None, 1.0, 0.5)]
    result = {"embeds": embeds, "unchanged": unchanged, "failure": failure, "log_probs": log_probs}
    print(json.dumps(result), flush=True)
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [Path(folder) for folder in sys.argv[3:]])
