"""Trial of the models before anything is started: each is built without memory, from `config.json` and its files'
headers.

The workers' own loaders are used, so a model that they would refuse is refused here: incomplete or quantised weights,
weights that do not match `config.json`, adapters that do not fit, a missing head. Only the values of weights are not
read.
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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
NEXT = ".eh_proj."
"""Part of the names of layers that predict further tokens; their numbers follow the model's own layers."""
SCALES = re.compile(r"(?:weight_scale(?:_inv|_2)?|_scale_inv|\.SCB|\.absmax|\.quant_state\.[^.]*)$")
"""Suffixes of tensors that scale quantised weights."""
HEAD, EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "wte.weight", "embed_in.weight")
"""Names of a head and of embeddings, which may be tied."""
COMPARED = 64
"""Number of rows of a tied head and embedding that are compared."""

Load = Callable[[ModelConfig, str], Any]


@contextmanager
def without_memory() -> Iterator[list[tuple[Any, set[str]]]]:
    """Build models of `transformers` from the headers of their files, on the meta device, inside the context.

    Yields:
        the models, each with the names in its files that it has no place for.
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
    """Yield notes on the model at `model.path`, the value of the setting `key`, as loaded by `load`.

    A Hub model is not downloaded: it is tried if its files are in the cache of this machine.

    Raises ValueError if it cannot be loaded.
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
        # Heads are for other uses of a model.
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
    """Return the names in `unread`, weights without a place in `lm`, that belong to layers after its last one."""
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
    """Compare a head with the embedding that it is tied to.

    Raises ValueError if both are in the files with different values.
    """
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
    """Return True if all files of a Hub model are cached. A folder counts as complete: its loader names what is
    missing."""
    if Path(path).is_dir():
        return True
    try:
        return bool(weight_files.find_weights(folder).files)
    except ValueError:
        return False


def try_models(config: Config, tokenizer: "PreTrainedTokenizerBase", trained: bool = True) -> Iterator[str]:
    """Yield notes on all models of a run.

    Args:
        config: settings of the run.
        tokenizer: tokenizer of the policy.
        trained: True if the policy is trained; engines without a trainer can read quantised models.

    Raises ValueError if one of them cannot be used.
    """
    model, source = config.model, config.model.tokenizer_path or config.model.path
    plain = replace(model, lora=LoraConfig())
    found: list[tuple[str, ModelConfig, Load]] = [("model.path", model, load_policy)]
    if trained and uses_critic(config) and config.critic.path:
        lora = replace(model.lora, path=None)
        found.append(("critic.path", replace(model, path=config.critic.path, lora=lora), _load_critic))
    if trained and reads_reference(config) and config.scoring.reference.path:
        found.append(("scoring.reference.path", replace(plain, path=config.scoring.reference.path), load_policy))
    for key, one, load in found:
        yield from try_tokenizer(tokenizer, one, key, source)
        if trained:
            yield from try_model(one, key, load)
        elif not quantisation(one.path):
            yield from _try_engine_model(one, key)
    if config.reward.model.path:
        key = "reward.model.path"
        one = replace(plain, path=config.reward.model.path, tokenizer_path=None)
        yield from try_tokenizer(load_tokenizer(one, key=key), one, key)
        yield from try_model(one, key, load_reward_model)


def try_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", model: ModelConfig, key: str = "model.path", source: str | None = None
) -> Iterator[str]:
    """Yield notes on a tokenizer (of `source`, else of `model`) for the model at `model.path`, the value of `key`.

    Raises ValueError if the model's embedding has no row for a token.
    """
    source = source or model.tokenizer_path or model.path
    if note := check_vocabulary(tokenizer, source, vocabulary(model), f"{key}={model.path}"):
        yield note


def _try_engine_model(model: ModelConfig, key: str) -> Iterator[str]:
    """Yield notes on a model that only an engine reads; engines have their own code for some families.

    Raises ValueError like `try_model` if `transformers` reads the family.
    """
    try:
        yield from try_model(model, key, load_lm)
    except NotLoadedError as error:
        yield f"{error}. An evaluation leaves it to vLLM; it could not be trained"


def _load_critic(model: ModelConfig, key: str) -> Any:
    return ValueModel(load_lm(model, key, with_head=False))
