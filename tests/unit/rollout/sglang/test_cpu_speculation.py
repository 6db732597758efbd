"""Test speculative decoding on a CPU: the samples, log-probs and versions of an engine with a draft model are
those of one without, and the number of passes is that of drafting by hand with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from megarl.agents.trajectory import Sample
from megarl.config.schema import SGLangConfig, SGLangMode
from megarl.rollout.interface import SamplingParameters, plan_requests
from megarl.rollout.sglang.cpu_speculation import (
    accept_chain,
    build_chain,
    copy_slots,
    copy_slots_between,
    last_accepted,
    record_slots,
)
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.weights.checksum import checksum
from tests.unit.rollout.models import push, weights_of
from tests.unit.rollout.sglang_engines import server_model, spec_for

PROMPTS = [[5, 6, 14, 8], [9, 11], [20, 21, 22, 23, 24, 25, 26]]
STEPS = 2
POLICY = 1  # seed of the policy whose weights the draft model has


@pytest.fixture(scope="module")
def drafting(forked_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """Start a server for `server_model`, whose draft model has the weights of one of them."""
    draft = tmp_path_factory.mktemp("draft")
    model = server_model(POLICY)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(draft)
    spec = spec_for(server_model(), tmp_path_factory.mktemp("policy"), mode=SGLangMode.server)
    server_args = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": STEPS,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": STEPS + 1,
    }
    sglang = SGLangConfig(mode=SGLangMode.server, server_args=server_args)
    engine = SGLangEngine(replace(spec, rollout=replace(spec.rollout, sglang=sglang)))
    yield engine
    engine.close()


def num_passes(model: PreTrainedModel, prompt: list[int], sample: Sample) -> int:
    """Return the passes in which a policy verifies this model's greedy drafts until it has the sample.

    SGLang gives a draft model the sequence without its first token, as heads of EAGLE get it.
    """
    tokens = [*prompt, *sample.token_ids.tolist()]
    known = len(prompt) + 1  # the first token comes from the pass over the prompt
    count = 0
    while known < len(tokens):
        drafted = tokens[1:known]
        for _ in range(STEPS):
            with torch.no_grad():
                drafted.append(int(model(torch.tensor([drafted])).logits[0, -1].argmax()))
        right = [ours == theirs for ours, theirs in zip(drafted[known - 1 :], tokens[known:], strict=False)]
        known += (right + [False]).index(False) + 1
        count += 1
    return count


def test_a_draft_model_changes_the_passes_and_not_the_samples(
    drafting: SGLangEngine, sglang_server: SGLangEngine
) -> None:
    draft = server_model(POLICY)
    for version, seed in enumerate((0, POLICY, POLICY), start=1):
        model = server_model(seed)
        if version == 3:
            drafting.sleep()
            drafting.wake()
            drafting.wake_cache()
        for engine in (sglang_server, drafting):
            push(model, engine, version)
        # The draft model is as it was loaded; otherwise this is an error.
        assert drafting.checksums() == {name: checksum(value) for name, value in weights_of(model).items()}

        for sampling in (
            SamplingParameters(max_new_tokens=24, seed=3, temperature=0.0, ignore_eos=True),
            SamplingParameters(max_new_tokens=24, seed=3, n=2, temperature=0.7),
            SamplingParameters(max_new_tokens=24, seed=4, n=2, top_k=5, top_p=0.9),
        ):
            expected = sglang_server.generate(PROMPTS, sampling)
            samples = drafting.generate(PROMPTS, sampling)
            for prompt, ours, theirs in zip(
                [prompt for prompt in PROMPTS for _ in range(sampling.n)], samples, expected, strict=True
            ):
                assert ours.token_ids.tolist() == theirs.token_ids.tolist()
                assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
                assert (ours.finish_reason, ours.spans) == (theirs.finish_reason, theirs.spans)
                assert theirs.num_verifications == 0
                assert ours.num_verifications == num_passes(draft, prompt, ours)


def test_log_probs_are_those_of_the_weights_that_verified_a_token(drafting: SGLangEngine) -> None:
    """New weights arrive while samples are in flight; at which token does not matter."""
    models = {version: server_model(version) for version in (2, 3)}
    push(models[2], drafting, 2)
    sampling = SamplingParameters(max_new_tokens=48, seed=6, temperature=0.7, ignore_eos=True)
    requests = plan_requests(PROMPTS, sampling)
    drafting.submit(requests)
    push(models[3], drafting, 3)
    samples = dict[int, Sample]()
    while len(samples) < len(requests):
        samples |= dict(drafting.collect(1.0))

    for request in requests:
        sample = samples[request.request_id]
        tokens = torch.tensor(sample.token_ids.tolist())
        assert len(tokens) == 48
        for version, model in models.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*request.prompt, *tokens.tolist()]])).logits[0]
            log_probs = (logits[len(request.prompt) - 1 : -1] / 0.7).log_softmax(-1)
            expected = log_probs.gather(1, tokens[:, None])[:, 0].numpy()
            is_of_version = sample.token_versions == version
            assert sample.log_probs[is_of_version] == pytest.approx(expected[is_of_version], abs=1e-4)


def test_cache_slots_by_hand() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows = torch.tensor([2, 0])
    lengths = torch.tensor([3, 5])
    slots = torch.empty(4, dtype=torch.int64)
    copy_slots(rows, table, lengths, slots, 10, 1, 2)
    assert slots.tolist() == [23, 24, 5, 6]

    slots = torch.zeros(6, dtype=torch.int64)
    copy_slots_between(rows, table, lengths, lengths + torch.tensor([1, 3]), slots, 10)
    assert slots.tolist() == [23, 5, 6, 7, 0, 0]

    record_slots(rows, table, lengths, lengths + torch.tensor([1, 3]), torch.tensor([91, 92, 93, 94]), 10)
    assert (table[2, 2:5].tolist(), table[0, 4:9].tolist()) == ([22, 91, 24], [4, 92, 93, 94, 8])


def test_chains_by_hand() -> None:
    mask = torch.zeros(2 * 9, dtype=torch.bool)
    positions = torch.empty(6, dtype=torch.int64)
    index, following, sibling = (torch.full((2, 3), -7) for _ in range(3))
    nothing = torch.empty(0)
    build_chain(
        nothing, nothing, torch.tensor([4, 9]), mask, positions, index, following, sibling, 1, 2, 3, 1
    )
    assert positions.tolist() == [4, 5, 6, 9, 10, 11]
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert following.tolist() == [[1, 2, -1]] * 2
    assert sibling.tolist() == [[-1] * 3] * 2
    assert mask.view(2, 3, 3)[1].long().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    # Of three requests with two drafts each, both are right, the first alone, and the second alone.
    candidates = torch.tensor([[1, 10, 11], [2, 20, 21], [3, 30, 31]])
    policy = torch.tensor([[10, 11, 12], [20, 99, 22], [98, 31, 32]])
    predicts = torch.zeros(9, dtype=torch.int32)
    accepted = torch.full((3, 3), -1, dtype=torch.int32)
    counts = torch.empty(3, dtype=torch.int32)
    accept_chain(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=candidates,
        target_predict=policy,
    )
    assert counts.tolist() == [2, 1, 0]
    assert accepted.tolist() == [[0, 1, 2], [3, 4, -1], [6, -1, -1]]
    assert predicts.tolist() == [10, 11, 12, 20, 99, 0, 98, 0, 0]
    last = torch.empty(3, dtype=torch.int32)
    last_accepted(predicts[accepted.long()], counts + 1, last, 3)
    assert last.tolist() == [12, 99, 98]
