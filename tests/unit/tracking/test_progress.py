"""Test the progress bar on a terminal, and that nothing is drawn elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from megarl.tracking.progress import ProgressBar


def _drawn(*, terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=160, color_system=None)

    with ProgressBar("PPO", 4, console) as bar:
        bar.advance(
            {
                "critic/score/mean": 0.51234,
                "actor/reward_kl_penalty": 0.0123,
                "perf/throughput": 1234.0,
                "timing_s/gen": 9.0,
            }
        )

    return output.getvalue()


def test_a_terminal_sees_step_reward_kl_and_throughput():
    drawn = _drawn(terminal=True)
    for shown in ("PPO", "1/4", "reward 0.512", "KL in the reward 0.0123", "tokens/s 1,234", "left"):
        assert shown in drawn
    assert "9" not in drawn.split("tokens/s")[-1].split("left")[0].replace("1,234", "").replace("0:00:00", "")


def test_a_run_without_rewards_shows_none():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=160, color_system=None)
    with ProgressBar("distillation", 4, console, has_rewards=False) as bar:
        bar.advance({"critic/score/mean": 0.0, "distillation/reverse_kl/mean": 0.5})
    assert "KL from the teacher 0.5" in output.getvalue()
    assert "reward" not in output.getvalue()


def test_a_log_file_gets_no_control_characters():
    assert _drawn(terminal=False).strip() == ""
