"""Rules for `reward.judges`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from megarl.config.finding import Finding, Findings, is_http_url
from megarl.config.schema import JudgeConfig, PPOConfig

_OWNED = ("model", "messages", "temperature", "seed", "max_tokens", "n", "stream")


def judges(config: PPOConfig) -> Findings:
    """Check the judges' names, servers, parsers and requests."""
    seen: dict[str, int] = {}
    for index, judge in enumerate(config.reward.judges):
        key = f"reward.judges[{index}]"

        # Metrics are named after the judge.
        if re.fullmatch(r"[A-Za-z0-9_-]+", judge.name) is None:
            yield Finding(
                (f"{key}.name",),
                f"is {judge.name!r}, but is part of metrics such as reward/judge/<name>/mean; use letters, "
                "digits, '_' and '-'",
            )
        if judge.name in seen:
            yield Finding(
                (f"{key}.name",),
                f"is {judge.name!r}, the name of reward.judges[{seen[judge.name]}]; use another",
            )
        seen.setdefault(judge.name, index)

        yield from _server(judge, key) if judge.path is None else _served(judge, key)
        yield from _parse(judge, key)


def _served(judge: JudgeConfig, key: str) -> Iterator[Finding]:
    """Check a judge whose model the run serves."""
    for name in ("url", "model", "api_key_env"):
        if getattr(judge, name) is not None:
            yield Finding(
                (f"{key}.{name}", f"{key}.path"),
                "are both given, but the run serves the model in `path` itself; remove one of them",
            )


def _server(judge: JudgeConfig, key: str) -> Iterator[Finding]:
    """Check a judge on a server that the user has started."""
    example = "give the base URL of the API, such as http://localhost:30000/v1"
    if judge.url is None:
        yield Finding((f"{key}.url", f"{key}.path"), f"neither is given; {example}, or the folder of a model")
        return
    if judge.model is None:
        yield Finding((f"{key}.model",), "is missing; give the name of the model on the server")
    parts = urlsplit(judge.url) if is_http_url(judge.url) else None
    if parts is None:
        yield Finding((f"{key}.url",), f"{judge.url!r} is not an http or https URL; {example}")
    elif parts.username is not None or parts.query or parts.fragment:
        yield Finding(
            (f"{key}.url",),
            f"has a user name, a query or a fragment; {example}, and name the environment variable with the "
            "key in api_key_env",
        )
    elif parts.path.rstrip("/").endswith("/chat/completions"):
        yield Finding((f"{key}.url",), f"{judge.url!r} ends with /chat/completions; {example}")

    # A key that is pasted here would be written to the run's folder.
    if judge.api_key_env is not None and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", judge.api_key_env) is None:
        yield Finding(
            (f"{key}.api_key_env",),
            "is not the name of an environment variable; give the name of the variable that contains the "
            "key, such as OPENAI_API_KEY, and not the key",
        )

    if owned := [name for name in _OWNED if name in judge.request]:
        yield Finding(
            (f"{key}.request",),
            f"has {', '.join(owned)}, which megarl sets; use the judge's own keys for model, temperature, "
            "seed and max_tokens, and remove the others",
        )


def _parse(judge: JudgeConfig, key: str) -> Iterator[Finding]:
    parse = judge.parse
    given = [name for name in ("regex", "json", "path") if getattr(parse, name) is not None]
    if len(given) != 1:
        yield Finding(
            (f"{key}.parse",),
            f"has {' and '.join(given) or 'neither regex, json nor path'}, but needs exactly one of them, "
            "such as {regex: 'Score: ([0-9.]+)'}",
        )

    if parse.regex is not None:
        try:
            groups = re.compile(parse.regex).groups
        except re.error as error:
            yield Finding((f"{key}.parse.regex",), f"{parse.regex!r} is no regular expression: {error}")
            return

        if groups != 1:
            yield Finding(
                (f"{key}.parse.regex",),
                f"{parse.regex!r} has {groups} groups, but its only group must be the score, such as "
                "'Score: ([0-9.]+)'; write other groups as (?:...)",
            )
