"""The real kernels and the real P2P backend in P processes on CPU: every bit as in the reference, state included."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from contributions import contributions
from echoreduce import reference
from echoreduce.config import NO_FEEDBACK, FeedbackConfig, QuantConfig
from echoreduce.feedback.compensator import FeedbackState, correction, update
from echoreduce.runtime.schedule import Tuning

SMALL = Tuning(warps=1, chunk_values=2048, waves=2, blocks=(2, 2, 1))


def open_backend(group: dist.ProcessGroup, **options: object):
    from echoreduce.runtime.p2p import P2PBackend

    return P2PBackend(group, device="cpu", tuning=SMALL, **{"timeout": timedelta(seconds=60), "first_half": 1 << 16, **options})


def run_pass(group, quant, algorithm, feedback, dtype, numel, sites, options):
    """One pass of `sites` calls: outputs, and the averages after each."""
    backend = open_backend(group, **options)
    state = backend.new_state(feedback) if feedback.enabled else None
    outputs, averages = [], []
    for site in range(sites):
        x = contributions(dist.get_world_size(group), numel, dtype, seed=site)[dist.get_rank(group)]
        outputs.append(backend.all_reduce(x, quant, algorithm, state))
        averages.append([(value.clone(), None if e is None else e.clone()) for value, e in state.averages()] if state else [])
    backend.close()
    return outputs, averages


PAPER = FeedbackConfig("group", 0.75, 0.35, (0.7, 0.3), "fp32")
CASES = [
    (2, "two_shot", QuantConfig(), NO_FEEDBACK, torch.bfloat16, 1280, {}),
    (2, "one_shot", QuantConfig(), FeedbackConfig(state="float8_e4m3"), torch.bfloat16, 1501, {}),
    (3, "two_shot", QuantConfig(bits=8), FeedbackConfig(state="float8_e5m2"), torch.float16, 2003, {}),
    (4, "two_shot", QuantConfig(), FeedbackConfig(state="bf16"), torch.float32, 3001, {}),
    (4, "one_shot", QuantConfig(bits=5, group_size=64), FeedbackConfig(decays=(0.7, 0.3), gain=0.75), torch.bfloat16, 1029, {}),
    (2, "two_shot", QuantConfig(qparams="fp16"), PAPER, torch.bfloat16, 2601, {}),
    (3, "one_shot", QuantConfig(rotation="hadamard"), FeedbackConfig("group", state="float8_e4m3"), torch.bfloat16, 1301, {}),
    (3, "two_shot", QuantConfig(bits=6, policy="asymmetric"), NO_FEEDBACK, torch.float16, 5, {}),
    (4, "two_shot", QuantConfig(policy="symmetric"), NO_FEEDBACK, torch.float32, 1, {}),
    (2, "two_shot", QuantConfig(group_size=16), FeedbackConfig(), torch.bfloat16, 3001, {"largest_half": 1 << 12}),
    (2, "one_shot", QuantConfig(), PAPER, torch.bfloat16, 20001, {"largest_half": 1 << 14}),
]


@pytest.mark.parametrize("world_size, algorithm, quant, feedback, dtype, numel, options", CASES)
def test_pass_equals_the_reference(ranks, world_size, algorithm, quant, feedback, dtype, numel, options):
    sites = 3
    results = ranks.run(run_pass, world_size, quant, algorithm, feedback, dtype, numel, sites, options)
    state = FeedbackState(feedback)
    for site in range(sites):
        x = contributions(world_size, numel, dtype, seed=site)
        expected = reference.all_reduce(x, quant, algorithm, correction(state), feedback.residual)
        for outputs, _ in results:
            torch.testing.assert_close(outputs[site], expected.output, rtol=0, atol=0, equal_nan=True)
        if feedback.enabled:
            update(state, expected.residuals, expected.steps)
            for rank, (_, averages) in enumerate(results):
                for mine, want in zip(averages[site], state.averages, strict=True):
                    check_average(mine, want.values[rank].reshape(-1), None if want.exponent is None else want.exponent[rank].reshape(-1))


def check_average(mine, values, exponent):
    stored, scale = mine
    if exponent is None:
        assert torch.equal(stored, values)
    else:
        assert torch.equal(scale, exponent)
        assert torch.equal(stored, values.view(torch.int8))
