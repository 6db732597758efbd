#!/usr/bin/env bash
# Make one archive with which a machine with a GPU but without a package index runs tests/gpu and benchmarks/gpu: this commit, the wheels of
# requirements/bundle.txt for Python 3.12 with the versions and hashes of requirements/lock.txt, and run.sh. The machine needs torch 2.11 or later, triton and transformers.
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
# pip takes no hashes for packages without a version, so it gets the lock's entries: each a line with the version, and lines with its hashes.
sed 's/#.*//; /^ *$/d' "$bundle/megarl/requirements/bundle.txt" |
  awk 'NR == FNR { wanted[$1]; next } /^[^ ]/ { split($1, entry, "=="); taken = entry[1] in wanted } taken' - "$bundle/megarl/requirements/lock.txt" \
    >"$scratch/locked.txt"
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest "$bundle/wheels" --require-hashes --requirement "$scratch/locked.txt"
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
