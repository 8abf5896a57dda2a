"""Make a tiny language model and its tokenizer: `python -m jobs.tiny --out DIR --data FILES...`.

1. The model is a Qwen3 with about two million random weights. Heads have 32 dimensions, the smallest size that vLLM's
   CPU attention supports. (It is not a Qwen2, since `AutoTokenizer` would replace the pre-tokenizer of a Qwen2.)
2. The tokenizer is a byte-level BPE, trained on the texts of the task. All 256 bytes are in its alphabet, so it needs
   no unknown token. Text is split only at digits and after newlines: digits are single tokens, which arithmetic needs
   (with `--digits 2`, two digits can be a token), and the constant text between them merges into few tokens, which
   keeps CPU runs fast.
3. The chat template is ChatML. Text is split after newlines, so `assistant\\n` and the response after it never merge: a
   prompt has the same tokens with and without a response after it.
4. Tools are written in Hermes style: schemas in the system message, `<tool_call>` in assistant messages,
   `<tool_response>` in a user's turn. If the files have a column `tools`, the tokenizer is trained on these texts too.
5. With `--experts N` it is a mixture of experts, a Qwen3-MoE; a token takes two of them, which together are as wide as
   the feed-forward network of the other model.
6. With `--vision FAMILY` the model reads pictures, and gets a processor (`tiny_vision.py`).
"""

import argparse
import itertools
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from jobs.command import called
from jobs.entry import command
from jobs.prepare import countdown
from jobs.prepare.__main__ import Parser
from jobs.prepare.puzzles import Ranges, puzzles
from jobs.tiny_vision import FAMILIES, QUESTIONS, build_vision_model, prepare_tokenizer, save_vision
from pipeline.cells import check_names, values
from pipeline.config.paths import check_out, local_path
from pipeline.conversations import read_messages, read_tools
from pipeline.models.save import written_whole

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's CPU attention, which has the fewest
MIN_VOCAB = 256 + 3
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PIECES = r"[0-9]{1,%d}|[^0-9\n]*\n|[^0-9\n]+"
# A newline right after a tag would be trimmed, so it is written as an expression.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{{ '\\n' }}{% endif %}"
    "<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    'To call one: <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{% if loop.first or loop.previtem['role'] != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}"
    "<tool_response>{{ message['content'] }}</tool_response>"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}<|im_end|>{{ '\\n' }}{% endif %}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    """<tool_call>{"name": "{{ call['function']['name'] }}", "arguments": """
    "{{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}"
    "<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BATCH_ROWS = 1024
CHOSEN = 2
"""Number of experts that a token takes in each layer."""


def texts(files: Iterable[str | Path], rows: int) -> Iterator[str]:
    """Yield the contents of chat messages in the columns `prompt` and `messages` of parquet files.

    For rows with tools, all text between the turn markers of the chat template is yielded.

    Args:
        files: the parquet files.
        rows: number of rows to read in each file, from the first on.

    Raises:
        ValueError: a file cannot be read, has neither column, or holds no chat messages.
    """
    template = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    for file in files:
        try:
            with pq.ParquetFile(file) as parquet:
                names = parquet.schema_arrow.names
                check_names(names, str(file))
                columns = [name for name in ("prompt", "messages") if name in names]
                with_tools = [*columns, "tools"] if "tools" in names else columns
                if not columns:
                    raise ValueError(f"{file} has neither a `prompt` nor a `messages` column, but {', '.join(names)}")
                batches = parquet.iter_batches(BATCH_ROWS, columns=with_tools)
                some = itertools.islice((row for batch in batches for row in values(batch)), rows)
                for row, column in ((row, column) for row in some for column in columns):
                    messages = read_messages(row[column], f"{file}, column {column!r}")
                    schemas = read_tools(row.get("tools"), f"{file}, column 'tools'")
                    if schemas is None:
                        yield from (message["content"] for message in messages if message["content"])
                        continue
                    text = str(template.apply_chat_template(messages, tools=list(schemas), tokenize=False))
                    yield from filter(None, re.split(f"{re.escape(START)}|{re.escape(END)}", text))
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{file} cannot be read as parquet: {error}") from error


def countdown_texts(count: int, seed: int) -> Iterator[str]:
    """Yield the contents of the messages of `count` Countdown puzzles with solutions, in the template `short`."""
    for puzzle in itertools.islice(puzzles((3, 4), (1.0, 1.0), Ranges(), seed), count):
        yield from (message["content"] for message in countdown.messages(puzzle, "short", "steps"))


def build_tokenizer(corpus: Iterable[str], vocab_size: int, digits: int = 1) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    Any text can be encoded and decoded without loss. The end-of-sequence token ends a turn; padding has its own token.

    Args:
        corpus: texts to train on.
        vocab_size: maximum number of tokens; there are fewer if the corpus has too few texts.
        digits: maximum number of digits in a token.

    Raises:
        ValueError: `vocab_size` has no room for the 256 bytes and the special tokens, or `digits` is below 1.
    """
    if digits < 1:
        raise ValueError(f"--digits {digits} must be at least 1")
    if vocab_size < MIN_VOCAB:
        raise ValueError(f"--vocab {vocab_size} is too small; {MIN_VOCAB} tokens (bytes and special tokens) are needed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES % digits), behavior="isolated"),
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
    # Role names of the template are added to the corpus so often that each becomes a single token.
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


def decoder_sizes(
    tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, heads: int, kv_heads: int, tie: bool
) -> dict[str, Any]:
    """Return the sizes of a decoder with the vocabulary of `tokenizer`, as entries of its configuration.

    Raises ValueError for sizes that vLLM's CPU attention does not support.

    Args:
        tokenizer: the tokenizer.
        hidden: hidden size.
        layers: number of layers.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        tie: True to share the weights of embedding and head.
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
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 64 * round(hidden * 8 / 3 / 64) or 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tie,
    }


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tie: bool,
    seed: int,
    experts: int = 0,
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """Return a Qwen3, or a Qwen3-MoE with `experts`, with random weights and the vocabulary of `tokenizer`.

    `seed` is the seed of the weights. Other arguments and errors are the same as for `decoder_sizes`.

    Raises ValueError also for fewer experts than a token takes.
    """
    sizes = decoder_sizes(tokenizer, hidden, layers, heads, kv_heads, tie) | {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if experts and experts < CHOSEN:
        raise ValueError(f"--experts {experts} must be 0, or at least {CHOSEN}, the number that a token takes")
    torch.manual_seed(seed)
    if not experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    width = sizes["intermediate_size"] // CHOSEN
    config = Qwen3MoeConfig(
        **sizes, num_experts=experts, num_experts_per_tok=CHOSEN, moe_intermediate_size=width, norm_topk_prob=True
    )
    return Qwen3MoeForCausalLM(config)


def make(args: argparse.Namespace) -> str:
    """Make and save model and tokenizer as the options set. Returns a line of text with their sizes."""
    check_out(args.out)
    if args.vision and args.experts:
        raise ValueError("--experts is for models of text; leave out --vision or --experts")
    heads = args.heads or max(1, args.hidden // 32)
    if args.data:
        corpus: Iterable[str] = texts(args.data, args.rows)
    else:
        corpus = QUESTIONS if args.vision else countdown_texts(args.rows, args.seed)
    tokenizer = build_tokenizer(corpus, args.vocab, args.digits)
    kv_heads = heads if args.kv_heads is None else args.kv_heads
    sizes = args.hidden, args.layers, heads, kv_heads, args.tie
    disable_progress_bar()
    if args.vision:
        prepare_tokenizer(tokenizer, args.vision)
        model: Any = build_vision_model(tokenizer, args.vision, decoder_sizes(tokenizer, *sizes), args.seed)
        with written_whole(args.out) as folder:
            save_vision(folder, model, tokenizer, args.vision)
    else:
        model = build_model(tokenizer, *sizes, args.seed, args.experts)
        with written_whole(args.out) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens"


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 2 bad option or input, 1 not writable."""
    parser = Parser(prog=" ".join(called("tiny")), description="Make a tiny language model and its tokenizer.")
    add = parser.add_argument
    data_help = "parquet files whose messages train the tokenizer (default: Countdown puzzles made on the spot)"
    out_help = "folder for model and tokenizer; new or empty"
    add("--out", type=local_path, required=True, metavar="DIR", help=out_help)
    add("--data", type=local_path, nargs="+", default=[], metavar="FILE", help=data_help)
    add("--rows", type=int, default=4096, metavar="N", help="rows read of each file (default: %(default)s)")
    add("--vocab", type=int, default=512, metavar="N", help="most tokens (default: %(default)s)")
    add("--digits", type=int, default=1, metavar="N", help="most digits in one token (default: %(default)s)")
    add("--hidden", type=int, default=192, metavar="N", help="width (default: %(default)s)")
    add("--layers", type=int, default=4, metavar="N", help="layers (default: %(default)s)")
    add("--heads", type=int, metavar="N", help="attention heads (default: width / 32)")
    add("--kv-heads", type=int, metavar="N", help="key and value heads (default: as --heads)")
    add("--tie", action=argparse.BooleanOptionalAction, default=True, help="share embedding and head (default: yes)")
    add("--experts", type=int, default=0, metavar="N", help="experts in each layer (default: 0, no mixture)")
    add("--vision", choices=sorted(FAMILIES), help="family of a model that reads pictures (default: text only)")
    add("--seed", type=int, default=0, metavar="S", help="seed of the weights (default: %(default)s)")
    args = parser.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        print(f"{args.out}: {make(args)}")
    except (ValueError, OSError) as error:
        problem = f"cannot write {args.out}: " if isinstance(error, OSError) else ""
        print(f"{parser.prog}: {problem}{error}", file=sys.stderr)
        return 1 if problem else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
