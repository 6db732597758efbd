"""What a process must have before it imports `sglang`: environment variables, and stubs where CUDA packages
are absent."""

from __future__ import annotations

import os
import sys
import warnings
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"


def prepare(device: str, num_ranks: int = 1) -> None:
    """Called before `sglang` is imported; what this process spawns inherits both the variables and sys.path.

    On the CPU, packages that SGLang imports and does not use there (sgl_kernel, triton, torchvision, IPython,
    soundfile) are stood in for. The folder comes last on the path: a real package always wins.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of loading a file, in a log

    # on what is not installed, from every process again
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")

    # Otherwise the last token of a sample that fills the model's context could not be generated
    # (server_args.py).
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if device == "cuda" and (folder := cuda_runtime_folder()) is not None:
        # SGLang preloads the memory saver into its processes. The loader ends a process whose preloaded
        # library lacks a dependency.
        paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path]
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys([*paths, str(folder)]))

    if device == "cpu":
        if "transformers" in sys.modules and find_spec("torchvision") is None:
            # It decides once, when it is imported, which of its classes there are, and SGLang asks for those
            # for images.
            raise RuntimeError(
                "transformers was imported in this process before SGLang: start the engine in a process of "
                "its own"
            )
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        # A CUDA build of torch brings NCCL. SGLang would load it for ranks on the CPU, and fail.
        os.environ["SGLANG_NCCL_SO_PATH"] = os.devnull
        # a few small functions would be compiled: seconds, and a C++ compiler is needed
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # By default each rank is bound to a NUMA node of its own, and more ranks than nodes are refused.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * num_ranks)
        # as many threads as cores, per rank, stand in each other's way
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if str(STUBS) not in sys.path:
            sys.path.append(str(STUBS))


def cuda_runtime_folder() -> Path | None:
    """Return the folder of libcudart that pip installed for torch, which is not on the loader's path. None if
    it is the system's."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):  # of CUDA 13 and later, and of 12
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name.startswith("libcudart.so."):
                return Path(str(file.locate())).resolve().parent
    return None
