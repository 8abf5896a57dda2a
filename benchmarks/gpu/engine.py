"""Stage C of the battery: vLLM and the trainer on one GPU.

python -m benchmarks.gpu.engine --shape 0.5b
python -m benchmarks.gpu.engine --device cpu --shape tiny --minutes 20

throughput   tokens per second of the rollout stage, and its ratio to bare vLLM on the same engine
on_policy    a run whose engine sleeps while the trainer computes, on the same GPU; the gap of log-probs
float32      the same with an engine in float32
corrected    the gap in bfloat16 under truncated importance sampling
in_flight    weights that change while responses run, one iteration ahead; the engine stays awake
curve        the demo: supervised warm start, then validated training
"""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu import runs
from benchmarks.gpu.battery import Figures, Options, run_stage

PROMPTS, SAMPLES, CHUNK = 64, 8, 8
ROOT = Path(__file__).resolve().parents[2]


def shared(options: Options, sleep: bool = True) -> list[str]:
    """Make the settings of engine and train worker on one GPU; on CPUs the two take turns on the cores."""
    if options.device == "cpu":
        return ["rollout.num_threads=1"]
    return [
        *("rollout.num_gpus=0.4", "trainer.gpus_per_worker=0.6", "rollout.dtype=bfloat16"),
        *(f"rollout.sleep={str(sleep).lower()}", "rollout.enforce_eager=false", "rollout.gpu_memory_utilization=0.35"),
    ]


def run(options: Options, case: str, *changes: str, sleep: bool = True, iterations: int = 4) -> Figures:
    """Make a short run with real engines and the reward of short responses."""
    name = f"{case}-{options.shape}"
    settings = [
        *runs.base(options, runs.model(options), runs.prompts(options), name),
        *(f"data.train_batch_size={PROMPTS}", f"rollout.n={SAMPLES}", f"rollout.chunk_prompts={CHUNK}"),
        *(f"actor.ppo_mini_batch_size={PROMPTS // 2}", f"trainer.total_training_steps={iterations}"),
        *shared(options, sleep),
        *changes,
    ]
    return runs.train(options, name, settings)


def throughput(options: Options) -> Figures:
    """Run `benchmarks.rollout` on this device."""
    cuda = options.device == "cuda"
    command = [
        *(sys.executable, "-m", "benchmarks.rollout", "--where", "process", "--repeats", str(options.repeats)),
        *("--model", str(runs.model(options)), "--data", f"{runs.prompts(options)}/train.parquet"),
        *("--prompts", "64" if cuda else "8", "--max-tokens", "256" if cuda else "32"),
        *("--chunk-prompts", "16" if cuda else "4"),
        *(["rollout.num_gpus=1", "rollout.dtype=bfloat16", "rollout.enforce_eager=false"] if cuda else []),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    line = r"process\s+(.+?)\s+(\d+) tokens per second, ([\d.]+) of bare"
    found = {
        name.strip(): {"tokens_per_s": int(rate), "of_bare_vllm": float(ratio)}
        for name, rate, ratio in re.findall(line, done.stdout)
    }
    if done.returncode or not found:
        raise RuntimeError(f"benchmarks.rollout failed: {done.stdout[-2000:]}{done.stderr[-6000:]}")
    return found


def on_policy(options: Options) -> Figures:
    """Run strictly on-policy; `first_gap_max` is the gap of equal weights."""
    return run(options, "on_policy")


def float32(options: Options) -> Figures:
    """Run with an engine in the type of the trained weights."""
    return run(options, "float32", "rollout.dtype=float32", "actor.fsdp.param_dtype=float32")


def corrected(options: Options) -> Figures:
    """Run in decoupled mode with token weights."""
    return run(options, "corrected", "algorithm=[grpo,tis]", "actor.old_log_probs=recompute")


def in_flight(options: Options) -> Figures:
    """Run with generation one iteration ahead of training."""
    ahead = ["algorithm.max_staleness=1", "rollout.weight_update=in_flight"]
    return run(options, "in_flight", *ahead, sleep=False, iterations=6)


def curve(options: Options) -> Figures:
    """Run the demo of `make demo`: accuracy on the test puzzles before, during and after training."""
    from jobs import sft
    from jobs import train as job

    # On a CPU the case only shows that the demo runs; `make demo` is the whole demo there.
    cuda = options.device == "cuda"
    sft_steps, iterations, every = (400, 130, 20) if cuda else (4, 2, 2)
    tiny = Options(options.device, "tiny", options.work, options.repeats)
    data, warm, begun = runs.prompts(tiny, full=cuda), options.work / "warm", time.perf_counter()
    runs.with_any_versions()
    if not (warm / "config.json").is_file():
        folder = options.work / "demo"
        if not (folder / "config.json").is_file():
            from jobs import tiny as maker

            runs.checked(maker.main(["--out", str(folder), "--data", f"{data}/sft_train.parquet"]), "jobs.tiny")
        arguments = [
            *(f"out={warm}", f"model.path={folder}", f"data.train_files={data}/sft_train.parquet"),
            *("data.train_batch_size=64", f"trainer.total_training_steps={sft_steps}", "optim.lr=2e-3"),
            *("optim.min_lr_ratio=0", "optim.weight_decay=0.1", "optim.betas=[0.9,0.98]"),
            f"trainer.use_gpu={str(cuda).lower()}",
        ]
        runs.checked(sft.main(arguments), "jobs.sft")
    warm_s = time.perf_counter() - begun
    dropped = ("data.val_files", "trainer.test_freq", "trainer.val_before_train", "reward.")
    settings = [setting for setting in runs.base(tiny, warm, data, "curve") if not setting.startswith(dropped)]
    settings += [
        *(f"data.val_files={data}/test.parquet", f"trainer.test_freq={every}", "trainer.save_freq=-1"),
        *(f"trainer.total_training_steps={iterations}", *shared(tiny)),
    ]
    shutil.rmtree(options.work / "runs" / "curve", ignore_errors=True)
    runs.checked(job.main(settings), "jobs.train")
    lines = (options.work / "runs" / "curve" / "metrics.jsonl").read_text().splitlines()
    accuracy = {
        str(record["iteration"]): value
        for record in map(json.loads, lines)
        for key, value in record.items()
        if key.startswith("val-core/") and "mean@" in key
    }
    return {"warm_start_s": warm_s, "accuracy": accuracy, "in_all_s": time.perf_counter() - begun}


CASES = {
    "throughput": throughput,
    "on_policy": on_policy,
    "float32": float32,
    "corrected": corrected,
    "in_flight": in_flight,
    "curve": curve,
}

if __name__ == "__main__":
    sys.exit(run_stage("engine", CASES, once=("curve",)) > 0)
