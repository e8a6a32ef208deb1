"""The accuracy harness: every variant of every set runs, figures are what they say, and a run continues where it stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import accuracy_run
from accuracy_blend import near_one_sided, rounding_errors
from accuracy_report import (
    CLAIMS,
    blend_table,
    cell,
    claims_by_size,
    claims_by_text,
    frontier,
    frontier_table,
    short_verdict,
    tables,
    verdict,
)
from accuracy_run import Job, compare, key, measure, missing, read_lines, standard_error, summary
from accuracy_texts import Windows, find, load_windows
from accuracy_trials import Shape, Trial
from accuracy_variants import BLENDS, SETS, table4, trials
from echoreduce.config import PRESETS
from echoreduce.errors import ConfigError
from gemma import begin_with, merges

HIDDEN, SITES = 64, 4


@pytest.fixture(scope="module")
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in made.parameters():
        if parameter.dim() == 2:
            parameter.data *= 10  # logits of a model that knows something
    return made


def job(model: Any, out: Path, world_size: int = 2, windows: int = 3) -> Job:
    tokens = torch.randint(0, 64, (windows, 9), generator=torch.Generator().manual_seed(1))
    conditions = {
        "model": "toy",
        "text": "noise",
        "world_size": world_size,
        "windows": windows,
        "window": 8,
        "batch": 2,
        "dtype": "float32",
    }
    conditions |= {"hidden": HIDDEN, "sites": SITES}
    return Job(conditions, {}, model, SITES, Windows(tokens, torch.ones(windows, 8, dtype=torch.bool)), 2, out)


@pytest.mark.parametrize("name", [name for name in SETS if name != "sites"])
def test_every_variant_runs_and_counts_its_bits(model: Any, tmp_path: Path, name: str) -> None:
    chosen = trials([name], Shape(HIDDEN, SITES))
    lines = measure(job(model, tmp_path / "out.jsonl", windows=1), chosen)
    assert [line["name"] for line in lines] == [trial.name for trial in chosen]
    for line in lines:
        assert math.isfinite(line["perplexity"])
        assert 3 < line["bits_per_value"] <= 16
        assert (line["kl"] > 1e-9) == (line["bits_per_value"] < 16), line["name"]


def test_names_are_unique_over_all_sets() -> None:
    every = trials(SETS, Shape(576, 60))
    assert len({trial.name for trial in every}) == len(every) > 400
    assert len({json.dumps(trial.as_data()) for trial in every}) > 0.9 * len(every)


def test_single_site_variants_change_one_site(model: Any, tmp_path: Path) -> None:
    chosen = {trial.name: trial for trial in trials(["sites"], Shape(HIDDEN, SITES))}
    assert chosen["only site 2 at 4 bits"].config.sites == (16, 16, 4, 16)
    assert chosen["all at 4 but site 0 at 8"].config.sites == (8, 4, 4, 4)
    lines = {line["name"]: line for line in measure(job(model, tmp_path / "out.jsonl"), list(chosen.values()))}
    assert all(line["kl"] > 0 for line in lines.values())
    assert lines["only site 2 at 4 bits"]["bits_per_value"] > 13


def test_exact_sum_costs_nothing_and_bits_order_the_damage(model: Any, tmp_path: Path) -> None:
    lines = {line["name"]: line for line in measure(job(model, tmp_path / "out.jsonl", windows=5), table4(Shape(HIDDEN, SITES)))}
    assert abs(lines["16-bit"]["kl"]) < 1e-9
    assert lines["16-bit"]["agreement"] == 1.0
    assert lines["16-bit"]["tokens"] == 40
    assert 0 < lines["8-bit"]["kl"] < 0.2 * lines["no feedback"]["kl"]


def test_a_stopped_run_continues(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    chosen = table4(Shape(HIDDEN, SITES))
    first = measure(job(model, out), chosen[:2])
    with out.open("a") as file:
        file.write('{"model": "toy", "cut')
    lines = read_lines(out)
    assert lines == first
    left = missing(job(model, out), chosen, {key(line) for line in lines})
    assert left == chosen[2:]
    assert missing(job(model, out, world_size=4), chosen, {key(line) for line in lines}) == chosen
    changed = [Trial(chosen[0].name, PRESETS["paper"])]
    assert missing(job(model, out), changed, {key(line) for line in lines}) == changed
    assert list(accuracy_run.groups(chosen, 4)) == [chosen[:4], chosen[4:]]


def test_divergence_and_perplexity_are_the_textbook_ones() -> None:
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]).log()
    q = torch.tensor([[0.25, 0.75], [0.9, 0.1], [0.8, 0.2]]).log()
    tokens = torch.tensor([[0, 1, 0, 1]])
    found = compare([p], [q], tokens, torch.tensor([[True, True, False]]))
    assert found.kl.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-6)
    assert found.nll.item() == pytest.approx(-math.log(0.75) - math.log(0.9), rel=1e-6)
    assert found.agree.item() == 1
    base = compare([p], [p], tokens, torch.tensor([[True, True, False]]))
    figures = summary(found, base.nll, torch.tensor([2.0], dtype=torch.float64))
    assert figures["perplexity"] == pytest.approx((0.75 * 0.9) ** -0.5)
    assert figures["exact_perplexity"] == pytest.approx((0.5 * 0.9) ** -0.5)
    assert figures["nll_windows"] == pytest.approx([(found.nll - base.nll).item() / 2], rel=1e-4, abs=1e-12)
    assert figures["kl_windows"] == pytest.approx([found.kl.item() / 2], rel=1e-4)


def test_standard_error_is_that_of_a_mean() -> None:
    sums = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 8
    counts = torch.full((50,), 8.0, dtype=torch.float64)
    assert standard_error(sums, counts) == pytest.approx((sums / 8).std().item() / math.sqrt(50))


class Characters:
    eos_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def test_only_solutions_are_scored(tmp_path: Path) -> None:
    folder = tmp_path / "choice"
    folder.mkdir()
    records = [{"question": "1+1?", "answer": "two"}, {"question": "What?", "answer": "a long answer"}, {"question": "x", "answer": "y"}]
    (folder / "gsm8k_test.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = load_windows("gsm8k", tmp_path, Characters(), 64, 2)
    assert found.tokens.shape[0] == 2
    scored = ["".join(map(chr, row[1:][mask].tolist())) for row, mask in zip(found.tokens, found.scored)]
    assert scored == [" two", " a long answer"]
    short = load_windows("gsm8k", tmp_path, Characters(), 24, 3)
    assert short.tokens.shape[1] == 25
    with pytest.raises(ConfigError, match="no text 'nothing'"):
        find("nothing", tmp_path)


def test_bos_begins_each_window_and_is_followed_by_an_unscored_token(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefghijkl")
    tokenizer = Characters()
    tokenizer.bos_token_id = 1  # type: ignore[attr-defined]
    found = load_windows("text.txt", tmp_path, tokenizer, 4, None, bos=True)
    assert ["".join(map(chr, row[1:])) for row in found.tokens.tolist()] == ["abcd", "defg", "ghij"]
    assert found.tokens[:, 0].tolist() == [1, 1, 1]
    assert found.scored.tolist() == [[False, True, True, True]] * 3


def test_tables_and_pictures_show_what_was_measured(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    measure(job(model, out), trials(["table4", "table8", "wire", "sites"], Shape(HIDDEN, SITES)))
    lines = read_lines(out)
    text = tables(lines, ["table4", "table8", "sites"])
    by_name = {line["name"]: line for line in lines}
    assert f"| paper | 4.250 | {cell(by_name['paper'])} |" in text
    assert "Llama-3-8B" in text
    assert text.count("confirmed") + text.count("contradicted") + text.count("undecided") == len(CLAIMS)
    assert "not measured" not in text
    rows = [row for row in text.split("### sites")[1].splitlines() if row.startswith(("| only", "| all"))]
    assert len(rows) == 2 * SITES
    assert "16-bit" in frontier_table(lines)
    pytest.importorskip("matplotlib")
    from accuracy_plots import draw

    assert [path.name.split("_")[1] for path in draw(lines, tmp_path / "figures")] == ["frontier", "wire", "sites"]


def test_the_frontier_has_no_dominated_line() -> None:
    lines = [{"name": n, "bits_per_value": b, "kl": k} for n, b, k in (("a", 4, 0.5), ("b", 5, 0.7), ("c", 4, 0.4), ("d", 6, 0.1))]
    assert [line["name"] for line in frontier(lines)] == ["c", "d"]


def test_verdicts_need_two_standard_errors() -> None:
    assert verdict({"kl": 1.0, "kl_error": 0.1, "windows": 9}, {"kl": 1.2, "kl_error": 0.1, "windows": 9}).startswith("undecided")
    assert verdict({"kl": 1.0, "kl_error": 0.1, "windows": 9}, {"kl": 1.4, "kl_error": 0.1, "windows": 9}).startswith("confirmed")
    assert verdict({"kl": 1.4, "kl_error": 0.1, "windows": 9}, {"kl": 1.0, "kl_error": 0.1, "windows": 9}).startswith("contradicted")


def test_verdicts_compare_window_by_window() -> None:
    first = {"kl": 2.0, "kl_error": 0.6, "windows": 3, "kl_windows": [1.0, 2.0, 3.0]}
    assert verdict(first, {**first, "kl": 2.1, "kl_windows": [1.1, 2.1, 3.1]}).startswith("confirmed")
    assert verdict(first, {**first, "kl": 2.1, "kl_windows": [1.4, 1.9, 3.0]}).startswith("undecided")
    assert verdict(first, {**first, "kl": 2.1, "windows": 4, "kl_windows": [1.1, 2.1, 3.1]}).startswith("undecided")


def test_claims_side_by_side_compare_the_same_windows() -> None:
    same = {"window": 8, "dtype": "float32", "kl_error": 0.01, "model": "m", "text": "t", "world_size": 2}
    few = [{**same, "name": name, "windows": 4, "tokens": 32, "kl": kl} for name, kl in (("a", 1.0), ("b", 1.5))]
    many = [{**same, "name": name, "windows": 9, "tokens": 72, "kl": kl} for name, kl in (("a", 2.0), ("b", 5.0))]
    assert short_verdict([few[0], many[0]], [few[1], many[1]]) == "confirmed, 2.5 times"
    assert short_verdict([few[0], many[0]], [few[1]]) == "confirmed, +50.0 %"
    assert short_verdict([few[1]], [few[0]]) == "contradicted, -33.3 %"
    assert short_verdict([few[0]], [many[1]]) == "not measured"
    for bits in (4, 8):
        few += [{**few[0], "name": f"b{bits} paper zero_aware g128"}, {**few[1], "name": f"b{bits} off zero_aware g128"}]
    text = claims_by_size(few, "t")
    assert "| the compensator beats none | confirmed, +50.0 % | confirmed, +50.0 % |" in text
    assert text.count("not measured") == 2 * (len(CLAIMS) - 1)
    assert claims_by_size(few, "another") == ""
    few += [{**line, "text": "u", "kl": 2 * line["kl"]} for line in few]
    text = claims_by_text(few, 2)
    assert "| claim | 4 bits, t | u | 8 bits, t | u |" in text
    assert "| the compensator beats none |" + 4 * " confirmed, +50.0 % |" in text
    assert claims_by_text(few, 4) == ""


def test_rounding_errors_of_the_zero_point_rules(model: Any, tmp_path: Path) -> None:
    here = job(model, tmp_path / "out.jsonl", windows=4)
    records = rounding_errors(model, here.windows, 2, SITES, 2)
    assert [record["site"] for record in records] == ["all", *range(SITES)]
    assert "zero-point rules" in blend_table([{**here.conditions, "blend": record} for record in records])
    for record in records:
        assert set(record["errors"]) == set(BLENDS)
        assert 0 < record["errors"]["zero_aware"]["push"] < 0.2
        assert 0 <= record["one_sided"] <= record["near"] <= 1


def test_rules_differ_where_groups_lie_on_one_side_of_zero() -> None:
    x = torch.rand(4, 1280, generator=torch.Generator().manual_seed(0)) + 0.5  # gap of half a range
    errors = {name: (form.encode_decode(x) - x).square().mean() for name, form in BLENDS.items()}
    assert errors["zero_aware"] == errors["always offset"] == errors["offset beyond 0.25 ranges"]
    assert errors["always zero"] == errors["offset beyond 1.0 ranges"] > 1.5 * errors["zero_aware"]
    near, one_sided = near_one_sided(x.unflatten(-1, (-1, 128)))
    assert near.all()
    assert one_sided.all()


def test_a_post_processor_puts_bos_first() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<bos>": 0, "a": 1, "b": 2}, unk_token="a"))
    data = {**json.loads(plain.to_str()), "post_processor": begin_with("<bos>", 0)}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    assert tokenizer.encode("b").ids == [0, 2]
    assert tokenizer.encode("b", add_special_tokens=False).ids == [2]


def test_merges_of_a_byte_pair_model_follow_the_scores() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4, "abc": 5}
    scores = {"a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0, "abc": -3.0}
    assert merges(vocabulary, scores) == [["b", "c"], ["a", "b"], ["a", "bc"], ["ab", "c"]]
