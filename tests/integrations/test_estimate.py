"""Probes see the matrices of a linear network, tangents are derivatives, passes obey the recursion, verdicts name what fails."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echoreduce import FeedbackConfig, preset
from echoreduce.config import NO_FEEDBACK
from echoreduce.errors import ConfigError
from echoreduce.integrations.analysis import PROBE, analyze
from echoreduce.integrations.estimate import follow, isotropic, probe, standard_error, unevenness
from echoreduce.integrations.evaluation import Variant
from echoreduce.integrations.residual_stream import ResidualStream, eager_attention, find_blocks
from echoreduce.integrations.verdicts import Check, judge, network_assumptions, pass_assumptions
from echoreduce.theory import network as matrices
from echoreduce.theory import stream as streams
from echoreduce.theory.network import LinearNetwork, coefficients, propagate, random_network

transformers = pytest.importorskip("transformers")

KERNELS = {"none": NO_FEEDBACK, "single step": FeedbackConfig(), "paper": preset("paper").feedback}


class LinearStream:
    """What `probe` asks of a stream, with known Jacobians; float64."""

    def __init__(self, network: LinearNetwork) -> None:
        self.network, self.sites, self.dim = network, network.sites, network.dim
        self.clean = [torch.full((1, 1, self.dim), float(scale), dtype=torch.float64) for scale in network.scales]

    def tangents(self, injected: Mapping[int, Tensor], rows: int) -> dict[int, Tensor]:
        start = min(injected)
        arrived, v = {}, torch.zeros(rows, 1, self.dim, dtype=torch.float64)
        for k in range(start, self.sites):
            arrived[k] = v
            v = v + v @ torch.from_numpy(self.network.jacobians[k]).T + injected.get(k, 0.0)
        return arrived | {self.sites: v}


def test_probes_of_a_linear_network_are_its_matrices() -> None:
    network = random_network(7, 30, 1.0, 3)
    found = probe(LinearStream(network), KERNELS, 400)  # type: ignore[arg-type]
    measured, exact = found.network(), matrices.measure(network)
    frobenius = np.sum(network.jacobians**2, axis=(1, 2)) / 30
    for k in range(1, 7):
        assert abs(measured.jacobian_energy[k] - frobenius[k]) < 5 * standard_error(found.second[:, k, k + 1])
    for name, kernel in KERNELS.items():
        energy = np.sum(coefficients(network, kernel) ** 2, axis=(1, 2)) / 30
        rows = found.coefficients[name]
        assert np.all(np.abs(rows.mean(0) - energy) <= 5 * rows.std(0, ddof=1) / 20 + 1e-6)
    assert measured.scales == pytest.approx(network.scales)
    assert measured.budget == pytest.approx(exact.budget, abs=0.1)
    assert measured.constants().c0 == pytest.approx(exact.c0, rel=0.05)


def test_assumption_1_of_a_network_that_grows_as_its_scales_is_free() -> None:
    scales = np.array([1.0, 1.2, 2.0, 2.5, 4.0])
    jacobians = (scales[1:] / scales[:-1] - 1.0)[:, None, None] * np.eye(6)
    measured = probe(LinearStream(LinearNetwork(jacobians, scales)), {}, 3).network()  # type: ignore[arg-type]
    assert measured.budget == pytest.approx(0.0, abs=1e-9)
    assert measured.arriving == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", KERNELS)
def test_predicted_is_measured_for_a_linear_network(name: str) -> None:
    network = random_network(8, 20, 1.0, 5)
    found = probe(LinearStream(network), KERNELS, 200)  # type: ignore[arg-type]
    q = np.linspace(1.0, 3.0, 8)
    injected = streams.random_sphere((8, 2000, 20), 1.0, 0) * q[:, None, None]
    output = propagate(network, streams.run(injected, KERNELS[name]).net)
    energy = np.sum(output**2, axis=-1)
    predicted = np.sum(q**2 * found.coefficients[name], axis=1)
    assert abs(energy.mean() - predicted.mean()) < 5 * (standard_error(energy) + standard_error(predicted))


def tiny(architecture: str = "Llama") -> Any:
    torch.manual_seed(0)
    kind = transformers.Gemma3TextConfig if architecture == "Gemma3" else transformers.LlamaConfig
    config = kind(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


pytestmark = pytest.mark.filterwarnings("ignore:.*norms its sums")
TOKENS = torch.arange(1, 13) * 5 % 64  # Gemma's token 0 is padding, whose embedding is zero, where a norm is not smooth


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])
def test_tangents_are_derivatives(architecture: str) -> None:
    model = tiny(architecture).double()
    with eager_attention(model):
        stream = ResidualStream(model, TOKENS)
        assert stream.sites == 6
        v = torch.randn(stream.clean[0].shape, dtype=torch.float64)
        for site in (0, 3):
            arrived = stream.tangents(injected={site: v})
            moved = {}
            for sign in (1, -1):
                with stream.hooked(leaving=lambda k, output, sign=sign, site=site: output + sign * 1e-3 * v if k == site else None):
                    moved[sign] = stream.visit()
            for k in range(site + 1, 7):
                slope = (moved[1][k] - moved[-1][k]) / 2e-3
                assert (arrived[k] - slope).norm() < 1e-3 * slope.norm()  # the norms of the model compute in float32
            assert torch.equal(arrived[site + 1], v)


def test_read_tangents_give_single_jacobians() -> None:
    model = tiny().double()
    with eager_attention(model):
        stream = ResidualStream(model, TOKENS)
        v = isotropic(stream.clean[0].shape[1:], 2, 0).double()
        alone = stream.tangents(read={2: v, 3: v}, rows=2)
        for k in (2, 3):
            through = stream.tangents(injected={k - 1: v}, rows=2)
            assert alone[k + 1] - alone[k] == pytest.approx(through[k + 1] - v, abs=1e-10)


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])
def test_a_pass_obeys_the_recursion(architecture: str) -> None:
    model = tiny(architecture)
    with eager_attention(model):
        stream = ResidualStream(model, TOKENS)
        exact = follow(stream, preset("exact"), 4)
        fine = follow(stream, preset("int8", group_size=16), 4)
        coarse = follow(stream, preset("no_feedback", group_size=16), 4)
    assert exact.injected.max() == 0
    assert exact.deviation.max() < 1e-5 * np.sqrt(stream.dim)
    for pass_ in (fine, coarse):
        assert pass_.deviation[0] == 0
        assert pass_.deviation[1] == pytest.approx(pass_.joined[0], rel=1e-3)
        assert (pass_.relative > 0).all()
    assert fine.linear[-1] == pytest.approx(fine.deviation[-1], rel=0.05)
    assert fine.second_order[-1] / fine.linear[-1] < 0.3 * coarse.second_order[-1] / coarse.linear[-1]
    assert (fine.joined == pytest.approx(fine.injected)) == (architecture == "Llama")


def test_feedback_obeys_eq_13_up_to_its_state() -> None:
    model = tiny()
    config = preset("default", group_size=16)
    with eager_attention(model):
        stream = ResidualStream(model, TOKENS)
        full = SimpleNamespace(**{name: follow(stream, preset(name, group_size=16), 4) for name in ("no_feedback", "paper")})
        coarse = follow(stream, config, 4)
    assert full.no_feedback.departure < 1e-5
    assert full.paper.departure < 1e-5
    assert 1e-3 < coarse.departure < 0.2
    assert coarse.partial[3] < full.no_feedback.partial[3]


@pytest.fixture(scope="module")
def analyzed() -> dict[str, Any]:
    steps: list[str] = []
    variants = [Variant(name, preset(name, group_size=16)) for name in ("no_feedback", "paper", "default")]
    result = analyze(tiny(), TOKENS, variants, 4, 3, steps.append)
    assert steps == [PROBE] * 5 + ["no_feedback", "paper", "default"]
    return result


def test_every_bound_holds_or_names_what_fails(analyzed: dict[str, Any]) -> None:
    assert analyzed["sandwich"] is None
    for one in analyzed["variants"]:
        names = [check["name"] for check in one["checks"]]
        assert any(name.startswith(("Theorem 1", "Eq. 21")) for name in names)
        assert any(name.startswith("Lemma 4") for name in names)
        for check in one["checks"] + analyzed["network"]["checks"]:
            if check["right"] is None:
                assert "R1" in check["verdict"]
            elif check["left"] > check["right"] * (1 + 1e-5):
                assert check["verdict"].startswith("violated: ")
                assert any(figure.isdigit() for figure in check["verdict"])
            else:
                assert check["verdict"] == "holds"
        output = one["output"]
        assert output["predicted"] == pytest.approx(sum(one["by_site"]["share_of_output"]), rel=1e-4)
        assert output["linear"] == pytest.approx(output["measured"], rel=0.5)
    outputs = [one["output"]["measured"] for one in analyzed["variants"]]
    assert outputs[2] < outputs[0]


def test_a_norm_behind_the_sum_is_said_to_be_not_covered() -> None:
    result = analyze(tiny("Gemma3"), TOKENS, [Variant("default", preset("default", group_size=16))], 4, 1, lambda label: None)
    assert "does not cover" in result["sandwich"]
    joins = [one for one in result["variants"][0]["assumptions"] if "Eq. 14" in one["name"]]
    assert len(joins) == 1
    assert not joins[0]["holds"]


def test_a_violated_bound_names_exact_feedback_or_the_noise_model() -> None:
    model = tiny()
    feedback = FeedbackConfig(state="fp32")
    with eager_attention(model):
        stream = ResidualStream(model, TOKENS)
        found = probe(stream, {"x": feedback}, 1)
        one = follow(stream, preset("default", group_size=16), 4)
    honest = judge(feedback, one, found, found.coefficients["x"], False)
    broken = SimpleNamespace(**vars(one) | {"partial": 3 * one.injected.max() * np.ones(6), "linear": 100 * one.linear})
    checks = judge(feedback, broken, found, found.coefficients["x"], False)  # type: ignore[arg-type]
    verdicts = {check.name: check.verdict for check in checks}
    assert verdicts["Theorem 1 (Eq. 19): max ||S_t||"].startswith("violated: exact feedback (Eq. 13), departure")
    assert verdicts["Lemma 4 (Eq. 20), q_s by site: ||E^lin||^2"].startswith("violated: noise model (Eq. 22)")
    assert sum(not check.holds for check in checks) > sum(not check.holds for check in honest)
    assert Check("a", 1.0, 2.0, "holds").holds
    assert {each.name for each in network_assumptions(found)} == {"R1", "R2", "Assumption 1 (Eq. 24)"}
    assert len(pass_assumptions(one, found, False)) == 4


def test_isotropic_vectors_and_unevenness() -> None:
    v = isotropic(torch.Size((5, 8)), 3, 0)
    assert v.square().sum((1, 2)) == pytest.approx(torch.full((3,), 40.0))
    assert not torch.equal(v[0], v[1])
    assert unevenness(torch.ones(4, 8)) == pytest.approx(1.0)
    assert unevenness(torch.tensor([[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]])) == pytest.approx(3.0)
    assert unevenness(torch.zeros(4, 8)) == 1.0


def test_what_cannot_be_analyzed_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        analyze(tiny().bfloat16(), TOKENS, [], 4, 1, lambda label: None)
    odd = tiny()
    del odd.base_model.layers[1].post_attention_layernorm
    with pytest.raises(ConfigError, match="layer 1 of LlamaForCausalLM is no attention and MLP in sequence"):
        find_blocks(odd)
