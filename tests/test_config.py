"""Settings are validated once, quoting the bad value; presets are what their documentation says."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from echoreduce import NO_FEEDBACK, PRESETS, EchoConfig, FeedbackConfig, QuantConfig, early_half, edges, load_config, preset, uniform
from echoreduce.config import ONE_SHOT_VALUES
from echoreduce.errors import ConfigError
from echoreduce.sites import bits_at


@pytest.mark.parametrize(
    ("build", "quoted"),
    [
        (lambda: QuantConfig(bits=9), "9"),
        (lambda: QuantConfig(bits=1), "1"),
        (lambda: QuantConfig(group_size=100), "100"),
        (lambda: QuantConfig(policy="naive"), "naive"),
        (lambda: QuantConfig(rotation="haar"), "haar"),
        (lambda: FeedbackConfig(gain=1.5), "1.5"),
        (lambda: FeedbackConfig(decays=(1.0, 0.3)), "1.0"),
        (lambda: FeedbackConfig(state="int4"), "int4"),
        (lambda: EchoConfig(algorithm="ring"), "ring"),
        (lambda: edges(first=-1), "-1"),
        (lambda: edges(bits=12), "12"),
        (lambda: preset("papre"), "papre"),
    ],
)
def test_bad_values_are_quoted(build: object, quoted: str) -> None:
    with pytest.raises(ConfigError, match=quoted.replace(".", r"\.")):
        build()


def test_site_policies() -> None:
    assert [bits_at(uniform(), k, None, 4) for k in range(3)] == [4, 4, 4]
    assert [bits_at(edges(2, 1, 8), k, 6, 4) for k in range(6)] == [8, 8, 4, 4, 4, 8]
    assert [bits_at(early_half(8), k, 5, 4) for k in range(5)] == [8, 8, 8, 4, 4]
    assert [bits_at([8, None, 16], k, 3, 5) for k in range(3)] == [8, 5, 16]
    assert bits_at(lambda site, sites: 6 if site == sites - 1 else None, 3, 4, 4) == 6
    with pytest.raises(ConfigError, match="lists 3 sites"):
        bits_at([8, 8, 8], 0, 4, 4)
    with pytest.raises(ConfigError, match="number of sites"):
        bits_at(edges(), 0, None, 4)
    with pytest.raises(ConfigError, match="11"):
        bits_at(lambda site, sites: 11, 0, 4, 4)


def test_presets() -> None:
    paper = preset("paper")
    assert paper.feedback == FeedbackConfig(residual="group", gain=0.75, blend=0.35, decays=(0.7, 0.3), state="fp32")
    assert paper.quant == QuantConfig(bits=4, group_size=128, qparams="fp16")
    assert (paper.algorithm, paper.sites, paper.rescale) == ("two_shot", uniform(), "backward")
    assert preset("paper_early").sites == early_half(8)
    fast = preset("fast", group_size=64)
    assert (fast.feedback.residual, fast.feedback.gain, fast.feedback.decays) == ("local", 1.0, (0.0, 0.0))
    assert (fast.sites, fast.quant) == (edges(2, 2, 8), QuantConfig(group_size=64))
    rotated = QuantConfig(group_size=64, policy="compact", rotation="hadamard")
    assert preset("default") == EchoConfig(quant=rotated, feedback=fast.feedback, sites=edges(3, 2, 7))
    assert preset("accurate") == EchoConfig(quant=rotated.with_bits(5), feedback=fast.feedback, sites=edges(3, 2, 8))
    assert preset("post_norm") == load_config(
        Path(__file__).parents[1] / "experiments" / "six_bits_rotated.json"
    )  # as measured, docs/tasks.md
    assert preset("no_feedback").feedback == NO_FEEDBACK


def test_compact_codes_of_seven_and_eight_bits_keep_two_words() -> None:
    compact = QuantConfig(group_size=64, policy="compact")
    assert [compact.with_bits(bits).bits_per_value() for bits in (4, 6, 7, 8)] == [4.25, 6.25, 7.5, 8.5]
    assert [compact.with_bits(bits).layout for bits in (6, 7)] == ["compact", "zero_aware"]


def test_equal_configurations_have_equal_digests_also_after_pickling() -> None:
    digests = {name: config.digest() for name, config in PRESETS.items()}
    assert len(set(digests.values())) == len(PRESETS)
    for config in PRESETS.values():
        assert pickle.loads(pickle.dumps(config)).digest() == config.digest()
        assert 0 <= config.digest() < 2**63


def test_auto_is_one_shot_at_two_ranks_below_128_mib() -> None:
    assert EchoConfig().algorithm_for(2) == "one_shot"
    assert EchoConfig().algorithm_for(2, ONE_SHOT_VALUES - 1) == "one_shot"
    assert EchoConfig().algorithm_for(2, ONE_SHOT_VALUES) == "two_shot"
    assert EchoConfig(algorithm="one_shot").algorithm_for(2, ONE_SHOT_VALUES) == "one_shot"
    assert EchoConfig().algorithm_for(4) == "two_shot"
    assert EchoConfig(algorithm="two_shot").algorithm_for(2) == "two_shot"
