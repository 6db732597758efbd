"""Test the golden runs against their record: bitwise on its platform, and up to rounding elsewhere.

`python -m tests.integration.golden --write` rewrites the record after an intended change of the numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.golden import (
    LAYOUTS,
    RECORDS,
    Observed,
    Recorded,
    differences,
    digest,
    observe,
    own_record,
    read_record,
)
from tests.integration.tiny_run import save_inputs

runs_on_ray = pytest.mark.usefixtures("ray_cluster")
of_each_run = pytest.mark.parametrize("name", LAYOUTS)

# With torch's plainest kernels instead of AVX-512 (ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE), every
# sampled token stays the same, and metrics change by at most 1.1e-5 relative. A wrong term, or a different
# sampled token, changes them by far more.
RELATIVE = 1e-3
ABSOLUTE = 1e-5
# Shares of tokens change by whole tokens, of about 40 in an update: one at the edge of a clip range falls on
# either side of it.
ABSOLUTE_OF_SHARES = 0.06


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Observed]:
    save_inputs(inputs := tmp_path_factory.mktemp("inputs"))
    return {name: observe(name, inputs, tmp_path_factory.mktemp(name)) for name in LAYOUTS}


def recorded_anywhere() -> Path:
    """Return this platform's record, or any other."""
    return own_record() if own_record().exists() else min(RECORDS.glob("*.json"))


@runs_on_ray
@of_each_run
def test_the_metrics_are_the_recorded_ones_but_for_rounding(observed: dict[str, Observed], name: str) -> None:
    recorded = read_record(recorded_anywhere())[name].metrics
    assert [line["step"] for line in observed[name].metrics] == [line["step"] for line in recorded]

    for line, then in zip(observed[name].metrics, recorded, strict=True):
        assert line.keys() == then.keys()
        shares = {key for key in then if key.endswith("clipfrac")}
        for keys, absolute in ((then.keys() - shares, ABSOLUTE), (shares, ABSOLUTE_OF_SHARES)):
            expected = {key: then[key] for key in keys}
            assert {key: line[key] for key in keys} == pytest.approx(expected, rel=RELATIVE, abs=absolute), (
                line["step"]
            )


@runs_on_ray
@of_each_run
def test_batches_metrics_and_states_are_the_recorded_ones_to_the_last_bit(
    observed: dict[str, Observed], name: str
) -> None:
    if not own_record().exists():
        pytest.skip(f"bits were not compared: there is no record of this platform, {own_record().name}")
    found = differences(name, observed[name], read_record(own_record())[name])
    assert not found, "\n" + "\n".join(found)


def test_one_bit_is_a_difference() -> None:
    values = torch.tensor([[1.0, 2.0]])
    recorded = Recorded([{"step": 1, "loss": 0.5}], {"values": digest(values)})
    assert differences("run", Observed([{"step": 1, "loss": 0.5}], {"values": values}), recorded) == []
    others: list[torch.Tensor] = [torch.nextafter(values, values + 1), values.T, values.view(torch.int32)]
    for other in others:
        assert len(differences("run", Observed([{"step": 1, "loss": 0.5}], {"values": other}), recorded)) == 1
    assert differences("run", Observed([{"step": 1, "loss": 0.5 + 2**-53}], {}), recorded) == [
        f"run: metrics/1/loss is {0.5 + 2**-53}, the record has 0.5",
        f"run: values is missing, the record has {digest(values)}",
    ]
    assert differences(
        "run", Observed([{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}], {"values": values}), recorded
    ) == [
        "run: metrics/2/step is 2, the record has nothing",
        "run: metrics/2/loss is 0.5, the record has nothing",
    ]
