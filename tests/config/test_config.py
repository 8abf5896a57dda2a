"""Settings: composition, refusals with the nearest key, round trips, and no key without effect."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from pipeline.config import CONFIG_DIR, Config, ConfigError, diff, load_config, load_yaml, save_yaml, to_flat
from pipeline.config.schema import keys

ROOT = Path(__file__).resolve().parents[2]


def refusal(*overrides: str, **options: object) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(overrides, **options)
    assert "$VALUE" not in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_import_loads_no_heavy_library():
    code = (
        "import sys, pipeline.config, pipeline.plan.checks, pipeline.plan.plan;"
        "import pipeline.storage.resume, pipeline.run.versions;"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_defaults_are_those_of_the_dataclasses():
    assert load_config() == load_config(["experiment=null"]) == load_config(["algorithm=null"]) == Config()


def test_an_argument_wins_over_the_experiment_and_the_experiment_over_the_default():
    assert load_config(["experiment=countdown_cpu"]).rollout.dtype == "float32" != Config().rollout.dtype
    assert load_config(["experiment=countdown_cpu", "rollout.dtype=bfloat16"]).rollout.dtype == "bfloat16"


def test_values_have_the_declared_types():
    config = load_config(["actor.optim.betas=[0.9,0.95]", "trainer.logger=[console]", "trainer.seed=7"])
    assert config.actor.optim.betas == (0.9, 0.95)
    assert config.trainer.logger == ["console"] and type(config.trainer.logger) is list
    assert config.trainer.seed == 7


def test_an_algorithm_is_laid_over_the_experiment_and_arguments_over_both(tmp_path):
    assert load_config(["algorithm=ppo"]).algorithm.adv_estimator == "gae" != Config().algorithm.adv_estimator
    for arguments in (["algorithm=ppo", "algorithm.lam=0.95"], ["algorithm.lam=0.95", "algorithm=ppo"]):
        algorithm = load_config(arguments).algorithm
        assert (algorithm.adv_estimator, algorithm.lam) == ("gae", 0.95)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nactor: {clip_ratio_high: 0.9, clip_ratio: 0.7}"
    )
    for arguments in (["experiment=mine", "algorithm=dapo"], ["algorithm=dapo", "experiment=mine"]):
        actor = load_config(arguments, config_dir=tmp_path).actor
        assert (actor.clip_ratio_high, actor.clip_ratio) == (0.28, 0.7)


def test_an_experiment_may_choose_an_algorithm(tmp_path):
    (tmp_path / "experiment").mkdir()
    own = "# @package _global_\ndefaults: [/algorithm/gspo, _self_]\nrollout: {n: 3}"
    (tmp_path / "experiment" / "mine.yaml").write_text(own)
    config = load_config(["experiment=mine"], config_dir=tmp_path)
    assert (config.actor.policy_loss.loss_mode, config.rollout.n) == ("gspo", 3)
    config = load_config(["experiment=mine", "algorithm=dapo"], config_dir=tmp_path)
    assert (config.actor.policy_loss.loss_mode, config.rollout.n) == ("vanilla", 3)


def test_algorithms_of_ones_own(tmp_path, named):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("# @package _global_\nalgorithm: {adv_estimator: opo}")
    assert load_config(["algorithm=mine"], config_dir=tmp_path).algorithm.adv_estimator == "opo"
    named(refusal("algorithm=yours", config_dir=tmp_path), "algorithm=yours cispo, mine,")


def test_several_algorithms_one_on_top_of_the_other(named):
    config = load_config(["algorithm=[dapo,icepop]"])
    assert config.actor.clip_ratio_high == 0.28
    assert config.algorithm.rollout_correction.rollout_is_threshold == "0.5_5.0"
    named(refusal("algorithm=[dapo,nope]"), "algorithm=nope cispo,")


@pytest.mark.parametrize("text", ["0.5_2", "1_2", "2.0", "1e3", "'0.5_2.0'"])
def test_text_that_looks_like_a_number_stays_as_it_was_written(text):
    for key in ("rollout_is_threshold", "rollout_rs_threshold"):
        correction = load_config([f"algorithm.rollout_correction.{key}={text}"]).algorithm.rollout_correction
        assert getattr(correction, key) == text.strip("'")


@pytest.mark.parametrize("text", ["rollout.engine_kwargs.foo=1", "+rollout.engine_kwargs.foo=1"])
def test_mappings_take_any_name(text):
    assert load_config([text]).rollout.engine_kwargs == {"foo": 1}
    assert load_config(["rollout.engine_kwargs={foo:{bar:2}}"]).rollout.engine_kwargs == {"foo": {"bar": 2}}


def test_files_are_composed_once_and_arguments_change_no_later_settings():
    before = load_config(["algorithm=dapo"])
    with patch("pipeline.config.compose.compose", side_effect=AssertionError("composed again")):
        other = load_config(["algorithm=dapo", "rollout.n=3", "rollout.stop=[x]", "algorithm.adv_estimator_kwargs.a=1"])
        assert load_config(["algorithm=dapo"]) == before
    assert (other.rollout.n, other.rollout.stop) == (3, ["x"]) and before.rollout.n != 3


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("actor.lr", "actor.optim.lr"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optim.lr"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "rollout.val_kwargs.n"),
        ("custom_reward_function.path", "reward.custom_reward_function.path"),
        ("data.train_bach_size", "data.train_batch_size"),
        ("trainer.total_epoch", "trainer.total_epochs"),
    ],
)
def test_unknown_key_names_the_nearest(wrong, right, tmp_path, named):
    named(refusal(f"{wrong}=1"), f"{wrong} {right}")
    named(refusal(f"+{wrong}=1"), f"{wrong} {right}")
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\n" + as_yaml(wrong, "1"))
    named(refusal("experiment=mine", config_dir=tmp_path), f"{file} {wrong.split('.')[0]}")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("custom_reward_function: {path: x}", "reward.custom_reward_function.path"),
        ("actor: {optm: {lr: 1}}", "actor.optim.lr"),
        ("actr: {optim: {weight_decay: 1}}", "actor.optim.weight_decay"),
        ("scoring: {refernce: {placement: replicas}}", "scoring.reference.placement"),
    ],
)
def test_an_unknown_section_of_a_file_names_the_nearest_key(text, right, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    assert refusal("experiment=mine", config_dir=tmp_path).endswith(f"did you mean {right}?")


def test_key_that_is_like_no_other_lists_its_section(named):
    named(refusal("algorithm.foo=1"), "algorithm.foo adv_estimator")
    assert "the keys of actor.optim are name, lr, betas" in refusal("actor.optim.foo=1")
    assert refusal("foo=1").endswith("`slipstream docs configuration` lists all keys")


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("actor.optim.lr", "abc", "a number"),
        ("rollout.n", "1.5", "a whole number"),
        ("trainer.seed", "null", "a whole number"),
        ("trainer.total_training_steps", "many", "a whole number or null"),
        ("data.shuffle", "maybe", "true or false"),
        ("trainer.logger", "5", "a list"),
        ("actor.optim.betas", "[a,b]", "a list of 2, each a number"),
    ],
)
def test_wrong_type_names_key_value_and_what_was_expected(key, value, kind, tmp_path, named):
    sentence = refusal(f"{key}={value}")
    named(sentence, f"{key}={value} {kind}")
    (tmp_path / "own.yaml").write_text(f"defaults: [train_schema, _self_]\n{as_yaml(key, value)}")
    sentence = refusal(config_name="own", config_dir=tmp_path)
    named(sentence, f"{tmp_path}/own.yaml {key} {kind}")


def as_yaml(key: str, value: str) -> str:
    for part in reversed(key.split(".")):
        value = f"{{{part}: {value}}}"
    return value[1:-1] + "\n"


def test_section_given_a_value(named):
    named(refusal("actor.optim=3"), "actor.optim")


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("rollout.n=1,2", "rollout.n=1,2"),
        ("~trainer.logger", "~trainer.logger"),
        ("experiment=nope", "countdown_cpu"),
        ("no equals sign", "key=value"),
        ("--flag", "key=value"),
        ("algorithm={lam:0.5}", "algorithm.lam"),
    ],
)
def test_arguments_that_are_no_setting(text, keys, named):
    named(refusal(text), keys)


def test_an_argument_with_a_package_of_hydra_names_the_key():
    assert "the key actor.optim.lr@actor does not exist; the keys of actor.optim are" in refusal(
        "actor.optim.lr@actor=1"
    )


def test_missing_files_and_broken_yaml(tmp_path, named):
    named(refusal(config_name="nope"), "nope train")
    named(refusal(config_dir=tmp_path / "nope"), f"{tmp_path}/nope")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    named(refusal(config_name="broken", config_dir=tmp_path), f"{tmp_path}/broken.yaml")


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("experiment/*.yaml")), ids=lambda path: path.stem)
def test_experiments_compose(path):
    assert load_config([f"experiment={path.stem}"]).trainer.experiment_name != Config().trainer.experiment_name


def test_saved_settings_come_back_the_same(tmp_path):
    config = load_config(["experiment=countdown_cpu", "rollout.engine_kwargs.foo=[1,2]", "data.train_files=[a,b]"])
    save_yaml(config, tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml", Config) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        *((b"rollout: {n: a}", "rollout.n"), (b"rollout: {nn: 1}", "rollout.nn"), (b"[", "YAML")),
        *((b"", ""), (b"\xff\xfe", ""), (b"\0\0", "YAML")),
    ],
)
def test_settings_of_a_damaged_file_are_refused(text, keys, tmp_path, named):
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(ConfigError) as refused:
        load_yaml(tmp_path / "config.yaml", Config)
    named(refused.value, f"config.yaml {keys}")


def test_flat_has_every_key_and_diff_names_the_changed_ones():
    assert list(to_flat(Config())) == list(keys(Config))
    assert {name: key.default for name, key in keys(Config).items()} == to_flat(Config())
    changed = load_config(["rollout.n=3", "actor.optim.lr=0.5"])
    assert diff(Config(), changed) == [("rollout.n", 8, 3), ("actor.optim.lr", 1e-6, 0.5)]


READ_OTHERWISE = {
    "data.train_max_samples": "getattr with the split's name in prompts/source.py",
    "data.val_max_samples": "getattr with the split's name in prompts/source.py",
    **dict.fromkeys(
        ("teacher.adapter", "teacher.prompt", "teacher.sources"), "of the teachers that teachers.py goes through"
    ),
    **dict.fromkeys(
        [f"{name}.{key}" for name in ("rollout", "rollout.val_kwargs") for key in ("temperature", "top_p", "top_k")],
        "of the sampling settings that rollout/vllm.py goes through, one per response",
    ),
}


def reads() -> Iterator[tuple[str, str, str]]:
    """(attribute, name it is taken from, text of the file) of every attribute read outside of settings and checks."""
    for path in {*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("jobs/**/*.py")} - {*ROOT.glob("pipeline/plan/*.py")}:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "problems":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = node.value
                name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
                yield node.attr, name.lstrip("_"), text


def test_every_key_is_read():
    """A key counts as read where it is taken from its section, or from a name that its file declares as the section.

    `config.actor.optim.lr`, `optim.lr`, `self.config.lr` in a file that names OptimConfig, and `c.lr` where `c` is
    annotated with OptimConfig all read `actor.optim.lr`. What the keys of algorithm, actor and critic do is shown, one
    by one, in test_keys.py.
    """
    found = list(reads())
    unread = []
    for key in keys(Config).values():
        *_, section, name = ["", *key.name.split(".")]
        owner = key.owner.__name__

        def is_read(attribute: str, base: str, text: str, section=section, name=name, owner=owner) -> bool:
            if attribute != name or not base:
                return False
            if base == section or (base == "config" and owner in text) or (base == "self" and f"class {owner}" in text):
                return True
            given = rf"\b{re.escape(base)}: [\w| ]*\b({owner})\b"
            taken = rf"\b{re.escape(base)} = [\w.]*\.{section}\b"
            return re.search(f"{given}|{taken}", text) is not None

        if key.name.split(".")[0] not in ("algorithm", "actor", "critic") and not any(is_read(*one) for one in found):
            unread.append(key.name)
    assert set(unread) <= set(READ_OTHERWISE), "remove these keys or let them do something"
    assert all(name in keys(Config) for name in READ_OTHERWISE)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[" * 3000 + "]" * 3000, "cannot be read as key=value"),
        ("{a:" * 300 + "1" + "}" * 300, "cannot be read as key=value|nested too deeply|data.train_files"),
        ("9" * 5000, "cannot be read as key=value .*digits"),
    ],
)
def test_values_that_python_does_not_read_are_named(value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        load_config([f"data.train_files={value}"])
    assert len(str(refused.value).splitlines()[0]) < 3000
