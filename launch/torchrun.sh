#!/usr/bin/env bash
# A run on the nodes of a torchrun. Run it on every node:
#
#   torchrun --nnodes N --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint NODE_0:29500 --shutdown-timeout 900 \
#       --no-python launch/torchrun.sh CONFIG key=value ...
#
# It calls `megarl launch`, which can also be given to torchrun directly: --no-python megarl launch CONFIG key=value ...
# Node 0 starts Ray and drives the run, the others join; all end together with the driver's status.
# Run by tests/integration/test_launch.py with two nodes on loopback; not run between machines or with GPUs there.
set -euo pipefail
exec "${PYTHON:-python}" -m megarl launch "$@"
