"""An attention that transformers does not have is refused by name."""

import pytest

from pipeline.config.model import ModelConfig
from pipeline.models.attention_names import check_attention


def test_attention_is_one_of_transformers() -> None:
    for name in ("sdpa", "eager", "flash_attention_2", "kernels-community/flash-attn"):
        check_attention(ModelConfig(attn_implementation=name))
    with pytest.raises(
        ValueError, match=r"attn_implementation=flash_atention_2 .*nearest is 'flash_attention_2'\); .*sdpa"
    ):
        check_attention(ModelConfig(attn_implementation="flash_atention_2"))
