"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import RankPool

README = Path(__file__).parents[1] / "README.md"


def block(beginning: str) -> str:
    """The Python block of the README that begins so."""
    found = [code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if code.startswith(beginning)]
    assert len(found) == 1, beginning
    return found[0]


def test_attach_and_detach(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    inputs = {"input_ids": torch.arange(12).reshape(2, 6)}
    with torch.no_grad():
        before = model(**inputs).logits
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: model)
        names: dict[str, Any] = {"inputs": inputs}
        exec(block("from transformers import AutoModelForCausalLM\nfrom echoreduce.integrations.transformers import attach"), names)
        assert "tensor(" in capsys.readouterr().out
        assert torch.equal(model(**inputs).logits, before)


def communicate(group: Any) -> bool:
    names: dict[str, Any] = {"group": group, "x": torch.arange(300.0)}
    exec(block("from echoreduce.communicator import Communicator"), names)
    exact = 2 * names["x"]
    return bool((names["y"] - exact).norm() < 0.1 * exact.norm())


def test_communicator(pool: RankPool) -> None:
    assert pool.run(communicate, 2) == [True, True]
