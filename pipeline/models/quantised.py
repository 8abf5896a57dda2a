"""Detection of models with quantised weights (stored in few bits), which engines can read, but training cannot."""

from typing import Any

from pipeline.models.weight_files import CONFIG, model_files, read_json

ENTRIES = ("quantization_config", "compression_config")
"""Entries of `config.json` with the settings of quantised weights."""
MODELOPT = "hf_quant_config.json"
"""File with these settings in models of NVIDIA's ModelOpt."""


def quantisation(path: str | None) -> str:
    """Describe the quantisation of the model at `path`, a folder or a Hub name, for a sentence; "" if it has none.

    Raises:
        ValueError: a file is damaged.
    """
    folder = model_files(path)
    if folder is None:
        return ""
    config = read_json(folder / CONFIG)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for entry in ENTRIES:
            if isinstance(found := part.get(entry), dict) and _in_few_bits(found):
                method = found.get("quant_method") or found.get("quant_algo") or "of a kind that is not named"
                bits = next((f" in {n} bits" for n in (4, 8) if found.get(f"load_in_{n}bit")), "")
                bits = bits or (f" in {found['bits']} bits" if isinstance(found.get("bits"), int) else "")
                return f"{method}{bits} ({entry} of {CONFIG})"
    if (folder / MODELOPT).is_file():
        settings = read_json(folder / MODELOPT).get("quantization")
        algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
        return f"modelopt {algorithm or ''}".strip() + f" ({MODELOPT})"
    return ""


def _in_few_bits(settings: dict[str, Any]) -> bool:
    # Some tools leave settings in which both kinds are switched off.
    switches = [settings[name] for name in ("load_in_4bit", "load_in_8bit") if name in settings]
    return bool(settings) and (not switches or any(switches))


def check_not_quantised(path: str | None, key: str) -> None:
    """Raise ValueError if the weights of the model at `path` are quantised. `key` names the setting in the error."""
    if kind := quantisation(path):
        raise ValueError(
            f"{key}={path} has quantised weights: {kind}. The trainer computes with whole ones; give the model in "
            "bfloat16 or float32 that it was made from (model.lora trains adapters with less memory). jobs.evaluate "
            "and jobs.serve can use quantised models, since only vLLM reads them"
        )
