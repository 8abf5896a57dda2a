"""A tiny policy made here: `python -m jobs.tiny --out DIR --data FILES...`.

1. The model is a Qwen3 of about two million parameters with random weights; heads have 32 dimensions, the smallest that
   vLLM's CPU attention takes. Warm-start it with `jobs.sft`. (A Qwen2 would not do: `AutoTokenizer` gives every model
   of that type the original's pre-tokenizer and normaliser, whatever the folder says.)
2. The tokenizer is a byte-level BPE trained on the task's text. All 256 bytes are in its alphabet, so there is no
   unknown token. A piece ends at a digit or after a newline, and nowhere else: digits are single tokens, which
   arithmetic needs, and the constant wording between them merges into a few tokens, which keeps CPU runs fast.
3. The chat template is ChatML. Newlines end pieces, so `assistant\\n` and the answer after it never merge: a prompt
   gives the same tokens alone and in front of an answer.

    python -m jobs.prepare countdown --out data/countdown --template short --sft 40000
    python -m jobs.tiny --out models/tiny --data data/countdown/sft_train.parquet
"""

import argparse
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from jobs.prepare import countdown
from jobs.prepare.puzzles import Ranges, puzzles

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's CPU attention, which has the fewest
MIN_VOCAB = 256 + 3
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PIECES = r"[0-9]|[^0-9\n]*\n|[^0-9\n]+"
# A newline right after a tag would be trimmed, so that one is an expression.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLUMNS = ("prompt", "messages")
BATCH_ROWS = 1024


def texts(files: Iterable[str | Path], rows: int) -> Iterator[str]:
    """Contents of all chat messages in the `prompt` and `messages` columns of parquet files, `rows` rows per file.

    Raises:
        ValueError: a file cannot be read or has neither column.
    """
    for file in files:
        try:
            with pq.ParquetFile(file) as parquet:
                columns = [name for name in COLUMNS if name in parquet.schema_arrow.names]
                if not columns:
                    found = ", ".join(parquet.schema_arrow.names)
                    raise ValueError(f"{file} has neither a `prompt` nor a `messages` column, but {found}")
                left = rows
                for batch in parquet.iter_batches(BATCH_ROWS, columns=columns):
                    yield from _contents(batch.slice(0, left), file)
                    left -= len(batch)
                    if left <= 0:
                        break
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{file} cannot be read as parquet: {error}") from error


def _contents(batch: pa.RecordBatch, file: str | Path) -> Iterator[str]:
    for row in batch.to_pylist():
        for column, messages in row.items():
            if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
                raise ValueError(
                    f"{file}: column {column!r} holds no chat messages {{role, content}}, but {messages!r}"
                )
            yield from (message["content"] for message in messages if message.get("content"))


def countdown_texts(count: int, seed: int) -> Iterator[str]:
    """Messages of `count` Countdown puzzles in the short template with steps and answers."""
    for puzzle in itertools.islice(puzzles((3, 4), (1.0, 1.0), Ranges(), seed), count):
        yield from (message["content"] for message in countdown.messages(puzzle, "short", "steps"))


def build_tokenizer(corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most `vocab_size` tokens, fewer where the corpus is used up.

    Any text survives encoding and decoding. The end-of-sequence token ends a turn; padding has a token of its own.

    Raises:
        ValueError: `vocab_size` has no room for the 256 bytes and the special tokens.
    """
    if vocab_size < MIN_VOCAB:
        raise ValueError(f"--vocab {vocab_size} is too small; {MIN_VOCAB} tokens (bytes and special tokens) are needed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The template's own words are text of the task too; often enough that the trainer merges them whole.
    frame = itertools.repeat("system\nuser\nassistant\n", 1000)
    tokenizer.train_from_iterator(itertools.chain(frame, corpus), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, heads: int, kv_heads: int, tie: bool, seed: int
) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights whose vocabulary is exactly the tokenizer's.

    Raises:
        ValueError: the sizes do not fit together or vLLM's CPU attention does not take them.
    """
    for option, value in (("--hidden", hidden), ("--layers", layers), ("--heads", heads), ("--kv-heads", kv_heads)):
        if value < 1:
            raise ValueError(f"{option} {value} must be at least 1")
    if hidden % heads or hidden // heads not in HEAD_DIMS:
        raise ValueError(
            f"--hidden {hidden} over --heads {heads} gives heads of {hidden / heads:g} dimensions, but vLLM's CPU "
            f"attention takes {', '.join(map(str, HEAD_DIMS))}; change either"
        )
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=64 * round(hidden * 8 / 3 / 64) or 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


class Parser(argparse.ArgumentParser):
    """Answers a bad option with a sentence instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def parser() -> argparse.ArgumentParser:
    """The options of `python -m jobs.tiny`."""
    own = Parser(prog="python -m jobs.tiny", description="Make a tiny language model and its tokenizer.")
    add = own.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for model and tokenizer; must not hold a model")
    add("--data", nargs="+", default=[], metavar="FILE", help="parquet files whose messages the tokenizer is trained "
        "on (default: Countdown puzzles made on the spot)")  # fmt: skip
    add("--rows", type=int, default=4096, metavar="N", help="rows read of each file (default: %(default)s)")
    add("--vocab", type=int, default=512, metavar="N", help="most tokens (default: %(default)s)")
    add("--hidden", type=int, default=192, metavar="N", help="width (default: %(default)s)")
    add("--layers", type=int, default=4, metavar="N", help="layers (default: %(default)s)")
    add("--heads", type=int, metavar="N", help="attention heads (default: width / 32)")
    add("--kv-heads", type=int, metavar="N", help="key and value heads (default: as --heads)")
    add("--tie", action=argparse.BooleanOptionalAction, default=True, help="share embedding and head (default: yes)")
    add("--seed", type=int, default=0, metavar="S", help="seed of the weights (default: %(default)s)")
    return own


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Write model and tokenizer; returns their sizes.

    Raises:
        ValueError: an option or a file cannot be used.
        OSError: the folder cannot be written.
    """
    if (args.out / "config.json").exists():
        raise ValueError(f"--out {args.out} already holds a model; choose another folder or remove it")
    heads = args.heads or max(1, args.hidden // 32)
    corpus = texts(args.data, args.rows) if args.data else countdown_texts(args.rows, args.seed)
    tokenizer = build_tokenizer(corpus, args.vocab)
    kv_heads = heads if args.kv_heads is None else args.kv_heads
    model = build_model(tokenizer, args.hidden, args.layers, heads, kv_heads, args.tie, args.seed)
    disable_progress_bar()
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    return {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    own = parser()
    args = own.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        sizes = make(args)
    except ValueError as error:
        print(f"{own.prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{own.prog}: cannot write {args.out}: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {sizes['parameters']:,} parameters, {sizes['vocabulary']} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
