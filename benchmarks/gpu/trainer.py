"""Stage A of the battery: only the trainer, on one rank, with random weights; no Ray, no engine.

python -m benchmarks.gpu.trainer --shape 0.5b 1.5b             # on a GPU
python -m benchmarks.gpu.trainer --device cpu --shape tiny     # the same on this machine

imports       actor, critic and publisher import without ray, vllm and mlflow
matmul        FLOP/s that the device reaches in one large product, to compare with
same_numbers  two updates in float32 give the CPU's log-probs, loss, gradient norm and weights
update:*      one update of the actor, in the ways of `VARIANTS`
plain         the same step on the same rows as a loop of plain torch
attention     forward and backward of one layer's attention: padded, masked, packed
publish       the weights become the buffers that engines read
profile       the kernels that take most of an update's time
tests         tests/train and tests/models on the device
"""

import os
import re
import subprocess
import sys
import time
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from benchmarks.gpu.battery import Figures, Options, run_stage
from benchmarks.gpu.measure import begin, fastest, peak_gib, rates, sync
from benchmarks.gpu.plain import attention, plain
from benchmarks.gpu.shapes import SHAPES, batch, model_folder

VARIANTS: dict[str, list[str]] = {
    "default": [],
    "float32": ["actor.fsdp.param_dtype=float32"],
    "no_checkpointing": ["model.enable_gradient_checkpointing=false"],
    "rows_alone": ["model.share_prompts=never"],
    "shared_prompts": ["model.share_prompts=always"],
    "flash_attention": ["model.attn_implementation=flash_attention_2"],
    "chunks_of_4096": ["actor.logits_chunk_tokens=4096"],
    "activation_offload": ["model.activation_offload=true"],
    "optimizer_offload": ["actor.fsdp.offload=optimizer"],
    "offload": ["actor.fsdp.offload=all"],
    "adamw_8bit": ["actor.optim.name=adamw_8bit"],
    "lora": ["model.lora.rank=16", "model.lora.alpha=32"],
    "reference": ["actor.use_kl_loss=true", "scoring.reference.placement=train_workers"],
    "reference_offload": [
        *("actor.use_kl_loss=true", "scoring.reference.placement=train_workers", "scoring.reference.offload=true"),
    ],
}
"""Changes to the settings of an update; a variant whose keys this version lacks is left out."""

BLOCKED = ("ray", "vllm", "mlflow")
TOLERANCE = 1e-4
"""Largest relative difference to the CPU in float32."""
PROFILED = 12
"""Kernels in the summary of a profile."""


def settings(options: Options, *changes: str) -> Any:
    """Make the settings of an update of the shape, as a run on this device has them."""
    from pipeline.config import load_config

    shape = SHAPES[options.shape]
    folder = model_folder(options.shape, options.work, options.device)
    return load_config(
        [
            f"model.path={folder}",
            f"model.enable_gradient_checkpointing={str(options.shape != 'tiny').lower()}",
            f"data.train_batch_size={shape.prompts}",
            f"data.max_response_length={shape.longest}",
            f"rollout.n={shape.samples}",
            f"rollout.chunk_prompts={shape.prompts}",
            f"actor.ppo_max_token_len_per_gpu={shape.budget}",
            f"trainer.use_gpu={str(options.device == 'cuda').lower()}",
            *changes,
        ]
    )


def update(actor: Any, rows: Any) -> dict[str, float]:
    """Make one update with these rows; returns its metrics."""
    from pipeline.stats import reduce
    from pipeline.train.update import StreamedUpdate

    streamed = StreamedUpdate(actor, 1)
    streamed.add(rows)
    return reduce([streamed.finish()])


def imports(options: Options) -> Figures:
    """Check that the train modules do not need the packages that stage A does not carry."""

    class Blocked(MetaPathFinder):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] in BLOCKED:
                raise ImportError(f"{name} is blocked: the train modules must not need it")

    sys.meta_path.insert(0, Blocked())
    import torch

    import pipeline.train.critic
    import pipeline.train.setup
    import pipeline.train.update
    import pipeline.weights.publish  # noqa: F401

    found: Figures = {"without": " ".join(BLOCKED), "torch": torch.__version__}
    if options.device == "cuda":
        found |= {
            "card": torch.cuda.get_device_name(0),
            "cuda": torch.version.cuda,
            "bf16": torch.cuda.is_bf16_supported(),
        }
    return found


def matmul(options: Options) -> Figures:
    """Measure the FLOP/s of one large product of random numbers."""
    import torch

    device = torch.device(options.device)
    size, types = (8192, ("bfloat16", "float32")) if options.device == "cuda" else (1024, ("float32",))
    found: Figures = {}
    for name in types:
        a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, name)) for _ in range(2))
        found[f"{name}_tflops"] = 2 * size**3 / fastest(10, lambda a=a, b=b: a @ b, device) / 1e12  # type: ignore[misc]
    return found


def same_numbers(options: Options) -> Figures:
    """Compare two updates of the tiny shape on the CPU and on the device in float32, and on the device in bfloat16."""
    import torch

    from pipeline.models.fsdp import full_state_dict
    from pipeline.train.setup import build_actor

    device = begin(options)
    tiny = Options(options.device, "tiny", options.work)

    def trained(place: Any, dtype: str) -> dict[str, Any]:
        # A large eps keeps AdamW from blowing rounding noise of tiny gradients up to whole steps.
        changes = [f"actor.fsdp.param_dtype={dtype}", "actor.optim.lr=1e-2", "actor.optim.eps=1e-2"]
        config = settings(tiny, *changes, "model.dtype=float32")
        actor = build_actor(config, place, 100)
        found: dict[str, Any] = {}
        for step in range(2):
            data = batch(SHAPES["tiny"], step)
            metrics = update(actor, data)
            found |= {f"{name}_{step}": metrics[f"actor/{name}"] for name in ("pg_loss", "grad_norm")}
            found[f"log_probs_{step}"] = torch.from_numpy(data.old_log_probs).double()
        state = full_state_dict(actor.module)
        found["weights"] = torch.cat([tensor.double().flatten() for tensor in state.values()])
        return found

    def difference(ours: Any, theirs: Any) -> float:
        one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs))
        return float((one - other).abs().max() / other.abs().max().clamp_min(1e-3))

    expected, found = trained(torch.device("cpu"), "float32"), trained(device, "float32")
    differences = {name: difference(found[name], expected[name]) for name in expected}
    worst = max(differences, key=lambda name: differences[name])
    figures: Figures = {"worst": worst, "float32_difference": differences[worst]}
    if differences[worst] > TOLERANCE:
        raise AssertionError(f"{worst} differs by {differences[worst]:.2g} of its size, more than {TOLERANCE:g}")
    low = trained(device, "bfloat16")
    return figures | {
        "bfloat16_log_probs_difference": float((low["log_probs_0"] - expected["log_probs_0"]).abs().max())
    }


def updated(options: Options, variant: str) -> Figures:
    """Measure speed and memory of one update: old log-probs, forward and backward pass, step."""
    import torch

    from pipeline.config import ConfigError
    from pipeline.train.setup import build_actor

    try:
        config = settings(options, *VARIANTS[variant])
    except ConfigError as error:
        return {"left_out": str(error).splitlines()[0]}
    device, shape = begin(options), SHAPES[options.shape]
    begun = time.perf_counter()
    actor = build_actor(config, device, 100)
    sync(device)
    load_s, before = time.perf_counter() - begun, peak_gib(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    data = [batch(shape) for _ in range(options.repeats + 1)]
    first = update(actor, data[0])
    turns = iter(data[1:])
    seconds = fastest(options.repeats - 1, lambda: update(actor, next(turns)), device)
    return {
        "load_s": load_s,
        "state_gib": before,
        "pg_loss": first["actor/pg_loss"],
        "grad_norm": first["actor/grad_norm"],
        "log_prob_gap": first["training/rollout_log_probs_diff_max"],
        **rates(data[0], options, seconds, passes=4),
        "peak_gib": peak_gib(device),
    }


def publish(options: Options) -> Figures:
    """Measure packing the weights into the buffers that engines read, and joining them, without the object store."""
    import torch

    from pipeline.train.setup import build_actor
    from pipeline.weights.load import parameters
    from pipeline.weights.publish import pack, parts

    device = begin(options)
    module = build_actor(settings(options), device, 1).module
    dtype, limit = torch.bfloat16, 2**29
    packed: list[Any] = []

    def gather() -> None:
        packed[:] = [pack(parts(module, 0, dtype), 0, limit, lambda buffer: buffer)]

    seconds = fastest(options.repeats, gather, device)
    local = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    copy_s = fastest(options.repeats, lambda: [part.to(dtype).cpu() for part in local], device)
    begun, joined = time.perf_counter(), dict(parameters(packed, lambda refs: refs))
    join_s = time.perf_counter() - begun
    gib = sum(tensor.nbytes for tensor in joined.values()) / 2**30
    held = zip(dict(module.named_parameters()), local, strict=True)
    wrong = [name for name, part in held if not torch.equal(joined[name], part.to(dtype).cpu())]
    if wrong:
        raise AssertionError(f"{len(wrong)} parameters arrived with other numbers, the first {wrong[0]}")
    return {
        "gib": gib,
        "pack_s": seconds,
        "pack_gib_per_s": gib / seconds,
        "over_a_copy": seconds / copy_s,
        "join_s": join_s,
    }


def profile(options: Options) -> Figures:
    """Find the kernels that take most of an update; the whole table lies in the folder of `--work`."""
    import torch
    from torch.profiler import ProfilerActivity

    from pipeline.train.setup import build_actor

    device = begin(options)
    actor = build_actor(settings(options), device, 100)
    data = [batch(SHAPES[options.shape]) for _ in range(2)]
    update(actor, data[0])
    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=kinds) as profiled:
        update(actor, data[1])
        sync(device)
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    averages = profiled.key_averages()
    (options.work / f"profile-{options.shape}.txt").write_text(averages.table(sort_by=key, row_limit=60))
    times = sorted(((getattr(entry, key), entry.key) for entry in averages), reverse=True)
    total = sum(seconds for seconds, _ in times) or 1
    return {name[:60]: f"{seconds / total:.1%}" for seconds, name in times[:PROFILED]}


def tests(options: Options) -> Figures:
    """Run tests/train and tests/models with the device in the place of the CPU; tests that need Ray do not count."""
    root = Path(__file__).resolve().parents[2]
    place = "cuda:0" if options.device == "cuda" else "cpu"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "unit"),
        *("--continue-on-collection-errors", "tests/train", "tests/models"),
    ]
    done = subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"SLIPSTREAM_TEST_DEVICE": place},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    last = lines[-1] if lines else done.stderr.strip()[-300:]
    found: Figures = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if not found:
        raise RuntimeError(f"pytest did not run: {last}")
    broken = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return found | {"device": place, "broken": broken[:40]}


CASES: dict[str, Any] = {
    "imports": imports,
    "matmul": matmul,
    "same_numbers": same_numbers,
    "update:default": partial(updated, variant="default"),
    "plain": plain,
    **{f"update:{name}": partial(updated, variant=name) for name in VARIANTS if name != "default"},
    "publish": publish,
    "attention": attention,
    "profile": profile,
    "tests": tests,
}
ONCE = ("imports", "matmul", "same_numbers", "tests")
"""Cases that have their own model or none."""

if __name__ == "__main__":
    sys.exit(run_stage("trainer", CASES, once=ONCE) > 0)
