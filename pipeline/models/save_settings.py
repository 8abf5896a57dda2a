"""The files of a saved model other than weights: config, generation config, tokenizer, and Python code of the model.

`transformers` can read some files that it then refuses to write. So the generation config is written without its
checks, and config and tokenizer are written once before the run starts, to a temporary folder, as a trial.
"""

import copy
import errno
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.config.model import ModelConfig
from pipeline.errors import short_reason
from pipeline.models.ends import as_list, as_stored
from pipeline.models.repeatable import own_randomness

GENERATION_FILE = "generation_config.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error numbers of a disk that is full or read-only."""


def save_settings(
    lm: Any,
    tokenizer: Any,
    folder: Path,
    dtype: torch.dtype | None = None,
    ends: Sequence[int] = (),
    processor: Any = None,
) -> None:
    """Write all files of a model except weights into `folder`, which has no weights yet.

    Args:
        lm: model of `transformers`.
        tokenizer: the model's tokenizer.
        folder: created if it is missing.
        dtype: dtype to write into `config.json`; None keeps the model's.
        ends: ids of the end tokens to write into the generation config; empty keeps the model's.
        processor: the model's processor of images; None for a model of text.
    """
    if ends and set(ends) != set(as_list(lm.generation_config.eos_token_id)):
        lm.generation_config.eos_token_id = as_stored(ends)
    with own_randomness(lm), generation_as_it_is(lm, folder):
        lm.save_pretrained(folder, state_dict={})
        if dtype is not None:
            config = copy.deepcopy(lm.config)
            config.dtype = dtype
            config.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # after the processor, which has a tokenizer of its own


@contextmanager
def generation_as_it_is(lm: Any, folder: Path) -> Iterator[None]:
    """Write the model's generation config into `folder` after the block, unchecked.

    Within the block the model has a default one, since `save_pretrained` refuses settings such as a temperature without
    sampling.
    """
    if not lm.can_generate():
        yield
        return
    own = lm.generation_config
    lm.generation_config = type(own)()
    try:
        yield
    finally:
        lm.generation_config = own
    own.to_json_file(folder / GENERATION_FILE, keys_to_pop=["compile_config"])


def check_settings(model: ModelConfig, tokenizer: Any) -> None:
    """Check that config and tokenizer of a model, which could be read, can also be written; no weights are read.

    Raises:
        ValueError: one of them cannot be written, so saving the model at the end would fail.
        OSError: the folder for temporary files cannot be written.
    """
    from transformers import AutoConfig

    path = model.path or ""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    # The loader of the model reports errors in its config.
    except (OSError, ValueError):
        return
    for what, key, part in (
        ("config", f"model.path={path}", config),
        ("tokenizer", f"model.tokenizer_path={model.tokenizer_path or path}", tokenizer),
    ):
        try:
            with tempfile.TemporaryDirectory(prefix="slipstream-try-") as folder:
                part.save_pretrained(folder)
        except Exception as error:
            # The tokenizers' Rust code raises a plain exception for a full disk.
            if "os error" in str(error) or (isinstance(error, OSError) and error.errno in FULL):
                raise OSError(
                    f"{tempfile.gettempdir()} cannot be written: {short_reason(error)}; make room, or name another "
                    "folder: export TMPDIR=FOLDER"
                ) from error
            raise ValueError(
                f"{key}: its {what} can be read and not written, so the model could not be saved at the end: "
                f"{short_reason(error)}"
            ) from error
