"""The lm-eval example of docs/tasks.md runs and is at most five lines long beside its imports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm-eval==0.4.13")

import questions

DOCUMENT = Path(__file__).parent.parent / "docs" / "tasks.md"


def test_the_lm_eval_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import lm_eval.evaluator

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # asks pip and the driver, for seconds
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith(("from ", "import "))]) <= 5
    questions.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": questions.model(), "tokenizer": questions.tokenizer()}
    exec(code, names)
    assert 0 <= names["found"]["results"]["questions"]["acc,none"] <= 1
    assert names["found"]["n-samples"]["questions"]["effective"] == 12
