"""Run GRPO in your own training loop, with megarl's roles, placement, checkpoints and metrics.

    python -m examples.own_loop outputs/quickstart/sft/huggingface outputs/quickstart/data/train.parquet outputs/own_loop

The arguments are a Hugging Face folder, data as described in docs/data.md, and an output folder. Overrides
such as trainer.total_steps=40 follow them. The same command resumes a run that was interrupted.
"""

import sys


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Return the fraction of characters that match; extra and missing characters count as wrong."""
    right = sum(mine == true for mine, true in zip(solution_str, ground_truth, strict=False))
    return right / max(len(solution_str), len(ground_truth), 1)


def main(model: str, data: str, output_dir: str, *overrides: str) -> list[float]:
    """Train, and return the mean score of each step."""
    from megarl import api  # imported here because the reward processes import this file too

    config = {
        "algorithm": "grpo",
        "model": {"path": model, "dtype": "float32"},
        "data": {"train_files": [data], "max_prompt_length": 16, "max_response_length": 8},
        "actor": {"optim": {"lr": 1e-3}},
        "rollout": {"n": 8},
        "reward": {"functions": [{"path": __file__}], "num_processes": 1},
        "trainer": {"total_steps": 20, "prompts_per_step": 32, "output_dir": output_dir},
        "checkpoint": {"every_steps": 10},
    }
    scores = []

    with api.start(config, *overrides) as run:
        for step in run.steps():
            batch = run.generate(next(run.prompts), step)
            batch = batch.union(
                run.reward.score(batch), run.actor.old_log_probs(batch, step), run.reference.log_probs(batch)
            )
            batch = run.add_advantages(batch)
            run.log(run.actor.update(batch, step).get())
            run.push_weights()
            run.log_batch(batch, step)
            scores.append(batch.tensors["token_level_scores"].sum(1).mean().item())
        run.save_hf(f"{output_dir}/huggingface")

    return scores


if __name__ == "__main__":
    print("score by step:", [round(score, 2) for score in main(*sys.argv[1:])])
