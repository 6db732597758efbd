#!/usr/bin/env bash
# In a bundle of tools/gpu_bundle.sh: install the packages that this Python lacks into the bundle, and print the table of tests/gpu and
# benchmarks/gpu.
#   gpu-bundle/run.sh [--rehearse]            PYTHON=python3 is the Python that has torch; --rehearse: a dry run on the CPU
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}

# Megatron-Core is the bundle's. Other packages are the machine's own if it has them, because they match its other packages.
lacking=$("$python" - wheels/*.whl <<'PROGRAM'
import importlib.metadata
import sys
from pathlib import Path

installed = {each.metadata["Name"].lower().replace("-", "_") for each in importlib.metadata.distributions()} - {"megatron_core"}
print("\n".join(wheel for wheel in sys.argv[1:] if Path(wheel).name.split("-")[0].lower() not in installed))
PROGRAM
)
mapfile -t wheels <<<"$lacking"
rm -rf packages
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target packages "${wheels[@]}"

export PYTHONPATH=$PWD/megarl:$PWD/packages PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
cd megarl
exec "$python" -m tests.gpu.table "$@"
