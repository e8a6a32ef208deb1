"""Real gloo processes equal the reference bit for bit, at any P, size, dtype and layout."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from contributions import contributions
from echoreduce import EchoConfig, FeedbackConfig, QuantConfig, preset
from echoreduce import reference as ref
from echoreduce.communicator import Communicator
from echoreduce.feedback import compensator
from echoreduce.quant import packing
from echoreduce.runtime.c10d import C10dBackend
from echoreduce.session import Session
from echoreduce.virtual import VirtualBackend
from ranks import RankPool


def sha(x: Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and sha(a) == sha(b)


# --- one call -------------------------------------------------------------------------------------------------------------------


def many_calls(group: Any, cases: list[tuple[int, torch.dtype, QuantConfig, str]]) -> list[str]:
    backend = C10dBackend(group)
    hashes = []
    for numel, dtype, quant, algorithm in cases:
        x = contributions(backend.world_size, numel, dtype)[backend.rank]
        hashes.append(sha(backend.all_reduce(x, quant, algorithm)))
    return hashes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_outputs_equal_the_reference_on_every_rank(pool: RankPool, world_size: int) -> None:
    cases = [
        (numel, dtype, QuantConfig(bits=bits, group_size=64, policy=policy, rotation=rotation), algorithm)
        for numel in (1, 5, 127, 1000, 4097)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for bits, policy, rotation, algorithm in (
            (4, "zero_aware", "none", "two_shot"),
            (4, "zero_aware", "hadamard", "two_shot"),
            (4, "symmetric", "none", "one_shot"),
            (5, "asymmetric", "none", "two_shot"),
            (8, "zero_aware", "none", "one_shot"),
            (4, "compact", "hadamard", "two_shot"),
        )
    ]
    hashes = pool.run(many_calls, world_size, cases)
    assert all(rank == hashes[0] for rank in hashes)
    for case, found in zip(cases, hashes[0]):
        numel, dtype, quant, algorithm = case
        assert sha(ref.all_reduce(contributions(world_size, numel, dtype), quant, algorithm).output) == found, case


def sent_bytes(group: Any, quant: QuantConfig, algorithm: str) -> list[Tensor]:
    backend = C10dBackend(group)
    sent: list[Tensor] = []
    encode = packing.encode

    def recording(*args: Any) -> Tensor:
        sent.append(encode(*args))
        return sent[-1]

    packing.encode = recording
    try:
        backend.all_reduce(contributions(backend.world_size, 3000)[backend.rank], quant, algorithm)
    finally:
        packing.encode = encode
    return sent


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_codes_and_qparams_on_the_wire_are_those_of_the_reference(pool: RankPool, algorithm: str, bits: int) -> None:
    quant = QuantConfig(bits=bits)
    record = ref.trace(contributions(3, 3000), quant, algorithm)
    for rank, sent in enumerate(pool.run(sent_bytes, 3, quant, algorithm)):
        pushed = record.pushed
        expected = packing.encode(pushed.level, pushed.grid, quant, torch.bfloat16)[rank]
        assert torch.equal(sent[0], expected)
        if record.gathered is not None:
            reduced = packing.encode(record.gathered.level, record.gathered.grid, quant, torch.bfloat16)[rank]
            assert torch.equal(sent[1], reduced)
        assert len(sent) == (1 if algorithm == "one_shot" else 2)


def one_rank(group: Any) -> tuple[bool, list[float]]:
    x = torch.randn(4, 8, requires_grad=True)
    y = Communicator(group, "default").all_reduce(x * 1)
    same_bits = torch.equal(y, x)
    y.mul_(2)
    y.sum().backward()
    return same_bits, x.grad.unique().tolist()


def test_o11_one_real_rank(pool: RankPool) -> None:
    assert pool.run(one_rank, 1) == [(True, [2.0])]


def a_pass(group: Any, config: EchoConfig, numel: int, sites: int) -> tuple[list[Tensor], list[tuple[Tensor, Tensor | None]]]:
    session = Communicator(group, config).session(sites)
    session.begin()
    outputs = [session.reduce(contributions(session.backend.world_size, numel, seed=k)[session.backend.rank]) for k in range(sites)]
    state = session._passes["forward"].state
    return outputs, [(average.values, average.exponent) for average in state.averages]


CONFIGS = [
    preset("default"),
    preset("paper"),
    preset("paper_early", group_size=64),
    EchoConfig(algorithm="two_shot", feedback=FeedbackConfig(state="fp32")),
    EchoConfig(algorithm="two_shot", quant=QuantConfig(rotation="hadamard"), feedback=FeedbackConfig(state="float8_e5m2")),
    EchoConfig(algorithm="one_shot", feedback=FeedbackConfig(residual="group", decays=(0.7, 0.3), gain=0.75, state="float8_e4m3")),
]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_a_compensated_pass_equals_virtual_ranks_state_included(pool: RankPool, world_size: int, config: EchoConfig) -> None:
    sites, numel = 5, 1500
    config = replace(config)
    virtual = Session(VirtualBackend(world_size), config, sites)
    virtual.begin()
    expected = [virtual.reduce(contributions(world_size, numel, seed=k)) for k in range(sites)]
    averages = virtual._passes["forward"].state.averages
    for rank, (outputs, state) in enumerate(pool.run(a_pass, world_size, config, numel, sites)):
        assert all(same(a, b) for a, b in zip(outputs, expected))
        assert len(state) == len(averages) > 0
        for (values, exponent), average in zip(state, averages):
            assert same(values, average.values[rank])
            assert (exponent is None) == (average.exponent is None)
            assert exponent is None or same(exponent, average.exponent[rank])


def residual_of_one_call(group: Any, residual: str, algorithm: str) -> Tensor:
    backend = C10dBackend(group)
    state = backend.new_state(FeedbackConfig(residual=residual, state="fp32"))
    backend.all_reduce(contributions(backend.world_size, 1000)[backend.rank], QuantConfig(), algorithm, state)
    return compensator.correction(state)


@pytest.mark.parametrize("residual", ["local", "group"])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_o10_residuals_sum_to_minus_the_error_over_real_ranks(pool: RankPool, residual: str, algorithm: str) -> None:
    for world_size in (3, 5, 6):
        u = torch.stack(pool.run(residual_of_one_call, world_size, residual, algorithm))
        record = ref.trace(contributions(world_size, 1000), QuantConfig(), algorithm)
        bound = 1e-6 * record.compensated.abs().sum(0).amax()
        assert (u.sum(0) + ref.injected_error(record)).abs().max() <= bound


# --- cases of the field -----------------------------------------------------------------------------------------------------------


def odd_big_length(group: Any, numel: int, bits: int) -> tuple[str, bool, bool]:
    communicator = Communicator(group, EchoConfig(quant=QuantConfig(bits=bits), algorithm="two_shot"))
    storage = torch.full((numel + 64,), 123.0)
    view = storage[32:-32]
    view.copy_(contributions(communicator.world_size, numel)[communicator.rank])
    kept = view.clone()
    out = communicator.all_reduce(view)
    untouched = torch.equal(view, kept)
    communicator.all_reduce_(view)
    guards = bool((storage[:32] == 123).all() and (storage[-32:] == 123).all())
    return sha(out), same(out, view) and untouched, guards


@pytest.mark.parametrize("bits", [4, 8])
def test_o08_odd_big_length_in_and_out_of_place(pool: RankPool, bits: int) -> None:
    numel = 1_055_659
    expected = sha(ref.all_reduce(contributions(4, numel), QuantConfig(bits=bits)).output)
    assert pool.run(odd_big_length, 4, numel, bits) == [(expected, True, True)] * 4


def few_elements(group: Any) -> list[tuple[torch.Size, torch.dtype, bool]]:
    communicator = Communicator(group, "no_feedback")
    found = []
    for shape in ((), (1,), (2,), (3,), (1, 5)):
        for dtype in (torch.float32, torch.bfloat16):
            every = torch.randn(4, *shape, generator=torch.Generator().manual_seed(5)).to(dtype)
            out = communicator.all_reduce(every[communicator.rank])
            found.append((out.shape, out.dtype, same(out, ref.all_reduce(every, QuantConfig()).output)))
    return found


def test_o09_fewer_elements_than_ranks(pool: RankPool) -> None:
    for rank in pool.run(few_elements, 4):
        shapes = [torch.Size(s) for s in ((), (1,), (2,), (3,), (1, 5)) for _ in range(2)]
        assert [found[0] for found in rank] == shapes
        assert all(found[2] for found in rank)


@pytest.mark.parametrize("world_size", [3, 5, 6])
def test_o10_odd_world_sizes(pool: RankPool, world_size: int) -> None:
    cases = [
        (numel, dtype, QuantConfig(bits=bits), "two_shot")
        for numel in (world_size * 128, world_size * 128 + 1, 1000, 4096 * 7)
        for dtype in (torch.float32, torch.bfloat16)
        for bits in (4, 8)
    ]
    hashes = pool.run(many_calls, world_size, cases)
    for index, (numel, dtype, quant, algorithm) in enumerate(cases):
        expected = sha(ref.all_reduce(contributions(world_size, numel, dtype), quant, algorithm).output)
        assert {rank[index] for rank in hashes} == {expected}


def empty_then_normal(group: Any) -> tuple[Any, ...]:
    communicator = Communicator(group, "no_feedback")
    x = torch.randn(0, 4096, requires_grad=True)
    y = communicator.all_reduce(x * 1)
    attached = y.requires_grad
    y.sum().backward()
    every = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(5))
    normal = communicator.all_reduce(every[communicator.rank])
    return tuple(y.shape), y.dtype, attached, tuple(x.grad.shape), same(normal, ref.all_reduce(every, QuantConfig()).output)


def test_o12_empty_tensors(pool: RankPool) -> None:
    assert pool.run(empty_then_normal, 2) == [((0, 4096), torch.float32, True, (0, 4096), True)] * 2


def layouts(group: Any) -> dict[str, Any]:
    communicator = Communicator(group, "no_feedback")
    base = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(5))[communicator.rank]
    found: dict[str, Any] = {}
    for name, cut in (("transposed", lambda b: b.t()), ("strided", lambda b: b[:, ::2]), ("expanded", lambda b: b[:1].expand(4, 16))):
        x = cut(base.clone())
        found[name] = same(communicator.all_reduce(x), communicator.all_reduce(x.contiguous()))
        storage = base.clone()
        view = cut(storage)
        expected = communicator.all_reduce(view.contiguous())
        try:
            communicator.all_reduce_(view)
        except ValueError as error:
            found[name + " in place"] = type(error).__name__
            continue
        found[name + " in place"] = torch.equal(view, expected)
        if name == "strided":
            found["outside"] = torch.equal(storage[:, 1::2], base[:, 1::2])
    leaf = torch.randn(4, requires_grad=True)
    try:
        communicator.all_reduce_(leaf)
    except ValueError as error:
        found["leaf"] = str(error)
    return found


def test_o13_layouts_in_and_out_of_place(pool: RankPool) -> None:
    for found in pool.run(layouts, 2):
        assert found.pop("leaf").startswith("out is a leaf")
        assert found == {
            "transposed": True,
            "transposed in place": True,
            "strided": True,
            "strided in place": True,
            "outside": True,
            "expanded": True,
            "expanded in place": "ShapeError",
        }


def dtypes(group: Any) -> dict[str, str]:
    communicator = Communicator(group, "no_feedback")
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64):
        try:
            found[str(dtype)] = str(communicator.all_reduce(torch.ones(100).to(dtype)).dtype)
        except TypeError as error:
            found[str(dtype)] = f"{type(error).__name__}: {str(dtype) in str(error)}"
    found["after"] = str(communicator.all_reduce(torch.tensor(2.0)).item())
    return found


def test_o14_dtypes(pool: RankPool) -> None:
    refused = dict.fromkeys(map(str, (torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)), "DTypeError: True")
    kept = {str(d): str(d) for d in (torch.float16, torch.bfloat16, torch.float32)}
    assert pool.run(dtypes, 2) == [{**kept, **refused, "after": "4.0"}] * 2


def ops(group: Any) -> tuple[Any, ...]:
    communicator = Communicator(group, "no_feedback")
    x = torch.full((10,), communicator.rank + 1.0, requires_grad=True)
    average = communicator.all_reduce(x * 1, op="avg")
    average.sum().backward()
    refused = []
    for op in ("max", "product", "min"):
        try:
            communicator.all_reduce(x, op=op)
        except ValueError as error:
            refused.append(op in str(error))
    out = torch.empty(10)
    communicator.all_reduce(x.detach(), op="avg", out=out)
    return average.tolist(), x.grad.tolist(), refused, out.tolist()


def test_o15_average_and_refused_operations(pool: RankPool) -> None:
    assert pool.run(ops, 4) == [([2.5] * 10, [0.25] * 10, [True] * 3, [2.5] * 10)] * 4


def disagree(group: Any, what: str) -> str:
    backend = C10dBackend(group)
    odd = backend.rank == 0
    x = torch.randn(
        *((100, 256) if odd and what == "shape" else (2,) if odd and what == "length" else (3,) if what == "length" else (200, 256))
    )
    if odd and what == "dtype":
        x = x.bfloat16()
    quant = QuantConfig(bits=8 if odd and what == "settings" else 4)
    try:
        backend.all_reduce(x, quant, "two_shot")
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "no error"
    usable = backend.all_reduce(torch.ones(5), QuantConfig(), "two_shot")
    return text + f" | then {usable[0].item()}"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("shape", "shape: rank 0 (100, 256), rank 1 (200, 256), rank 2 (200, 256), rank 3 (200, 256)"),
        ("length", "shape: rank 0 (2,), rank 1 (3,), rank 2 (3,), rank 3 (3,)"),
        ("dtype", "dtype: rank 0 torch.bfloat16, rank 1 torch.float32"),
        ("settings", "settings: rank 0 #"),
    ],
)
def test_o16_a_rank_that_differs_raises_the_same_error_everywhere(pool: RankPool, what: str, expected: str) -> None:
    texts = pool.run(disagree, 4, what)
    assert len(set(texts)) == 1
    assert texts[0].startswith("MismatchError: ")
    assert expected in texts[0]
    assert texts[0].endswith("| then 4.0")


def changing_shapes(group: Any) -> list[str]:
    backend = C10dBackend(group)
    state = torch.Generator().manual_seed(3)
    hashes = []
    for call in range(60):
        rows = int(torch.randint(1, 65, (), generator=state))
        hidden = (2880, 64, 4096)[call % 3] if call != 58 else 8 * 4096
        x = contributions(4, rows * hidden if call != 59 else 1, seed=call)[backend.rank]
        hashes.append(sha(backend.all_reduce(x, QuantConfig(), "two_shot")))
    return hashes


def test_o29_shapes_change_from_call_to_call(pool: RankPool) -> None:
    hashes = pool.run(changing_shapes, 4)
    assert all(rank == hashes[0] for rank in hashes)
    generator = torch.Generator().manual_seed(3)
    rows = [int(torch.randint(1, 65, (), generator=generator)) for _ in range(60)]
    for call in (0, 1, 2, 58, 59):
        numel = 1 if call == 59 else rows[call] * (8 * 4096 if call == 58 else (2880, 64, 4096)[call % 3])
        assert hashes[0][call] == sha(ref.all_reduce(contributions(4, numel, seed=call), QuantConfig()).output)


def hashes_of_ten_sites(group: Any, config: EchoConfig, dtype: torch.dtype, delays: int) -> list[str]:
    session = Communicator(group, config).session(10)
    session.begin()
    noise = torch.Generator().manual_seed(delays * 100 + dist.get_rank(group))
    hashes = []
    for site in range(10):
        if delays:  # busy work of random length before each site, different on each rank
            size = int(torch.randint(1, 200, (), generator=noise))
            torch.randn(size, size) @ torch.randn(size, size)
        x = contributions(session.backend.world_size, 1100, dtype, seed=site)[session.backend.rank]
        hashes.append(sha(session.reduce(x)))
    return hashes


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_o33_one_hash_over_all_ranks_and_runs(pool: RankPool, world_size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for config in (preset("default"), preset("paper"), EchoConfig(quant=QuantConfig(bits=8, policy="symmetric"), algorithm="two_shot")):
            runs = [pool.run(hashes_of_ten_sites, world_size, config, dtype, delays) for delays in (0, 0, 1)]
            flat = {tuple(rank) for run in runs for rank in run}
            assert len(flat) == 1
