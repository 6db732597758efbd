"""Calibrate this machine with SGLang: `python -m tests.soak.calibration`.

The script runs `megarl tune --calibrate` on the quickstart's model, prints its tables, and reads the file. It
exits with status 1 if the decode steps were not measured, or if a larger batch does not generate faster.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from megarl.cli.main import main as megarl
from megarl.config.load import load_config
from megarl.config.published import with_published_models
from megarl.config.schema import PPOConfig
from megarl.models.families import read_architecture
from megarl.plan.step_time.device import load_device
from megarl.rehearse.calibration.measurements import CalibrationRequest
from megarl.rehearse.calibration.processes import measure_decoding

CONFIG = "configs/quickstart.yaml"
GIB = 2**30


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "mine.yaml")
        if status := megarl(["tune", CONFIG, "--calibrate", str(file)]):
            return status
        source = load_device(file).sources["efficiency.decode_layer_us"]
        if not source.startswith("measured"):
            print(f"decode steps were not measured: {source}")
            return 1
        return _check_sweep(folder)


def _check_sweep(folder: str) -> int:
    """Check that a batch of eight is faster than one sequence, by its tokens per second."""
    config, _ = with_published_models(load_config(PPOConfig, CONFIG), CONFIG)
    request = CalibrationRequest(
        config=config,
        architecture=read_architecture(config.model.path),
        is_cuda=False,
        num_ranks=2,
        folder=folder,
    )
    sweep = measure_decoding(request, GIB, print)
    rates = {time.batch: time.batch / time.seconds for time in sweep.times}
    if sweep.problem is not None or rates[8] < 2 * rates[1]:
        print(f"{sweep.problem}: tokens per second by batch are {rates}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
