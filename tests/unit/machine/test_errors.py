"""Test numbers with nouns and sizes in messages, and that no message puts a number before a fixed plural."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megarl
from megarl.machine.errors import counted, sized

ROOT = Path(megarl.__file__).parent
_NOUNS = (
    *("row", "device", "rank", "step", "token", "file", "process", "node", "replica", "sample", "prompt"),
    *("layer", "expert", "head", "GPU", "tensor", "stage"),
)
_PLURALS = frozenset(f"{noun}es" if noun.endswith("s") else f"{noun}s" for noun in _NOUNS)
# Words between a number and its noun.
_BETWEEN = (
    "image",
    "tensor-parallel",
    "data-parallel",
    "virtual",
    "response",
    "safetensors",
    "data",
    "evaluated",
)
_COUNTED = re.compile(rf" (?:(?:{'|'.join(_BETWEEN)}) )?([A-Za-z]+)(?![\w/-])")
# Values that are not 1, or are no number of what follows, by module.
_ALLOWED = frozenset(
    {
        ("agents/sandboxes/local.py", "num_threads"),  # more than a limit
        ("batch/data_proto.py", "[len(batch) for batch in with_rows]"),
        ("cli/run/replay.py", "len(tensors)"),  # of a whole model
        ("cli/run/resumption.py", "steps"),  # more than a run has made
        ("cli/tables/run.py", "rollout.pipeline_parallel_size"),  # only shown if there are more
        ("config/rules/experts.py", "rollout.max_staleness"),
        ("config/rules/experts.py", "experts.num_experts"),  # does not divide
        ("config/rules/experts.py", "parallel.tensor_parallel_size"),  # more than 1
        ("config/rules/experts.py", "size"),  # does not divide
        ("config/rules/models.py", "config.max_row_tokens"),  # a prompt and a response
        ("config/rules/rollout.py", "config.max_row_tokens"),  # a prompt and a response
        ("config/rules/models.py", "tokens"),  # a prompt and a response
        ("config/rules/models.py", "either(nearest_divisors(letters[letter], ranks))"),
        ("config/rules/models.py", "either(nearest_divisors(layers, stages))"),
        ("data/hub.py", "len(files)"),  # several, or none
        ("data/packing.py", "rows_together"),  # more than 1
        ("data/tables.py", "first"),  # more than a limit
        ("doctor/storage.py", "num_nodes"),  # more than 1
        ("endpoint/session.py", "most"),  # the words of OpenAI's API
        ("endpoint/session.py", "num_tokens"),
        ("engine/micro_batch.py", "len(run)"),  # one token is contiguous
        ("engine/megatron_options.py", "layers.value"),
        ("engine/optimizer.py", "sorted(counts)"),
        ("plan/placement/plan.py", "sum(asked.values())"),  # more than a node has
        ("plan/placement/requests.py", "num_nodes"),  # more than 1
        ("plan/placement/requests.py", "size"),
        ("plan/placement/requests.py", "stages"),
        (
            "recipes/math/prepare.py",
            "convert_gsm8k(getattr(arguments, split), split, folder / f'{split}.parquet')",
        ),
        ("recipes/math/prepare.py", "distinct(arguments.files, folder / 'train.parquet')"),
        ("recipes/starter/make_data.py", "len(part)"),
        ("recipes/starter/make_pairs.py", "len(part)"),
        ("rollout/driver/scheduler.py", "most"),  # 2 or more
    }
)


def _fixed_plurals(source: str) -> Iterator[str]:
    """Yield the values of f-strings before a noun in its plural.

    Shares ("2 of 7 rows"), rates, means and key=value are no such values.
    """
    for text in ast.walk(ast.parse(source)):
        if not isinstance(text, ast.JoinedStr):
            continue
        before = ""
        for part, after in zip(text.values, [*text.values[1:], None], strict=True):
            is_share = re.fullmatch(r" of (?:the )?", before) or before.endswith("=")
            if isinstance(part, ast.Constant):
                before = str(part.value)
                continue
            before = ""
            assert isinstance(part, ast.FormattedValue)
            form = "" if part.format_spec is None else ast.unparse(part.format_spec)
            if is_share or re.search("[.g%]", form) or not isinstance(after, ast.Constant):
                continue
            noun = _COUNTED.match(str(after.value))
            if noun is not None and noun[1] in _PLURALS:
                yield ast.unparse(part.value)


def test_no_message_puts_a_number_before_a_fixed_plural() -> None:
    found = {
        (str(path.relative_to(ROOT)), value)
        for path in ROOT.rglob("*.py")
        for value in _fixed_plurals(path.read_text(encoding="utf-8"))
    }
    assert sorted(found - _ALLOWED) == [], "use megarl.machine.errors.counted"
    assert sorted(_ALLOWED - found) == [], "no longer in the code"


@pytest.mark.parametrize(
    "message",
    [
        'f"{n} rows"',
        'f"a batch of {len(x):,} samples is"',
        'f"of {n} tensors"',
        'f"its {n} image tokens: {text}"',
        'f"{a} has {b} processes"',
        'f"{n} "\nf"ranks"',
        'say(f"{n} GPUs" + "")',
    ],
)
def test_a_planted_plural_is_found(message: str) -> None:
    assert len(list(_fixed_plurals(f"({message})"))) == 1


@pytest.mark.parametrize(
    "message",
    [
        "f\"{counted(n, 'row')}\"",
        'f"{k} of {n} rows"',
        'f"{k} of the {n} rows"',
        'f"{rate} tokens/s"',
        'f"{mean:.1f} tokens"',
        'f"limit={n} tokens"',
        'f"{name} has rows"',
        '"7 rows"',
    ],
)
def test_other_messages_pass(message: str) -> None:
    assert list(_fixed_plurals(message)) == []


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (1000, "micro-batch", "1,000 micro-batches"),
        (2, "query", "2 queries"),
        (1, "image token", "1 image token"),
    ],
)
def test_a_number_has_its_noun(number: int, noun: str, said: str) -> None:
    assert counted(number, noun) == said


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0.00 KiB"),
        (700, "0.68 KiB"),
        (2**20 - 1, "1,024.00 KiB"),
        (2**20, "1.00 MiB"),
        (4.87 * 2**20, "4.87 MiB"),
        (2**30, "1.00 GiB"),
        (3000 * 2**30, "3,000.00 GiB"),
    ],
)
def test_a_size_has_a_unit_that_shows_it(nbytes: float, said: str) -> None:
    assert sized(nbytes, 2) == said
