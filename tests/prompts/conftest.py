from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.config.data import DataConfig
from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.encode import PromptEncoder
from pipeline.prompts.files import resolve
from pipeline.prompts.generator import make_generator
from pipeline.prompts.loader import PromptLoader
from pipeline.prompts.quarantine import Quarantine
from pipeline.prompts.sampler import make_sampler

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% if message.tool is defined %}!{{ message.tool }}{% endif %}"
    "{% endfor %}"
    "{% if shout %}LOUD{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


def _row(number: int, content: str | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": f"question {number}" if content is None else content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"target": number, "numbers": [1, 2]}},
        "extra_info": {"split": "train", "index": number},
    } | changes


@pytest.fixture(scope="session")
def prompt_row() -> Callable[..., dict[str, Any]]:
    """Makes a row in verl's format: `prompt_row(number, content, **changes)`."""
    return _row


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as `name` into the test's folder and returns the path."""

    def write_rows(rows: list[dict[str, Any]] | pa.Table, name: str = "train.parquet", row_group_rows: int = 10) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        pq.write_table(table, path, row_group_size=row_group_rows)
        return str(path)

    return write_rows


@pytest.fixture
def loader_of(tokenizer: Any, tmp_path: Path) -> Callable[..., PromptLoader]:
    """Makes the loader of some files, or of none, with settings of `data`."""

    def make(
        paths: Any, seed: int = 1, split: str = "train", epochs: int | None = None, lag: int = 2, **changes: Any
    ) -> PromptLoader:
        data = DataConfig(**{"shuffle_window_rows": 8} | changes)
        files = resolve(paths, f"data.{split}_files") if paths else []
        encoder = PromptEncoder(ChatTokenizer(tokenizer, data), Quarantine(data.max_bad_rows))
        made = make_sampler(data, seed), make_generator(data, seed)
        return PromptLoader(files, data, encoder, seed, split, *made, epochs, str(tmp_path / "run"), lag)

    return make
