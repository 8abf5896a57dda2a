"""The table of model families: its forms, how a trial ends, and the page."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import families, family_sides
from benchmarks.families import BEGIN, END, FOUND, STEPS, Trial, cells, largest, main, tried, verdict, write
from benchmarks.family_forms import FORMS, LENGTH, ORIGINAL, WINDOW, build
from benchmarks.family_sides import PROMPTS, RESPONSES, Side

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
GOOD: dict[str, Any] = {
    **{"name": "llama", "family": "llama", "class": "LlamaForCausalLM", "engine": "LlamaForCausalLM"},
    **{"way": "packed rows", "still": [], "gaps": [{"alone": 1e-6, "packed": 3e-6}, {"alone": 2e-6, "packed": 1e-6}]},
}


def page_rows() -> dict[str, list[str]]:
    """The rows of the page's table, by the name of the form."""
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return {name.strip("`"): row for name, *row in rows}


def test_forms_are_many_and_of_known_families() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    families = {family for family, _ in FORMS.values()}
    assert len(FORMS) >= 40 and len(families) >= 40
    assert families <= CONFIG_MAPPING_NAMES.keys()


def test_rows_are_longer_than_what_forms_change_at() -> None:
    assert min(PROMPTS) + min(RESPONSES) < WINDOW < ORIGINAL < max(PROMPTS) + max(RESPONSES) < LENGTH


@pytest.mark.parametrize("name", ["llama-3", "gemma-2", "phi-4-mini", "glm-4.5"])
def test_a_form_has_no_weight_that_could_be_left_out(name: str, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    lm = build(name, AutoTokenizer.from_pretrained(tiny_model))
    plain = [key for key, weight in lm.named_parameters() if weight.ndim == 1 and len(set(weight.tolist())) == 1]
    assert not plain
    biases = [tensor for key, tensor in lm.named_buffers() if key.endswith("bias")]
    assert bool(biases) == (name == "glm-4.5") and all(tensor.abs().min() > 0 for tensor in biases)


def test_verdicts() -> None:
    assert verdict(GOOD) == ("works", "packed rows")
    assert cells(GOOD)[-1] == "3.0e-06" and largest(GOOD) == {"alone": 2e-6, "packed": 3e-6}
    for gap in (2e-4, math.nan, math.inf):
        result, why = verdict(GOOD | {"gaps": [{"alone": 1e-6, "packed": gap}, {"alone": 1e-6, "packed": 1e-6}]})
        assert result == "differs" and "packed" in why and "alone" not in why, gap
    assert verdict(GOOD | {"still": ["a.weight"]}) == ("fails", "the update leaves 1 parameters as they were: a.weight")
    for step in STEPS:
        for kind in ("ValueError", "FinalError", "EngineDead"):
            failed = {"name": "a", "gaps": [], "step": step, "failed": {"kind": kind, "error": "no"}}
            result, why = verdict(failed)
            assert result == ("fails" if kind == "EngineDead" and step != "engine" else "refused")
            assert why == f"{STEPS[step]}: no"
    crash = {"name": "a", "gaps": [], "step": "trainer", "failed": {"kind": "IndexError", "error": "x " * 200}}
    result, why = verdict(crash)
    assert result == "fails" and why.endswith(" ...") and len(why) < 300


def test_a_form_that_was_tried_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def run(trial: Trial) -> dict[str, Any]:
        made.append(trial.name)
        return GOOD | {"name": trial.name}

    monkeypatch.setattr(Trial, "run", run)
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{BEGIN}\n\nold\n\n{END}\n\nthe end\n")
    command = ["--only", "llama", "qwen2", "--out", str(tmp_path)]
    main([*command, "--page", str(page)])
    main(command)
    assert made == ["llama", "qwen2"]
    main([*command, "--again"])
    assert made[2:] == ["llama", "qwen2"]
    before, table, after = page.read_text().split("<!--")
    assert before == "# Page\n\n" and after.endswith("the end\n") and "old" not in table
    assert [line.split(" | ")[0] for line in table.splitlines() if "`" in line] == ["| `llama`", "| `qwen2`"]


class Ends:
    """A side whose process ends, or does not answer, in the middle of a call."""

    def make(self, name: str, folder: Path) -> None:
        if name == "llama":
            os._exit(3)
        time.sleep(600)


@pytest.mark.slow
def test_a_crash_and_a_step_without_end_are_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "Trainer", Ends)
    found = tried("llama", tmp_path, False)
    assert (found["step"], found["failed"]["kind"]) == ("model", "BrokenProcessPool")
    assert "BrokenProcessPool" in (tmp_path / "llama" / "log").read_text()
    assert json.loads((tmp_path / "llama" / FOUND).read_text()) == found
    opened = Side.__init__

    def impatient(side: Side, *args: Any) -> None:
        opened(side, *args)
        monkeypatch.setattr(family_sides, "CALL_S", 2.0)

    monkeypatch.setattr(Side, "__init__", impatient)
    trial = Trial("qwen2", tmp_path / "qwen2")
    trial.log.parent.mkdir()
    found = trial.run()
    assert found["failed"]["kind"] == "TimeoutError" and verdict(found)[0] == "fails"
    for side in trial.sides:
        with pytest.raises(ProcessLookupError):
            # The process is a child of the fork server, which collects it.
            for _ in range(100):
                os.kill(side._pid, 0)
                time.sleep(0.1)


def test_a_page_without_marks_is_left_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    with pytest.raises(ValueError, match="families"):
        write(page, [GOOD])
    assert page.read_text() == "# Page\n"


def test_the_page_has_at_least_forty_forms_that_work() -> None:
    rows = page_rows()
    assert [name for name in FORMS if name in rows] == list(rows)
    assert sum(row[2] == "works" for row in rows.values()) >= 40


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", page_rows())
def test_a_form_does_what_the_page_says(name: str, tmp_path: Path) -> None:
    _, _, _, result, way, _ = cells(tried(name, tmp_path, False))
    expected = page_rows()[name]
    assert (result, way.split(":")[0]) == (expected[2], expected[3].split(":")[0])
