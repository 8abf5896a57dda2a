"""Reads a million prompts in 20 parquet files through the prompt source and watches time and memory.

    python -m benchmarks.prompt_stream                     # a temporary folder
    python -m benchmarks.prompt_stream --dir DIR --rows 5000000 --row-group-rows 1000000

The files, the byte tokenizer and its chat template are made here. Reported: seconds to resolve the files, to the
first chunk and to a first chunk in the middle of the epoch, milliseconds per chunk, and resident memory over the run.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.config import DataConfig
from pipeline.prompts.files import resolve
from pipeline.prompts.source import Position, PromptSource

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Return the final answer in <answer> </answer> tags."
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with a chat template: no file needed."""
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    return fast


def write_prompts(folder: Path, rows: int, files: int, row_group_rows: int) -> None:
    """`rows` prompts in `files` parquet files of the verl format, written row group by row group."""
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
    """(chunk number, seconds since the start, resident MiB of this process) for the first `count` chunks."""
    process, begin = psutil.Process(), time.perf_counter()
    for number, _ in zip(range(count), chunks, strict=False):
        yield number, time.perf_counter() - begin, process.memory_info().rss / 2**20


def measure(folder: Path, chunk_prompts: int, chunks: int, window_rows: int) -> dict[str, float]:
    """The plain source, in this process."""
    chat = ChatTokenizer(byte_tokenizer(), data := DataConfig(shuffle_window_rows=window_rows))
    gc.collect()
    rss_before = psutil.Process().memory_info().rss / 2**20
    begin = time.perf_counter()
    files = resolve(str(folder), "data.train_files")
    resolved = time.perf_counter() - begin
    source = PromptSource(files, data, chat, seed=1)

    middle = Position(0, source.len_estimate // 2)
    sought = [seconds for _, seconds, _ in watch(source.chunks(chunk_prompts, middle), 1)][0]
    seen = list(watch(source.chunks(chunk_prompts), chunks))
    first, rest = seen[0][1], seen[-1][1] - seen[0][1]
    half = len(seen) // 2
    return {
        "rows": source.len_estimate,
        "row_groups": sum(len(file.row_groups) for file in files),
        "resolve_s": resolved,
        "first_chunk_s": first,
        "first_chunk_in_the_middle_s": sought,
        "ms_per_chunk": 1000 * rest / (len(seen) - 1),
        "rss_before_mib": rss_before,
        "rss_max_first_half_mib": max(rss for _, _, rss in seen[:half]),
        "rss_max_second_half_mib": max(rss for _, _, rss in seen[half:]),
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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.dir or Path(temporary)
        if not any(folder.glob("*.parquet")):
            begin = time.perf_counter()
            write_prompts(folder, args.rows, args.files, args.row_group_rows)
            print(f"wrote {args.rows} prompts in {args.files} files in {time.perf_counter() - begin:.0f} s")
        result = measure(folder, args.chunk_prompts, args.chunks, args.window_rows)
        print(json.dumps({key: round(value, 3) for key, value in result.items()}, indent=2))


if __name__ == "__main__":
    main()
