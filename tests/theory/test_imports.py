"""The theory runs where torch, scipy and matplotlib are not installed."""

import subprocess
import sys

MODULES = ("weights", "source", "stream", "bounds", "remainder", "network", "constructions", "backward", "residuals")


def test_nothing_heavy_is_reachable():
    lines = [f"import echoreduce.theory.{name}" for name in MODULES]
    lines += ["import sys", "print(sorted({'torch', 'scipy', 'matplotlib'} & sys.modules.keys()))"]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
