"""The record that a figure carries: hardware, versions, commit, command; and JSON reports made of it.

A number never travels without its conditions. `environment` gathers what a reader needs to repeat a run; `write_json` puts it in front
of the results.

Leaves out: taking the measurement (`timing`, `numeric`).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("echoreduce", "torch", "triton", "transformers", "numpy")


def environment() -> dict[str, Any]:
    """Hardware, versions, commit and command of this process. No host names, no paths beyond the command's own arguments.

    Returns:
        date (UTC, ISO), command, commit (with `+` if the tree has changes; None outside a checkout), python, packages, os, cpu, cores,
        threads (torch), and with CUDA: gpus, cuda, capability.
    """
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := package_version(name))},
        "os": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        record["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
        record["cuda"] = torch.version.cuda
        record["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return record


def command_line() -> str:
    """The command as a reader would type it: program name and arguments, absolute paths cut to their last part."""
    program = Path(sys.argv[0]).name
    arguments = [Path(argument).name if argument.startswith("/") else argument for argument in sys.argv[1:]]
    return " ".join(["python -m echoreduce" if program == "__main__.py" else program, *arguments])


def commit() -> str | None:
    """Short hash of the checkout that the package is imported from, `+` appended if tracked files were changed; None if there is none."""
    folder = Path(__file__).parent
    try:
        short = _git(folder, "rev-parse", "--short", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("ECHOREDUCE_COMMIT")
    return short + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def package_version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Model name of the processor as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def write_json(path: str | Path, **results: Any) -> None:
    """Write {"environment": ..., **results} as indented JSON; folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
