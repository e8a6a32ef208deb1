"""`auto` on a model that generates: the prompt goes low-bit, decode steps are too small and go exact; alike on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")


def generate(group: dist.ProcessGroup) -> tuple[list[int], list[int], list[str]]:
    """(bits of each site in turn, tokens, reasons) of a prompt of 8 tokens and 3 new ones."""
    from echoreduce.integrations.transformers import attach
    from echoreduce.runtime.dispatch import AutoBackend, Table
    from echoreduce.runtime.p2p import P2PBackend
    from echoreduce.runtime.schedule import Tuning

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    sent: list[int] = []

    class Watched(P2PBackend):
        def all_reduce(self, x, quant, algorithm, state=None, out=None):
            sent.append(quant.bits)
            return super().all_reduce(x, quant, algorithm, state, out)

    backend = AutoBackend(Watched(group, device="cpu", tuning=Tuning(warps=1, chunk_values=2048, waves=2, blocks=(2, 2, 1))))
    backend._tables[4] = Table(2048, "this test")
    with attach(model, "no_feedback", backend=backend), torch.no_grad():
        ids = torch.arange(8).reshape(1, 8) % 64
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0)
    reasons = [backend.explain(rows * 64 * 4, torch.float32) for rows in (8, 1)]
    backend.close()
    return sent, tokens[0].tolist(), reasons


def test_decode_steps_stay_in_16_bits(ranks):
    found = ranks.run(generate, 2)
    assert found[0] == found[1]
    sent, tokens, reasons = found[0]
    assert sent == [4] * 4 + [16] * 8  # four sites a pass; one prompt, two steps with the cache
    assert len(tokens) == 11
    assert reasons[0].startswith("p2p: 2048 bytes")
    assert reasons[1].startswith("exact: 256 bytes are below the crossover of 2048 bytes (this test)")
