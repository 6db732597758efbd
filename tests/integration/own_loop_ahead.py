"""User loop that generates ahead of training: python -m tests.integration.own_loop_ahead CONFIG OVERRIDES

It prints as JSON, for each step, the uids and the versions of the weights that sampled its tokens relative to
the newest weights, and uids that were taken without samples.
"""

import json
import sys

from megarl import api


def main(config: str, *overrides: str) -> dict[str, list]:
    steps = []
    taken = []

    with api.start(config, *overrides) as run:
        for step in run.steps():
            prompts = next(run.prompts)
            batch = run.generate(prompts, step)
            assert (
                batch.non_tensor_batch["uid"][:: run.config.rollout.n].tolist()
                == prompts.non_tensor_batch["uid"].tolist()
            )
            if step == 1:
                further = run.prompts.take(2)
                taken += further.non_tensor_batch["uid"].tolist()
                now = run.generate(further, step)
                assert set(now.non_tensor_batch["weight_version"]) == {batch.meta_info["weight_version"]}

            batch = batch.union(
                run.reward.score(batch), run.actor.old_log_probs(batch, step), run.reference.log_probs(batch)
            )
            batch = run.add_advantages(batch)
            run.log(run.actor.update(batch, step).get())
            run.log_batch(batch, step)

            newest = batch.meta_info["weight_version"]
            versions = batch.ragged["token_versions"].flat().unique().tolist()
            steps.append(
                {
                    "uids": prompts.non_tensor_batch["uid"].tolist(),
                    "version": newest,
                    "ages": [newest - version for version in versions],
                }
            )
            run.push_weights()

    return {"steps": steps, "taken": taken}


if __name__ == "__main__":
    print("steps:", json.dumps(main(*sys.argv[1:])))
