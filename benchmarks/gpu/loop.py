"""Stage B of the battery: the train loop under Ray, with rows that `transformers` has generated; no vLLM.

python -m benchmarks.gpu.loop --shape 0.5b
python -m benchmarks.gpu.loop --device cpu --shape tiny

record   `transformers` generates the responses of a few iterations, which the other cases train on
train    Ray Train with nccl (gloo on CPUs): GRPO, chunk by chunk, with a checkpoint every second iteration
resume   the same run goes on from its checkpoint
ppo      actor and critic; the critic's weights reach a replica on the same GPU through the object store
sft      supervised fine-tuning of the model
"""

import shutil
import sys
import time
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu import runs
from benchmarks.gpu.battery import Figures, Options, run_stage

ITERATIONS, PROMPTS, SAMPLES, CHUNK = 4, 32, 4, 8


def settings(options: Options, name: str, *changes: str) -> list[str]:
    """Make the settings of a run over the recorded rows."""
    given = runs.base(options, runs.model(options), runs.prompts(options), name)
    return [
        *(setting for setting in given if not setting.startswith("data.train_files")),
        "data.train_files=null",
        f"data.recorded_run={options.work}/runs/recorded-{options.shape}",
        *sizes(),
        *changes,
    ]


def sizes() -> list[str]:
    """Make the settings of an iteration of four chunks and two optimiser steps."""
    return [
        *(f"data.train_batch_size={PROMPTS}", f"rollout.n={SAMPLES}", f"rollout.chunk_prompts={CHUNK}"),
        f"actor.ppo_mini_batch_size={PROMPTS // 2}",
    ]


def record(options: Options) -> Figures:
    """Generate the responses of all iterations with `transformers`, as a run would have recorded them."""
    import pyarrow as pa
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipeline.config import load_config, save_yaml
    from pipeline.models.precision import torch_dtype
    from pipeline.prompts.encode import stamp, to_table
    from pipeline.prompts.stage import loaders
    from pipeline.rollout.stage import Rollout, decoded
    from pipeline.sampling import row_limits
    from pipeline.track.trajectories import Record

    name, cuda = f"recorded-{options.shape}", options.device == "cuda"
    folder = options.work / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    path = runs.model(options)
    dtype = "bfloat16" if cuda else "float32"
    given = runs.base(options, path, runs.prompts(options), name)
    config = load_config([*given, *sizes(), f"rollout.dtype={dtype}"])
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype(dtype, "dtype")).eval()
    model.to(options.device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    train, _ = loaders(config.data, config.model, row_limits(config), config.trainer.seed)
    stage: Any = SimpleNamespace(_greedy=False, name="transformers")
    tokens, seconds = 0, 0.0
    for iteration in range(1, ITERATIONS + 1):
        made = train.iteration(iteration, PROMPTS)
        for chunk in range(PROMPTS // CHUNK):
            number = (iteration - 1) * (PROMPTS // CHUNK) + chunk
            table: pa.Table = stamp(to_table(made[chunk * CHUNK : (chunk + 1) * CHUNK]), "train", number, iteration)
            begun = time.perf_counter()
            generated = generate(model, table["prompt_ids"].to_pylist(), tokenizer, config.data.max_response_length)
            seconds += time.perf_counter() - begun
            texts = decoded(tokenizer, [one.token_ids.tolist() for one in generated])
            rows = Rollout._rows(stage, table, generated, texts, None, 0.0, 0.0)
            Record(str(folder))(rows)
            tokens += sum(len(one.token_ids) for one in generated)
    save_yaml(config, folder / "config.yaml")
    where = torch.cuda.get_device_name(0) if cuda else "cpu"
    return {"where": where, "tokens": tokens, "tokens_per_s": tokens / seconds}


def generate(model: Any, prompts: list[list[int]], tokenizer: Any, longest: int) -> list[Any]:
    """Generate `SAMPLES` responses to each prompt, with the log-probs of their tokens."""
    import numpy as np
    import torch

    from pipeline.generation import Generation

    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        made = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            num_return_sequences=SAMPLES,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    responses = made.sequences[:, width:]
    chances = torch.stack(made.logits, dim=1).float().log_softmax(-1)
    chosen = chances.gather(-1, responses[..., None]).squeeze(-1).cpu().numpy()
    found = []
    for tokens, log_probs in zip(responses.cpu().numpy(), chosen, strict=True):
        ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        reason = "stop" if len(ends) else "length"
        kept = tokens[:length].astype(np.int32), log_probs[:length].astype(np.float32)
        found.append(Generation(*kept, reason, ((0, length),)))
    return found


def train(options: Options) -> Figures:
    """Train on half of the recorded iterations."""
    name = f"grpo-{options.shape}"
    half = f"trainer.total_training_steps={ITERATIONS // 2}"
    return runs.train(options, name, settings(options, name, half, "trainer.save_freq=2"))


def resume(options: Options) -> Figures:
    """Train on the other half, from the checkpoint."""
    name = f"grpo-{options.shape}"
    steps = f"trainer.total_training_steps={ITERATIONS}"
    found = runs.train(options, name, settings(options, name, steps, "trainer.save_freq=2"), fresh=False)
    if found["iterations"] != ITERATIONS:
        raise AssertionError(f"{found['iterations']} iterations are recorded after the second half, not {ITERATIONS}")
    return found


def ppo(options: Options) -> Figures:
    """Train actor and critic, with a replica of the critic."""
    name = f"ppo-{options.shape}"
    shared = ["trainer.gpus_per_worker=0.6", "scoring.value.num_gpus=0.4"] if options.device == "cuda" else []
    steps = f"trainer.total_training_steps={ITERATIONS}"
    return runs.train(options, name, settings(options, name, "algorithm=ppo", "critic.optim.lr=1e-4", steps, *shared))


def sft(options: Options) -> Figures:
    """Run a few steps of supervised fine-tuning."""
    from jobs import sft as job

    out = options.work / f"sft-{options.shape}"
    shutil.rmtree(out, ignore_errors=True)
    data, begun = runs.prompts(options), time.perf_counter()
    arguments = [f"out={out}", f"model.path={runs.model(options)}", f"data.train_files={data}/sft_train.parquet"]
    cuda = str(options.device == "cuda").lower()
    runs.with_any_versions()
    runs.checked(job.main([*arguments, "trainer.total_training_steps=4", f"trainer.use_gpu={cuda}"]), "jobs.sft")
    return {"seconds_in_all": time.perf_counter() - begun, "saved": sorted(file.name for file in out.iterdir())}


CASES = {"record": record, "train": train, "resume": resume, "ppo": ppo, "sft": sft}

if __name__ == "__main__":
    sys.exit(run_stage("loop", CASES) > 0)
