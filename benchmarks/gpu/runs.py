"""Whole runs for the stages with Ray: their prompts and models, which are made on the spot, and their figures."""

import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.battery import Figures, Options
from benchmarks.gpu.shapes import SHAPES
from jobs.demo import TASKS

FEWER = ["--template", "short", "--train", "512", "--test", "32", "--sft", "512", "--sft-test", "32"]
REWARD = Path(__file__).with_name("reward.py")

MEDIANS = {
    "timing_s/step": "step_s",
    "timing_s/gen": "wait_for_rows_s",
    "timing_s/update_actor": "update_s",
    "timing_s/publish": "publish_s",
    "timing_s/update_weights": "step_to_engines_s",
    "timing_s/load_weights": "load_weights_s",
    "timing_s/save_checkpoint": "save_checkpoint_s",
    "perf/throughput": "tokens_per_s_and_worker",
    "perf/rollout_idle": "engines_idle",
    "perf/train_idle": "trainer_idle",
    "actor/grad_norm": "grad_norm",
    "actor/perf/max_memory_allocated_gb": "trainer_gib",
}
"""Metrics whose median over the iterations after the first is a figure."""
LARGEST = {"training/rollout_log_probs_diff_max": "gap_max", "training/rollout_log_probs_diff_mean": "gap_mean"}
"""Metrics whose largest value is a figure: differences of log-probs between engine and trainer."""


def with_any_versions() -> None:
    """Run with the versions that the machine has; the report names them."""
    from pipeline.run import versions

    versions.TESTED.clear()


def prompts(options: Options, full: bool = False) -> Path:
    """Make Countdown prompts, with `full` the demo's, unless they exist; returns their folder."""
    from jobs.prepare import __main__ as prepare

    folder = options.work / ("countdown" if full else "countdown-few")
    if not (folder / "sft_test.parquet").is_file():
        puzzles = TASKS["countdown"].prepare.split() if full else FEWER
        checked(prepare.main(["countdown", "--out", str(folder), *puzzles]), "jobs.prepare")
    return folder


def model(options: Options, full: bool = False) -> Path:
    """Make a random model of the shape's sizes with a tokenizer of its own, unless it exists; returns its folder."""
    from jobs import tiny

    shape, folder = SHAPES[options.shape], options.work / f"loop-{options.shape}{'-full' * full}"
    if not (folder / "tokenizer.json").is_file():
        data = str(prompts(options, full) / "sft_train.parquet")
        heads = shape.heads if options.shape != "tiny" else 2
        kv_heads = shape.kv_heads if options.shape != "tiny" else 2
        sizes = {"hidden": shape.hidden, "layers": shape.layers, "heads": heads, "kv-heads": kv_heads}
        given = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
        checked(tiny.main(["--out", str(folder), "--data", data, *given]), "jobs.tiny")
    return folder


def checked(code: int | None, name: str) -> None:
    """Raise RuntimeError unless a job returned 0."""
    if code:
        raise RuntimeError(f"{name} ended with exit code {code}; its output stands above")


def base(options: Options, folder: Path, data: Path, name: str) -> list[str]:
    """Make the settings of every run: one train worker, on the GPU unless the device is `cpu`."""
    cuda = options.device == "cuda"
    return [
        *("experiment=countdown_cpu", f"model.path={folder}", f"data.train_files={data}/train.parquet"),
        *("data.val_files=null", "trainer.test_freq=-1", "trainer.val_before_train=false"),
        *(f"trainer.experiment_name={name}", f"trainer.default_local_dir={options.work}/runs", "trainer.num_workers=1"),
        *("trainer.logger=[console]", f"trainer.use_gpu={str(cuda).lower()}", "trainer.max_log_prob_gap=null"),
        f"reward.custom_reward_function.path={REWARD}",
    ]


def train(options: Options, name: str, settings: Sequence[str], fresh: bool = True) -> Figures:
    """Train in this process; returns the figures of the run.

    Args:
        options: options of the case.
        name: name of the run; its folder is emptied first if `fresh`.
        settings: settings of the run, `base` included.
    """
    from jobs import train as job

    folder = options.work / "runs" / name
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    with_any_versions()
    checked(job.main(list(settings)), "jobs.train")
    return figures(folder)


def figures(folder: Path) -> Figures:
    """Read the figures of a run from its `metrics.jsonl`."""
    with (folder / "metrics.jsonl").open() as lines:
        records = [record for record in map(json.loads, lines) if "timing_s/step" in record]
    if not records:
        raise RuntimeError(f"{folder}/metrics.jsonl holds no iteration")
    # In the first one engines start and kernels are compiled.
    later = records[1:] or records
    found: Figures = {"iterations": len(records)}
    for choose, names in ((statistics.median, MEDIANS), (max, LARGEST)):
        for key, short in names.items():
            if values := [record[key] for record in later if key in record]:
                found[short] = choose(values)
    gap = "training/rollout_log_probs_diff_max"
    # Before the first step engine and trainer have the same weights; rows of later steps may be older.
    return found | ({"first_gap_max": records[0][gap]} if gap in records[0] else {})
