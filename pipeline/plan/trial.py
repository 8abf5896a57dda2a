"""Try to load the models of a run before anything is started, without memory for their weights.

Each model is built on the meta device from `config.json` and the headers of its files, with the same loaders as in the
workers. So a model that they would refuse is refused here: incomplete or quantised weights, weights that do not match
`config.json`, adapters that do not fit, a missing head.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.config import Config
from pipeline.config.engines import EngineFacts
from pipeline.config.model import LoraConfig, ModelConfig
from pipeline.config.paths import model_folder
from pipeline.derived import reads_reference, uses_critic
from pipeline.models import weight_files
from pipeline.models.attention_names import PLAIN
from pipeline.models.policy import load_lm, load_policy
from pipeline.models.pretrained import NotLoadedError
from pipeline.models.quantised import quantisation
from pipeline.models.reward_model import load_reward_model
from pipeline.models.tokenizer import load_tokenizer
from pipeline.models.tokenizer_fit import check_vocabulary, vocabulary
from pipeline.models.value import ValueModel
from pipeline.plan.models import teacher_paths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
NEXT = ".eh_proj."
"""Text in the names of layers for multi-token prediction, which are numbered after the model's own layers."""
SCALES = re.compile(r"(?:weight_scale(?:_inv|_2)?|_scale_inv|\.SCB|\.absmax|\.quant_state\.[^.]*)$")
"""Pattern for the ends of names of tensors that hold the scales of quantised weights."""
HEAD, EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "wte.weight", "embed_in.weight")
"""Ends of the names of language-model heads and of token embeddings, which may be tied."""
COMPARED = 64
"""Number of first rows in which a tied head and its embedding are compared."""

Load = Callable[[ModelConfig, str], Any]


@contextmanager
def without_memory() -> Iterator[list[tuple[Any, set[str]]]]:
    """Inside the context, `transformers` builds models on the meta device from the headers of their files.

    Yields:
        a list that gets (model, names of weights in its files that the model does not have) for each model built.
    """
    from transformers.utils import logging as bars

    from pipeline.upstream.transformers import replaced_loader

    nowhere = {"": torch.device("meta")}
    built: list[tuple[Any, set[str]]] = []

    def build(read: Any, model: Any, state: Any, files: list[str], options: Any, *more: Any, **named: Any) -> Any:
        shapes = {name: shape for file in files for name, shape in weight_files.tensor_shapes(Path(file)).items()}
        empty = {name: torch.empty(shape, dtype=model.dtype, device="meta") for name, shape in shapes.items()}
        return read(model, empty, None, replace(options, device_map=nowhere), *more, **named)

    def report(finish: Any, model: Any, options: Any, *more: Any) -> Any:
        info = finish(model, replace(options, device_map=nowhere), *more)
        built.append((model, set(info.unexpected_keys)))
        return info

    logger = logging.getLogger("transformers")
    level, bar = logger.level, bars.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    try:
        with replaced_loader(build, report):
            yield built
    finally:
        logger.setLevel(level)
        if bar:
            bars.enable_progress_bar()


def try_model(model: ModelConfig, key: str, load: Load) -> Iterator[str]:
    """Try to load a model; yield notes about it. Raises ValueError if the model cannot be loaded.

    A Hub model is not downloaded: it is tried only if its files are in the cache of this machine.

    Args:
        model: settings of the model.
        key: the setting that holds `model.path`, for error texts.
        load: loader of the workers for this kind of model.
    """
    from pipeline.upstream.transformers import knows_loader

    path = model.path or ""
    folder = model_folder(path, key) or weight_files.model_files(path)
    if folder is None or not _is_complete(folder, path):
        return
    if note := weight_files.note(folder, f"{key}={path}"):
        yield note
    if not knows_loader():
        return
    # The kernels of another machine need not be here.
    attention = model.attn_implementation if model.attn_implementation in PLAIN else "eager"
    with without_memory() as built:
        load(replace(model, path=str(folder), attn_implementation=attention), key)
    for lm, unread in built:
        inside = f"{lm.base_model_prefix}."
        # In other models than the policy, heads may be left unread.
        lost = sorted(name for name in unread if key == "model.path" or name.startswith(inside))
        if beyond := _layers_beyond(lm, lost):
            layers = lm.config.get_text_config().num_hidden_layers
            raise ValueError(
                f"{key}={path} holds weights of more layers than num_hidden_layers={layers} of its config.json, such "
                f"as {beyond[0]}: they are not of one model. Give a complete checkpoint."
            )
        if scales := [name for name in lost if SCALES.search(name)]:
            raise ValueError(
                f"{key}={path} holds scales of quantised weights, such as {scales[0]}, and its config.json has no "
                "quantization_config, so weights would be read without them; give the model in bfloat16 or float32"
            )
        if lost:
            yield (
                f"{key}={path} holds {len(lost)} weights that are not read, the first {lost[0]}: the "
                f"{type(lm).__name__} of its config.json has no place for them"
            )
        _check_tied(lm, weight_files.find_weights(folder).files, f"{key}={path}")


def _layers_beyond(lm: Any, unread: Sequence[str]) -> list[str]:
    """Return the names in `unread` (weights in the files that `lm` does not have) of layers after the model's last."""
    count = getattr(lm.config.get_text_config(), "num_hidden_layers", None)
    modules, inside = {name for name, _ in lm.named_modules()}, f"{lm.base_model_prefix}."
    found: dict[str, list[str]] = {}
    for name in unread:
        layer = LAYER.search(name)
        if count and layer and int(layer[1]) >= count:
            first = f"{name[: layer.start(1)]}0"
            # Towers have layers of their own, and base models are saved without the prefix.
            if not modules.isdisjoint((first, inside + first)):
                found.setdefault(name[: layer.end()], []).append(name)
    return [name for names in found.values() if not any(NEXT in name for name in names) for name in names]


def _check_tied(lm: Any, files: Sequence[Path], model: str) -> None:
    """Raise ValueError if the head is tied to the embedding and the files hold both with different values."""
    from safetensors import safe_open

    if not getattr(lm.config.get_text_config(), "tie_word_embeddings", False):
        return
    found: dict[str, torch.Tensor] = {}
    for file in files:
        names = [name for name in weight_files.tensor_shapes(file) if name.endswith((HEAD, *EMBEDDINGS))]
        if not names or file.suffix != weight_files.SAFETENSORS:
            continue
        with safe_open(file, "pt") as tensors:
            found |= {HEAD if name.endswith(HEAD) else "": tensors.get_slice(name)[:COMPARED] for name in names}
    if len(found) == 2 and not torch.equal(*found.values()):
        raise ValueError(
            f"{model} has tie_word_embeddings in its config.json, but its files hold a {HEAD} with other values than "
            "the embedding: an engine would compute with the embedding and the trainer with the head. Set "
            "tie_word_embeddings to false, or delete the head."
        )


def _is_complete(folder: Path, path: str) -> bool:
    """Return True if `path` is a folder, or a Hub model with all of its files in the cache `folder`.

    Folders are not checked here, since the loader names missing files.
    """
    if Path(path).is_dir():
        return True
    try:
        return bool(weight_files.find_weights(folder).files)
    except ValueError:
        return False


def try_models(config: Config, tokenizer: "PreTrainedTokenizerBase", trained: bool = True) -> Iterator[str]:
    """Try to load all models of a run; yield notes about them. Raises ValueError if one of them cannot be used.

    Args:
        config: settings of the run.
        tokenizer: tokenizer of the policy.
        trained: True if the policy is trained. False (evaluation) allows quantised models, which engines can read.
    """
    model, source = config.model, config.model.tokenizer_path or config.model.path
    plain = replace(model, lora=LoraConfig())
    found: list[tuple[str, ModelConfig, Load]] = [("model.path", model, load_policy)]
    if trained and uses_critic(config) and config.critic.path:
        lora = replace(model.lora, path=None)
        found.append(("critic.path", replace(model, path=config.critic.path, lora=lora), _load_critic))
    if trained and reads_reference(config) and config.scoring.reference.path:
        found.append(("scoring.reference.path", replace(plain, path=config.scoring.reference.path), load_policy))
    for key, path in (teacher_paths(config) if trained else {}).items():
        one = replace(plain, path=path)
        yield from try_same_tokens(tokenizer, one, key)
        found.append((key, one, load_policy))
    for key, one, load in found:
        yield from try_tokenizer(tokenizer, one, key, source)
        if trained:
            yield from try_model(one, key, load)
        elif not (config.rollout.facts.quantised and quantisation(one.path)):
            yield from _try_engine_model(one, key, config.rollout.facts)
    if config.reward.model.path:
        key = "reward.model.path"
        one = replace(plain, path=config.reward.model.path, tokenizer_path=None)
        yield from try_tokenizer(load_tokenizer(one, key=key), one, key)
        yield from try_model(one, key, load_reward_model)


def try_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", model: ModelConfig, key: str = "model.path", source: str | None = None
) -> Iterator[str]:
    """Compare a tokenizer with a model's vocabulary; yield notes.

    Raises ValueError if the tokenizer has a token for which the model's embedding has no row.

    Args:
        tokenizer: the tokenizer.
        model: settings of the model.
        key: the setting that holds `model.path`, for texts.
        source: folder or Hub name of the tokenizer, for texts; None takes the tokenizer of `model`.
    """
    source = source or model.tokenizer_path or model.path
    if note := check_vocabulary(tokenizer, source, vocabulary(model), f"{key}={model.path}"):
        yield note


def try_same_tokens(tokenizer: "PreTrainedTokenizerBase", teacher: ModelConfig, key: str) -> Iterator[str]:
    """Compare the policy's tokenizer with a teacher's; yield a note if the teacher has none.

    Raises ValueError if an id is another token of the teacher's.
    """
    try:
        theirs = load_tokenizer(replace(teacher, tokenizer_path=None), needs_chat_template=False, key=key).get_vocab()
    except ValueError as error:
        yield f"{error}; it is assumed that its tokens are the policy's"
        return
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            other = next((name for name, place in theirs.items() if place == number), "no token")
            raise ValueError(
                f"{key}={teacher.path} has another tokenizer than the policy: token {number} is {other!r} there and "
                f"{token!r} here, so their log-probs cannot be compared; name a teacher with the policy's tokenizer"
            )


def _try_engine_model(model: ModelConfig, key: str, facts: EngineFacts) -> Iterator[str]:
    """Try to load a model that only engines use; yield notes about it.

    If `transformers` cannot load the family, this is only a note if the engine may have its own code for it. Raises
    ValueError for other problems, like `try_model`.
    """
    try:
        yield from try_model(model, key, load_lm)
    except NotLoadedError as error:
        if not facts.own_models:
            raise
        yield f"{error}. An evaluation leaves it to the engine; it could not be trained"


def _load_critic(model: ModelConfig, key: str) -> Any:
    return ValueModel(load_lm(model, key, with_head=False))
