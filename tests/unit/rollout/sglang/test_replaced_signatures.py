"""Each function that megarl replaces in SGLang's processes can be called in every way in which the original can.

A new SGLang that passes a further argument, or one by another name, fails here and not in a user's run.
"""

from __future__ import annotations

import json
import subprocess

from tests import fork_server
from tests.replaced_functions import ROOT, Argument, problems

# Packages of which a process of SGLang replaces functions.
PACKAGES = ("sglang", "torch", "transformers", "psutil")
PYTHON = (*fork_server.PYTHON, "--sglang")
REPLACED = """
import json, sys
from megarl.rollout.sglang import cpu_adaptations, processes
from tests.replaced_functions import replaced_in
cpu_adaptations.install_in_arguments()
processes.adapt_scheduler("cpu", num_stages=2, is_drafting=True)
PLANTED
print(json.dumps(replaced_in(*sys.argv[1:])))
"""
# Replacements with other arguments than the originals, compiled as if they were in megarl's folder.
PLANTED = """
import torch
from sglang.srt.layers import sampler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.pool_host import common
planted = {}
exec(compile('\\n'.join([
    'def murmur_hash32(seed, positions, columns): ...',
    'def register(buffer): ...',
    'def resume(self, request): ...',
    'def get_device_module(device): ...',
    'def make(host_name, port, world_size=None, is_master=False, **options): ...',
]), processes.__file__, 'exec'), planted)
sampler.murmur_hash32 = planted['murmur_hash32']
common._cuda_host_register = planted['register']
SchedulerWeightUpdaterManager.resume_memory_occupation = planted['resume']
torch.get_device_module = planted['get_device_module']
sys.modules['torch.distributed.rendezvous'].TCPStore = planted['make']
"""


def replaced(planted: str = "") -> dict[str, list[Argument]]:
    """Return the replaced functions of a scheduler process by address, after running the code `planted`."""
    run = subprocess.run(
        [*PYTHON, "-c", REPLACED.replace("PLANTED", planted), *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    return {address: [Argument(*each) for each in arguments] for address, arguments in found.items()}


def test_replaced_functions_accept_the_arguments_of_the_originals(forked_processes: None) -> None:
    ours = replaced()
    # One of each kind: a function, a method, a function of torch, and a class in C++.
    assert {
        "sglang.kernels.ops.sampling.murmur_hash:murmur_hash32",
        "sglang.srt.layers.sampler:murmur_hash32",
        "sglang.srt.speculative.eagle_utils:eagle_sample",
        "sglang.srt.managers.scheduler:Scheduler._record_scheduler_state_for_paused_engine",
        "torch:get_device_module",
        "torch.distributed.rendezvous:TCPStore",
        "psutil:Process.send_signal",
    } <= ours.keys()
    assert len(ours) >= 13, sorted(ours)
    assert not (found := problems(ours, PYTHON)), "\n".join(found)


def test_differences_are_found(forked_processes: None) -> None:
    found = problems(replaced(PLANTED), PYTHON)
    for address, problem in {
        "common:_cuda_host_register": "registration_granularity_bytes is not accepted by name",
        "rendezvous:TCPStore": "timeout is not accepted by position",
        "SchedulerWeightUpdaterManager.resume_memory_occupation": "recv_req is not accepted by name",
        "sampler:murmur_hash32": "col_indices is not accepted by name",
        "torch:get_device_module": "device is required, but optional in the original",
    }.items():
        assert any(each.endswith(f"{address}: {problem}") for each in found), found
    assert len(found) == 5
