"""Test the CUDA image, built by docker/Dockerfile's own steps from the package index and Debian alone.

A build with Docker differs in two ways: it has another base image (chroot_image.py), and it compiles Transformer
Engine's part for torch with optimization and without a precompiled header, which takes hours on two cores
instead of a quarter of an hour. No GPU is needed, and no kernel runs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.requirement_files import locked
from tests.soak.chroot_image import ChrootImage

# c++ in the base image. Options come after the package's own -O3. The header is compiled with the options of the first file.
COMPILER = r"""#!/bin/bash
source=$(printf '%s\n' "$@" | grep '/csrc/.*\.cpp$')
[ -n "$source" ] || exec g++ "$@"
all=("$@")
header=/tmp/precompiled/all.h
if [ ! -e $header.gch ]; then
  mkdir -p ${header%/*}
  echo "#include \"${source%/csrc/*}/csrc/extensions.h\"" > $header
  options=()
  while [ $# -gt 0 ]; do
    case "$1" in
      -o | -MF) shift 2 ;;
      -c | -MMD | *.cpp) shift ;;
      *) options+=("$1"); shift ;;
    esac
  done
  g++ "${options[@]}" -O0 -x c++-header $header -o $header.gch
fi
exec g++ "${all[@]}" -O0 -include $header
"""
IMPORTS = (
    "deep_gemm",
    "flash_attn.cute",
    "flashinfer",
    "megarl.engine.engine",
    "megarl.rollout.sglang.engine",
    "megatron.core.models.gpt.gpt_layer_specs",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.qwen2",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.server_args",
    "torch_memory_saver",
    "transformer_engine.pytorch",
)
# These ask the driver while they are imported, and what they say.
NEED_A_DRIVER = {"sgl_kernel": "common_ops", "deep_ep": "driver", "flash_mla": "cuda.abi3.so"}
# Megatron is imported as in `platform.activate`.
TRY = """
import contextlib, importlib, json, sys
from megarl.engine.platform import UNUSED, without_modules
found = {}
for name in sys.argv[1:]:
    try:
        with without_modules("flash_mla", *UNUSED) if name.startswith("mega") else contextlib.nullcontext():
            importlib.import_module(name)
        found[name] = ""
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
# A kernel for Hopper, linked as torch's and SGLang's extensions are.
KERNEL = """
#include <cuda_runtime.h>
__global__ void twice(float *x) { x[threadIdx.x] *= 2; }
extern "C" int start(float *x) { twice<<<1, 32>>>(x); return cudaGetLastError(); }
"""


@pytest.fixture(scope="module")
def image(python_on_debian: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChrootImage]:
    folder = tmp_path_factory.mktemp("cuda")
    compiler = folder / "compiler/usr/local/bin/c++"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    layers = (folder / "compiler", python_on_debian)
    built = ChrootImage(ROOT / "docker" / "Dockerfile", ROOT, layers, folder, {"MAX_JOBS": "1"})
    built.build()
    yield built
    shutil.rmtree(folder)  # 15 GB


def printed(image: ChrootImage, command: str) -> str:
    ended = image.type(command)
    assert ended.returncode == 0, f"{command}\n{ended.stdout[-6000:]}"
    return ended.stdout


def test_the_lock_resolves_for_the_images_debian(tmp_path: Path) -> None:
    """Debian 12 has glibc 2.36."""
    lists = [str(ROOT / "requirements" / name) for name in ("run.txt", "gpu.txt", "gpu_source.txt")]
    resolved = tmp_path / "resolved.txt"
    options = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_36", "--generate-hashes"]
    options += [
        "--prerelease",
        "if-necessary-or-explicit",
        "--constraint",
        str(ROOT / "requirements/lock.txt"),
    ]
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", *options, *lists]
    subprocess.run([*command, "--output-file", resolved], check=True)
    found = locked(resolved)
    lock = locked()
    assert len(found) > 200
    assert {name: lock.get(name) for name in found} == found


def test_what_is_installed_is_in_the_lock(image: ChrootImage) -> None:
    listed = json.loads(printed(image, "uv pip list --quiet --format json"))
    installed = {each["name"].lower(): each["version"] for each in listed}
    lock = locked()
    ours = {"megarl", "pip"}
    assert ours <= set(installed)
    assert {name: lock.get(name) for name in installed if name not in ours} == {
        name: version for name, version in installed.items() if name not in ours
    }


def test_cuda_and_cudnn_are_there_once(image: ChrootImage) -> None:
    found = printed(
        image, "find / -xdev -name 'libcudnn.so*' -o -xdev -name 'libcudart.so.*' 2>/dev/null || true"
    ).split()
    assert sorted(Path(path).name for path in found) == ["libcudart.so.13", "libcudnn.so.9"]
    assert all("/site-packages/nvidia/" in path for path in found)


def test_a_kernel_compiles_and_links(image: ChrootImage) -> None:
    printed(image, f"cat > /tmp/kernel.cu <<'END'\n{KERNEL}END\n")
    printed(
        image,
        "cd /tmp && nvcc=$CUDA_HOME/bin/nvcc && $nvcc -arch=sm_90a -Xcompiler -fPIC -c kernel.cu -o kernel.o"
        " && c++ -shared kernel.o -L$CUDA_HOME/lib64 -lcudart -o kernel.so"
        " && python -c \"import ctypes; ctypes.CDLL('/tmp/kernel.so').start\"",
    )


def test_modules_are_imported_or_need_a_driver(image: ChrootImage) -> None:
    printed(image, f"cat > /tmp/try.py <<'END'\n{TRY}END\n")
    found = json.loads(
        printed(image, f"python /tmp/try.py {' '.join((*IMPORTS, *NEED_A_DRIVER))}").splitlines()[-1]
    )
    assert {name: found[name] for name in IMPORTS} == dict.fromkeys(IMPORTS, "")
    for name, said in NEED_A_DRIVER.items():
        assert said in found[name]


@pytest.mark.parametrize(
    "command",
    [
        "python -m megarl.recipes.quickstart.prepare"
        " && megarl doctor configs/quickstart.yaml model.path=outputs/quickstart/model",
        "megarl check configs/qwen2.5_7b_grpo.yaml",
        "megarl rehearse configs/qwen2.5_7b_grpo.yaml",
    ],
)
def test_commands_work_without_a_gpu(image: ChrootImage, command: str) -> None:
    printed(image, command)
