"""Settings that no longer exist are refused by name, with what to do instead."""

import pytest

from pipeline.config import Config, ConfigError, load_config
from pipeline.config.renamed import RENAMED
from pipeline.config.schema import keys

INSTEAD = {
    "rollout.oversample": "rollout.update=in_flight",
    "rollout.oversample_policy": "leave this key out",
    "rollout.partial_tokens": "rollout.update=in_flight",
    "rollout.scale_up_s": "leave it out",
    "rollout.scale_down_s": "leave it out",
    "algorithm.on_stale": "leave this key out",
    "stream.order": "leave this key out",
    "stream": "every chunk",
    "trainer.early": "trainer.stream_gradients",
}
"""What the sentence of each removed key names in its place."""


@pytest.mark.parametrize("key", INSTEAD)
def test_a_removed_key_is_refused_with_what_takes_its_place(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([f"{key}=1"])
    (line,) = (line for line in str(error.value).splitlines() if f"the key {key} no longer exists" in line)
    assert INSTEAD[key] in line


def test_every_removed_key_has_its_case() -> None:
    assert set(RENAMED) == set(INSTEAD)


def test_no_key_is_both_there_and_removed() -> None:
    assert not set(RENAMED) & set(keys(Config))
