"""JSON Schemas of configuration files.

They refuse what the loader refuses in a single key, and accept all shipped files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from omegaconf import OmegaConf

from megarl.cli.main import main
from megarl.config.json_schema import KINDS, json_schema
from megarl.config.load import load_config, plain_values, read_config, schema_of
from megarl.config.schema import SCHEMAS, DPOConfig, PPOConfig, RunKind, SFTConfig
from megarl.config.schema.keys import Leaf, leaves
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import validate

ROOT = Path(__file__).parents[3]
SHIPPED_RUNS = sorted(CONFIGS_DIR.glob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
PRESETS = sorted((CONFIGS_DIR / "algorithm").glob("*.yaml"))
RUN_KINDS = {schema: kind.value for kind, schema in SCHEMAS.items()}
# A valid run in few words, with an element in each list of sections.
NEEDED: dict[type, dict[str, Any]] = {
    PPOConfig: {
        "model": {"path": "m"},
        "data": {"train_files": ["a.parquet"]},
        "reward": {"functions": [{"path": "score.py"}]},
        "agent": {"tools": ["calculator"]},
    },
    SFTConfig: {"kind": "sft", "model": {"path": "m"}, "data": {"train_files": ["a.parquet"]}},
    DPOConfig: {"kind": "dpo", "model": {"path": "m"}, "data": {"train_files": ["a.parquet"]}},
}


@cache
def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(json_schema(kind))


def refused(kind: str, values: Any) -> set[str]:
    """Return the dotted keys about which a validator complains; "" for the whole file."""
    return {key for error in validator(kind).iter_errors(values) for key in keys_of(error)}


def keys_of(error: ValidationError) -> set[str]:
    """The key of an error, or those inside it that are to blame where one of several forms has to fit."""
    inner = {key for each in error.context or () for key in keys_of(each)}
    own = dotted(error.absolute_path)
    return {key for key in inner if len(key) > len(own)} or {own}


def dotted(path: Iterable[str | int]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path).removeprefix(".")


def with_values(schema: type, values: dict[str, Any]) -> dict[str, Any]:
    """The run in few words with other values, by their dotted keys."""
    container: Any = OmegaConf.create(NEEDED[schema])
    for key, value in values.items():
        OmegaConf.update(container, key, value, merge=False)
    return dict(OmegaConf.to_container(container))  # type: ignore[arg-type]


def leaves_of(schema: type) -> Iterator[Leaf]:
    """Every value of the run in few words, but its kind."""
    return (leaf for leaf in leaves(read_config(schema, NEEDED[schema]).required()) if leaf.key != "kind")


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_printed_and_is_one(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema", kind]) == 0
    printed = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(printed)
    assert printed == json_schema(kind)
    assert printed["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_without_a_kind_it_is_that_of_any_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema("run")
    assert refused(
        "run", {"kind": "sft", "base": "b.yaml", "trainer": {"samples_per_step": 1, "prompts_per_step": 1}}
    ) == {"trainer"}
    assert refused(
        "run", {"kind": "ppo", "base": "b.yaml", "trainer": {"samples_per_step": 1, "prompts_per_step": 1}}
    ) == {"trainer"}
    assert refused("run", {"kind": "sft", "base": "b.yaml", "trainer": {"samples_per_step": 1}}) == set()
    assert refused("run", {"base": "b.yaml", "trainer": {"prompts_per_step": 1}}) == set()
    for kind in ("dpo", "reward_model"):
        own = {"kind": kind, "base": "b.yaml", "trainer": {"pairs_per_step": 1}}
        assert refused("run", own) == set()
        assert refused("run", own | {"loss": {"beta": 1, "center_coefficient": 1}}) == {"loss"}
    assert refused("run", {"kind": "grpo", "base": "b.yaml"}) == {"kind"}


@pytest.mark.parametrize("file", [*SHIPPED_RUNS, *EXAMPLES], ids=lambda file: file.stem)
def test_a_shipped_run_is_valid_as_it_is_written_and_in_full(file: Path) -> None:
    values = OmegaConf.to_container(OmegaConf.load(file))
    schema = schema_of(str(file))
    assert refused("run", values) == refused(RUN_KINDS[schema], values) == set()
    assert refused("run", plain_values(load_config(schema, file))) == set()


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_a_shipped_preset_is_valid(file: Path) -> None:
    values: Any = OmegaConf.to_container(OmegaConf.load(file))
    assert refused("algorithm", values) == set()
    assert refused("algorithm", values | {"no_such_key": 1}) == {""}
    assert refused("algorithm", values | {"with": {"algorithm": {}}}) == {"with"}
    assert refused("algorithm", values | {"with": {"rollout": {"max_staleness": -1}}}) == {
        "with.rollout.max_staleness"
    }


def test_a_preset_or_another_file_may_be_named() -> None:
    own = NEEDED[PPOConfig]
    assert refused("ppo", own | {"algorithm": "grpo"}) == set()
    assert refused("ppo", own | {"algorithm": "one_of_my_own"}) == set()
    assert refused("ppo", own | {"algorithm": {"base": "grpo", "kl": {"coefficient": 0.01}}}) == set()
    assert refused("ppo", own | {"algorithm": {"base": "grpo", "kl": {"coefficient": -1}}}) == {
        "algorithm.kl.coefficient"
    }
    assert refused("ppo", own | {"algorithm": 3}) == {"algorithm"}
    assert refused("ppo", {"base": "configs/quickstart.yaml"}) == set()
    assert refused("ppo", {"base": ["configs/quickstart.yaml"]}) == {"base"}
    assert refused("sft", NEEDED[SFTConfig] | {"algorithm": "grpo"}) == {""}


def test_required_keys_may_come_from_a_base() -> None:
    assert refused("ppo", {}) == {""}
    assert refused("ppo", {"model": {"dtype": "auto"}, "data": {"train_files": ["a.parquet"]}}) == {"model"}
    assert refused("sft", {"model": {"path": "m"}, "data": {"max_length": 7}}) == {"data"}
    assert refused("ppo", {"base": "b.yaml", "model": {"dtype": "auto"}}) == set()
    assert refused("ppo", {"base": "b.yaml", "reward": {"functions": [{"weight": 2}]}}) == {
        "reward.functions[0]"
    }


def refused_by_loader(schema: type[PPOConfig] | type[SFTConfig], values: dict[str, Any]) -> set[str]:
    """Return which keys the loader refuses for their type, and else for their range: one key by itself."""
    reading = read_config(schema, with_values(schema, values))
    messages = [str(violation) for violation in validate(reading.config)]
    by_range = {key for key in values if any(message.startswith(f"{key}: is ") for message in messages)}
    return by_range | inside(values, reading.refused)


def refused_by_schema(schema: type[PPOConfig] | type[SFTConfig], values: dict[str, Any]) -> set[str]:
    """Return which keys have an error, in their value or deeper."""
    return inside(values, refused(RUN_KINDS[schema], with_values(schema, values)))


def inside(keys: Iterable[str], found: Iterable[str]) -> set[str]:
    """Return the keys that are found, or something in their value."""
    names = list(found)
    return {
        key for key in keys if any(name == key or name.startswith((f"{key}.", f"{key}[")) for name in names)
    }


def number_keys(schema: type[PPOConfig] | type[SFTConfig]) -> list[Leaf]:
    every = list(leaves_of(schema))
    no_number, text = (
        read_config(
            schema, with_values(schema, {leaf.key: value for leaf in every if "[" not in leaf.key})
        ).refused
        for value in (1, "x")
    )
    return [leaf for leaf in every if leaf.key in text - no_number]


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig, DPOConfig])
def test_ranges_are_those_of_the_loader(schema: type[PPOConfig] | type[SFTConfig]) -> None:
    """All numbers at the same time: on an end of their range, then just beyond it."""
    numbers = number_keys(schema)
    assert len(numbers) > (90 if schema is PPOConfig else 25)
    num_refused = 0

    for end, step in (
        ("at_least", 0),
        ("at_least", -1),
        ("above", 0),
        ("at_most", 0),
        ("at_most", 1),
        ("below", 0),
    ):
        ends = {leaf.key: getattr(leaf.range, end) for leaf in numbers}
        num_refused += check_ranges(
            schema, {key: int(value) + step for key, value in ends.items() if math.isfinite(value)}
        )

    for value in (10**9, 10**9 + 1, -(10**9), -(10**9) - 1):
        num_refused += check_ranges(schema, {leaf.key: value for leaf in numbers})
    assert num_refused > 3 * len(numbers)


def check_ranges(schema: type[PPOConfig] | type[SFTConfig], values: dict[str, int]) -> int:
    """Compare what is refused because of a range. Returns how many keys that are."""
    config = read_config(schema, with_values(schema, values)).required()
    by_range = {
        leaf.key for leaf in leaves(config) if leaf.key in values and values[leaf.key] not in leaf.range
    }
    assert by_range <= refused_by_loader(schema, values)
    assert refused_by_schema(schema, values) == by_range

    return len(by_range)


WRONG_TYPES: tuple[Any, ...] = (
    True,
    3,
    1.5,
    "text",
    "None",
    None,
    [],
    ["text"],
    [None],
    [[]],
    {},
    {"a": None},
    [{}],
)


# Most sections of supervised fine-tuning are those of reinforcement learning.
@pytest.mark.parametrize(
    ("schema", "value"),
    [(PPOConfig, value) for value in WRONG_TYPES] + [(SFTConfig, value) for value in WRONG_TYPES[::4]],
    ids=lambda each: each.__name__ if isinstance(each, type) else repr(each),
)
def test_types_are_those_of_the_loader(schema: type[PPOConfig] | type[SFTConfig], value: object) -> None:
    """All keys are tested at the same time.

    The loader also accepts a number for a string, which a schema refuses.
    """
    every = [leaf.key for leaf in leaves_of(schema)]
    for keys in ([key for key in every if "[" not in key], [key for key in every if "[" in key]):
        values = dict.fromkeys(keys, value)
        by_type = inside(values, read_config(schema, with_values(schema, values)).refused)
        by_schema = refused_by_schema(schema, values)
        assert by_type <= by_schema
        if isinstance(value, bool) or not isinstance(value, int | float):
            assert by_schema <= refused_by_loader(schema, values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.n", 0),
        ("rollout.n", 2.5),
        ("rollout.n", "eight"),
        ("rollout.temperature", 100.5),
        ("actor.optim.lr", 0),
        ("actor.optim.lr", 1.01),
        ("actor.optim.betas", [0.9]),
        ("critic.optim.betas", [0.9, 1.0]),
        ("actor.micro_batch.max_tokens", 0),
        ("algorithm.advantage.estimator", "gropo"),
        ("algorithm.advantage.gamma", 1.5),
        ("trainer.seed", 10**10),
        ("trainer.total_steps", None),
        ("model.dtype", "float16"),
        ("model.trust_remote_code", 1),
        ("model.trust_remote_code", "${data.shuffle}"),
        ("checkpoint.dir", True),
        ("placement.roles", ["actor"]),
        ("placement.pools", {"a": ["x"]}),
        ("tracking.loggers", "console"),
        ("tracking.loggers", ["console", "paper"]),
        ("reward.functions", {"path": "score.py"}),
        ("reward.functions", [{"name": "f"}]),
        ("reward.functions", [{"path": "score.py", "wieght": 2}]),
        ("checkpoint.dir", "None"),
        ("actor.optm", {"lr": 1}),
        ("device", "gpu"),
    ],
)
def test_loader_and_schema_refuse_the_same_values(key: str, value: object) -> None:
    given = with_values(PPOConfig, {key: value})
    reading = read_config(PPOConfig, given)
    assert reading.problems or any(key in violation.keys for violation in validate(reading.config))
    found = refused("ppo", given)
    assert found
    assert all(key.startswith(name) or name.startswith(key) for name in found), found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor.optim.lr", 1),
        ("actor.optim.betas", [0, 0.999]),
        ("algorithm.policy_loss.norm_tokens", "${data.max_response_length}"),
        ("critic.optim.betas", "${actor.optim.betas}"),
        ("device", "cpu"),
        ("actor.micro_batch.max_tokens", None),
        ("reward.pass_score", None),
        ("rollout.sglang.server_args", {"mem_fraction_static": 0.8, "enable_x": True, "names": ["a"]}),
        ("placement.pools", {"a": [0, 1]}),
        ("tracking.loggers", []),
        ("agent.parser", "llama3"),
    ],
)
def test_loader_and_schema_accept_the_same_values(key: str, value: object) -> None:
    given = with_values(PPOConfig, {key: value})
    assert read_config(PPOConfig, given).required()
    assert refused("ppo", given) == set()


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig])
def test_every_key_has_its_default_and_what_the_reference_says(schema: type) -> None:
    found = dict(described(json_schema(RUN_KINDS[schema])["properties"]))
    defaults = plain_values(schema())
    defaults["kind"] = None
    values = OmegaConf.create(defaults)

    for leaf in leaves(schema()):
        entry = found[leaf.key]
        assert entry["description"], leaf.key
        if leaf.value == "???":
            assert "default" not in entry
        elif leaf.key != "kind":
            value = OmegaConf.select(values, leaf.key)
            assert entry["default"] == (
                OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            ), leaf.key

    assert (
        "- linear: linear decay to `min_lr`, which is the rate of the last update"
        in found["actor.optim.decay"]["description"]
    )


def test_a_section_has_the_defaults_of_its_role() -> None:
    found = dict(described(json_schema("ppo")["properties"]))
    assert (found["actor.optim.lr"]["default"], found["critic.optim.lr"]["default"]) == (1e-6, 1e-5)


def described(properties: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, entry in properties.items():
        section = next((form for form in entry.get("anyOf", ()) if "properties" in form), entry)
        if "properties" in section:
            yield from described(section["properties"], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry


def test_each_kind_of_run_has_a_schema() -> None:
    assert {kind.value for kind in RunKind} < set(KINDS)


def test_keys_that_most_runs_set_are_first_and_say_when() -> None:
    properties = json_schema("ppo")["properties"]
    rollout = properties["rollout"]["properties"]
    assert list(rollout)[:5] == ["engine", "num_replicas", "tensor_parallel_size", "n", "temperature"]
    assert rollout["engine"]["description"].endswith("\nWhen to set it: `sglang` on GPUs")
    assert "When to set it" not in rollout["dtype"]["description"]
    # Sections with such keys are first, too.
    assert list(properties["actor"]["properties"])[:4] == ["parallel", "optim", "micro_batch", "recompute"]
