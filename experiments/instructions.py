"""Instructions a value in the kernels' machine code, by stage and by execution pipe; needs no GPU.

    python experiments/instructions.py --presets no_feedback,fast,default --capability 90

Each stage is compiled alone (the staged kernels, which call the same functions) and its loop over tiles is found in the disassembly: the
longest stretch from a backward branch to its target. A thread holds 32 values of a tile, so instructions of the loop / 32 are
instructions a value. `alu` instructions (integer, logic, minimum, select, conversions) and `fma` ones (additions, products) have a pipe
each, of 16 and 32 lanes a scheduler on Hopper; `mio` are shuffles and shared memory. Totals weigh the stages by the values each handles at
P = 2: half push, half reduce, half tail.

Leaves out: time (`bench`, `p2p_variants.py`), anything outside the loop.
Source: nvdisasm, which Triton ships; docs/kernels.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from echoreduce.config import preset
from echoreduce.kernels.spec import Spec
from echoreduce.kernels.staged import stage_kernel

TYPES = {"table": "*i64", "record": "*i64", "x": "*bf16", "y": "*bf16"} | dict.fromkeys(("control", "m0", "e0", "m1", "e1"), "*i32")
LONG = ("half", "area", "patience")
FLOATS = ("w0", "w1", "d0", "r0", "d1", "r1")
#: Opcode prefixes by pipe (Hopper); what is in none is counted as `other` (branches, barriers, uniform arithmetic).
PIPES = {
    "mio": ("SHFL", "LDS", "STS", "LDSM", "STSM"),
    "fma": ("FADD", "FMUL", "FFMA", "IMAD", "HADD2", "HFMA2", "HMUL2"),
    "alu": ("IADD", "LOP", "SHF", "LEA", "PRMT", "SEL", "FSEL", "FMNMX", "VI", "IMNMX", "ISETP", "FSETP", "F2FP", "MOV", "CS2R", "PLOP"),
    "memory": ("LDG", "STG", "LD.", "ST.", "ATOM", "RED", "LDL", "STL"),
    "slow": ("MUFU", "I2F", "F2I", "F2F", "POPC", "I2IP"),
}


def compiled(kernel: Any, spec: Spec, warps: int, capability: int, **constants: Any) -> Any:
    """What Triton makes of a kernel, by format (`ptx`, `cubin`), bf16 data and 16-byte aligned pointers; `constants` beside the spec."""
    fixed = {"spec": spec, **constants}
    signature = {}
    for name in kernel.arg_names:
        number = "fp32" if name in FLOATS else "i64" if name in LONG else "i32"
        signature[name] = "constexpr" if name in fixed else TYPES.get(name, number)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm


def cubin(stage: str, spec: Spec, warps: int, capability: int) -> bytes:
    """Machine code of one stage."""
    code: bytes = compiled(stage_kernel, spec, warps, capability, stage=stage, last=False)["cubin"]
    return code


def disassemble(code: bytes) -> list[tuple[int, str]]:
    """(index of the instruction that it branches to or -1, text without predicate) of each instruction."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([tool, "-c", "-hex", file.name], check=True, capture_output=True, text=True).stdout
    found, labels = [], {}
    for line in text.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(found)
        match = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.+?)\s*;", line)
        if match:
            found.append(match[2])
    resolved = []
    for text in found:
        target = re.search(r"`\((\.L_x_\d+)\)", text)
        where = labels.get(target[1], -1) if target else -1
        resolved.append((where, text))
    return resolved


def longest_loop(code: list[tuple[int, str]]) -> list[str]:
    """Instructions of the tile loop: the longest loop without another one in it (polls, of less than 60 instructions, aside)."""
    loops = [range(target, place + 1) for place, (target, text) in enumerate(code) if text.startswith("BRA") and 0 <= target <= place]

    def inside(other: range, loop: range) -> bool:
        return other != loop and len(other) > 60 and loop.start <= other.start and other.stop <= loop.stop

    chosen = max((loop for loop in loops if not any(inside(other, loop) for other in loops)), key=len)
    return [code[place][1] for place in chosen]


def pipe_of(instruction: str) -> str:
    """Pipe of an instruction."""
    return next((pipe for pipe, prefixes in PIPES.items() if instruction.startswith(prefixes)), "other")


def spec_of(name: str, capability: int, stage: str) -> Spec:
    """Kernel of a preset at P = 2, rank 0, inside a pass, 4 warps."""
    config = preset(name)
    feedback = config.feedback
    size = config.quant.group_size
    return Spec(
        2, 0, bits=config.quant.bits, group_size=size, policy=config.quant.layout, rotate=config.quant.rotation == "hadamard",
        residual=feedback.residual if feedback.enabled else "none", averages=len(feedback.weights) if feedback.enabled else 0,
        first=False, state=feedback.state, rows=1024 // size * 4, native_float8=capability >= 89,
    )  # fmt: skip


def listed(counts: Mapping[str, float]) -> str:
    """Figures by pipe, in one line."""
    return ", ".join(f"{pipe} {count:.2f}" for pipe, count in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="no_feedback,fast,default")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--stages", default="push,reduce,tail")
    parser.add_argument("--opcodes", action="store_true", help="print the opcodes too")
    options = parser.parse_args()
    for name in options.presets.split(","):
        total: Counter[str] = Counter()
        for stage in options.stages.split(","):
            loop = longest_loop(disassemble(cubin(stage, spec_of(name, options.capability, stage), 4, options.capability)))
            counts = Counter(map(pipe_of, loop))
            total.update({pipe: count / 64 for pipe, count in counts.items()})
            print(f"{name:12} {stage:7} {len(loop) / 32:6.2f} a value: {listed({p: c / 32 for p, c in counts.items()})}")
            if options.opcodes:
                opcodes = Counter(re.split(r"[\s.]", text)[0] for text in loop)
                print("    " + ", ".join(f"{code} {count}" for code, count in opcodes.most_common(30)))
        print(f"{name:12} all     {sum(total.values()):6.2f} a value: {listed(total)}")


if __name__ == "__main__":
    main()
