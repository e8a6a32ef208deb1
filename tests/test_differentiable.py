"""The differentiable functions on virtual ranks: gradients, double backward, torch.compile, recomputation, lifetime of handles."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from echoreduce import EchoConfig, QuantConfig, edges, preset
from echoreduce.differentiable import close_pass, copy_to_tp, open_pass, reduce_from_tp
from echoreduce.errors import ConfigError, PassError
from echoreduce.session import Session
from echoreduce.virtual import VirtualBackend

P, SITES, WIDTH = 2, 5, 32  # `default` sends 8, 8, 4, 8, 8 bits


def session(name: str = "default", sites: int = SITES) -> Session:
    return Session(VirtualBackend(P), preset(name, group_size=16), sites)


def weights(sites: int = SITES) -> Tensor:
    return torch.randn(sites, P, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)).div(WIDTH**0.5).requires_grad_()


def batch(rows: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def block(x: Tensor, weight: Tensor, used: Session, key: str) -> Tensor:
    """x + the sum over ranks of tanh(x W_i) W_i^T; every rank holds its own W_i [P, WIDTH, WIDTH]."""
    inner = torch.tanh(torch.einsum("pbi,pij->pbj", copy_to_tp(x, used, key), weight))
    return x + reduce_from_tp(torch.einsum("pbj,pij->pbi", inner, weight), used, key)


def forward(x: Tensor, weight: Tensor, used: Session, reentrant: bool | None = None, marked: bool = True) -> Tensor:
    if marked:
        x = open_pass(x, used)
    else:
        used.begin()
    for site in range(weight.shape[0]):
        arguments = (x, weight[site], used, f"block {site}")
        x = block(*arguments) if reentrant is None else checkpoint(block, *arguments, use_reentrant=reentrant)
    return close_pass(x, used) if marked else x


def dense(x: Tensor, weight: Tensor) -> Tensor:
    for w in weight:
        x = x + torch.einsum("pbj,pij->bi", torch.tanh(torch.einsum("bi,pij->pbj", x, w)), w)
    return x


def grads(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), inputs)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-5 * b.norm())


def test_o26_exact_gradients_are_those_of_one_process() -> None:
    x, w = batch(), weights()
    for ours, theirs in zip(grads(forward(x, w, session("exact")), x, w), grads(dense(x, w), x, w)):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    for ours, theirs in zip(grads(forward(x, w, session("int8")), x, w), grads(dense(x, w), x, w)):
        assert 0 < (ours - theirs).norm() < 0.02 * theirs.norm()


def test_each_direction_has_its_own_sites_and_state() -> None:
    used = session()
    x, w = batch(), weights()
    first = grads(forward(x, w, used), x, w)
    assert (used.site, used._passes["backward"].site) == (SITES, SITES)
    assert not used._passes["backward"].open, "the end of the backward closes its pass"
    assert all(torch.equal(a, b) for a, b in zip(grads(forward(x, w, used), x, w), first))


def test_higher_orders_are_those_of_one_process() -> None:
    x, w = batch(), weights()

    def penalties(y: Tensor) -> list[Tensor]:
        found = []
        for _ in range(3):
            (y,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
            found += [y.detach(), *torch.autograd.grad(y.square().mean(), (w,), retain_graph=True)]
        return found

    for ours, theirs in zip(penalties(forward(x, w, session("exact"))), penalties(dense(x, w))):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_o30_compiled_in_one_graph_with_dynamic_batch(backend: str) -> None:
    torch._dynamo.reset()
    config = EchoConfig(QuantConfig(bits=4 if backend == "aot_eager" else 16, group_size=16))
    used, w = Session(VirtualBackend(P), config, 3), weights(3)
    same = torch.equal if backend == "aot_eager" else close  # inductor rounds products and tanh its own way
    compiled = torch.compile(lambda x: forward(x, w, used), fullgraph=True, dynamic=True, backend=backend)
    for rows in (2, 5, 9):
        x = batch(rows)
        before = x.detach().clone()
        eager = forward(x, w, used)
        expected = grads(eager, x, w)
        y = compiled(x)
        assert same(y, eager)
        assert all(same(a, b) for a, b in zip(grads(y, x, w), expected))
        assert used._passes["backward"].site == 3
        assert torch.equal(x, before)
        assert y.data_ptr() != x.data_ptr()
        with torch.no_grad():
            assert same(compiled(x), eager)
    assert used.recorded_bytes == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_compiled_passes_in_flight(backend: str) -> None:
    """The number of a pass must leave the forward graph; a number that is looked up in the backward would name the last pass."""
    torch._dynamo.reset()
    used, w = session("exact"), weights(2)
    compiled = torch.compile(lambda x: forward(x, w, used), fullgraph=True, dynamic=True, backend=backend)
    xs = [batch(seed=1), batch(rows=5, seed=2)]
    ys = [compiled(x) for x in xs]
    for index, (x, y) in enumerate(zip(xs, ys)):
        numbers = []
        x.register_hook(lambda _: numbers.append(used._passes["backward"].number))
        assert close(grads(y, x)[0], grads(dense(x, w), x)[0])
        assert numbers[0] == index + 1


def test_operators_pass_the_checks_of_torch_library() -> None:
    used = session()
    x = batch().detach()
    for operator, arguments in (
        (torch.ops.echoreduce.open_pass, (x, used.handle, False)),
        (torch.ops.echoreduce.reduce, (x.expand(P, *x.shape), used.handle, "forward", "", True, False, True, None)),
        (torch.ops.echoreduce.close_pass, (x, used.handle)),
    ):
        used.begin()
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_output_never_aliases_the_input() -> None:
    for world_size in (1, 2):
        used = Session(VirtualBackend(world_size), preset("exact"), 4)
        x = torch.randn(world_size, 4, 8)
        used.begin()
        for strided in (x, x.transpose(1, 2), x.requires_grad_()):
            y = used.reduce(strided)
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            assert y.is_contiguous()


def test_o12_empty_tensors_stay_in_the_graph() -> None:
    used, w = session(), weights()
    x = torch.zeros(0, WIDTH, requires_grad=True)
    y = forward(x, w, used)
    assert y.shape == (0, WIDTH)
    y.sum().backward()
    assert x.grad.shape == (0, WIDTH)
    assert used._passes["backward"].site == SITES
    assert torch.equal(forward(batch(), w, used), forward(batch(), w, session()))


# --- recomputation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "paper", "exact"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("marked", [True, False])
def test_o21_checkpoints_change_nothing(name: str, reentrant: bool, marked: bool) -> None:
    x, w = batch(), weights()
    expected = grads(forward(x, w, session(name)), x, w)
    used = session(name)
    for _ in range(2):
        x.grad = w.grad = None
        y = forward(x, w, used, reentrant, marked)
        assert used.recorded_bytes > 0
        y.square().sum().backward()
        assert torch.equal(x.grad, expected[0])
        assert torch.equal(w.grad, expected[1])
        assert (used.site, used._passes["backward"].site) == (SITES, SITES)
    used.begin()
    assert used.recorded_bytes == 0


def test_recordings_are_freed_with_the_backward_and_not_made_for_nothing() -> None:
    x, w = batch(), weights()
    used = session()
    y = forward(x, w, used, False)
    code_bytes = 5 * 7 / 8  # all five sites are edges: 7 bits; and 4 bytes of qparams in groups of 16
    assert used.recorded_bytes == P * x.numel() * (code_bytes + SITES * 4 / 16), "one-shot keeps P codes a value"
    y.sum().backward()
    assert used.recorded_bytes == 0
    forward(x, w, used)
    with torch.no_grad():
        forward(x, w, used, False)
    assert used.recorded_bytes == 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_passes_in_flight(reentrant: bool, order: tuple[int, int]) -> None:
    w = weights()
    xs = [batch(seed=1), batch(rows=5, seed=2)]
    expected = [grads(forward(x, w, session()), x) for x in xs]
    used = session()
    ys = [forward(x, w, used, reentrant) for x in xs]
    with torch.no_grad():
        forward(batch(rows=3), w, used, reentrant)
    for index in order:
        ys[index].square().sum().backward()
        assert torch.equal(xs[index].grad, expected[index][0])
    assert used.recorded_bytes == 0


def test_without_marks_the_backward_must_be_named() -> None:
    w = weights()
    xs = [batch(seed=1), batch(rows=5, seed=2)]
    expected = [grads(forward(x, w, session()), x) for x in xs]
    used = session()
    ys, numbers = [], []
    for x in xs:
        ys.append(forward(x, w, used, True, marked=False))
        numbers.append(used.number)
    with pytest.raises(PassError, match="put close_pass on the model's output"):
        ys[0].square().sum().backward(retain_graph=True)
    for x, y, number, whole in zip(xs, ys, numbers, expected):
        x.grad = None
        with used.run_pass("backward", number=number):
            y.square().sum().backward()
        assert torch.equal(x.grad, whole[0])


def test_a_failed_backward_leaves_nothing_behind() -> None:
    x, w = batch(), weights()
    expected = grads(forward(x, w, session()), x, w)
    used = session()
    y = forward(x, w, used, False)
    handle = w.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("as if out of memory")))
    with pytest.raises(MemoryError):
        y.square().sum().backward()
    handle.remove()
    for _ in range(2):
        x.grad = w.grad = None
        forward(x, w, used, False).square().sum().backward()
        assert torch.equal(x.grad, expected[0])
        assert torch.equal(w.grad, expected[1])


def compiler_recomputes() -> bool:
    """Whether torch.compile runs our sites again for a checkpoint inside the graph: torch 2.11 keeps their sums instead."""
    return tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)


def test_o21_a_compiled_graph_that_recomputes() -> None:
    """One checkpoint over all blocks, inside the graph: where the compiler runs the sites again, only `record=True` can foresee it."""
    torch._dynamo.reset()
    x, w = batch(), weights(3)
    config = EchoConfig(QuantConfig(group_size=16))

    def blocks(x: Tensor, used: Session) -> Tensor:
        for site in range(3):
            x = block(x, w[site], used, f"block {site}")
        return x

    expected = grads(forward(x, w, Session(VirtualBackend(P), config, 3)), x, w)
    for record in (True, None):
        used = Session(VirtualBackend(P), config, 3, record=record)
        run = lambda x, used=used: close_pass(checkpoint(blocks, open_pass(x, used), used, use_reentrant=False), used)  # noqa: E731
        y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
        if record:
            assert used.recorded_bytes > 0
            assert all(torch.equal(a, b) for a, b in zip(grads(y, x, w), expected))
            assert (used.site, used.recorded_bytes) == (3, 0)
        elif compiler_recomputes():
            with pytest.raises(PassError, match=r"session\.record = True"):
                grads(y, x, w)
        else:
            assert all(torch.equal(a, b) for a, b in zip(grads(y, x, w), expected))


@pytest.mark.parametrize("marked", [True, False])
def test_a_backward_is_tried_again_after_it_failed_at_its_end(marked: bool) -> None:
    x, w = batch(), weights()
    expected = grads(forward(x, w, session()), x, w)
    used = session()
    y = forward(x, w, used, marked=marked)
    handle = x.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("as if out of memory")))
    with pytest.raises(MemoryError):
        torch.autograd.grad(y.square().sum(), (x, w), retain_graph=True)
    assert used._passes["backward"].site == SITES
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(grads(y, x, w), expected))


def test_a_second_backward_of_one_forward() -> None:
    x, w = batch(), weights()
    used = session()
    y = forward(x, w, used)
    first = torch.autograd.grad(y.square().sum(), (x, w), retain_graph=True)
    again = torch.autograd.grad(y.square().sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    y = forward(x, w, used, True)
    y.sum().backward(retain_graph=True)
    with pytest.raises(PassError, match="needs a second forward"):
        y.sum().backward()


def test_sites_in_a_checkpoint_need_different_keys() -> None:
    x, w = batch(), weights()
    used = session()
    used.begin()
    x = checkpoint(block, x, w[0], used, "same", use_reentrant=False)
    with pytest.raises(PassError, match="two sites of a pass have the key 'same'"):
        checkpoint(block, x, w[1], used, "same", use_reentrant=False)
    used = session()
    used.begin()
    y = checkpoint(block, batch(), w[0], used, "", use_reentrant=True)
    with pytest.raises(PassError, match="give the sites inside an activation checkpoint a key"):
        y.sum().backward()


def test_passes_without_a_backward_are_bounded() -> None:
    used = Session(VirtualBackend(P), preset("default", group_size=16), SITES, passes_in_flight=3)
    w = weights()
    ys = [forward(batch(), w, used, True) for _ in range(5)]
    one = used.recorded_bytes // 3
    assert used.recorded_bytes == 3 * one
    with pytest.raises(PassError, match="more than 3 passes"):
        ys[0].sum().backward()


def test_frozen_layers_count_the_sites_that_are_left() -> None:
    """The input of block 1 needs no gradient, so the backward has three sites, and the last of them gets the bits of an edge."""
    config = EchoConfig(quant=QuantConfig(group_size=16), sites=edges(first=0, last=1, bits=8))
    used = Session(VirtualBackend(P), config, SITES)
    bits = []
    inner = used.backend.all_reduce
    used.backend.all_reduce = lambda x, quant, *rest, **named: bits.append(quant.bits) or inner(x, quant, *rest, **named)
    w = weights()
    x = batch().detach()
    frozen = [w[0].detach(), *w[1:]]
    x = open_pass(x, used)
    for site, weight in enumerate(frozen):
        x = block(x, weight, used, f"block {site}")
    close_pass(x, used).square().sum().backward()
    assert bits == [4, 4, 4, 4, 8, 4, 4, 8]


def test_a_reentrant_checkpoint_hides_gradients_so_the_sites_are_those_that_were_said() -> None:
    x, w = batch(), weights()
    expected = grads(forward(x, w, session()), x)[0]
    used = session()
    y = open_pass(x, used)
    for site in range(SITES):
        arguments = (y, w[site], used, f"block {site}")
        y = checkpoint(block, *arguments, use_reentrant=True) if site < 2 else block(*arguments)
    close_pass(y, used).square().sum().backward()
    assert torch.equal(x.grad, expected)


def test_the_paper_preset_needs_a_backend_that_rescales() -> None:
    class Plain(VirtualBackend):
        training = False

    used = Session(Plain(P), preset("paper", group_size=16), SITES)
    y = forward(batch(), weights(), used)
    with pytest.raises(ConfigError, match="cannot change units"):
        y.sum().backward()
    used = Session(Plain(P), preset("default", group_size=16), SITES)
    x, w = batch(), weights()
    expected = grads(forward(x, w, session()), x)
    forward(x, w, used, False).square().sum().backward()
    assert torch.equal(x.grad, expected[0]), "a backend without recordings keeps the sum"


def test_a_handle_does_not_keep_its_session() -> None:
    used = session()
    alive, handle = weakref.ref(used), used.handle
    y = forward(batch(), weights(), used)
    del used
    gc.collect()
    y.sum().backward()
    del y
    gc.collect()
    assert alive() is None
    with pytest.raises(PassError, match="is gone"):
        torch.ops.echoreduce.open_pass(batch().detach(), handle, False)
