"""The reference on a GPU gives the bits that it gives on the CPU: rounding of constants and divisions included."""

from __future__ import annotations

import pytest
import torch

from contributions import contributions
from echoreduce import QuantConfig
from echoreduce import reference as ref
from echoreduce.quant import packing
from echoreduce.quant.grid import qparams_dtype


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("policy", ["symmetric", "asymmetric", "zero_aware"])
@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_cuda_equals_cpu(dtype: torch.dtype, algorithm: str, bits: int, policy: str, rotation: str) -> None:
    quant = QuantConfig(bits=bits, policy=policy, rotation=rotation)
    x = contributions(3, 5001, dtype)
    here, there = ref.trace(x, quant, algorithm), ref.trace(x.cuda(), quant, algorithm)
    qparams = qparams_dtype(quant, dtype)
    wire = [packing.encode(record.pushed.level, record.pushed.grid, quant, qparams).cpu() for record in (here, there)]
    assert torch.equal(*wire)
    for of in (lambda r: r.values, lambda r: ref.local_residuals(r)[0], lambda r: ref.group_residuals(r)[0]):
        a, b = of(here), of(there).cpu()
        assert torch.equal(a.nan_to_num(0), b.nan_to_num(0))
        assert torch.equal(a.isnan(), b.isnan())
