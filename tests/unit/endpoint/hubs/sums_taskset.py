"""A taskset of verifiers and a harness that plays it in the same process."""

from __future__ import annotations

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def is_right(self, task, trace) -> float:
        """Give half of the reward to a reply that contains the answer."""
        reply = trace.last_reply.strip()
        return float(reply == task.answer) / 2 + float(task.answer in reply) / 2

    @vf.metric
    async def length(self, task, trace) -> float:
        return float(len(trace.last_reply))


class SumTasks(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield SumTask(SumData(prompt=f"{number}+{number}", answer=str(2 * number)), self.config.task)


class TwoTurnsConfig(vf.HarnessConfig):
    pass


class TwoTurns(vf.Harness[TwoTurnsConfig]):
    """Asks, and asks again."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **options):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            for _ in range(2):
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                answer.raise_for_status()
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumTasks", "TwoTurns"]
