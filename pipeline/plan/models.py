"""Models of a run as their files describe them, before anything is loaded."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.config.paths import model_folder
from pipeline.derived import reads_reference, uses_critic
from pipeline.models import adapter, weight_files
from pipeline.models.architecture import most_positions

TOWERS = ("vision_config", "audio_config")
"""Entries of `config.json` in models that read images or sound."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

TIED = re.compile(r"embed_tokens|\bwte\b|embed_in|word_embeddings")
"""Names of token embeddings."""

TABLES = re.compile(r"embed|\bwte\b|\bwpe\b|^lm_head\b|^score\b")
"""Names of matrices that are not linear layers inside of a model."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in `config.json` for the number of experts in a layer, by model family."""

ROUTED = ".experts."
"""Part of the names of expert weights that only some tokens use."""

ROUTER = re.compile(r"(?<!\.router)\.gate\.weight$")
"""Names of matrices that choose experts. Like experts, they are not linear layers in `transformers`."""

OTHER_CLASSES = ("Classification", "MaskedLM", "QuestionAnswering", "PreTraining")
"""Suffixes of class names in `config.json` that are not causal language models."""

LM_HEAD = "lm_head."
"""Prefix of the head's tensors, which a critic does not have."""


@dataclass(frozen=True)
class ModelFiles:
    """Facts in the files of a model's folder."""

    config: Mapping[str, Any]
    """`config.json`, merged with its `text_config`: multimodal families keep the decoder's sizes there."""
    parameters: int
    """Number of parameters in the headers of the files; 0 without files."""
    head: int
    """Number of parameters of the language model's head; 0 if it is tied to the embedding."""
    tables: int = 0
    """Number of parameters of embeddings and heads."""
    matrices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Outputs and inputs of each linear layer inside of the model, which may get an adapter."""

    def size(self, name: str, default: int = 0) -> int:
        """Return a number of `config.json`; `default` if it is missing or null."""
        value = self.config.get(name)
        return value if isinstance(value, int) else default

    @property
    def embedding(self) -> int:
        """Number of parameters of embeddings that are not tied to the head; FSDP gathers them by themselves."""
        return self.tables - self.head if self.head else 0

    def with_value_head(self) -> "ModelFiles":
        """Return the model as a critic: a head of one output, with a bias, replaces the language model's head."""
        head = self.size("hidden_size") + 1
        parameters, tables = (count - self.head + head for count in (self.parameters, self.tables))
        return replace(self, config={**self.config, "vocab_size": 1}, parameters=parameters, head=head, tables=tables)

    @property
    def experts(self) -> tuple[str, int]:
        """Name of the number of experts in `config.json`, and the number of experts in a layer; 0 without any."""
        return next(((name, self.size(name)) for name in EXPERTS if self.size(name)), (EXPERTS[0], 0))

    @property
    def routes(self) -> int:
        """Experts of a layer that each token uses; 0 without experts."""
        return self.size("num_experts_per_tok", 1) if self.experts[1] else 0

    @property
    def layers(self) -> int:
        """Number of transformer layers; at least 1."""
        return max(1, self.size("num_hidden_layers"))

    @property
    def layer(self) -> int:
        """Mean number of parameters of a layer."""
        return (self.parameters - self.tables) // self.layers

    @property
    def queries(self) -> int:
        """Outputs of a layer's query projection: heads x head size."""
        heads = self.size("num_attention_heads", 1)
        return heads * self.size("head_dim", self.size("hidden_size") // heads)

    @property
    def keys(self) -> int:
        """Outputs of a layer's key projection."""
        heads = self.size("num_attention_heads", 1)
        return self.queries // heads * self.size("num_key_value_heads", heads)

    @property
    def intermediate(self) -> int:
        """Outputs of a layer's first feed-forward projection for a token, summed over the experts that it uses."""
        routed = self.routes * self.size("moe_intermediate_size", self.size("intermediate_size"))
        return routed or self.size("intermediate_size")


def read_model(path: str | Path | None) -> ModelFiles | None:
    """Read the model at `path`, a folder or a Hub name, from files on this machine; None without a `config.json`.

    Raises:
        ValueError: a file is damaged.
    """
    folder = weight_files.model_files(path)
    if folder is None:
        return None
    # Files of the Hub's cache are links.
    stamps = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir() if file.exists()]
    return _read(folder, Path(path or "").is_dir(), tuple(sorted(stamps)))


@functools.lru_cache(maxsize=64)
def _read(folder: Path, complete: bool, _stamps: tuple[tuple[str, int, int], ...]) -> ModelFiles:
    """Read the model in `folder`. The result is cached by the files' times and sizes: a mixture of experts has
    thousands of tensors."""
    config = weight_files.read_json(folder / weight_files.CONFIG)
    config |= config.get("text_config") or {}
    try:
        shapes = weight_files.model_shapes(folder)
    except ValueError:
        if complete:
            raise
        # The Hub's cache may hold some of the files.
        shapes = {}
    if config.get("tie_word_embeddings") is True and any(TIED.search(name) for name in shapes):
        # Some files hold the tied head a second time.
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(LM_HEAD)}
    return ModelFiles(
        config=config,
        parameters=sum(map(math.prod, shapes.values())),
        head=sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(LM_HEAD)),
        tables=sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and TABLES.search(name)),
        matrices={
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in shapes.items()
            if len(shape) == 2 and name.endswith(".weight") and not TABLES.search(name)
            if ROUTED not in name and not ROUTER.search(name)
        },
    )


def not_causal(model: ModelFiles) -> str | None:
    """Return the kind of a model that is not a causal language model, by its `config.json`; None for all others."""
    named = model.config.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if classes and all(name.endswith(OTHER_CLASSES) for name in classes):
        return f"a {classes[0]}"
    return "a model with an encoder" if model.config.get("is_encoder_decoder") is True else None


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per model that cannot be used or cannot read the run's rows."""
    if not config.model.path:
        yield "model.path is not set; give the folder or the hub name of a Hugging Face model"
        return
    used: dict[str, str | None] = {"model.path": config.model.path}
    if uses_critic(config):
        used["critic.path"] = config.critic.path
    if reads_reference(config):
        used["scoring.reference.path"] = config.scoring.reference.path
    used["reward.model.path"] = config.reward.model.path
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    sizes = {}
    for key, path in used.items():
        if not path:
            continue
        try:
            model_folder(path, key)
            model = read_model(path)
        except ValueError as error:
            yield str(error)
            continue
        if key in ("model.path", "critic.path"):
            lora = config.model.lora if key == "model.path" else replace(config.model.lora, path=None)
            yield from adapter.problems(lora, model.matrices if model else {}, path, key)
        if model is None:
            continue
        if towers := [part for part in TOWERS if model.config.get(part)]:
            yield f"{key}={path} has {towers[0]} in its config.json; only models of text can be trained"
        if key in ("model.path", "scoring.reference.path") and (other := not_causal(model)):
            yield f"{key}={path} is {other} by its config.json; give a causal language model"
        sizes[key] = model.config.get("vocab_size")
        longest = most_positions(model.config)
        if longest is not None and prompt + response > longest[0] and key != "reward.model.path":
            yield (
                f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = {prompt + response} "
                f"tokens, more than the {longest[0]} of the model {key}={path} ({longest[1]}); shorten one"
            )
    own, theirs = sizes.get("model.path"), sizes.get("scoring.reference.path")
    if own is not None and theirs is not None and own != theirs:
        yield (
            f"scoring.reference.path={used['scoring.reference.path']} has a vocabulary of {theirs} tokens and "
            f"model.path={config.model.path} one of {own}, so their log-probs of a token cannot be compared"
        )
    tokenizer = Path(config.model.tokenizer_path or config.model.path)
    if tokenizer.is_dir() and not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        key = "model.tokenizer_path" if config.model.tokenizer_path else "model.path"
        yield (
            f"{key}={tokenizer} has no tokenizer ({', '.join(TOKENIZER_FILES)}); save one there with "
            "tokenizer.save_pretrained, or set model.tokenizer_path"
        )
