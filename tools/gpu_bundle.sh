#!/usr/bin/env bash
# Make one archive with which a machine with a GPU but without a package index runs tests/gpu and benchmarks/gpu: this commit, the wheels of
# requirements/gpu.txt for Python 3.12, and run.sh. The machine needs torch 2.11 or later, triton and transformers.
#   tools/gpu_bundle.sh [ARCHIVE]             default: build/gpu-bundle.tar.gz; PYTHON=python3 is the Python whose pip downloads the wheels
#   tar -xzf gpu-bundle.tar.gz && gpu-bundle/run.sh
set -euo pipefail
LIMIT_BYTES=$((60 * 1024 * 1024))

root=$(cd "$(dirname "$0")/.." && pwd)
archive=${1:-$root/build/gpu-bundle.tar.gz}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bundle=$scratch/gpu-bundle

mkdir -p "$bundle/megarl" "$(dirname "$archive")"
git -C "$root" archive HEAD | tar -x -C "$bundle/megarl"
if [ -n "$(git -C "$root" status --porcelain)" ]; then
  echo "left out: what is not committed" >&2
fi
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest "$bundle/wheels" --requirement "$bundle/megarl/requirements/gpu.txt"
cp "$bundle/megarl/tools/gpu_bundle_run.sh" "$bundle/run.sh"
chmod +x "$bundle/run.sh"
tar -czf "$scratch/archive" -C "$scratch" gpu-bundle

size=$(stat --format %s "$scratch/archive")
if [ "$size" -gt "$LIMIT_BYTES" ]; then
  echo "the bundle has $size bytes, and $LIMIT_BYTES are allowed; its largest files:" >&2
  (cd "$bundle" && find . -type f -printf '%s %P\n' | sort --numeric-sort --reverse | sed -n 1,10p) >&2
  exit 1
fi
mv "$scratch/archive" "$archive"
echo "$archive: $((size / 1024)) KiB"
