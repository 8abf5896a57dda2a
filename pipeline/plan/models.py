"""Read sizes of models from `config.json` and the headers of weight files, and check the models of a run.

No weights are loaded.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.config.paths import model_folder
from pipeline.derived import reads_reference, reads_teacher, uses_critic, uses_images
from pipeline.models import adapter, weight_files
from pipeline.models.architecture import EXPERTS, most_positions

VISION = "vision_config"
TOWERS = (VISION, "audio_config")
"""Keys of `config.json` that only models of images or sound have."""

TOWER = re.compile(r"(?:^|\.)(?:visual|vision_model|vision_tower|connector|multi_modal_projector)\.")
"""Pattern for names of weights of vision towers and their projectors."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

TIED = re.compile(r"embed_tokens|\bwte\b|embed_in|word_embeddings")
"""Pattern for names of token embeddings."""

TABLES = re.compile(r"embed|\bwte\b|\bwpe\b|^lm_head\b|^score\b")
"""Pattern for names of matrices that are embeddings or heads, not linear layers inside of a model."""

ROUTED = ".experts."
"""Text in the names of weights of routed experts, which only some tokens use."""

ROUTER = re.compile(r"(?<!\.router)\.gate\.weight$")
"""Pattern for names of router matrices, which choose experts. Like experts, they are not linear layers in
`transformers`."""

OTHER_CLASSES = ("Classification", "MaskedLM", "QuestionAnswering", "PreTraining")
"""Suffixes of class names (`architectures` in `config.json`) of models that are not causal language models."""

LM_HEAD = "lm_head."
"""Prefix of the names of the language-model head's tensors, which a critic does not have."""


@dataclass(frozen=True)
class ModelFiles:
    """Configuration and sizes of a model, from the files in its folder."""

    config: Mapping[str, Any]
    """Content of `config.json`, merged with its entry `text_config`, which holds the sizes of the decoder in multimodal
    families."""
    parameters: int
    """Number of parameters, from the headers of the weight files; 0 without files."""
    head: int
    """Number of parameters of the language model's head; 0 if it is tied to the embedding."""
    tables: int = 0
    """Number of parameters of embeddings and heads."""
    matrices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of (outputs, inputs) of each linear layer inside of the model, by name. These layers may get adapters."""
    family: str = ""
    """`model_type` of the whole model in `config.json`."""
    tower: int = 0
    """Number of parameters of the vision tower and its projector, which `parameters` includes."""

    def size(self, name: str, default: int = 0) -> int:
        """Return the number `name` in `config.json`; `default` if it is missing or null."""
        value = self.config.get(name)
        return value if isinstance(value, int) else default

    @property
    def embedding(self) -> int:
        """Number of parameters of embeddings that are not tied to the head, and which FSDP gathers separately; 0 if
        they are tied."""
        return self.tables - self.head if self.head else 0

    def with_value_head(self) -> "ModelFiles":
        """Return the sizes of a critic made from this model: the language-model head is replaced by a head with one
        output and a bias."""
        head = self.size("hidden_size") + 1
        parameters, tables = (count - self.head + head for count in (self.parameters, self.tables))
        return replace(self, config={**self.config, "vocab_size": 1}, parameters=parameters, head=head, tables=tables)

    @property
    def experts(self) -> tuple[str, int]:
        """(Key of `config.json` with the number of experts, number of experts per layer); the number is 0 without
        experts."""
        return next(((name, self.size(name)) for name in EXPERTS if self.size(name)), (EXPERTS[0], 0))

    @property
    def routes(self) -> int:
        """Number of experts per layer that one token uses; 0 without experts."""
        return self.size("num_experts_per_tok", 1) if self.experts[1] else 0

    @property
    def layers(self) -> int:
        """Number of transformer layers; at least 1."""
        return max(1, self.size("num_hidden_layers"))

    @property
    def layer(self) -> int:
        """Mean number of parameters per layer."""
        return (self.parameters - self.tower - self.tables) // self.layers

    @property
    def queries(self) -> int:
        """Number of outputs of a layer's query projection: heads x head size."""
        heads = self.size("num_attention_heads", 1)
        return heads * self.size("head_dim", self.size("hidden_size") // heads)

    @property
    def keys(self) -> int:
        """Number of outputs of a layer's key projection: key heads x head size."""
        heads = self.size("num_attention_heads", 1)
        return self.queries // heads * self.size("num_key_value_heads", heads)

    @property
    def intermediate(self) -> int:
        """Width of a layer's feed-forward network; in a mixture of experts, the sum over the experts that one token
        uses."""
        routed = self.routes * self.size("moe_intermediate_size", self.size("intermediate_size"))
        return routed or self.size("intermediate_size")


def read_model(path: str | Path | None) -> ModelFiles | None:
    """Read the sizes of the model `path`, a folder or a Hub name, from files on this machine.

    Returns None if this machine does not have the `config.json`.

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
    """Read the sizes of the model in `folder`, cached, since a mixture of experts has thousands of tensors.

    Args:
        folder: folder with `config.json`.
        complete: True if all files must be there; else weight files may be missing (in the Hub's cache).
        _stamps: (name, time of change, bytes) of each file, so a changed file is read again.
    """
    config = weight_files.read_json(folder / weight_files.CONFIG)
    family = str(config.get("model_type") or "")
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
    parameters = sum(map(math.prod, shapes.values()))
    if config.get(VISION):
        shapes = {name: shape for name, shape in shapes.items() if not TOWER.search(name)}
    return ModelFiles(
        config=config,
        parameters=parameters,
        head=sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(LM_HEAD)),
        tables=sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and TABLES.search(name)),
        matrices={
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in shapes.items()
            if len(shape) == 2 and name.endswith(".weight") and not TABLES.search(name)
            if ROUTED not in name and not ROUTER.search(name)
        },
        family=family,
        tower=parameters - sum(map(math.prod, shapes.values())),
    )


def not_causal(model: ModelFiles) -> str | None:
    """Return None for a causal language model, else the kind of the model as text, from its `config.json`."""
    named = model.config.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if classes and all(name.endswith(OTHER_CLASSES) for name in classes):
        return f"a {classes[0]}"
    return "a model with an encoder" if model.config.get("is_encoder_decoder") is True else None


def teacher_paths(config: Config) -> dict[str, str]:
    """Return the paths of the run's teachers, by their settings."""
    declared = config.teacher.declared() if reads_teacher(config) else {}
    named = {"teacher.path" if name is None else f"teacher.named.{name}.path": one for name, one in declared.items()}
    return {key: one.path for key, one in named.items() if one.path}


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per problem with the run's models, such as a missing folder or rows that are too long."""
    if not config.model.path:
        yield "model.path is not set; give the folder or the hub name of a Hugging Face model"
        return
    used: dict[str, str | None] = {"model.path": config.model.path}
    if uses_critic(config):
        used["critic.path"] = config.critic.path
    if reads_reference(config):
        used["scoring.reference.path"] = config.scoring.reference.path
    frozen = teacher_paths(config)
    used |= frozen
    used["reward.model.path"] = config.reward.model.path
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    sizes, images = {}, uses_images(config)
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
        if towers := [part for part in TOWERS if model.config.get(part) and not (images and part == VISION)]:
            yield f"{key}={path} has {towers[0]} in its config.json; only models of text can be trained"
        if key in ("model.path", "scoring.reference.path", *frozen) and (other := not_causal(model)):
            yield f"{key}={path} is {other} by its config.json; give a causal language model"
        sizes[key] = model.config.get("vocab_size")
        longest = most_positions(model.config)
        if longest is not None and prompt + response > longest[0] and key != "reward.model.path":
            yield (
                f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = {prompt + response} "
                f"tokens, more than the {longest[0]} of the model {key}={path} ({longest[1]}); shorten one"
            )
    own = sizes.get("model.path")
    for key in ("scoring.reference.path", *frozen):
        theirs = sizes.get(key)
        if own is not None and theirs is not None and own != theirs:
            yield (
                f"{key}={used[key]} has a vocabulary of {theirs} tokens and model.path={config.model.path} one of "
                f"{own}, so their log-probs of a token cannot be compared"
            )
    tokenizer = Path(config.model.tokenizer_path or config.model.path)
    if tokenizer.is_dir() and not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        key = "model.tokenizer_path" if config.model.tokenizer_path else "model.path"
        yield (
            f"{key}={tokenizer} has no tokenizer ({', '.join(TOKENIZER_FILES)}); save one there with "
            "tokenizer.save_pretrained, or set model.tokenizer_path"
        )
