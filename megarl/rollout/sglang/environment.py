"""Setup of a process before it imports `sglang`.

This sets environment variables, and provides stubs for missing CUDA packages.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STUBS = Path(__file__).parent / "stubs"  # last on the path: a real package takes precedence
PREFERRED_STUBS = STUBS / "preferred"  # first on the path


def prepare_for(server_args: Mapping[str, Any]) -> None:
    """Prepare the process for an engine with these arguments."""
    num_ranks = server_args["tp_size"] * server_args["pp_size"]
    prepare(server_args["device"], num_ranks, has_memory_saver="enable_memory_saver" in server_args)
    if "nnodes" in server_args:
        # A node without the first rank returns when its schedulers are ready, not when they end.
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
        # Disable the queue between nodes, which would accept pickled objects from anyone. Ranks use gloo.
        os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"


def prepare(device: str, num_ranks: int = 1, *, has_memory_saver: bool = False) -> None:
    """Prepare the process.

    Call this before `sglang` is imported; spawned processes inherit both the variables and sys.path.

    On the CPU, packages that SGLang imports but does not use there (sgl_kernel, torchvision, IPython,
    soundfile) are replaced by stubs if they are not installed. Triton always is: each process then starts
    with 100 MB less.

    Args:
        has_memory_saver: Whether the engine releases its memory while it sleeps.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of loading files, in a log

    # warnings about missing packages, repeated by every process
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")

    # Otherwise the last token of a sample that fills the model's context could not be generated
    # (server_args.py).
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # Prompts with images keep the tokens that the trainer will read, instead of being encoded again.
    os.environ["SGLANG_MM_AVOID_RETOKENIZE"] = "1"
    if device == "cuda" and (folder := cuda_runtime_folder()) is not None:
        # SGLang preloads the memory saver into its processes. The dynamic loader ends a process whose
        # preloaded library lacks a dependency.
        paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path]
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys([*paths, str(folder)]))

    if has_memory_saver:
        # Otherwise the memory saver leaves out CUDA graphs, which then stay on the device during sleep.
        os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"

    if device == "cpu":
        if "transformers" in sys.modules and find_spec("torchvision") is None:
            # transformers decides at import time which of its classes exist, and SGLang needs those for
            # images.
            raise RuntimeError(
                "transformers was imported in this process before SGLang: start the engine in a process of "
                "its own"
            )
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        # A CUDA build of torch includes NCCL. SGLang would load it for ranks on the CPU, and fail.
        os.environ["SGLANG_NCCL_SO_PATH"] = os.devnull
        # otherwise a few small functions are compiled, which takes seconds and a C++ compiler
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # SGLang binds each rank to its own NUMA node by default, and refuses more ranks than nodes.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * num_ranks)
        # with one thread per core in every rank, the ranks would compete for the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if str(STUBS) not in sys.path:
            sys.path.append(str(STUBS))
            sys.path.insert(0, str(PREFERRED_STUBS))


def cuda_runtime_folder() -> Path | None:
    """Return the folder of libcudart that pip installed for torch, which is not on the loader's path.

    None if it is the system's.
    """
    try:
        files = metadata.files("nvidia-cuda-runtime") or []
    except metadata.PackageNotFoundError:
        return None

    for file in files:
        if file.name.startswith("libcudart.so."):
            return Path(str(file.locate())).resolve().parent
    return None
