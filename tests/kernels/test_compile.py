"""The kernels compile for three architectures without a GPU, and their PTX keeps what the interpreter cannot show.

Triton's release orders the stores of one thread only; a block barrier must stand between the last store and every release. Polls must be
system-scope acquires. And code that nobody sees in results: 16-byte accesses, IEEE division, no contraction.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from triton.compiler import ASTSource

from echoreduce import config
from echoreduce.kernels import spec as spec_module
from echoreduce.kernels.one_shot import one_shot_kernel
from echoreduce.kernels.spec import Spec, digest
from echoreduce.kernels.two_shot import two_shot_kernel
from instructions import compiled

PLAIN = Spec(2, 0, rows=16)
LOCAL = replace(PLAIN, residual="local", averages=1, first=False, state="float8_e4m3")
DEFAULT = replace(LOCAL, group_size=64, policy="compact", rotate=True, rows=32)
KERNELS = [(two_shot_kernel, PLAIN), (two_shot_kernel, LOCAL), (one_shot_kernel, LOCAL), (two_shot_kernel, DEFAULT)]


def ptx_of(kernel, spec: Spec, capability: int) -> str:
    return compiled(kernel, spec, 2, capability)["ptx"]


def unfenced_releases(ptx: str) -> list[str]:
    """Releases with a store to global memory, but no block barrier, before them."""
    bad, stored = [], False
    for line in ptx.splitlines():
        if "st.global" in line:
            stored = True
        elif "bar.sync" in line or "barrier.sync" in line:
            stored = False
        elif re.search(r"\batom\S*\.(release|acq_rel)\.", line) and stored:
            bad.append(line.strip())
    return bad


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kernel, spec", KERNELS)
def test_compiles_with_every_release_behind_a_barrier(kernel, spec, capability):
    ptx = ptx_of(kernel, replace(spec, native_float8=capability >= 89), capability)
    assert unfenced_releases(ptx) == []
    # One PUSH flag a peer and, in two-shot, one GATHER flag; one-shot also raises its own.
    assert len(re.findall(r"atom\.global\.sys\.release\.exch\.b64", ptx)) >= 2
    assert re.search(r"ld\.global\.sys\.acquire\.b64|ld\.acquire\.sys\.global\.b64", ptx)
    assert "div.rn.f32" in ptx
    assert "div.approx" not in ptx
    assert ".ftz" not in ptx
    assert re.search(r"st\.global\S*\.v4\.b32", ptx)


def test_the_cache_tells_versions_of_the_spec_apart():
    """Triton looks a compiled kernel up by a hash of its source and its constants' text."""

    def key(spec):
        signature = {name: "constexpr" if name == "spec" else "i32" for name in two_shot_kernel.arg_names}
        return ASTSource(two_shot_kernel, signature=signature, constexprs={"spec": spec}).hash()

    assert key(PLAIN) == key(replace(PLAIN))
    assert key(PLAIN) != key(replace(PLAIN, version="older"))
    assert PLAIN.version == digest(spec_module, config) != digest(spec_module)


def test_code_hardly_grows_with_the_number_of_ranks():
    """Copies of the push and tail stages for each peer took 38 s to compile for eight ranks."""
    two, eight = (ptx_of(two_shot_kernel, replace(DEFAULT, world_size=world), 90) for world in (2, 8))
    assert len(eight.splitlines()) < 1.75 * len(two.splitlines())
    assert unfenced_releases(eight) == []


def test_the_check_finds_a_release_without_a_barrier():
    ptx = ptx_of(two_shot_kernel, PLAIN, 90)
    without = re.sub(r"^\s*(bar|barrier)\.sync.*$", "", ptx, flags=re.MULTILINE)
    assert len(unfenced_releases(without)) >= 2
