import pytest

from pipeline.advantage.estimators import get_adv_estimator, register_adv_est
from pipeline.advantage.outcome import grpo


def test_names():
    assert get_adv_estimator("grpo").function is grpo
    with pytest.raises(ValueError, match=r"'grop' is unknown. Did you mean 'grpo'\?"):
        get_adv_estimator("grop")
    with pytest.raises(ValueError, match="registered twice"):
        register_adv_est("grpo", scope="group")(lambda data, config: None)
    with pytest.raises(ValueError, match="'group' or 'batch'"):
        register_adv_est("other", scope="token")(len)
    with pytest.raises(ValueError, match=r"needs \['luck'\]; it may need values, baselines"):
        register_adv_est("other", needs=("values", "luck"))(len)


def test_import_path():
    assert get_adv_estimator("pipeline.advantage.outcome:grpo").function is grpo
    assert get_adv_estimator("pipeline.advantage.outcome:gpg").scope == "batch"
    assert get_adv_estimator("pipeline.advantage.returns:gae").needs == ("values",)
