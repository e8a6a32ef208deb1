"""Machine code of the kernels, which no result shows: instructions a value, and nothing through shared memory inside a tile's loop."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from instructions import cubin, disassemble, longest_loop, pipe_of, spec_of


def loop(preset: str, stage: str) -> list[str]:
    return longest_loop(disassemble(cubin(stage, spec_of(preset, 90, stage), 4, 90)))


@pytest.mark.parametrize("preset, most", [("no_feedback", 21.0), ("fast", 29.0), ("default", 40.0)])
def test_instructions_a_value(preset, most):
    """18.8, 26.6 and 36.6 with Triton 3.6 (docs/kernels.md); other compilers get a little room."""
    loops = {stage: loop(preset, stage) for stage in ("push", "reduce", "tail")}
    assert 10.0 < sum(map(len, loops.values())) / 64 < most
    for stage, instructions in loops.items():
        assert not [text for text in instructions if text.startswith(("LDS", "STS", "BAR"))], f"{stage} goes through shared memory"
        assert any(text.startswith("STG") for text in instructions), f"{stage} stores nothing: not the loop over tiles"


def test_every_arithmetic_instruction_has_a_pipe():
    texts = loop("default", "reduce")
    named = [pipe_of(text) for text in texts]
    assert named.count("other") < 0.05 * len(texts)
    assert (pipe_of("SHFL.BFLY PT, R1, R2"), pipe_of("SHF.L.U32 R1"), pipe_of("FADD R1")) == ("mio", "alu", "fma")
