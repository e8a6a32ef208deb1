"""What goes wrong is said, on every rank, in bounded time: late peers, mismatched calls, memory that cannot be shared, misuse."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from contributions import contributions
from echoreduce import reference
from echoreduce.config import FeedbackConfig, QuantConfig
from echoreduce.runtime.schedule import Tuning

SMALL = Tuning(warps=1, chunk_values=2048, waves=2, blocks=(2, 2, 1))


def open_backend(group: dist.ProcessGroup, **options: object):
    from echoreduce.runtime.p2p import P2PBackend

    return P2PBackend(group, device="cpu", tuning=SMALL, **{"timeout": timedelta(seconds=60), "first_half": 1 << 16, **options})


def late(group, algorithm):
    """Rank 0 calls alone; the others never come."""
    backend = open_backend(group, timeout=timedelta(seconds=0.4), blocking=True)
    rank = dist.get_rank(group)
    found = ""
    if rank == 0:
        out = torch.zeros(700)
        try:
            backend.all_reduce(torch.ones(700), QuantConfig(), algorithm, out=out)
        except Exception as error:
            found = type(error).__name__, str(error), error.ranks
        try:
            backend.all_reduce(torch.ones(700), QuantConfig(), algorithm)
        except Exception as error:
            found = (*found, str(error), bool(out.isnan().any()))
    dist.barrier(group)
    return found


@pytest.mark.parametrize("algorithm, stage", [("two_shot", "push"), ("one_shot", "push")])
def test_a_peer_that_does_not_come_is_named_and_its_sum_is_not_a_number(ranks, algorithm, stage):
    kind, text, missing, again, marked = ranks.run(late, 2, algorithm)[0]
    assert kind == "PeerError"
    assert missing == (1,)
    assert f"stage {stage}, tile 0, expected epoch 1, seen 0" in text
    assert again == text
    assert marked


def mismatched(group, change):
    backend = open_backend(group, blocking=True)
    rank = dist.get_rank(group)
    x, quant, algorithm = torch.ones(700), QuantConfig(), "two_shot"
    if rank == 0 and change == "size":
        x = torch.ones(900)
    if rank == 0 and change == "bits":
        quant = QuantConfig(bits=8)
    if rank == 0 and change == "algorithm":
        algorithm = "one_shot"
    if rank == 0 and change == "dtype":
        x = x.half()
    try:
        backend.all_reduce(x, quant, algorithm)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("change, words", [("size", "900 values"), ("bits", "8 bits"), ("algorithm", "one_shot"), ("dtype", "fp16")])
def test_a_mismatch_raises_the_same_text_on_both_ranks(ranks, change, words):
    (kind, text), other = ranks.run(mismatched, 2, change)
    assert kind == "MismatchError"
    assert words in text
    assert "700 values" in text
    assert other == (kind, text)


def refused(group, where):
    """One rank's step of the set-up fails."""
    from echoreduce.runtime.memory import FileBlock
    from echoreduce.runtime.workspace import Workspace

    rank = dist.get_rank(group)
    wrong = rank == dist.get_world_size(group) - 1
    kept = FileBlock.allocate, Workspace._probe_write

    def fail(*arguments):
        raise OSError("handle cannot be opened")

    if wrong and where == "allocate":
        FileBlock.allocate = fail
    if wrong and where == "write":
        Workspace._probe_write = lambda self, block: None
    try:
        open_backend(group)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        FileBlock.allocate, Workspace._probe_write = kept
    return "none", ""


REFUSALS = [("allocate", "rank 2: OSError: handle cannot be opened"), ("write", "nothing arrived from rank 2")]


@pytest.mark.parametrize("where, words", REFUSALS)
def test_set_up_is_all_or_nothing(ranks, where, words):
    results = ranks.run(refused, 3, where)
    assert {kind for kind, _ in results} == {"BackendUnavailable"}
    assert len({text for _, text in results}) == 1
    assert words in results[0][1]


def layouts(group):
    """In place, strided, empty, 0-dimensional, growing, and two groups at once."""
    backend = open_backend(group, first_half=1 << 12)
    rank = dist.get_rank(group)
    made = {}
    for name, shape in (("flat", (9000,)), ("scalar", ()), ("empty", (0, 4)), ("grown", (50_000,)), ("small", (3, 5))):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).bfloat16()
        y = backend.all_reduce(x, QuantConfig(), "two_shot")
        z = x.clone()
        backend.all_reduce(z, QuantConfig(), "two_shot", out=z)
        made[name] = y, torch.equal(y, z)
    base = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    view = base.t()[1:]
    row = base[:, 0].clone()
    made["strided"] = backend.all_reduce(view, QuantConfig(), "one_shot"), True
    backend.all_reduce(view, QuantConfig(), "one_shot", out=view)
    made["in place"] = view.clone(), torch.equal(row, base[:, 0])
    state = backend.new_state(FeedbackConfig("group", state="fp32"))
    w = torch.randn(400, generator=torch.Generator().manual_seed(rank))
    made["group residual in place"] = backend.all_reduce(w, QuantConfig(), "two_shot", state, out=w), True
    made["average"] = state.averages()[0][0].clone(), True
    backend.close()
    return made


def test_shapes_layouts_and_growth(ranks):
    results = ranks.run(layouts, 2)
    shapes = {"flat": (9000,), "scalar": (), "empty": (0, 4), "grown": (50_000,), "small": (3, 5)}
    for name, shape in shapes.items():
        every = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(2)])
        for made in results:
            assert made[name][0].shape == torch.Size(shape)
            assert torch.equal(made[name][0], reference.all_reduce(every, QuantConfig()).output)
            assert made[name][1], f"{name}: in place differs"
    every = torch.stack([torch.randn(8, 6, generator=torch.Generator().manual_seed(rank)).t()[1:] for rank in range(2)])
    expected = reference.all_reduce(every, QuantConfig(), "one_shot").output
    every = torch.stack([torch.randn(400, generator=torch.Generator().manual_seed(rank)) for rank in range(2)])
    late_sum = reference.all_reduce(every, QuantConfig(), residual="group")
    for rank, made in enumerate(results):
        assert torch.equal(made["strided"][0], expected)
        assert torch.equal(made["in place"][0], expected)
        assert made["in place"][1], "memory outside the view was touched"
        assert torch.equal(made["group residual in place"][0], late_sum.output)
        assert torch.equal(made["average"][0], late_sum.residuals[rank].reshape(-1))


def closed(group):
    backend = open_backend(group)
    backend.close()
    backend.close()
    try:
        backend.all_reduce(contributions(2, 8)[0], QuantConfig(), "two_shot")
    except Exception as error:
        return type(error).__name__
    return "none"


def test_a_closed_backend_refuses(ranks):
    assert ranks.run(closed, 2) == ["GroupError", "GroupError"]


def automatic(group):
    """Below the crossover exact and without state, above it low-bit; without peer-to-peer memory the agreed fallback."""
    from echoreduce.runtime.dispatch import AutoBackend, Table
    from echoreduce.runtime.dispatch import open_backend as choose_backend

    auto = AutoBackend(open_backend(group))
    auto._tables = {2: Table(1024, "test"), 4: Table(1024, "test")}
    state = auto.new_state(FeedbackConfig())
    rank = dist.get_rank(group)
    small = torch.full((16,), 1.0 + rank)
    below = auto.all_reduce(small, QuantConfig(), "two_shot", state)
    untouched = state.averages() == []
    x = contributions(2, 700)[rank]
    above = auto.all_reduce(x, QuantConfig(), "two_shot", state)
    auto.close()
    agreed = choose_backend(group, "auto", device="cuda")
    by_group = choose_backend(group, "auto")
    reasons = [(backend.name, reason) for backend, reason in (agreed, by_group)]
    return below, untouched, above, auto.explain(64, torch.float32), reasons


def test_auto_follows_its_table_and_falls_back(ranks):
    for below, untouched, above, text, reasons in ranks.run(automatic, 2):
        assert torch.equal(below, torch.full((16,), 3.0))
        assert untouched
        assert torch.equal(above, reference.all_reduce(contributions(2, 700), QuantConfig()).output)
        assert text == "exact: 64 bytes are below the crossover of 1024 bytes (test)"
        (agreed, reason), (by_group, why) = reasons
        assert (agreed, by_group) == ("c10d", "c10d")
        assert "rank 0: no CUDA device" in reason
        assert "not over NCCL" in why
