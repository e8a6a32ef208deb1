"""The emulation is the library where both can do the same, bit for bit; its residuals add up to -delta everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from contributions import contributions
from echoreduce import EchoConfig, FeedbackConfig, QuantConfig
from echoreduce.config import NO_FEEDBACK
from echoreduce.integrations.evaluation import bits_per_value
from echoreduce.session import Session
from echoreduce.sites import edges, uniform
from echoreduce.virtual import VirtualBackend
from emulation import EmulatedBackend, Emulation, Wire, emulated_bits, exchange, turn, turn_back
from wire_formats import ALWAYS, Codebook, Float8Blocks, Format, GroupGrid, LibraryGrid, OutlierChannels

SITES = 6


def library_wire(quant: QuantConfig) -> Wire:
    return Wire(LibraryGrid(quant), LibraryGrid(quant))


def outputs(backend: VirtualBackend, config: EchoConfig, world_size: int, numel: int) -> list[torch.Tensor]:
    session = Session(backend, config, SITES)
    with session.run_pass():
        return [session.reduce(contributions(world_size, numel, seed=site)) for site in range(SITES)]


@pytest.mark.parametrize("feedback", [NO_FEEDBACK, FeedbackConfig(state="fp32"), FeedbackConfig(state="fp32", gain=0.75)])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@pytest.mark.parametrize("quant", [QuantConfig(), QuantConfig(rotation="hadamard", group_size=32), QuantConfig(bits=5, policy="symmetric")])
@pytest.mark.parametrize(("world_size", "numel"), [(2, 1024), (3, 4099), (4, 1280)])
def test_library_grid_gives_the_bits_of_the_library(
    world_size: int, numel: int, quant: QuantConfig, algorithm: str, feedback: FeedbackConfig
) -> None:
    config = EchoConfig(quant=quant, feedback=feedback, algorithm=algorithm, sites=edges(1, 2, 8))  # type: ignore[arg-type]
    rotation = quant.group_size if quant.rotation == "hadamard" else 0
    setting = Emulation(library_wire(quant), library_wire(quant.with_bits(8)), rotation, (feedback.gain, feedback.gain))
    theirs = outputs(VirtualBackend(world_size), config, world_size, numel)
    ours = outputs(EmulatedBackend(world_size, setting, SITES), config, world_size, numel)
    for site in range(SITES):
        assert torch.equal(ours[site], theirs[site]), f"site {site}"
    assert emulated_bits(setting, config, world_size, numel, SITES) == pytest.approx(bits_per_value(config, world_size, numel, SITES))


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("slide", "policy"), [(0.0, "zero_aware"), (ALWAYS, "asymmetric")])
def test_group_grid_without_changes_is_the_library_grid(bits: int, slide: float, policy: str) -> None:
    quant = QuantConfig(bits=bits, group_size=64, policy=policy)  # type: ignore[arg-type]
    x = contributions(3, 2048)
    ours = GroupGrid(bits=bits, group_size=64, slide=slide)
    assert torch.equal(ours.encode_decode(x), LibraryGrid(quant).encode_decode(x))
    assert ours.bits_per_value == quant.bits_per_value()


@pytest.mark.parametrize(("bits", "rounding"), [(2, "down"), (4, "down"), (5, "up"), (6, "up")])
def test_one_word_grid_is_the_compact_grid_of_the_library(bits: int, rounding: str) -> None:
    quant = QuantConfig(bits=bits, group_size=64, policy="compact")
    x = contributions(3, 2048)
    ours = GroupGrid(bits=bits, group_size=64, gap=ALWAYS, one_word=True, rounding=rounding)
    assert torch.equal(ours.encode_decode(x), LibraryGrid(quant).encode_decode(x))
    other = GroupGrid(bits=bits, group_size=64, gap=ALWAYS, one_word=True, rounding="nearest")
    assert not torch.equal(other.encode_decode(x), LibraryGrid(quant).encode_decode(x))
    assert ours.bits_per_value == quant.bits_per_value()


FORMATS: list[Format] = [
    GroupGrid(gap=ALWAYS),
    GroupGrid(gap=0.25),
    GroupGrid(slide=2.0),
    GroupGrid(gap=ALWAYS, one_word=True, group_size=32),
    GroupGrid(gap=ALWAYS, one_word=True, group_size=64, rounding="down", below=(0, 1)),
    GroupGrid(spikes=1),
    GroupGrid(spikes=2, group_size=32),
    GroupGrid(shrink=(1.0, 0.9, 0.8)),
    GroupGrid(diffusion=True, group_size=32),
    Codebook(),
    Codebook(kind="lloyd", stretch=(1.0, 0.9, 1.1)),
    Float8Blocks(),
    Float8Blocks(32, two_level=True),
    OutlierChannels(GroupGrid(), 96, 3),
]


@pytest.mark.parametrize("quantize_own", [False, True])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_residuals_add_up_to_minus_the_injected_error(form: Format, algorithm: str, quantize_own: bool) -> None:
    x = contributions(3, 3 * 768).unflatten(-1, (3, 768))
    values, residual = exchange(x, Wire(form, form), algorithm, quantize_own)
    delta = values - x.sum(0)
    assert delta.abs().max() > 0
    torch.testing.assert_close(residual.sum(0), -delta, rtol=0, atol=float(2e-6 * x.abs().max()))


@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_formats_keep_zeros_and_are_close_on_normal_values(form: Format) -> None:
    zeros = torch.zeros(2, 768)
    assert torch.equal(form.encode_decode(zeros), zeros)
    x = torch.randn(2, 7680, generator=torch.Generator().manual_seed(0))
    error = (form.encode_decode(x) - x).square().mean().sqrt()
    assert 0 < error < 0.5 * 2 ** (4 - form.bits_per_value) + 0.1
    assert 4 < form.bits_per_value < 9


def test_one_word_scale_covers_the_group_within_a_sixteenth() -> None:
    x = contributions(2, 4096).unflatten(-1, (-1, 64))
    one, two = GroupGrid(group_size=64, gap=ALWAYS, one_word=True), GroupGrid(group_size=64, gap=ALWAYS)
    low, high = x.amin(-1), x.amax(-1)
    coarse, _, zero = one._grid(low, high)
    fine, _, _ = two._grid(low, high)
    assert ((coarse.view(torch.int32) & ((1 << 19) - 1)) == 0).all(), "8 exponent and 4 mantissa bits"
    assert (coarse >= (high.clamp(min=0) - low.clamp(max=0)) / 15 * (1 - 1e-6)).all()
    assert (coarse <= fine * (1 + 1 / 16)).all()
    assert ((zero >= 0) & (zero <= 15)).all()


def test_shrinking_and_stretching_never_raise_the_squared_error() -> None:
    x = contributions(2, 4096)
    for plain, searched in (
        (GroupGrid(), GroupGrid(shrink=(1.0, 0.9, 0.8))),
        (Codebook(kind="lloyd"), Codebook(kind="lloyd", stretch=(1.0, 0.8, 1.2))),
    ):
        errors = [(form.encode_decode(x) - x).unflatten(-1, (-1, 128)).square().sum(-1) for form in (plain, searched)]
        assert (errors[1] <= errors[0]).all()
        assert errors[1].sum() < errors[0].sum()


def test_spikes_and_outlier_channels_are_kept_in_sixteen_bits() -> None:
    x = contributions(2, 1024)
    groups, read = x.unflatten(-1, (-1, 32)), GroupGrid(group_size=32, spikes=2).encode_decode(x).unflatten(-1, (-1, 32))
    for extreme in (groups.argmin(-1, keepdim=True), groups.argmax(-1, keepdim=True)):
        assert torch.equal(read.gather(-1, extreme), groups.gather(-1, extreme).bfloat16().float())
    wide = torch.randn(2, 768, generator=torch.Generator().manual_seed(1))
    wide[:, 5::96] *= 100
    kept = OutlierChannels(GroupGrid(), 96, 1).encode_decode(wide)
    assert torch.equal(kept[:, 5::96], wide[:, 5::96].bfloat16().float())
    assert (kept - wide).square().sum() < 0.1 * (GroupGrid().encode_decode(wide) - wide).square().sum()


def test_feedback_two_sites_later_and_gain_by_depth() -> None:
    quant = QuantConfig(group_size=32)
    config = EchoConfig(quant=quant, feedback=FeedbackConfig(state="fp32"), algorithm="two_shot", sites=uniform())
    wire = library_wire(quant)
    x = [contributions(4, 512, seed=site) for site in range(SITES)]
    plain = EmulatedBackend(4, Emulation(wire, wire), SITES)

    def run(emulation: Emulation) -> list[torch.Tensor]:
        session = Session(EmulatedBackend(4, emulation, SITES), config, SITES)
        with session.run_pass():
            return [session.reduce(row) for row in x]

    pair = run(Emulation(wire, wire, lag=2))
    alone = [plain.all_reduce(row, quant, "two_shot") for row in x]
    assert torch.equal(pair[0], alone[0])
    assert torch.equal(pair[1], alone[1])
    net = [y - row.sum(0) for y, row in zip(pair, x)]
    left = (alone[2] - x[2].sum(0)).norm()
    assert (net[2] + net[0]).norm() < 1.5 * left, "site 2 pays back site 0"
    ramp = run(Emulation(wire, wire, gain=(0.0, 1.0)))
    assert torch.equal(ramp[0], alone[0])
    assert Emulation(wire, wire, gain=(0.0, 1.0)).gain_at(SITES - 1, SITES) == 1.0
    assert not torch.equal(ramp[1], alone[1])
    assert torch.equal(run(Emulation(wire, wire, gain=(0.0, 0.0)))[3], alone[3])


def test_gather_format_and_own_rounding_change_the_bits_and_the_error() -> None:
    quant = QuantConfig(group_size=32)
    config = EchoConfig(quant=quant, feedback=NO_FEEDBACK, algorithm="two_shot", sites=uniform())
    wire = library_wire(quant)
    fine = Wire(LibraryGrid(quant), LibraryGrid(quant.with_bits(8)))
    assert emulated_bits(Emulation(fine, wire), config, 4, 4096, SITES) == 4 + 1 + 2
    assert emulated_bits(Emulation(fine, wire), replace(config, algorithm="one_shot"), 4, 4096, SITES) == 5 * 2
    x = torch.randn(4, 4096, generator=torch.Generator().manual_seed(2))
    errors = [
        (EmulatedBackend(4, setting, SITES).all_reduce(x, quant, "two_shot") - x.sum(0)).norm()
        for setting in (Emulation(fine, wire), Emulation(wire, wire), Emulation(wire, wire, quantize_own=True))
    ]
    assert errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("signs", [False, True])
def test_rotation_turns_back_and_signs_spread_a_constant(signs: bool) -> None:
    x = contributions(3, 1024)
    torch.testing.assert_close(turn_back(turn(x, 64, signs), 64, signs), x, rtol=1e-5, atol=1e-2)
    largest = turn(torch.ones(1, 64), 64, signs).abs().max()
    assert (largest < 4) == signs
