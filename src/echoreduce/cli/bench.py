"""`echoreduce bench`: the all-reduce against other libraries in one run, in the manner of nccl-tests.

    torchrun --nproc-per-node 2 -m echoreduce bench --min-size 64M --max-size 1G --factor 4

Every result is checked before it is timed. Sizes are bytes of one rank's tensor; algbw = size / time, busbw = algbw * 2 (P - 1) / P, both
on these logical bytes, so that a quantized and a 16-bit all-reduce compare directly. Times are medians over iterations of the slowest rank.

Leaves out: schedules (`experiments/p2p_variants.py`), simulated machines (`echoreduce simulate`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from echoreduce.cli.sizes import SIZE_HELP, format_bytes, parse_range, refused
from echoreduce.config import EchoConfig, preset
from echoreduce.errors import BackendUnavailable, CheckError, ConfigError
from echoreduce.measure.numeric import bound, first_bad, sqnr_db
from echoreduce.measure.report import write_json
from echoreduce.measure.timing import Timing, summarize, time_eager, time_graph
from echoreduce.partition import wire_bytes
from echoreduce.runtime import baselines
from echoreduce.runtime import peers as other_packages
from echoreduce.runtime.baselines import Peer
from echoreduce.runtime.p2p import P2PBackend

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PEERS_HELP = "nccl, symm_one_shot, symm_two_shot, two_collective_8, _4, deepspeed_8, _4, flashinfer_fp8, several with commas, or none"
console = Console(soft_wrap=True)


@dataclass(frozen=True)
class Row:
    """One line of the table; times in ms, bandwidths in GB/s (10^9 bytes), wire bytes sent by one rank."""

    size: int
    name: str
    mode: str
    median: float
    fifth: float
    ninetyfifth: float
    algbw: float
    busbw: float
    wire: int
    sqnr: float | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)


def bench(
    min_size: Annotated[str, typer.Option(help=SIZE_HELP)] = "8K",
    max_size: Annotated[str, typer.Option(help=SIZE_HELP)] = "1G",
    factor: Annotated[float, typer.Option(help="each size is the one before times this")] = 2.0,
    step: Annotated[str | None, typer.Option(help="instead of --factor: bytes added from size to size")] = None,
    presets: Annotated[str, typer.Option(help="presets, bits behind a colon: default:4,no_feedback:8")] = "no_feedback,default",
    algorithms: Annotated[str, typer.Option(help="two_shot, one_shot or preset (the preset's own choice), several with commas")] = "preset",
    peers: Annotated[str, typer.Option(help=PEERS_HELP)] = "nccl",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    group_size: Annotated[int | None, typer.Option(help="values per quantization group; default: each preset's own")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="untimed calls")] = 30,
    iterations: Annotated[int, typer.Option(min=1, help="timed calls")] = 80,
    graph: Annotated[str, typer.Option(help="eager, graph (ten calls in a CUDA graph) or both")] = "both",
    json: Annotated[Path | None, typer.Option("--json", help="write rows and environment here")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw time against size here (needs the extra `plot`)")] = None,
) -> None:
    """Time the low-bit all-reduce and its competitors; needs torchrun and one CUDA device a rank."""
    with refused():
        sizes = parse_range(min_size, max_size, factor, step)
        modes = {"eager": ("eager",), "graph": ("graph",), "both": ("eager", "graph")}.get(graph)
        if dtype not in DTYPES or modes is None:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)} and --graph eager, graph or both; got {dtype!r}, {graph!r}")
        configs = [_config(text, group_size) for text in presets.split(",") if text != "none"]
        if plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install 'echoreduce[plot]'")
    device = start()
    backend = P2PBackend()
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for size in sizes:
        x = contribution(size // DTYPES[dtype].itemsize, DTYPES[dtype], device, dist.get_rank())
        for mode in modes:
            for name, call, wire, noise in _contenders(x, backend, configs, algorithms.split(","), peers.split(","), left_out):
                row = _row(size, name, mode, _time(call, mode, warmup, iterations, device), wire, noise)
                rows.append(row)
                call()
        backend.synchronize()
    backend.close()
    if dist.get_rank() == 0:
        print_rows(rows)
        if json is not None:
            missing = other_packages.missing() | left_out
            write_json(json, rows=[asdict(row) for row in rows], world_size=dist.get_world_size(), dtype=dtype, missing=missing)
        if plot is not None:
            draw(rows, plot)
    dist.destroy_process_group()


def _config(text: str, group_size: int | None) -> tuple[str, EchoConfig]:
    name, _, bits = text.partition(":")
    config = preset(name, bits=int(bits) if bits else None, group_size=group_size)
    return f"{name} {config.quant.bits}-bit", config


def start() -> torch.device:
    """Join the process group that torchrun describes, one CUDA device a rank.

    Raises:
        ConfigError: not started by torchrun, or no CUDA device.
    """
    if "LOCAL_RANK" not in os.environ:
        raise ConfigError("start this with torchrun, for example: torchrun --nproc-per-node 2 -m echoreduce bench")
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device was found")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def contribution(numel: int, dtype: torch.dtype, device: torch.device, rank: int) -> Tensor:
    """A rank's values: normal, another spread and offset on each rank, the same on every device of one kind."""
    generator = torch.Generator(device).manual_seed(977 + rank)
    return torch.randn(max(numel, 1), generator=generator, device=device, dtype=dtype).mul_(1.0 + 0.5 * rank).add_(0.1 * rank)


def _contenders(
    x: Tensor, backend: P2PBackend, configs: list[tuple[str, EchoConfig]], algorithms: list[str], peers: list[str], left_out: dict[str, str]
) -> list[tuple[str, Callable[[], Any], int, float | None]]:
    """(name, call, wire bytes, SQNR) of everything that is timed at this size, each checked."""
    world_size = dist.get_world_size()
    every = [contribution(x.numel(), x.dtype, x.device, rank) for rank in range(world_size)]
    exact = sum((each.float() for each in every[1:]), every[0].float())
    found: list[tuple[str, Callable[[], Any], int, float | None]] = []
    for peer in make_peers(x, peers, left_out):
        peer.call()
        torch.cuda.synchronize()
        found.append((peer.name, peer.call, peer.wire, check_peer(peer, every, exact)))
    for name, config in configs:
        for algorithm in algorithms:
            chosen = config.algorithm_for(world_size, x.numel()) if algorithm == "preset" else algorithm
            call, y = _ours(x, backend, config, chosen)
            call()
            backend.synchronize()
            bad = first_bad(y, exact, bound(every, exact, config.quant, x.dtype))
            if bad is not None:
                raise CheckError(f"{name} {chosen}: value {bad} is {float(y[bad])}, the exact sum {float(exact[bad])}")
            _same_everywhere(y, name)
            found.append((f"{name} {chosen}", call, wire_bytes(x.numel(), world_size, config.quant, chosen), sqnr_db(y, exact)))
    return found


def _ours(x: Tensor, backend: P2PBackend, config: EchoConfig, algorithm: str) -> tuple[Callable[[], Any], Tensor]:
    """A call of the middle of a pass: state is read and written each time."""
    state = backend.new_state(config.feedback) if config.feedback.enabled else None
    y = torch.empty_like(x)
    return lambda: backend.all_reduce(x, config.quant, algorithm, state, out=y), y


def make_peers(x: Tensor, names: list[str], left_out: dict[str, str]) -> list[Peer]:
    """The named competitors for this tensor; one that some rank cannot run is left out on all, its reason added to `left_out`."""
    group = dist.group.WORLD
    assert group is not None, "the process group is up"
    makers: dict[str, Callable[[], Peer]] = {
        "nccl": lambda: baselines.nccl(x, group),
        "symm_one_shot": lambda: baselines.symmetric(x, group, "one_shot"),
        "symm_two_shot": lambda: baselines.symmetric(x, group, "two_shot"),
        "two_collective_8": lambda: baselines.two_collective(x, group, preset("int8").quant),
        "two_collective_4": lambda: baselines.two_collective(x, group, preset("no_feedback").quant),
        "deepspeed_8": lambda: other_packages.deepspeed_two_collective(x, group, 8),
        "deepspeed_4": lambda: other_packages.deepspeed_two_collective(x, group, 4),
        "flashinfer_fp8": lambda: other_packages.flashinfer_fp8(x, group),
    }
    made = []
    for name in names:
        if name in ("none", ""):
            continue
        if name not in makers:
            raise ConfigError(f"--peers: unknown {name!r}; known are {', '.join(makers)} and none")
        peer, reason = None, "another rank cannot run it"
        try:
            peer = makers[name]()
        except (BackendUnavailable, RuntimeError) as error:
            reason = str(error)
        everywhere = torch.tensor([peer is not None], dtype=torch.int32, device=x.device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        if peer is not None and bool(everywhere):
            made.append(peer)
        elif left_out.get(name) != reason:
            left_out[name] = reason
            if dist.get_rank() == 0:
                console.print(f"{name} is left out: {reason}", markup=False)
    return made


def check_peer(peer: Peer, every: list[Tensor], exact: Tensor) -> float:
    """SQNR of the competitor's result in dB.

    Raises:
        CheckError: it is below 40 dB (16-bit sum) or 10 dB (quantized), or a value is further off than the peer's grid allows.
    """
    result = peer.result[: exact.numel()]
    noise = sqnr_db(result, exact)
    if not noise >= (40.0 if peer.exact else 10.0):
        raise CheckError(f"{peer.name}: the sum is wrong (SQNR {noise:.1f} dB)")
    bad = None if peer.allowed is None else first_bad(result, exact, peer.allowed(every, exact))
    if bad is not None:
        raise CheckError(f"{peer.name}: value {bad} is {float(result[bad])}, the exact sum {float(exact[bad])}")
    return noise


def _same_everywhere(y: Tensor, name: str) -> None:
    total = y.view(torch.int16 if y.element_size() == 2 else torch.int32).to(torch.int64)
    weights = torch.arange(total.numel(), device=y.device) % 8191 + 1
    checksum = (total * weights).sum().reshape(1)
    sums = [torch.empty_like(checksum) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, checksum)
    if any(int(other) != int(sums[0]) for other in sums):
        raise CheckError(f"{name}: the ranks hold different results")


def _time(call: Callable[[], Any], mode: str, warmup: int, iterations: int, device: torch.device) -> Timing:
    dist.barrier()
    durations = (time_graph if mode == "graph" else time_eager)(call, warmup, iterations, device)
    slowest = torch.tensor(durations, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return summarize(slowest.tolist())


def _row(size: int, name: str, mode: str, timing: Timing, wire: int, noise: float | None) -> Row:
    algbw = size / timing.median / 1e6
    world_size = dist.get_world_size()
    busbw = algbw * 2 * (world_size - 1) / world_size
    return Row(size, name, mode, timing.median, timing.fifth, timing.ninetyfifth, algbw, busbw, wire, noise)


def draw(rows: list[Row], path: Path) -> None:
    """Median time against size, one line a contender and mode, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6), constrained_layout=True)
    for mode, style in (("eager", "-"), ("graph", "--")):
        for name in dict.fromkeys(row.name for row in rows):
            points = [(row.size, row.median) for row in rows if row.name == name and row.mode == mode]
            if points:
                axes.plot(*zip(*points), style, marker=".", label=f"{name}, {mode}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of one rank's tensor")
    axes.set_ylabel("ms, median of the slowest rank")
    axes.legend(fontsize=7)
    axes.grid(visible=True, alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def print_rows(rows: list[Row]) -> None:
    """The table; `over` is the first contender's time of the same size and mode over this one's."""
    table = Table(title="all-reduce, time of the slowest rank", title_justify="left")
    for name in ("size", "mode", "all-reduce"):
        table.add_column(name)
    for name in ("ms", "5 %", "95 %", "algbw", "busbw", "wire", "SQNR dB", "over"):
        table.add_column(name, justify="right")
    first = {(row.size, row.mode): row.median for row in reversed(rows)}
    for row in rows:
        times = [f"{value:.4f}" for value in (row.median, row.fifth, row.ninetyfifth)]
        speed = [f"{row.algbw:.1f}", f"{row.busbw:.1f}", format_bytes(row.wire), "-" if row.sqnr is None else f"{row.sqnr:.1f}"]
        table.add_row(format_bytes(row.size), row.mode, row.name, *times, *speed, f"{first[row.size, row.mode] / row.median:.2f}")
    (console if console.is_terminal else Console(width=140)).print(table)
