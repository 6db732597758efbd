"""Tests what acts and scores besides the policy: agents, judges and teachers.

The tools or the environment of a run, and the prompts of its judges, are tested on the first row of its data.
The servers of judges are asked whether they would reply.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import httpx
from transformers import PreTrainedTokenizerBase

from megarl.agents.protocol import Schema, Task
from megarl.agents.responder import EnvironmentFailedError
from megarl.agents.user_tools import ANSWER, try_agent
from megarl.config.finding import DATA, SERVERS, Finding, doubtful, good, refused, wrong
from megarl.config.roles import ModelRole, absent_teacher
from megarl.config.schema import AgentConfig, DataConfig, JudgeConfig, PPOConfig
from megarl.config.schema.keys import names_code, split_code
from megarl.data.files import DataError
from megarl.data.prompts import read_prompt, read_prompt_rows, read_reward_inputs, read_reward_rows
from megarl.data.tables import chat_messages
from megarl.data.token_bounds import TooManyTokensError
from megarl.data.tokenizer import Tools
from megarl.data.tool_columns import names_of
from megarl.data.turns import TurnTemplate
from megarl.doctor.reward_functions import LOAD_LIMIT_S, REWARDS
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.harness import load_harness
from megarl.endpoint.hubs.rehearsal import rehearse_episode
from megarl.machine.errors import counted
from megarl.machine.user_functions import UnfinishedError, UserFunctionError, call_in_process
from megarl.rewards.judge_reply import load_judge
from megarl.rewards.judges import (
    is_temporary,
    load_template,
    prompt_variables,
    read_api_key,
    render,
    request_body,
)
from megarl.rewards.process import ScoreRequest
from megarl.rollout.tool_calls import call_format, check_parser, example_call, reads_calls

AGENT = "agent"
_PARSER_HINT = "docs/agents.md describes the formats of tool calls"
# Represents the tools of an agent program, which are unknown before it sends a request.
_HARNESS_TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["item"],
        },
    },
}
SOLUTION = "(the response)"  # a row of the data has none
ASK_LIMIT_S = 5.0  # limit of each of the two requests to the server of a judge
_QUESTION = "Reply with one word."
_NUM_SHOWN = 200  # characters of a server's message
_MOST_MODELS = 10
_CHECK = "tokenizers"


def judge_agent(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    skipped: Collection[str] = (),
    limit_s: float = LOAD_LIMIT_S,
) -> tuple[Finding, Tools]:
    """Let the tools or the environment answer a first turn, in a process with a time limit (see `try_agent`).

    The chat template is tested with a growing conversation and with the environment's reply.

    Returns:
        The result, and the schemas of the tools.
    """
    agent = config.agent
    if agent.environment.hub is not None:
        return _judge_hub(config, tokenizer, skipped), None
    if agent.harness.is_used:
        return _judge_harness(agent, tokenizer, limit_s), None
    references = [
        each for each in (*agent.tools, agent.environment.path) if each is not None and names_code(each)
    ]
    files = ", ".join(dict.fromkeys(split_code(each)[0] for each in references)) or "built-in tools"
    hint = f"fix {files}; test it with `megarl generate --{'tool' if agent.tools else 'environment'}`"
    task, place = (None, "") if agent.tools else _first_task(config, tokenizer, skipped)
    of_row = "" if task is None else f", with {place} and the answer {ANSWER!r}"

    # User code may hang or crash, so it runs in a process with a time limit.
    try:
        tools, messages = call_in_process(try_agent, agent, task, limit_s=limit_s)
    except EnvironmentFailedError as error:
        return wrong(AGENT, f"agent: {error}{of_row}", hint, files=files), None
    except ValueError as error:
        return refused(AGENT, "agent", error, hint, files=files), None
    except UnfinishedError as error:
        return wrong(AGENT, f"agent: {files}: {error} in a first turn{of_row}", hint, files=files), None

    # The chat template must extend a conversation without changing the previous tokens.
    template = TurnTemplate(tokenizer, tools, agent.max_result_tokens)
    try:
        template.check()
        if messages:
            template.bridge(messages)
    except ValueError as error:
        return refused(
            AGENT, "agent", error, "use a model whose chat template supports such conversations", files=files
        ), None
    if problem := _parser_problem(agent, template, tools or (), limit_s):
        return wrong(AGENT, f"agent.parser: {problem}", _PARSER_HINT, files=files), None

    what = (
        f"the tools {', '.join(names_of(list(tools)))}"
        if tools
        else f"the environment {split_code(agent.environment.path or '')[1]}"
    )
    does = "can be used" if task is None else f"answers a first turn about {place}"
    return good(
        AGENT,
        f"{what} of {files} {does}, and the chat template supports multi-turn conversations",
        files=files,
    ), tools


def _parser_problem(
    agent: AgentConfig, template: TurnTemplate, tools: Sequence[Schema], limit_s: float
) -> str | None:
    """Describe the problem if the parser of a run does not read calls as the chat template writes them."""
    written = {}
    for call in map(example_call, tools):
        # Templates may require an id of nine characters.
        of_chat = {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        if (text := template.written_call(of_chat)) is not None:
            written[call.name] = text

    if agent.parser is None and reads_calls(agent, tools, written):
        return None
    # Importing SGLang changes what others import, so its parsers are in a process of their own.
    try:
        call_in_process(check_parser, agent, tools, written, limit_s=limit_s)
    except ValueError as error:
        return str(error)
    except UnfinishedError:
        return f"the parser {agent.parser} cannot be loaded in {limit_s:g} s"
    return None


def _judge_harness(agent: AgentConfig, tokenizer: PreTrainedTokenizerBase, limit_s: float) -> Finding:
    """Load the program of a harness in a process with a time limit, without running it."""
    if agent.harness.external:
        return good(
            AGENT, f"external agents play the episodes, at port {agent.harness.port}", files="external"
        )
    function = agent.harness.function
    program = agent.harness.command[0] if function is None else split_code(function)[0]
    hint = f"fix {program}"

    # Importing the program runs the user's code, which may hang or end the process.
    try:
        call_in_process(_load_program, agent, limit_s=limit_s)
        TurnTemplate(tokenizer).check()
    except ValueError as error:
        return refused(AGENT, "agent.harness", error, hint, files=program)
    except UnfinishedError:
        return wrong(
            AGENT, f"agent.harness: {program} cannot be loaded in {limit_s:g} s", hint, files=program
        )

    # A program may use no tools, so only a parser that is set must read them.
    tools = [_HARNESS_TOOL]
    if problem := _parser_problem(agent, TurnTemplate(tokenizer, tools), tools, limit_s):
        judge = doubtful if agent.parser is None else wrong
        return judge(AGENT, f"agent.parser: {problem}", _PARSER_HINT, files=program)
    return good(
        AGENT,
        f"{program} can be started, and the chat template supports multi-turn conversations",
        files=program,
    )


def _judge_hub(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, skipped: Collection[str]) -> Finding:
    """Play the first row with a scripted model, and compare the trained tokens with those that it wrote."""
    agent = config.agent
    environment = agent.environment
    name = f"{environment.hub.value if environment.hub else ''}/{environment.name}"
    task, place = _first_task(config, tokenizer, skipped)
    if task is None:
        hint = f"write its rows with `megarl data {name} --output train.jsonl`, and set data.train_files"
        return wrong(AGENT, f"agent.environment: {name}: there is no row to play", hint, files=name)

    tokens = ChatTokens(tokenizer, partial(call_format, agent))
    try:
        playing = rehearse_episode(agent, task, tokenizer, tokens, [ANSWER], config.max_row_tokens)
        played = asyncio.run(playing)
    except ValueError as error:
        return refused(AGENT, "agent.environment", error, "see docs/agents.md", files=name)
    if played.why:
        message = f"agent.environment: {name}, with {place} and the answer {ANSWER!r}: {played.why}"
        return wrong(AGENT, message, "fix the environment, its arguments or the row", files=name)

    # The order of branches may differ from that of the turns.
    if sorted(played.trained) != sorted(played.written):
        message = f"agent.environment: {name}: the trained tokens are not those that the model wrote"
        return wrong(AGENT, message, "report this as an error of megarl", files=name)
    texts = [str(tokenizer.decode([*row.prompt, *row.token_ids.tolist()])) for row in played.trajectory.rows]
    count = sum(map(len, played.trained))
    return good(
        AGENT,
        f"{name} ({played.version}) gives the reward {played.reward:g} to {place} with the answer "
        f"{ANSWER!r}, in {counted(len(played.trained), 'turn')}. The {counted(count, 'token')} with a loss "
        f"are exactly those that the model wrote. The conversation: {' | '.join(texts)}",
        files=name,
        reward=played.reward,
        metrics=dict(played.trajectory.metrics),
        conversations=texts,
    )


def _load_program(agent: AgentConfig) -> None:
    load_harness(agent.harness, num_threads=1)


def _first_task(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, skipped: Collection[str]
) -> tuple[Task | None, str]:
    """Return the task of the first readable row, and its place; None if the data is not on this machine."""
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        for file in files if key not in skipped else ():
            if not os.path.exists(file):
                continue
            try:
                prompt = read_prompt(
                    next(read_prompt_rows([file], config.data.columns)), tokenizer, config.data
                )
            except (DataError, TooManyTokensError):  # reported by the check of the data
                continue
            task = Task(
                messages=prompt.messages, reward_model=prompt.reward_model, extra_info=prompt.extra_info
            )
            return task, f"the first row of {file}"
    return None, ""


# ---- judges and teachers


def judge_prompts(config: PPOConfig, skipped: Collection[str]) -> Iterator[Finding]:
    """Load the template and the function of each judge, and render its prompt for the first row."""
    sample = None if "data.train_files" in skipped else first_sample(config.data)
    for index, judge in enumerate(config.reward.judges):
        key = f"reward.judges[{index}]"
        try:
            load_judge(judge)
            shown = (
                ""
                if sample is None
                else f"; the prompt of the first row has {len(prompt(judge, sample)):,} characters"
            )
        except UserFunctionError as error:
            yield refused(REWARDS, key, error, f"fix the files of judge {judge.name}", judge=judge.name)
            continue

        # The run's reward worker may be on another machine.
        if judge.api_key_env is not None and not os.environ.get(judge.api_key_env):
            yield doubtful(
                REWARDS,
                f"{key}.api_key_env: the environment variable {judge.api_key_env} is not set here",
                "export it where the run's processes start",
                judge=judge.name,
            )
            continue
        try:
            problem = None if judge.url is None else ask_server(judge, key)
        except UserFunctionError as error:
            hint = f"export {judge.api_key_env} without such characters"
            yield refused(SERVERS, key, error, hint, judge=judge.name)
            continue
        yield problem or good(REWARDS, f"judge {judge.name}: {judge.served_by}{shown}", judge=judge.name)


def ask_server(judge: JudgeConfig, key: str, limit_s: float = ASK_LIMIT_S) -> Finding | None:
    """Ask the server of a judge for its models, and for a reply if this leaves a doubt.

    Returns:
        The problem; None if the server would reply. A server that cannot be reached is only a doubt, because
        it may start later, or be reachable from the run's machines only.

    Raises:
        UserFunctionError: See `read_api_key`.
    """
    assert judge.url is not None
    url = judge.url.rstrip("/")
    facts = {"judge": judge.name, "url": url}
    secret = read_api_key(judge, key)
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}

    try:
        with httpx.Client(timeout=limit_s, headers=headers) as client:
            models = _listed_models(client.get(f"{url}/models"))
            # Some servers list their models without looking at the key.
            if secret is None and judge.model in models:
                return None
            reply = client.post(f"{url}/chat/completions", json=request_body(judge, _QUESTION))
    except httpx.TimeoutException:
        return doubtful(
            SERVERS,
            f"{key}.url: {url} does not answer within {limit_s:g} s",
            f"see whether the server of judge {judge.name} is up and not busy; a sample without a reply ends "
            "the run, unless reward.max_error_rate allows it",
            **facts,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return doubtful(
            SERVERS,
            f"{key}.url: no server answers at {url} ({str(error) or type(error).__name__})",
            f"start the server of judge {judge.name} before the run, or set {key}.url to its address",
            **facts,
        )

    # A server may repeat the key in its answer.
    words = " ".join(reply.text.split())
    words = words if secret is None else words.replace(secret, "...")
    return _refusal(judge, key, reply, words[:_NUM_SHOWN], models)


def _listed_models(listed: httpx.Response) -> list[str]:
    """Return the names in a server's list of models; none if it has no such list."""
    try:
        return [str(each["id"]) for each in listed.json()["data"]]
    except (ValueError, LookupError, TypeError):
        return []


def _refusal(
    judge: JudgeConfig, key: str, reply: httpx.Response, words: str, models: Sequence[str]
) -> Finding | None:
    """Describe the problem if the server would not reply to the judge's requests.

    Args:
        words: The message of the server, without the key.
        models: The names that the server lists.
    """
    if reply.is_success:
        return None
    status = reply.status_code
    facts = {"judge": judge.name, "url": judge.url, "status": status}
    said = f"{reply.request.url} answers with status {status}{f' ({words})' if words else ''}"

    if is_temporary(status):
        hint = "the run asks again up to max_attempts times; see whether the server is overloaded"
        return doubtful(SERVERS, f"{key}.url: {said}", hint, **facts)

    # The name of the variable may be shown, but not its value.
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        faulty = f"{key}.api_key_env"
        hint = "set it to the name of the environment variable with the server's key"
        if judge.api_key_env is not None:
            hint = f"export the key of this server as {judge.api_key_env}, or name another variable"
    elif models and judge.model not in models:
        faulty = f"{key}.model"
        more = " ..." if len(models) > _MOST_MODELS else ""
        hint = f"{judge.model!r} is not listed; use a model of the server: "
        hint += f"{', '.join(models[:_MOST_MODELS])}{more}"
    else:
        faulty = key
        hint = (
            "url must be the base of the API, which often ends with /v1; model and request must be those of "
            f"the server (now model {judge.model!r})"
        )
    return wrong(SERVERS, f"{faulty}: {said}", hint, **facts)


def first_sample(data: DataConfig) -> ScoreRequest | None:
    """Return the first row of the training data with SOLUTION as its response.

    None if it cannot be read, which is reported elsewhere.
    """
    try:
        for row in read_prompt_rows(data.train_files, data.columns):
            inputs = read_reward_inputs(row, data.columns)
            return ScoreRequest(
                "",
                inputs.data_source,
                SOLUTION,
                inputs.reward_model["ground_truth"],
                inputs.extra_info,
                messages=chat_messages(row, data.columns.prompt, data.system_prompt),
            )
    except DataError:  # reported by the check of the data
        return None
    return None


def prompt(judge: JudgeConfig, sample: ScoreRequest) -> str:
    """Render a judge's prompt for a sample.

    Raises:
        JudgePromptError: The template cannot be read or rendered.
    """
    return render(load_template(judge.prompt), judge.prompt, prompt_variables(sample))


def judge_data_sources(config: PPOConfig) -> Iterator[Finding]:
    """Check that a teacher scores the samples of each data source of the training files.

    All rows are read, without their prompts. The check of the data reports files that cannot be read.
    """
    sources: set[str] = set()
    for file in dict.fromkeys(config.data.train_files):
        try:
            for row in read_reward_rows([file], config.data.columns):
                sources.add(read_reward_inputs(row, config.data.columns).data_source)
        except DataError:  # reported by the check of the data
            continue
    if (problem := absent_teacher(config, sources)) is not None:
        message, hint = problem
        yield wrong(DATA, f"data.train_files: {message}", hint, data_sources=sorted(sources))


def judge_teacher(
    role: ModelRole, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase | None
) -> Finding:
    """Compare the vocabularies of a teacher's and the policy's tokenizers, with their special tokens.

    Args:
        policy: The policy's tokenizer. None if it has a problem, which is reported elsewhere.
    """
    facts = {"folder": role.path, "tokens": len(tokenizer)}
    if policy is None:
        return good(_CHECK, f"{role.path}: {counted(len(tokenizer), 'token')}", **facts)

    tokens = _by_id(tokenizer)
    expected = _by_id(policy)
    different = sorted(
        index for index in tokens.keys() | expected.keys() if tokens.get(index) != expected.get(index)
    )
    if not different:
        return good(_CHECK, f"{role.path}: {counted(len(tokenizer), 'token')}, those of the policy", **facts)

    first = different[0]
    return wrong(
        _CHECK,
        f"{role.path_key}: {role.path}: the tokenizer differs from the policy's in {len(different):,} of "
        f"{len(expected):,} ids, first in id {first}: {_shown(tokens.get(first))}, and the policy's "
        f"{_shown(expected.get(first))}, so the teacher would score other text than the policy writes",
        "use a teacher of the policy's model family",
        **facts,
    )


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
