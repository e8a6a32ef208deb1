"""`echoreduce info`: what this installation can do here, and what the presets are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from echoreduce.cli.report import console
from echoreduce.config import PRESETS
from echoreduce.measure.report import environment, write_json

OPTIONAL = {"transformers": "transformers", "gguf": "gguf", "matplotlib": "plot", "triton": "gpu"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("info")(info)


def info(json: Annotated[Path | None, typer.Option("--json", help="write the record here")] = None) -> None:
    """Hardware, versions, backends that can run here, and the presets."""
    record = environment()
    record["backends"] = backends()
    record["extras"] = {name: importlib.util.find_spec(name) is not None for name in OPTIONAL}
    record["presets"] = {name: str(config) for name, config in PRESETS.items()}
    table = Table(show_header=False, box=None)
    for key in ("commit", "python", "packages", "os", "cpu", "cores", "gpus", "cuda"):
        if record.get(key) is not None:
            table.add_row(key, str(record[key]))
    for name, reason in record["backends"].items():
        table.add_row(f"backend {name}", reason)
    for name, extra in OPTIONAL.items():
        found = record["extras"][name]
        table.add_row(name, "installed" if found else f"missing: pip install 'echoreduce[{extra}]'")
    for name, text in record["presets"].items():
        table.add_row(f"preset {name}", text)
    console.print(table)
    if json is not None:
        write_json(json, **{key: record[key] for key in ("backends", "extras", "presets")})


def backends() -> dict[str, str]:
    """Each backend, and whether it can run here."""
    names = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()] if dist.is_available() else []
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "virtual": "yes, on any device",
        "c10d": f"yes, over {', '.join(names)}" if names else "no: this torch has no torch.distributed",
        "p2p": f"{gpus} CUDA devices" if gpus > 1 else f"no: {gpus} CUDA devices found, 2 are needed",
    }
