"""Compare conversion between Hugging Face and Megatron with a plain copy of the same files, in speed and memory.

    python benchmarks/conversion.py [--repeats 3] [--layers 16] [--tensor-parallel 2] [--pipeline-parallel 2] [--folder DIR] [--cold]

A model of the shapes of Llama 3.2 1B (2.47 GB in bfloat16; its embedding has 525 MB) is created in a
temporary folder. Then four jobs alternate, each in its own process: its Hugging Face folder is copied, and
converted to Megatron's distributed checkpoint in TP2 x PP2; that is copied, and converted back. Conversions
and copies end with all bytes on the disk (fsync). Input files are in the page cache before each job, or with
--cold in none. The conversion back includes the comparison of every byte with the checkpoint's checksums.
Seconds are the fastest of the repeats, without the start of Python.

Target: at least half the speed of the copy, and a peak of memory below twice the largest tensor plus 500 MB.
The peak is the kernel's (VmHWM), of the whole process with Python and torch; its share of mapped pages is
sampled. A conversion uses as many threads as there are cores, and the copy one: on a machine with busy cores
it loses that advantage. The processor seconds, which add up over threads, show what it would need.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from math import prod
from pathlib import Path

import torch

from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.role_folder import Layout
from megarl.machine.files import sync_tree
from megarl.models.families import read_architecture
from megarl.weights.checkpoint_index import SINGLE_FILE
from megarl.weights.manifest import manifest_of
from megarl.weights.safetensors_file import SafetensorsFile

TARGET_SPEED = 0.5
TARGET_EXTRA_BYTES = 500 * 10**6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def make_model(folder: Path, num_layers: int) -> int:
    """Write a model of random bits and return the bytes of its largest tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
    manifest = manifest_of(read_architecture(str(folder)), torch.bfloat16)
    block = torch.randn(2**22 + 17, generator=torch.Generator().manual_seed(0)).bfloat16()
    file = SafetensorsFile(folder / SINGLE_FILE, manifest)
    largest = 0

    for name, meta in manifest.items():
        numel = prod(meta.shape)
        largest = max(largest, numel * 2)
        for start in range(0, numel, block.numel()):
            count = min(block.numel(), numel - start)
            file.write(name, start, block[:count])

    file.close()
    return largest


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    sync_tree(target)


def to_megatron(source: Path, target: Path, tensor: int, pipeline: int) -> None:
    layout = Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        virtual_pipeline_parallel_size=None,
        data_parallel_size=1,
    )
    write_distributed(open_model(source), target, layout)


def to_hugging_face(source: Path, target: Path) -> None:
    write_hugging_face(open_model(source), target)


def status(field: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":")
    )
    return int(line.split()[1]) * 1024


def measure(job: str, source: Path, target: Path, arguments: argparse.Namespace) -> None:
    """Run one job in this process and print its seconds and memory as JSON."""
    torch.set_num_threads(1)
    done = threading.Event()
    files_peak = [0]

    def sample() -> None:
        while not done.wait(0.01):
            files_peak[0] = max(files_peak[0], status("RssFile"))

    sampler = threading.Thread(target=sample)
    before = status("VmRSS")
    sampler.start()
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()

    if job == "copy":
        copy(source, target)
    elif job == "to Megatron":
        to_megatron(source, target, arguments.tensor_parallel, arguments.pipeline_parallel)
    else:
        to_hugging_face(source, target)

    seconds = time.perf_counter() - start_s
    cpu_s = time.process_time() - start_cpu_s
    done.set()
    sampler.join()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu": cpu_s,
                "peak": status("VmHWM"),
                "before": before,
                "files": files_peak[0],
            }
        )
    )


def in_a_process(job: str, source: Path, target: Path, arguments: argparse.Namespace) -> dict[str, float]:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()

    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                if arguments.cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(2**24):
                        pass

    command = [sys.executable, __file__, "--job", job, str(source), str(target)]
    command += [
        "--tensor-parallel",
        str(arguments.tensor_parallel),
        "--pipeline-parallel",
        str(arguments.pipeline_parallel),
    ]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    return json.loads(output.splitlines()[-1])


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def same_weights(one: Path, other: Path) -> bool:
    return (
        subprocess.run(["cmp", "--silent", one / SINGLE_FILE, other / SINGLE_FILE], check=False).returncode
        == 0
    )


def run(arguments: argparse.Namespace, scratch: Path) -> bool:
    source = scratch / "source"
    megatron = scratch / "megatron"
    back = scratch / "back"
    largest = make_model(source, arguments.layers)
    turns = [
        ("copy", source, scratch / "copy"),
        ("to Megatron", source, megatron),
        ("copy", megatron, scratch / "copy"),
        ("to Hugging Face", megatron, back),
    ]
    results: list[list[dict[str, float]]] = [[] for _ in turns]

    for _ in range(arguments.repeats):
        for number, (job, from_folder, to_folder) in enumerate(turns):
            results[number].append(in_a_process(job, from_folder, to_folder, arguments))

    good = same_weights(source, back)
    print(
        f"{folder_bytes(source) / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, "
        f"{'cold' if arguments.cold else 'warm'} page cache"
    )
    print(f"there and back: {'bitwise identical' if good else 'DIFFERENT BITS'}\n")
    columns = ["", "seconds", "GB/s", "of the copy's speed", "processor seconds"]
    columns += ["peak memory MB", "allowed", "of it mapped files", "before it started"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    allowed = 2 * largest + TARGET_EXTRA_BYTES

    for first in (0, 2):
        copy_s = min(result["seconds"] for result in results[first])
        for number in (first, first + 1):
            job, folder, _ = turns[number]
            seconds = min(result["seconds"] for result in results[number])
            cpu_s = min(result["cpu"] for result in results[number])
            peak, files, before = (
                max(result[field] for result in results[number]) for field in ("peak", "files", "before")
            )
            speed = copy_s / seconds
            print(
                f"| {job} of the {'Hugging Face' if first == 0 else 'Megatron'} folder | {seconds:.2f} | "
                f"{folder_bytes(folder) / 1e9 / seconds:.2f} | {speed:.2f} | {cpu_s:.2f} | {peak / 1e6:.0f} "
                f"| {allowed / 1e6:.0f} | "
                f"{files / 1e6:.0f} | {before / 1e6:.0f} |"
            )
            if job != "copy":
                good = good and speed >= TARGET_SPEED and peak < allowed

    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--pipeline-parallel", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; needs 10 GB")
    parser.add_argument("--cold", action="store_true", help="input files are not in the page cache")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.job:
        job, source, target = arguments.job
        measure(job, Path(source), Path(target), arguments)
        return 0

    with tempfile.TemporaryDirectory(prefix="megarl-conversion-", dir=arguments.folder) as scratch:
        good = run(arguments, Path(scratch))
    print(f"\n{'targets are met' if good else 'a target is missed'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
