"""The experiments for GPUs, planned for the true sizes of their models: `jobs.train --dry-run`, without weights."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.train import main
from tests.shapes import write_shape

CHOSEN = ("math_qwen3_32b_8gpu", "math_qwen3_30b_a3b_16gpu")
"""Examples whose layout is the one that the plan suggests; the others keep engines awake."""
ROWS = {
    "gsm8k": ("openai/gsm8k", "42"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "\\frac{1}{2}"),
}
EXAMPLES = {
    "gsm8k_qwen2.5_0.5b_8gpu": ("Qwen2.5-0.5B", "replicate 1 x shard 4 x tensor 1", 8, "512 of the 2048 rows"),
    "gsm8k_qwen3_8b_lora_1gpu": ("Qwen3-8B", "replicate 1 x shard 1 x tensor 1", 1, "512 of the 512 rows"),
    "math_qwen3_32b_8gpu": ("Qwen3-32B", "replicate 1 x shard 4 x tensor 1", 8, "128 of the 512 rows"),
    "math_qwen3_30b_a3b_16gpu": ("Qwen3-30B-A3B", "replicate 1 x shard 2 x tensor 4", 16, "512 of the 1024 rows"),
}
"""The model of each, the mesh, the number of GPUs, and the rows of a rank."""


def write_prompts(file: Path, kind: str) -> None:
    source, truth = ROWS[kind]
    row = {
        "data_source": source,
        "prompt": [{"role": "user", "content": "How many?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0},
    }
    pq.write_table(pa.Table.from_pylist([row] * 512), file)


def plan_of(settings: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `--dry-run` prints, without the table's lines."""
    assert main(["--dry-run", *settings]) == 0
    return " ".join(re.sub("[│┃]", " ", capsys.readouterr().out).split())


@pytest.mark.parametrize("experiment", EXAMPLES)
def test_an_example_fits_gpus_of_80_gb(
    experiment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)
    model, mesh, gpus, rows = EXAMPLES[experiment]
    write_prompts(tmp_path / "prompts.parquet", experiment.split("_")[0])
    settings = [f"experiment={experiment}", f"model.path={write_shape(model, tmp_path / 'model')}"]
    settings += ["data.train_files=prompts.parquet", "data.val_files=prompts.parquet"]
    text = plan_of([*settings, "--gpus", f"{gpus}xH100"], capsys)
    assert f"{mesh} = " in text and rows in text and f" CPUs, {gpus} GPUs" in text
    assert "does not fit" not in text and "error" not in text
    suggestion = text.partition(f"suggested for {gpus} x H100 ")[2]
    assert suggestion.startswith("the settings as they are") == (experiment in CHOSEN), suggestion
    [used] = re.findall(r"memory of a train worker ([0-9.]+) GiB of 79 GiB .H100.", text)
    assert float(used) < 0.9 * 79, used
    header = (Path(__file__).parents[2] / "configs" / "experiment" / f"{experiment}.yaml").read_text()
    for stated in re.findall(r"about ([0-9]+) GiB (?:for|on the GPU of) (?:the|a) train worker", header):
        assert float(used) == pytest.approx(float(stated), abs=1)
