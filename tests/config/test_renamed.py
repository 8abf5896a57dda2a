"""Settings that no longer exist are refused by name, with what to do instead."""

import pytest

from pipeline.config import Config, ConfigError, load_config
from pipeline.config.renamed import RENAMED
from pipeline.config.schema import keys


@pytest.mark.parametrize("key", RENAMED)
def test_a_removed_key_is_refused_with_its_reason(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([f"{key}=1"])
    assert f"the key {key} no longer exists: {RENAMED[key]}" in str(error.value)


def test_no_key_is_both_there_and_removed() -> None:
    assert not set(RENAMED) & set(keys(Config))
