"""`echoreduce simulate`, `choose`, `plot` and `calibrate`: all-reduce algorithms proven, priced, chosen and measured.

Arguments and tables only; the work is in `collectives` and `cost`. Exit code 1 when a proof fails, 2 for wrong arguments.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from echoreduce.cli.machine import Changes, machine, wire
from echoreduce.cli.sizes import SIZE_HELP, format_bytes, parse_range, parse_size, refused
from echoreduce.collectives.bound import lower_bound
from echoreduce.collectives.catalogue import ALGORITHMS, algorithm
from echoreduce.collectives.counters import count_roundings, count_traffic
from echoreduce.collectives.program import Program
from echoreduce.collectives.proof import prove
from echoreduce.cost.model import formula, terms
from echoreduce.cost.selection import Choice, candidates, crossovers, price, rank, with_named_protocol
from echoreduce.cost.simulator import simulate as play
from echoreduce.cost.topology import PRESETS, Topology, Wire
from echoreduce.errors import ConfigError

#: Up to this many ranks a program is proven and counted; above it only timed (the proof is for all N = 1 .. 64 in the tests).
COUNTED = 64

#: Up to this many ranks programs without symmetry are simulated; above it `simulate` shows their closed form only.
SIMULATED = 32_768

console = Console()


class Backend(StrEnum):
    """What carries the messages of `calibrate`."""

    gloo = "gloo"
    nccl = "nccl"
    p2p = "p2p"


TopologyName = Annotated[str, typer.Option("--topology", "-t", help=f"{', '.join(PRESETS)}, or a file of `calibrate --json`")]
WorldSize = Annotated[int, typer.Option("--world-size", "-P", min=1, help="ranks")]
PerNode = Annotated[int | None, typer.Option("--ranks-per-node", min=1, help="ranks of a node (default: the topology's)")]
Nics = Annotated[int | None, typer.Option(min=1, help="network ports that a node's ranks share (default: one a rank)")]
Bits = Annotated[int, typer.Option(help="bits of a value on the wire: 2 to 8, or 16 for uncompressed")]
GroupSize = Annotated[int, typer.Option(help="values that share one scale: 16 to 256")]
AcrossOnly = Annotated[bool, typer.Option("--across-only", help="quantize only between nodes")]
Alpha = Annotated[float | None, typer.Option("--alpha", min=0.0, help="us a message inside a node")]
Bandwidth = Annotated[float | None, typer.Option("--bandwidth", help="GB/s inside a node")]
AcrossAlpha = Annotated[float | None, typer.Option("--across-alpha", min=0.0, help="us a message between nodes")]
AcrossBandwidth = Annotated[float | None, typer.Option("--across-bandwidth", help="GB/s of a network port")]
NodesPerPod = Annotated[int | None, typer.Option(min=1, help="nodes below one uplink")]
Oversubscription = Annotated[float | None, typer.Option(min=1.0, help="ports of a pod over its uplink")]
MinSize = Annotated[str, typer.Option("--min-size", "-b", help=f"smallest message: {SIZE_HELP}")]
MaxSize = Annotated[str, typer.Option("--max-size", "-e", help="largest message")]
Factor = Annotated[float, typer.Option("--factor", "-f", help="each size is the one before times this")]
Step = Annotated[str | None, typer.Option("--step", "-i", help="add this many bytes instead of multiplying")]
Json = Annotated[Path | None, typer.Option("--json", help="write rows and conditions there")]


def register(app: typer.Typer) -> None:
    """Add the four commands."""
    app.command("simulate")(simulate)
    app.command("choose")(choose)
    app.command("plot")(plot)
    app.command("calibrate")(calibrate)


def simulate(
    algorithms: Annotated[list[str] | None, typer.Argument(help=f"all that run there, or of: {', '.join(ALGORITHMS)}")] = None,
    world_size: WorldSize = 8,
    topology: TopologyName = "flat",
    ranks_per_node: PerNode = None,
    nics: Nics = None,
    pieces: Annotated[int | None, typer.Option(min=1, help="pieces of pipelined algorithms (default: the cheapest)")] = None,
    bits: Bits = 16,
    group_size: GroupSize = 128,
    across_only: AcrossOnly = False,
    min_size: MinSize = "64M",
    max_size: Annotated[str | None, typer.Option("--max-size", "-e", help="largest message (default: --min-size)")] = None,
    factor: Factor = 4.0,
    step: Step = None,
    alpha: Alpha = None,
    bandwidth: Bandwidth = None,
    across_alpha: AcrossAlpha = None,
    across_bandwidth: AcrossBandwidth = None,
    nodes_per_pod: NodesPerPod = None,
    oversubscription: Oversubscription = None,
    json_path: Json = None,
) -> None:
    """Prove all-reduce programs, count their traffic and roundings, and time them by closed form and event simulation."""
    with refused():
        changes = Changes(ranks_per_node, nics, alpha, bandwidth, across_alpha, across_bandwidth, oversubscription, nodes_per_pod)
        place = machine(topology, changes, world_size)
        compressed = wire(bits, group_size, across_only)
        sizes = parse_range(min_size, max_size or min_size, factor, step)
        names = [algorithm(name).name for name in algorithms] if algorithms else [a.name for a in candidates(place, world_size)]
        rows = [_simulated(name, place, world_size, nbytes, compressed, pieces) for nbytes in sizes for name in names]
    _print_simulated(rows, place, world_size, bits)
    _save(json_path, topology=place.name, world_size=world_size, bits=bits, rows=rows)


def _simulated(name: str, place: Topology, world_size: int, nbytes: int, compressed: Wire, pieces: int | None) -> dict[str, Any]:
    """One row: proof, counts and both times."""
    row = algorithm(name)
    per_node = min(place.node_size(world_size), world_size)
    choice = price(row, place, world_size, nbytes, compressed)
    cut = (pieces or choice.pieces) if row.pipelined else 1
    machine_ = with_named_protocol(place, choice)
    program = row.build(world_size, per_node, cut)
    form = terms(name, machine_, world_size, per_node, cut)
    closed = sum(t.seconds(machine_, nbytes, compressed, machine_.ports(world_size)) for t in form)
    symmetric = program.period is not None or world_size <= SIMULATED
    played = play(program, machine_, nbytes, compressed).seconds if symmetric else None
    return {
        "algorithm": name,
        "pieces": cut,
        "protocol": choice.protocol,
        "nbytes": nbytes,
        "rounds": program.round_count,
        **_counted(program, nbytes),
        "closed_form": closed,
        "formula": formula(form),
        "simulated": played,
    }


def _counted(program: Program, nbytes: int) -> dict[str, Any]:
    if program.world_size > COUNTED:
        return {"proven": None, "sent": None, "bound": lower_bound(program.world_size, nbytes), "roundings": None, "noise": None}
    prove(program)
    traffic, roundings = count_traffic(program, nbytes), count_roundings(program)
    sent = int(traffic.sent[: program.world_size].max())
    bound = lower_bound(program.world_size, nbytes)
    return {"proven": True, "sent": sent, "bound": bound, "roundings": roundings.most, "noise": roundings.noise}


def _print_simulated(rows: list[dict[str, Any]], place: Topology, world_size: int, bits: int) -> None:
    caption = (
        "sent: bytes of the busiest rank before compression, over Patarasuk and Yuan's bound 2 (N-1)/N X (in-switch sums may go below);\n"
        "noise: error variance over that of one rounding of one contribution, every hop quantized; busbw = 2 (N-1)/N X / time"
    )
    table = Table(title=f"{world_size} ranks, {bits} bits, {place.name}", caption=caption, title_justify="left", caption_justify="left")
    for name in ("algorithm", "message", "rounds", "sent / bound", "proof", "roundings", "noise", "closed form", "simulated", "busbw"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for r in rows:
        best = r["simulated"] if r["simulated"] is not None else r["closed_form"]
        busbw = 2 * (world_size - 1) / world_size * r["nbytes"] / best / 1e9 if best else 0.0
        table.add_row(
            str(Choice(r["algorithm"], r["pieces"], r["protocol"], 0.0)),
            format_bytes(r["nbytes"]),
            str(r["rounds"]),
            "-" if r["sent"] is None else f"{r['sent'] / r['bound']:.3f}" if r["bound"] else "0 / 0",
            "-" if r["proven"] is None else "proven",
            *("-" if r[key] is None else str(r[key]) for key in ("roundings", "noise")),
            seconds_text(r["closed_form"]),
            "-" if r["simulated"] is None else seconds_text(r["simulated"]),
            f"{busbw:.3g} GB/s",
        )
    console.print(table)


def choose(
    world_size: WorldSize = 8,
    topology: TopologyName = "h200",
    ranks_per_node: PerNode = None,
    nics: Nics = None,
    bits: Annotated[str, typer.Option(help="comma-separated bits of a value on the wire; crossovers are listed for each")] = "16,4",
    group_size: GroupSize = 128,
    across_only: AcrossOnly = False,
    only: Annotated[str | None, typer.Option(help="comma-separated algorithms to choose from; `nccl` means those of NCCL")] = None,
    size: Annotated[str, typer.Option("--size", "-s", help=f"message that the ranking is for: {SIZE_HELP}")] = "1M",
    min_size: MinSize = "1K",
    max_size: MaxSize = "1G",
    alpha: Alpha = None,
    bandwidth: Bandwidth = None,
    across_alpha: AcrossAlpha = None,
    across_bandwidth: AcrossBandwidth = None,
    json_path: Json = None,
) -> None:
    """The cheapest all-reduce by the closed forms, and the message sizes at which the answer changes, as NCCL's tuner does."""
    with refused():
        place = machine(topology, Changes(ranks_per_node, nics, alpha, bandwidth, across_alpha, across_bandwidth), world_size)
        nbytes = parse_size(size, "--size")
        low, high = (max(1, ends) for ends in (parse_range(min_size, max_size)[0], parse_size(max_size, "--max-size")))
        names = _names(only)
        result = {}
        for width in _integers(bits, "--bits"):
            compressed = wire(width, group_size, across_only)
            ranking = rank(place, world_size, nbytes, compressed, names)
            changes = crossovers(place, world_size, low, high, compressed, names)
            result[width] = (ranking, changes)
    for width, (ranking, changes) in result.items():
        _print_choice(ranking, f"{format_bytes(nbytes)}, {world_size} ranks, {width} bits, {place.name}")
        console.print(_change_text(changes, ranking, format_bytes(low)))
    _save(
        json_path,
        topology=place.name,
        world_size=world_size,
        choices={
            str(width): {
                "ranking": [vars(c) for c in ranking],
                "crossovers": [{"nbytes": c.nbytes, "from": str(c.before), "to": str(c.to)} for c in changes],
            }
            for width, (ranking, changes) in result.items()
        },
    )


def _names(only: str | None) -> list[str] | None:
    if only is None:
        return None
    if only == "nccl":
        return [a.name for a in ALGORITHMS.values() if a.nccl]
    return [algorithm(name.strip()).name for name in only.split(",")]


def _integers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not a comma-separated list of whole numbers") from None


def _print_choice(ranking: list[Choice], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("algorithm", "predicted", "over the cheapest"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for choice in ranking:
        over = f"{choice.seconds / ranking[0].seconds:.2f}" if ranking[0].seconds else "-"
        table.add_row(str(choice), seconds_text(choice.seconds), over)
    console.print(table)


def _change_text(changes: list[Any], ranking: list[Choice], low: str) -> str:
    if not changes:
        return f"cheapest from {low} on: {ranking[0].algorithm}" if ranking else "no algorithm runs there"
    parts = [f"from {low}: {changes[0].before.algorithm} {changes[0].before.protocol}".rstrip()]
    parts += [f"from {format_bytes(c.nbytes)}: {c.to.algorithm} {c.to.protocol}".rstrip() for c in changes]
    return "cheapest " + "; ".join(parts)


def plot(
    out: Annotated[Path, typer.Option(help="folder for the pictures")] = Path("docs/figures"),
    what: Annotated[str, typer.Option(help="comma-separated of size, ranks, ratio, error; or all")] = "all",
    topology: TopologyName = "summit",
    world_size: WorldSize = 24_576,
    bits: Annotated[int, typer.Option(help="bits of the error picture")] = 4,
    json_path: Json = None,
) -> None:
    """Draw time against size and against ranks, the latency ratio ring / tree, and roundings and error against ranks."""
    from echoreduce.cli.figures import FIGURES, draw

    with refused():
        place = machine(topology, Changes(), world_size)
        names = list(FIGURES) if what == "all" else [part.strip() for part in what.split(",")]
        unknown = [name for name in names if name not in FIGURES]
        if unknown:
            raise ConfigError(f"--what: {unknown[0]!r} is not one of {', '.join(FIGURES)}, all")
        data = {name: draw(name, out, place, world_size, bits) for name in names}
    for name in names:
        console.print(f"plot: {out / FIGURES[name]}")
    _save(json_path, topology=place.name, world_size=world_size, bits=bits, figures=data)


def calibrate(
    backend: Annotated[
        Backend, typer.Option(help="gloo (starts its own processes), nccl (under torchrun), p2p (one process)")
    ] = Backend.gloo,
    world_size: Annotated[
        str, typer.Option("--world-size", "-P", help="comma-separated numbers of processes (gloo) or devices (p2p)")
    ] = "2,4,8",
    min_size: MinSize = "2M",
    max_size: MaxSize = "32M",
    factor: Factor = 4.0,
    step: Step = None,
    sweeps: Annotated[int, typer.Option(min=1, help="how often everything is measured; medians count")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="calls of each program in a sweep")] = 3,
    quietest: Annotated[bool, typer.Option("--quietest", help="the fastest sweep counts, for a machine that others use too")] = False,
    timeout: Annotated[int, typer.Option(min=1, help="seconds after which a process gives up on its peers")] = 120,
    json_path: Json = None,
) -> None:
    """Measure alpha, beta and gamma of this machine, then all-reduces, and compare the model's prediction with them."""
    from echoreduce.cli import calibration

    with refused():
        sizes = parse_range(min_size, max_size, factor, step)
        plan = calibration.Plan(
            backend.value, tuple(_integers(world_size, "--world-size")), tuple(sizes), sweeps, repeats, timeout, quietest
        )
    results = calibration.run(plan)
    if results is None:
        return  # another rank prints
    for result in results:
        calibration.show(result, console)
    _save(json_path, backend=backend.value, calibrations=[r.as_dict() for r in results])


def seconds_text(seconds: float) -> str:
    """1.2 s, 3.4 ms, 5.6 us: 3 significant digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _save(path: Path | None, **results: Any) -> None:
    if path is None:
        return
    from echoreduce.measure.report import write_json

    write_json(path, **json.loads(json.dumps(results)))
    console.print(f"json: {path}", soft_wrap=True)
