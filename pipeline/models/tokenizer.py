"""The tokenizer of a model folder or hub name."""

from typing import TYPE_CHECKING

from pipeline.config.model import ModelConfig
from pipeline.config.paths import named_folder
from pipeline.errors import short_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("vocab.json", "vocab.txt", "tekken.json"),
)


def load_tokenizer(
    model: ModelConfig, needs_chat_template: bool = True, key: str | None = None
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of `model.tokenizer_path`, or else of `model.path`.

    Args:
        model: settings of the model.
        needs_chat_template: whether a tokenizer without a chat template is an error.
        key: name of the setting in errors; None for the setting that was used.

    Raises:
        ValueError: the folder is missing or holds no tokenizer, the tokenizer cannot be loaded, or it has no chat
            template although one is needed.
    """
    key = key or ("model.tokenizer_path" if model.tokenizer_path else "model.path")
    path = model.tokenizer_path or model.path
    if not path:
        raise ValueError("model.path is not set; give it a model folder or a hub name")
    folder = named_folder(path, key)
    if folder is not None:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(
                f"{key}: folder {path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save the tokenizer "
                "there, or name another folder with model.tokenizer_path"
            )
        path = str(folder)

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    # Readers of the formats may raise any error for damaged files (the Rust tokenizers raise plain Exception).
    except Exception as error:
        raise ValueError(
            f"{key}: the tokenizer of {path} cannot be loaded: {short_reason(error)}. Check that it is a model folder "
            "or a hub name this machine can reach; one that needs its own Python code also needs "
            "model.trust_remote_code=true."
        ) from error
    if needs_chat_template and not tokenizer.chat_template:
        raise ValueError(
            f"{key}: the tokenizer of {path} has no chat template; use an instruction-tuned model, put a "
            "chat_template.jinja into the folder, or name a tokenizer that has one with model.tokenizer_path"
        )
    return tokenizer
