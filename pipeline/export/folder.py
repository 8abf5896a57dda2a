"""A checkpoint as a Hugging Face folder: weights, config, tokenizer with chat template, generation config, model card.

1. The model's class is built without memory (on the `meta` device) only to know names, tied weights and the format in
   which `transformers` saves its kind; the weights come from the checkpoint.
2. `generation_config.json` keeps the base model's special tokens, which decide where an answer ends, and samples like
   the run's validation: the base model's own sampling was made for another policy.
3. The folder is written beside its place and renamed, so a broken-off export never looks like a model.
"""

import shutil
import uuid
from pathlib import Path

from pipeline.export.card import card
from pipeline.export.choice import Checkpoint
from pipeline.export.settings import ModelSettings
from pipeline.export.skeleton import (
    base_config,
    critic_names,
    critic_skeleton,
    fitted,
    generation_config,
    policy_names,
    policy_skeleton,
)
from pipeline.export.weights import read_weights
from pipeline.prompts.chat import load_tokenizer
from pipeline.train.fsdp import torch_dtype


def export(
    checkpoint: Checkpoint,
    out: Path,
    dtype: str | None = None,
    *,
    critic: bool = False,
    base: str | None = None,
    replace: bool = False,
) -> None:
    """Write the model of `checkpoint` into the folder `out`.

    Args:
        checkpoint: which.
        out: it must not exist or be empty, unless `replace` is set.
        dtype: type of the weights; None writes them as they were trained.
        critic: write the critic instead of the policy, as a model for token classification with one label. Its logit
            at a token is the value of the answer up to and with that token.
        base: the model that the run began with, if it is no longer where the run found it.
        replace: replace what is at `out`.

    Raises:
        ValueError: the checkpoint, the base model or `out` cannot be used.
        OSError: the folder cannot be written.
    """
    if out.exists() and not replace and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; choose another folder or remove it")
    config = checkpoint.config()
    model = base_config(config, checkpoint.run_dir, base, critic)
    tokenizer = load_tokenizer(model, needs_chat_template=False)
    wanted = torch_dtype(dtype, "--dtype") if dtype else None
    state = read_weights(checkpoint.path, "critic" if critic else "actor", wanted)
    kind = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    if critic:
        skeleton = critic_skeleton(model, kind)
        named = critic_names(state, skeleton)
    else:
        skeleton = policy_skeleton(model, kind)
        skeleton.generation_config = generation_config(model, config)
        named = policy_names(state)
    weights = fitted(skeleton, named, str(checkpoint.path))
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        skeleton.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
        if not critic:
            ModelSettings.of(config, checkpoint.iteration).save(partial)
        (partial / "README.md").write_text(card(checkpoint, config, critic), encoding="utf-8")
        for file in partial.iterdir():
            # safetensors makes files that only their owner can read, and others are to serve the model.
            file.chmod(0o644)
        _put(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _put(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`, replacing what is there."""
    if not out.exists():
        partial.rename(out)
        return
    old = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.old")
    out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
