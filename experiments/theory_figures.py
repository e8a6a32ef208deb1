"""Draws the figures of docs/theory.md and prints the numbers that it quotes: `python experiments/theory_figures.py`.

Everything is computed here from `echoreduce.theory` (numpy, seeded, about ten seconds on two cores); the figure of the residuals also
runs the plain reference's quantizer. Writes docs/figures/theory_*.png. Nothing is read from a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from echoreduce import reference
from echoreduce.config import NO_FEEDBACK, PRESETS, FeedbackConfig, QuantConfig
from echoreduce.theory import bounds, constructions, network, residuals, source, stream, weights

PAPER = PRESETS["paper"].feedback
PAPER_FULL = replace(PAPER, gain=1.0)
SINGLE = FeedbackConfig(gain=1.0, decays=(0.0, 0.0))
SINGLE_075 = replace(SINGLE, gain=0.75)
STYLES: dict[str, tuple[FeedbackConfig, str, str]] = {
    "no feedback": (NO_FEEDBACK, "tab:gray", "-"),
    "paper, gain 0.75": (PAPER, "tab:orange", "-"),
    "paper's averages, gain 1": (PAPER_FULL, "tab:red", "--"),
    "single step, gain 1": (SINGLE, "tab:blue", "-"),
}
SITES, DIM = 56, 32


def ages() -> plt.Figure:
    """phi_m by age."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    age = np.arange(20)
    for name, (feedback, color, line) in STYLES.items():
        axes.plot(age, weights.remaining(feedback, age), line, color=color, marker=".", label=name)
    axes.plot(age, weights.remaining(SINGLE_075, age), ":", color="tab:blue", marker=".", label="single step, gain 0.75")
    axes.set(xlabel="age m of an error (sites)", ylabel=r"$\phi_m$: part still in $S_t$", ylim=(-0.03, 1.08))
    axes.legend()
    for name, feedback in (("paper's averages", PAPER_FULL), ("single step", SINGLE)):
        print(f"{name}: mu_w {weights.mean_age(feedback):.4f}, tau_2 {weights.tail_energy(feedback):.4f}")
    return figure


def partial_sums() -> plt.Figure:
    """||S_t|| for four kinds of errors, with the bounds."""
    kinds: dict[str, Callable[[FeedbackConfig], np.ndarray]] = {
        "constant errors": lambda feedback: stream.constant(SITES, DIM, 1.0),
        "random errors (one pass)": lambda feedback: stream.random_sphere((SITES, DIM), 1.0, seed=0),
        "adversary that sees the state": lambda feedback: stream.adversarial(SITES, DIM, 1.0, feedback, seed=0),
        "alternating errors": lambda feedback: stream.alternating(SITES, DIM, 1.0),
    }
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True, sharey=True)
    for axes, (kind, errors) in zip(grid.flat, kinds.items()):
        for name, (feedback, color, line) in STYLES.items():
            partial = stream.run(errors(feedback), feedback).partial
            axes.plot(np.arange(1, SITES + 1), np.linalg.norm(partial, axis=-1), line, color=color, label=name)
            bound = [source.source_maximum(feedback, 1.0, n) for n in range(1, SITES + 1)]
            axes.plot(np.arange(1, SITES + 1), bound, ":", color=color, alpha=0.6)
            print(f"{kind}, {name}: largest ||S_t|| / q {np.linalg.norm(partial, axis=-1).max():.3f}, bound {bound[-1]:.3f}")
        axes.set(title=kind, yscale="log")
    for axes in grid[1]:
        axes.set_xlabel("site t + 1")
    for axes in grid[:, 0]:
        axes.set_ylabel(r"$\|S_t\| / q$  (dotted: bound)")
    grid[0, 1].legend(fontsize=8)
    return figure


def variance() -> plt.Figure:
    """Variance of S_N against N, and against the correlation between sites at N = 56."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    counts = np.unique(np.geomspace(1, 320, 60).astype(int))
    rho = np.linspace(-0.9, 0.9, 73)
    for name, (feedback, color, line) in STYLES.items():
        left.plot(counts, [source.source_variance(feedback, 1.0, int(n)) for n in counts], line, color=color, label=name)
        values = [source.correlated_variance(feedback, 1.0, r ** np.arange(SITES)) for r in rho]
        right.plot(rho, values, line, color=color, label=name)
        picked = [source.correlated_variance(feedback, 1.0, r ** np.arange(SITES)) for r in (-0.6, -0.3, 0.0, 0.3, 0.6)]
        print(f"variance at N = 56 for rho -0.6, -0.3, 0, 0.3, 0.6, {name}: " + ", ".join(f"{v:.3f}" for v in picked))
    right.plot(rho, 1 - rho**2, ":", color="black", label="best possible")
    left.set(xscale="log", yscale="log", xlabel="sites N", ylabel=r"$E\|S_{N-1}\|^2 / q^2$", title="uncorrelated errors")
    right.set(yscale="log", xlabel=r"correlation $\rho$ of neighbouring sites", title="correlated errors, N = 56", ylim=(0.1, 500))
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure


def output() -> plt.Figure:
    """First-order output deviation: the critical network (Remark 2), and one random network with its bounds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    dim, counts = 8, np.array([4, 8, 16, 32, 64, 128, 256, 512])
    blocks = constructions.Coherent(dim, h=0.0)
    q_bar = 1.0 / (np.sqrt(dim) * blocks.sigma(1))
    for name, (feedback, color, line) in STYLES.items():
        values = []
        for sites in counts:
            matrices = network.coefficients(constructions.linearize(blocks, int(sites)), feedback)
            values.append(bounds.mean_square(matrices, 1.0) / dim / blocks.sigma(int(sites)) ** 2 / q_bar**2)
        left.plot(counts, values, line, color=color, marker=".", label=name)
        print(f"critical network, {name}: E / (d sigma_N^2 q_bar^2) at N = 64 {values[4]:.3f}, at N = 512 {values[-1]:.3f}")
    left.set(xscale="log", xlabel="sites N", ylabel=r"$E\|E_N^{lin}\|^2 / (d\sigma_N^2 \bar q^2)$", title="critical network")
    left.legend(fontsize=8)
    bars(right)
    return figure


def bars(axes: plt.Axes) -> None:
    """Measured and bounded output deviation of a random network (d = 16, N = 24)."""
    net = network.random_network(24, 16, strength=0.8, seed=0)
    constants = network.measure(net)
    print(f"random network: C_0 {constants.c0:.3f}, Lambda {constants.budget:.3f}")
    shape = 16 * net.scales[-1] ** 2 * constants.relative_step(1.0) ** 2
    rows = []
    for name, (feedback, _, _) in STYLES.items():
        energy = np.sum(network.propagate(net, stream.run(stream.random_sphere((24, 4000, 16), 1.0, 1), feedback).net) ** 2, axis=-1)
        exact = bounds.mean_square(network.coefficients(net, feedback), 1.0) / shape
        sharp, paper = (f(feedback, constants, 1.0, net.scales) for f in (bounds.corollary_1_sharp, bounds.corollary_1))
        if feedback in (PAPER_FULL, SINGLE):
            paper = bounds.theorem_2_mean(feedback, constants, 1.0, net.scales[-1])
        scale = constants.relative_step(1.0) ** 2
        rows.append((name, energy.mean() / shape, exact, sharp / scale, paper / scale))
        print("random network, {}: measured {:.3f}, Lemma 4 {:.3f}, sharp bound {:.2f}, paper's bound {:.2f}".format(*rows[-1]))
    place = np.arange(len(rows))
    for offset, (label, column) in enumerate((("measured", 1), ("Lemma 4", 2), ("sharp bound", 3), ("paper's bound", 4))):
        axes.bar(place + 0.2 * (offset - 1.5), [row[column] for row in rows], 0.2, label=label)
    axes.set_xticks(place, [row[0].replace(", ", ",\n") for row in rows], fontsize=7)
    axes.set(yscale="log", title="random network, d = 16, N = 24")
    axes.legend(fontsize=8)


def sharpness() -> plt.Figure:
    """Proposition 2, run."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    blocks = constructions.Amplifying(8, c=0.5)
    counts = (np.arange(2, 65, 2)) ** 2
    for name, (feedback, color, line) in STYLES.items():
        energy = np.array([blocks.mean_square(int(n), 1.0, feedback) / 8 / blocks.sigma(int(n)) ** 2 for n in counts])
        left.plot(np.sqrt(counts), np.log10(energy), line, color=color, label=name)
        rate = np.polyfit(np.sqrt(counts[16:]), np.log(energy[16:]) + 1.25 * np.log(counts[16:]), 1)[0]
        print(f"amplifying network, {name}: log E = {rate:.3f} sqrt(N) - 1.25 log N + constant (2 (a): 4 c / sqrt(Delta) = 2)")
    left.set(xlabel=r"$\sqrt{N}$", ylabel=r"$\log_{10} E\|E_N\|^2 / (d\sigma_N^2)$", title="2 (a): amplifying network")
    second = constructions.Coherent(8, h=1.0)
    q_bar, roots = 1e-3, np.array([4, 8, 12, 16, 24, 32, 40])
    for name, (feedback, color, line) in STYLES.items():
        values = []
        for n in roots**2:
            errors = stream.random_sphere((1, 64, 8), q_bar * np.sqrt(8) * second.sigma(1), seed=0)
            result = constructions.run(second, int(n), errors, feedback)
            values.append(np.sqrt(np.mean(np.sum(result.second_order**2, axis=-1)) / 8) / second.sigma(int(n)) / q_bar**2)
        right.plot(roots, values, line, color=color, marker=".", label=name)
        rate = np.polyfit(roots[2:], values[2:], 1)
        print(f"coherent network, {name}: {rate[0]:.4f} sqrt(N) + {rate[1]:.3f} in units of q_bar^2")
    right.set(
        xlabel=r"$\sqrt{N}$", ylabel=r"second order / $(\sqrt{d}\,\sigma_N \bar q^2)$", title="2 (b): coherent network, one injection"
    )
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure


def play(contributions: torch.Tensor, feedback: FeedbackConfig) -> tuple[np.ndarray, np.ndarray]:
    """Largest push step and ||S_t|| of each site with the plain reference (4 bits, groups of 64)."""
    quant = QuantConfig(group_size=64)
    state = [torch.zeros(()) for _ in feedback.weights]
    steps, norms, total = [], [], torch.zeros(())
    for k, x in enumerate(contributions):
        correction = torch.stack([w * s for (w, _), s in zip(feedback.weights, state)]).sum(0) if k and state else None
        record = reference.trace(x, quant, "two_shot", correction)
        made = reference.local_residuals if feedback.residual == "local" else reference.group_residuals
        residual = made(record)[0]
        state = [b * s + (1 - b) * residual for (_, b), s in zip(feedback.weights, state)]
        total = total + reference.injected_error(record) + (0.0 if correction is None else correction.sum(0))
        steps.append(float(record.pushed.grid.scale.square().mean().sqrt()))
        norms.append(float(total.norm()))
    return np.array(steps), np.array(norms)


def steps() -> plt.Figure:
    """The step and S_t of the real quantizer under both residuals, P = 4."""
    noise = torch.randn(SITES, 4, 1024, generator=torch.Generator().manual_seed(0))
    settings = {
        "group, paper, gain 0.75": (PAPER, "tab:orange", "-"),
        "group, paper's averages, gain 1": (PAPER_FULL, "tab:red", "--"),
        "group, single step, gain 1": (replace(SINGLE, residual="group"), "tab:purple", "-."),
        "local, single step, gain 1": (SINGLE, "tab:blue", "-"),
        "no feedback": (NO_FEEDBACK, "tab:gray", ":"),
    }
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True)
    datasets = {"independent at every site": noise, "the same at every site": noise[:1].expand(SITES, -1, -1)}
    for column, (kind, data) in enumerate(datasets.items()):
        base, norm = play(data, NO_FEEDBACK)
        for name, (feedback, color, line) in settings.items():
            step, norms = play(data, feedback)
            grid[0, column].plot(step / base, line, color=color, label=name)
            grid[1, column].plot(norms / norm[0], line, color=color, label=name)
            said = residuals.range_growth(feedback, 4, SITES).mean()
            print(
                f"contributions {kind}, {name}: step x {np.mean(step / base):.3f} on average (independent: predicted {said:.3f}), "
                f"x {step[-1] / base[-1]:.3f} at the last site; ||S|| / first error {norms[-1] / norm[0]:.2f}"
            )
        grid[0, column].set(title=f"contributions {kind}", yscale="log")
        grid[1, column].set(xlabel="site", yscale="log")
    grid[0, 0].set_ylabel("push step over that without feedback")
    grid[1, 0].set_ylabel(r"$\|S_t\|$ over the first error")
    grid[0, 0].legend(fontsize=8)
    return figure


FIGURES: dict[str, Callable[[], plt.Figure]] = {
    "ages": ages,
    "partial_sums": partial_sums,
    "variance": variance,
    "output": output,
    "sharpness": sharpness,
    "steps": steps,
}


def main() -> None:
    """Draw all figures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="FIGURE", help=f"some of {', '.join(FIGURES)}; all if none is named")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "figures", help="output folder")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - FIGURES.keys()
    if unknown:
        parser.error(f"unknown figure {', '.join(sorted(unknown))}; known are {', '.join(FIGURES)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or FIGURES:
        figure = FIGURES[name]()
        for axes in figure.axes:
            axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(arguments.out / f"theory_{name}.png", dpi=110, metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
