"""The examples of docs/training.md run, and each is at most five lines long beside its imports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import toy
from echoreduce.communicator import Communicator
from ranks import RankPool
from stock import shard

DOCUMENT = Path(__file__).parent.parent / "docs" / "training.md"


def example(index: int) -> str:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)[index]


def test_examples_are_short() -> None:
    count = 0
    for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL):
        lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("from ", "import "))]
        assert len(lines) <= 5, code
        count += 1
    assert count == 4


def test_the_readme_has_the_same_examples() -> None:
    readme = (DOCUMENT.parent.parent / "README.md").read_text()
    assert all(example(index) in readme for index in range(4))


def by_hand(group: Any) -> float:
    session = Communicator(group, "exact").session(1)
    rank = session.backend.rank
    torch.manual_seed(0)
    whole_in, whole_out = torch.randn(8, 6), torch.randn(6, 8)
    columns = slice(3 * rank, 3 * rank + 3)
    given = {"session": session, "act": torch.tanh, "w_in": whole_in[:, columns], "w_out": whole_out[columns]}
    x = torch.randn(4, 8, requires_grad=True)
    given["x"] = x
    exec(example(3), given)
    given["y"].square().sum().backward()
    alone = x.detach().requires_grad_()
    (alone + torch.tanh(alone @ whole_in) @ whole_out).square().sum().backward()
    return (x.grad - alone.grad).abs().max().item() / alone.grad.abs().max().item()


def plain(group: Any) -> bool:
    model = toy.net()
    given = {"model": model, "mesh": DeviceMesh.from_group(group, "cpu")}
    exec(example(2), given)
    toy.step(model, toy.data())
    return model._echo_session.config == Communicator(group, "default").config and model._echo_session.site == 4


def test_by_hand_and_plain_pytorch(pool: RankPool) -> None:
    assert all(error < 1e-5 for error in pool.run(by_hand, 2))
    assert all(pool.run(plain, 2))


def test_from_pretrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the model loads and computes is tested in tests/integrations/test_transformers_tp.py."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, **options: asked.update(options, name=name))
    exec(example(0), {"name": config})
    assert asked["distributed_config"].tp_size == 4
    assert sum(style.endswith(" row") for style in asked["distributed_config"].tp_plan.values()) == 2


def enabled(group: Any) -> tuple[bool, int]:
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
    shard(model, DeviceMesh.from_group(group, "cpu"))
    given = {"model": model, "ids": torch.arange(6).reshape(1, 6)}
    exec(example(1), given)
    return bool(given["loss"].isfinite()) and model.lm_head.weight.grad is not None, given["echo"].session.number


def test_enable(pool: RankPool) -> None:
    pytest.importorskip("transformers")
    assert pool.run(enabled, 2) == [(True, 1)] * 2
