"""Whether a group can use peer-to-peer kernels at all: the cheap questions, asked before any memory is taken, one answer for all ranks.

Source: docs/design.md, Section 7; case O18 of the field.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echoreduce.errors import BackendUnavailable
from echoreduce.runtime.schedule import Device

#: torch's own switch for symmetric memory of several ranks on one device. The kernels then run, for tests: processes on one device take
#: turns, so every wait for a peer lasts until the driver gives that peer its turn.
SHARE_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def require_peers(group: dist.ProcessGroup, device: torch.device | str | None) -> tuple[torch.device, Device, bool]:
    """This rank's device, its limits, and whether it converts float8; collective.

    Raises:
        BackendUnavailable: on every rank, with the reason of each rank that lacks something.
    """
    chosen = _device(device)
    reason = _lack(chosen)
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (reason, str(chosen), _boot(), os.environ.get(SHARE_DEVICES) == "1"), group=group)
    failed = [f"rank {rank}: {answer[0]}" for rank, answer in enumerate(answers) if answer[0]]
    hosts = len({answer[2] for answer in answers})
    if hosts > 1:
        failed.append(f"the ranks are on {hosts} hosts")
    devices = [answer[1] for answer in answers]
    sharing = max(devices.count(each) for each in devices) if chosen.type == "cuda" else 1
    if not failed and sharing > 1 and not all(answer[3] for answer in answers):
        failed = [f"ranks share a device ({', '.join(devices)}; for tests: {SHARE_DEVICES}=1 on all ranks)"]
    if failed:
        raise BackendUnavailable(f"peer-to-peer kernels cannot run here: {'; '.join(failed)}")
    if chosen.type != "cuda":
        return chosen, Device(multiprocessors=1), False
    properties = torch.cuda.get_device_properties(chosen)
    multiprocessors = max(1, properties.multi_processor_count // sharing)
    return chosen, Device(multiprocessors=multiprocessors), (properties.major, properties.minor) >= (8, 9)


def _device(device: torch.device | str | None) -> torch.device:
    chosen = torch.device("cuda" if device is None else device)
    if str(chosen) == "cuda":  # without an index
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return torch.device("cuda", index)
    return chosen


def _lack(device: torch.device) -> str:
    """What this rank lacks, or an empty text."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'echoreduce[gpu]')"
    if device.type == "cpu":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else "device cpu needs Triton's interpreter (TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return f"no kernels for device type {device.type}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= (8, 0) else f"compute capability {capability[0]}.{capability[1]}, 8.0 is needed"


def _boot() -> str:
    """What processes on one kernel share; host names differ among its containers and repeat among machines."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
