"""Make a model folder from a GGUF file: `python -m jobs.from_gguf FILE.gguf --out DIR`.

1. `transformers` reads weights, settings, tokenizer and chat template from the file. The folder gets them as
   safetensors and JSON, so that it can be trained.
2. Quantised weights are unpacked. The folder is as precise as the file, which is less precise than the original model.
3. `transformers` skips tensors and settings that it does not know. A file with such parts is refused.
"""

import argparse
import importlib.util
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jobs.command import exit_code, new_parser
from jobs.entry import command
from pipeline.config.paths import check_out, local_path

PLAIN = ("F32", "F16", "BF16", "F64")
"""Types of tensors that are not quantised."""
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
"""Rules for splitting text (`tokenizer.ggml.pre`) that are GPT-2's, with each digit apart."""
GPT_2 = (None, "default", "gpt-2", "gpt2")
ORIGINAL = "train the original model instead, from its folder with safetensors"


def convert(file: Path, out: Path, dtype: str) -> list[str]:
    """Write the model in `file` to the folder `out`. Returns lines of text: sizes, and notes.

    Args:
        file: the GGUF file.
        out: the folder; new or empty.
        dtype: type of the saved weights, `float32` or `bfloat16`.

    Raises:
        ValueError: the file is damaged, `transformers` does not read all of it, or `out` is not empty.
        ImportError: the package gguf is not installed.
        OSError: a file cannot be read or written.
    """
    check_out(out, [str(file)])
    if not file.is_file():
        raise ValueError(f"{file} does not exist or is not a file; give a .gguf file")
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading a GGUF file needs the package gguf: pip install gguf")
    from transformers.utils.logging import disable_progress_bar

    from pipeline.models.save import written_whole

    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    content = _read(file)
    model, missing = _load(file, content, dtype)
    _check_whole(file, content, model, missing)
    tokenizer, notes = _tokenizer(file, content)
    with written_whole(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    sizes = Counter[str]()
    for tensor in content.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    if quantised := [name for name, _ in sizes.most_common() if name not in PLAIN]:
        notes.insert(0, f"its weights were quantised ({', '.join(quantised)}); the precision lost by that stays lost")
    size = f"{model.num_parameters():,} parameters in {dtype}, {len(tokenizer):,} tokens"
    return [f"{out}: {_field(content, 'general.architecture')}, {size}", *(f"note: {note}" for note in notes)]


def _read(file: Path) -> Any:
    """Open a GGUF file; its tensors stay on disk.

    Raises:
        ValueError: the file is not GGUF, or is not complete.
    """
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{file} is not a complete GGUF file ({error}); download it again") from error


def _field(content: Any, name: str) -> Any:
    """Return the value of a field; None if the file does not have it."""
    field = content.get_field(name)
    return None if field is None else field.contents()


def _load(file: Path, content: Any, dtype: str) -> tuple[Any, list[str]]:
    """Return the model, and the names of weights that are not in the file.

    Raises:
        ValueError: `transformers` cannot read this architecture.
    """
    import transformers

    name = _field(content, "general.architecture")
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True
        )
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        version = f"transformers {transformers.__version__}"
        raise ValueError(f"{version} cannot read {file}, of the architecture {name}: {error}; {ORIGINAL}") from error
    model, found = loaded
    # `save_pretrained` refuses a model with the quantiser's mark, and readers of the folder would look for blocks.
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, sorted(found["missing_keys"])


def _check_whole(file: Path, content: Any, model: Any, missing: list[str]) -> None:
    """Raise ValueError if the model has weights that `file` does not hold, or `file` has parts that were not read."""
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} tensors of the model, such as {missing[0]}; {ORIGINAL}")
    blocks = model.config.get_text_config().num_hidden_layers
    # Blocks after the last layer predict several tokens at once; no policy has them.
    tensors = [tensor for tensor in content.tensors if not _beyond(tensor.name, blocks)]
    stored, read = sum(int(tensor.n_elements) for tensor in tensors), sum(one.numel() for one in model.parameters())
    if stored != read:
        apart = [tensor.name for tensor in tensors if not tensor.name.startswith(("blk.", "token_embd", "output"))]
        hint = f" (it has {', '.join(apart[:3])})" if apart else ""
        raise ValueError(f"{file} holds {stored:,} values{hint}, and transformers reads {read:,}; {ORIGINAL}")
    scaling = _field(content, f"{_field(content, 'general.architecture')}.rope.scaling.type")
    rope = getattr(model.config, "rope_parameters", None) or {}
    if scaling not in (None, "none") and rope.get("rope_type", "default") == "default":
        raise ValueError(f"{file} scales rotary embeddings ({scaling}), which transformers does not read; {ORIGINAL}")


def _beyond(name: str, blocks: int) -> bool:
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return first == "blk" and number.isdecimal() and int(number) >= blocks


def _tokenizer(file: Path, content: Any) -> tuple[Any, list[str]]:
    """Return the tokenizer, and notes on it."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    notes = []
    rule, backend = _field(content, "tokenizer.ggml.pre"), tokenizer.backend_tokenizer
    if rule in DIGITS_APART:
        # transformers would split by GPT-2's rule only.
        apart = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(apart)
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and rule not in GPT_2:
        notes.append(
            f"transformers does not know the tokenizer's rule {rule} and splits text by GPT-2's; if the original "
            "tokenizer differs, name its folder with model.tokenizer_path"
        )
    if not tokenizer.chat_template:
        notes.append("the file has no chat template; put a chat_template.jinja into the folder to train on messages")
    return tokenizer, notes


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 written, 2 bad arguments, or a file that cannot be used."""
    about = "Make a model folder (safetensors, tokenizer, chat template) from a GGUF file, to train it."
    parser = new_parser("from_gguf", about)
    parser.add_argument("file", type=local_path, metavar="FILE.gguf", help="the GGUF file")
    text = "folder for the model; new or empty"
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=text)
    types = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=types, default=types[0], help="of the saved weights (default: %(default)s)")
    options: argparse.Namespace = parser.parse_args(arguments)

    def run() -> None:
        for line in convert(options.file, options.out, options.dtype):
            print(line)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
