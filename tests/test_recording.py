"""A recording gives the sum again, bit for bit, at the size that its text promises, on virtual ranks and on real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contributions import contributions
from echoreduce import QuantConfig
from echoreduce.config import FeedbackConfig
from echoreduce.errors import ShapeError
from echoreduce.recording import Recording
from echoreduce.runtime.c10d import C10dBackend
from echoreduce.virtual import VirtualBackend
from ranks import RankPool

CASES = [
    (numel, dtype, QuantConfig(bits=bits, rotation=rotation), algorithm)
    for numel in (1, 1500)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for bits, rotation, algorithm in (
        (4, "none", "two_shot"),
        (4, "hadamard", "one_shot"),
        (5, "none", "two_shot"),
        (8, "none", "one_shot"),
        (16, "none", "two_shot"),
    )
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replay_on_virtual_ranks(world_size: int) -> None:
    backend = VirtualBackend(world_size)
    for numel, dtype, quant, algorithm in CASES:
        state = backend.new_state(FeedbackConfig())
        for seed in range(2):
            recording = Recording()
            total = backend.all_reduce(contributions(world_size, numel, dtype, seed), quant, algorithm, state, recording=recording)
            kept = total.clone()
            total.zero_()
            assert torch.equal(recording.replay().view(torch.uint8), kept.view(torch.uint8))
            assert recording.replay().data_ptr() != recording.replay().data_ptr()


def replays(group: Any) -> list[bool]:
    backend = C10dBackend(group)
    same = []
    for numel, dtype, quant, algorithm in CASES:
        recording = Recording()
        x = contributions(backend.world_size, numel, dtype)[backend.rank].reshape(-1, 1)
        total = backend.all_reduce(x, quant, algorithm, backend.new_state(FeedbackConfig()), recording=recording)
        calls = backend._call
        same.append(torch.equal(recording.replay().view(torch.uint8), total.view(torch.uint8)) and backend._call == calls)
    return same


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replay_on_real_ranks(pool: RankPool, world_size: int) -> None:
    for rank in pool.run(replays, world_size):
        assert all(rank)


@pytest.mark.parametrize(
    ("world_size", "algorithm", "dtype", "bits_a_value"),
    [
        (4, "two_shot", torch.bfloat16, 4.25),
        (2, "one_shot", torch.bfloat16, 8.5),
        (4, "one_shot", torch.bfloat16, 16),
        (4, "one_shot", torch.float32, 17),
    ],
)
def test_what_a_recording_costs(world_size: int, algorithm: str, dtype: torch.dtype, bits_a_value: float) -> None:
    recording = Recording()
    numel = 4 * 4096
    VirtualBackend(world_size).all_reduce(contributions(world_size, numel, dtype), QuantConfig(), algorithm, recording=recording)
    assert 8 * recording.nbytes == bits_a_value * numel


def test_an_empty_recording_cannot_be_replayed() -> None:
    with pytest.raises(ShapeError, match="nothing was recorded"):
        Recording().replay()
