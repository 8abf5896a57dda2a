"""Time and memory of the prompt stream over a million prompts in 20 parquet files.

    python -m benchmarks.prompt_stream                     # a temporary folder
    python -m benchmarks.prompt_stream --dir DIR --rows 5000000 --row-group-rows 1000000 --parts source

The files, the byte tokenizer and its chat template are made here. Two parts:

- `source`: only the prompt source, in this process. Seconds to resolve the files, to the first chunk and to a first
  chunk in the middle of the epoch, milliseconds per chunk, resident memory over the run.
- `stream`: the whole stream on Ray Data with an instant stand-in for the engine and for the trainer. Seconds until the
  stream is built and until the first chunk arrives, chunks per second, and the private memory of every kind of process
  and the use of the object store along the run.
"""

import argparse
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.stand_in import InstantRollout, StandInTrainer, Watch, shard
from pipeline.config import load_config
from pipeline.config.data import DataConfig
from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.encode import PromptEncoder
from pipeline.prompts.files import resolve
from pipeline.prompts.loader import PromptLoader
from pipeline.prompts.quarantine import Quarantine
from pipeline.run.driver import start_ray
from pipeline.store.cursor import PromptCursor

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Return the final answer in <answer> </answer> tags."
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token per byte, with a chat template, without any file."""
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    return fast


def write_prompts(folder: Path, rows: int, files: int, row_group_rows: int) -> None:
    """Write `rows` prompts into `files` parquet files of the verl format, row group by row group."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        first, last = rows * number // files, rows * (number + 1) // files
        writer = None
        for start in range(first, last, row_group_rows):
            table = _prompts(start, min(start + row_group_rows, last))
            writer = writer or pq.ParquetWriter(folder / f"part-{number:05d}.parquet", table.schema)
            writer.write_table(table, row_group_size=row_group_rows)
        if writer is not None:
            writer.close()


def _prompts(start: int, stop: int) -> pa.Table:
    random = np.random.default_rng(start)
    numbers, targets = random.integers(1, 100, (stop - start, 4)).tolist(), random.integers(1, 1000, stop - start)
    return pa.table(
        {
            "data_source": ["countdown"] * (stop - start),
            "prompt": [
                [{"role": "user", "content": QUESTION.format(numbers=four, target=target)}]
                for four, target in zip(numbers, targets, strict=True)
            ],
            "ability": ["math"] * (stop - start),
            "reward_model": [
                {"style": "rule", "ground_truth": {"target": int(target), "numbers": four}}
                for four, target in zip(numbers, targets, strict=True)
            ],
            "extra_info": [{"split": "train", "index": index} for index in range(start, stop)],
        }
    )


def watch(chunks: Iterable[pa.Table], count: int) -> Iterator[tuple[int, float, float]]:
    """Yield (chunk number, seconds since the start, resident MiB of this process) for the first `count` chunks."""
    process, begin = psutil.Process(), time.perf_counter()
    for number, _ in zip(range(count), chunks, strict=False):
        yield number, time.perf_counter() - begin, process.memory_info().rss / 2**20


def measure(folder: Path, chunk_prompts: int, chunks: int, window_rows: int) -> dict[str, float]:
    """Measure the plain source, in this process."""
    chat = ChatTokenizer(byte_tokenizer(), data := DataConfig(shuffle_window_rows=window_rows))
    gc.collect()
    rss_before = psutil.Process().memory_info().rss / 2**20
    begin = time.perf_counter()
    files = resolve(str(folder), "data.train_files")
    resolved = time.perf_counter() - begin
    loader = PromptLoader(files, data, PromptEncoder(chat, Quarantine(0)), seed=1)

    made = (loader.iteration(number, chunk_prompts) for number in itertools.count(1))
    loader.load(PromptCursor(0, loader.epoch_rows // 2))
    sought = [seconds for _, seconds, _ in watch(made, 1)][0]
    loader.load(PromptCursor())
    seen = list(watch(made, chunks))
    first, rest = seen[0][1], seen[-1][1] - seen[0][1]
    half = len(seen) // 2
    return {
        "rows": loader.epoch_rows,
        "row_groups": sum(len(file.row_groups) for file in files),
        "resolve_s": resolved,
        "first_chunk_s": first,
        "first_chunk_in_the_middle_s": sought,
        "ms_per_chunk": 1000 * rest / (len(seen) - 1),
        "rss_before_mib": rss_before,
        "rss_max_first_half_mib": max(rss for _, _, rss in seen[:half]),
        "rss_max_second_half_mib": max(rss for _, _, rss in seen[half:]),
    }


def measure_stream(folder: Path, model: Path, run_dir: str, chunk_prompts: int, chunks: int) -> dict[str, Any]:
    """Measure the whole stream, in Ray. Memory is in MiB from the first chunk on, at tenths of the run."""
    byte_tokenizer().save_pretrained(model)
    config = load_config(
        [
            "experiment=countdown_cpu",
            f"model.path={model}",
            f"data.train_files={folder}",
            "data.val_files=null",
            "data.max_prompt_length=512",
            f"rollout.chunk_prompts={chunk_prompts}",
        ]
    )
    batch = config.data.train_batch_size
    rows = sum(file.rows for file in resolve(str(folder), "data.train_files"))
    start_ray(config)
    begin = time.perf_counter()
    trainer = StandInTrainer(config, rows // batch, run_dir, InstantRollout, [shard()])
    read, times, messages = 0, [], 0
    memory = Watch(lambda: read)
    while read < chunks:
        trainer.iterate()
        read += trainer.schedule.chunks_per_iteration
        times.append(time.perf_counter() - begin)
        messages, _ = trainer.events(messages)  # as the driver of a run does, so that they do not pile up
    samples = memory.stop()
    trainer.close()
    ray.shutdown()
    warm = [sample for sample in samples if sample.chunks]
    tenths = [warm[round(i * (len(warm) - 1) / 10)] for i in range(11)]
    kinds = sorted(tenths[-1].private)
    return {
        "iterations_scheduled": trainer.schedule.iterations,
        "pages": trainer.schedule.pages,
        "build_s": trainer.build_s,
        "first_iteration_s": times[0],
        "chunks": read,
        "chunks_per_s": (read - trainer.schedule.chunks_per_iteration) / (times[-1] - times[0]),
        "cpu_ms_per_chunk": {
            kind: round(1000 * (warm[-1].cpu_s[kind] - warm[0].cpu_s.get(kind, 0.0)) / (read - warm[0].chunks), 1)
            for kind in kinds
        },
        "chunks_read": [sample.chunks for sample in tenths],
        "object_store_mib": [round(sample.object_store, 1) for sample in tenths],
        "private_mib": {kind: [round(sample.private.get(kind, 0.0)) for sample in tenths] for kind in kinds},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, help="folder of the files; made when missing, kept and used again")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--row-group-rows", type=int, default=50_000)
    parser.add_argument("--window-rows", type=int, default=DataConfig.shuffle_window_rows)
    parser.add_argument("--chunk-prompts", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--parts", choices=["source", "stream"], nargs="+", default=["source", "stream"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.dir or Path(temporary) / "prompts"
        if not any(folder.glob("*.parquet")):
            begin = time.perf_counter()
            write_prompts(folder, args.rows, args.files, args.row_group_rows)
            print(f"wrote {args.rows} prompts in {args.files} files in {time.perf_counter() - begin:.0f} s")
        if "source" in args.parts:
            _show("source", measure(folder, args.chunk_prompts, args.chunks, args.window_rows))
        if "stream" in args.parts:
            work = Path(temporary)
            _show("stream", measure_stream(folder, work / "model", str(work / "run"), args.chunk_prompts, args.chunks))


def _show(part: str, result: dict[str, Any]) -> None:
    print(part, flush=True)
    for key, value in result.items():
        print(f"  {key}: {json.dumps(round(value, 3) if isinstance(value, float) else value)}", flush=True)


if __name__ == "__main__":
    main()
