"""Passes and sites: state is zero when a pass starts, sites are counted, misuse is an error."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor

from contributions import contributions
from echoreduce import EchoConfig, FeedbackConfig, QuantConfig, edges, preset
from echoreduce import reference as ref
from echoreduce.errors import ConfigError, PassError, ShapeError
from echoreduce.session import Session
from echoreduce.virtual import VirtualBackend

P, SITES = 2, 6


def session(config: EchoConfig | None = None, sites: int | None = SITES) -> Session:
    return Session(VirtualBackend(P), config or preset("fast"), sites)


def run_pass(session: Session, seed: int, *shape: int, sites: int = SITES, scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(seed)
    session.begin()
    return [session.reduce(torch.randn(P, *shape) * scale) for _ in range(sites)]


def test_sites_follow_the_policy_and_the_recurrence() -> None:
    config = EchoConfig(feedback=FeedbackConfig(state="fp32"), sites=edges(1, 1, 8), algorithm="two_shot")
    xs = [contributions(P, 1000, seed=k) for k in range(4)]
    with session(config, 4).run_pass() as open_session:
        outputs = [open_session.reduce(x) for x in xs]
    correction = None
    for site, (x, output) in enumerate(zip(xs, outputs)):
        quant = QuantConfig(bits=8 if site in (0, 3) else 4)
        expected = ref.all_reduce(x, quant, "two_shot", correction, "local")
        correction = expected.residuals
        assert torch.equal(output, expected.output)


def test_o19_o20_every_pass_starts_from_zero_whatever_came_before() -> None:
    alone = run_pass(session(), 7, 8, 64)
    used = session()
    run_pass(used, 1, 8, 64, scale=100.0)
    for shape in ((1, 37, 64), (1, 1, 64), (4, 16, 64), (2, 8, 64), (8, 2, 64)):
        first = run_pass(used, 3, *shape, sites=4)[0]
        torch.manual_seed(3)
        bits = QuantConfig(bits=8)
        assert torch.equal(first, ref.all_reduce(torch.randn(P, *shape), bits, "one_shot").output)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run_pass(used, 7, 8, 64), alone))


def test_o07_a_nan_does_not_reach_the_next_pass() -> None:
    alone = run_pass(session(), 7, 8, 64)
    used = session()
    used.begin()
    for site in range(3):
        x = torch.randn(P, 8, 64)
        x[1, 3, 5] = torch.nan
        assert used.reduce(x)[3].isnan().any(), site
    assert all(torch.equal(a, b) for a, b in zip(run_pass(used, 7, 8, 64), alone))


def test_o23_a_pass_that_broke_off_leaves_nothing_behind() -> None:
    alone = run_pass(session(), 7, 8, 64)
    for interruption in (RuntimeError, KeyboardInterrupt):
        broken = session()

        def fail(broken: Session = broken, interruption: type[BaseException] = interruption) -> None:
            with broken.run_pass():
                broken.reduce(torch.randn(P, 8, 64))
                raise interruption

        with pytest.raises(interruption):
            fail()
        assert all(torch.equal(a, b) for a, b in zip(run_pass(broken, 7, 8, 64), alone))
        run_pass(broken, 1, 8, 64, sites=2)  # early return
        assert all(torch.equal(a, b) for a, b in zip(run_pass(broken, 7, 8, 64), alone))


def test_an_interrupt_inside_a_call_leaves_nothing_behind() -> None:
    class Interrupting(VirtualBackend):
        armed = False

        def all_reduce(self, *args: object, **kwargs: object) -> Tensor:
            if self.armed:
                raise KeyboardInterrupt
            return super().all_reduce(*args, **kwargs)

    backend = Interrupting(P)
    broken = Session(backend, preset("fast"), SITES)
    broken.begin()
    broken.reduce(torch.randn(P, 8, 64))
    backend.armed = True
    with pytest.raises(KeyboardInterrupt):
        broken.reduce(torch.randn(P, 8, 64))
    backend.armed = False
    assert all(torch.equal(a, b) for a, b in zip(run_pass(broken, 7, 8, 64), run_pass(session(), 7, 8, 64)))


def test_o24_inference_mode_before_and_after_normal_use() -> None:
    alone = run_pass(session(), 7, 8, 64)
    for order in ((torch.inference_mode, torch.no_grad, torch.enable_grad), (torch.enable_grad, torch.no_grad, torch.inference_mode)):
        used = session()
        for mode in order:
            with mode():
                outputs = run_pass(used, 7, 8, 64)
            assert all(torch.equal(a, b) for a, b in zip(outputs, alone))
        used.begin()
        x = torch.randn(P, 8, 64, requires_grad=True)
        used.reduce(x * 1).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))


def test_misuse_is_an_error() -> None:
    used = session(sites=16)
    with pytest.raises(PassError, match="no forward pass is open"):
        used.reduce(torch.randn(P, 64))
    used.begin()
    for _ in range(16):
        used.reduce(torch.randn(P, 64))
    with pytest.raises(PassError, match="site 17 of a pass of 16"):
        used.reduce(torch.randn(P, 64))
    used.begin()
    used.reduce(torch.randn(P, 64))
    with pytest.raises(ShapeError, match="pass began with"):
        used.reduce(torch.randn(P, 65))
    used.end()
    with pytest.raises(PassError):
        used.reduce(torch.randn(P, 64))
    with pytest.raises(ConfigError, match="number of sites"):
        session(sites=None)
    with pytest.raises(ConfigError, match="at least 1"):
        session(sites=0)


def test_concurrent_use_is_an_error() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(VirtualBackend):
        def all_reduce(self, *args: object, **kwargs: object) -> Tensor:
            entered.set()
            assert leave.wait(30)
            return super().all_reduce(*args, **kwargs)

    shared = Session(Slow(P), preset("fast"), SITES)
    shared.begin()
    thread = threading.Thread(target=shared.reduce, args=(torch.randn(P, 64),))
    thread.start()
    assert entered.wait(30)
    with pytest.raises(PassError, match="concurrent use"):
        shared.reduce(torch.randn(P, 64))
    with pytest.raises(PassError, match="concurrent use"):
        shared.begin()
    leave.set()
    thread.join()
    shared.reduce(torch.randn(P, 64))


def test_forward_and_backward_keep_separate_state() -> None:
    both, forward = session(), session()
    both.begin("forward")
    both.begin("backward")
    forward.begin()
    for seed in range(4):
        x = contributions(P, 500, seed=seed)
        mixed = both.reduce(x)
        both.reduce(contributions(P, 700, seed=90 + seed), "backward")
        assert torch.equal(mixed, forward.reduce(x))


def test_a_forward_begins_while_a_backward_is_open() -> None:
    alone = session()
    alone.begin("backward")
    expected = [alone.reduce(contributions(P, 500, seed=seed), "backward") for seed in range(3)]
    both = session()
    both.begin("backward")
    for seed in range(3):
        assert torch.equal(both.reduce(contributions(P, 500, seed=seed), "backward"), expected[seed])
        both.begin()
        both.reduce(contributions(P, 700, seed=seed))


def test_two_sessions_share_a_backend() -> None:
    backend = VirtualBackend(P)
    one, two = Session(backend, preset("fast"), SITES), Session(backend, preset("paper"), SITES)
    alone = run_pass(session(), 7, 8, 64)
    one.begin()
    two.begin()
    torch.manual_seed(7)
    xs = [torch.randn(P, 8, 64) for _ in range(SITES)]
    for x, expected in zip(xs, alone):
        assert torch.equal(one.reduce(x), expected)
        two.reduce(x * 3)


def test_o25_copies_and_pickles() -> None:
    used = session()
    run_pass(used, 1, 8, 64, sites=3)
    twin = copy.deepcopy(used)
    assert all(torch.equal(a, b) for a, b in zip(run_pass(twin, 7, 8, 64), run_pass(session(), 7, 8, 64)))
    assert pickle.loads(pickle.dumps(used.config)) == used.config
    with pytest.raises(TypeError, match=r"session\.config"):
        pickle.dumps(used)


def test_o11_one_rank() -> None:
    used = Session(VirtualBackend(1), preset("fast"), 5)
    used.begin()
    for _ in range(5):
        x = torch.randn(1, 4, 8, requires_grad=True)
        y = used.reduce(x * 1)
        assert torch.equal(y, x[0])
        y.mul_(2)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2))
