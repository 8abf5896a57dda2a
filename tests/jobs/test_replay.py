"""The command line of a replay: the settings it begins with, what it refuses and how, and what it prints."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from jobs.replay import main, replay_config
from jobs.tiny import build_model, build_tokenizer, countdown_texts
from pipeline.config import Config, ConfigError, load_config, save_yaml
from pipeline.config.schema import value_of
from pipeline.plan.checks import check
from pipeline.plan.plan import plan
from pipeline.replay.checks import UNREAD
from pipeline.replay.checks import _check_tokens as check_tokens
from pipeline.replay.checks import _mismatches as mismatches
from pipeline.rows import ANSWER, OBSERVATION
from tests.recordings import BATCH, CHUNK, SAMPLES, record

Refused = Callable[..., str]
ITERATIONS = 3


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reaches Ray here fails the test."""

    def started(config: Config) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("pipeline.run.driver.start_ray", started)


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path) -> list[str]:
    """Of the run that is recorded; its prompt files are gone."""
    return [
        "data.train_files=/gone/train.parquet",
        "data.val_files=/gone/val.parquet",
        "data.sampler=solve_rate",
        f"data.train_batch_size={BATCH}",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        f"model.path={tiny_model}",
        f"rollout.n={SAMPLES}",
        f"rollout.chunk_prompts={CHUNK}",
        "rollout.num_engines=4",
        "rollout.num_gpus=1",
        "rollout.temperature=0.9",
        "rollout.dtype=float16",
        "actor.optim.lr=1e-3",
        "trainer.num_workers=2",
        "trainer.ray_num_cpus=8",
        "trainer.test_freq=1",
        "trainer.total_training_steps=50",
        "trainer.max_log_prob_gap=1e-3",
        "trainer.resume=never",
        "trainer.experiment_name=source",
        f"trainer.default_local_dir={tmp_path / 'runs'}",
    ]


@pytest.fixture
def recorded(settings: list[str], tmp_path: Path, tiny_model: Path) -> Path:
    """Folder of a run that has recorded three iterations."""
    folder = tmp_path / "runs" / "source"
    folder.mkdir(parents=True)
    record(folder, range(1, ITERATIONS + 1), load_config(settings), AutoTokenizer.from_pretrained(tiny_model))
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], recorded: Path) -> Refused:
    """Replay with further arguments; the one sentence on stderr, after checking that nothing else came of it."""

    def run(*arguments: str, parts: tuple[str, ...], run_dir: Path = recorded) -> str:
        before = sorted(path for path in recorded.parent.rglob("*"))
        code = main([str(run_dir), *arguments])
        printed = capsys.readouterr()
        assert code == 2, printed
        assert printed.out == ""
        sentence = printed.err.strip()
        assert sentence.startswith("error: ") and "Traceback" not in sentence and len(sentence.splitlines()) == 1
        assert "Errno" not in sentence
        for part in parts:
            assert part in sentence, sentence
        assert sorted(path for path in recorded.parent.rglob("*")) == before
        return sentence

    return run


def dry_run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a dry run prints, its spaces made single."""
    code = main([*arguments, "--dry-run"])
    printed = capsys.readouterr()
    assert code == 0, printed
    return " ".join(printed.out.replace("│", " ").split())


# settings


def test_a_replay_begins_with_the_settings_of_the_recording(recorded: Path, settings: list[str]) -> None:
    was, config = load_config(settings), replay_config(recorded, None, [])
    assert config.trainer.experiment_name == "source-replay"
    assert Path(config.trainer.default_local_dir) == recorded.parent
    assert (config.data.recorded_run, config.data.recorded_iterations) == (str(recorded), "1-3")
    assert (config.trainer.total_epochs, config.trainer.total_training_steps) == (1, None)
    assert config.trainer.max_log_prob_gap is None and config.trainer.resume == "auto"
    assert (config.actor, config.algorithm, config.reward, config.model) == (
        was.actor,
        was.algorithm,
        was.reward,
        was.model,
    )
    kept = ("data.train_batch_size", "data.max_response_length", "rollout.n", "rollout.temperature", "rollout.dtype")
    assert [value_of(config, name) for name in kept] == [value_of(was, name) for name in kept]
    default = Config()
    assert {"data.train_files", "data.val_files", "data.sampler", "rollout.num_engines"} < set(UNREAD)
    assert all(value_of(config, name) == value_of(default, name) for name in UNREAD)
    assert was == load_config(settings), "the recording's own settings stay as they are"


def test_settings_are_laid_over_those_of_the_recording(recorded: Path, tmp_path: Path) -> None:
    given = ["algorithm=[rloo,tis]", "actor.optim.lr=0.5", "trainer.total_epochs=3", "trainer.max_log_prob_gap=0.25"]
    config = replay_config(recorded, "2", given)
    assert config.algorithm.adv_estimator == "rloo" and config.actor.old_log_probs == "recompute"
    assert (config.actor.optim.lr, config.trainer.total_epochs, config.trainer.max_log_prob_gap) == (0.5, 3, 0.25)
    assert config.data.recorded_iterations == "2" and config.rollout.temperature == 0.9
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("# @package _global_\nactor: {clip_ratio: 0.7}")
    assert replay_config(recorded, None, ["algorithm=mine"], str(tmp_path)).actor.clip_ratio == 0.7


def test_the_folder_may_be_named_from_inside(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded)
    config = replay_config(Path("."), None, [])
    assert (config.trainer.experiment_name, config.trainer.default_local_dir) == ("source-replay", str(recorded.parent))


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("agent.environment=other:Game", "agent.environment=other:Game: the rows of"),
        ("agent.tools=[other:calc]", "made with agent.tools=[], and a replay runs no episodes"),
    ],
)
def test_episodes_stay_those_of_the_recording(refused: Refused, given: str, part: str) -> None:
    refused(given, parts=(part, "leave it as it was"))


def test_code_of_a_project_that_moved_is_the_same(tmp_path: Path) -> None:
    old, new = (
        load_config(
            [f"agent.environment={tmp_path}/{place}/game.py:Game", f"agent.tools=[{tmp_path}/{place}/tools.py]"]
        )
        for place in ("old", "new")
    )
    (tmp_path / "new").mkdir()
    for name in ("game.py", "tools.py"):
        (tmp_path / "new" / name).touch()
    assert list(mismatches(new, old)) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "game.py").touch()
    [sentence] = mismatches(new, old)
    assert sentence.startswith(f"agent.environment={tmp_path}/new/game.py:Game")


def test_both_runs_read_images_or_neither() -> None:
    text, shown = Config(), Config()
    shown.model.vision = "frozen"
    for new, old in ((text, shown), (shown, text)):
        [sentence] = mismatches(new, old)
        assert sentence.startswith(f"model.vision={new.model.vision}: the rows of")
    assert not list(mismatches(shown, shown))


def test_of_an_episode_the_tokens_of_the_last_answer_are_compared(settings: list[str], tiny_model: Path) -> None:
    config, tokenizer = load_config([*settings, "agent.tools=[a:b]"]), AutoTokenizer.from_pretrained(tiny_model)
    first, reply, last, closing = (tokenizer(text)["input_ids"] for text in ("12", "one two", "call(3) so 4", "!"))
    parts = [(ANSWER, first), (OBSERVATION, reply), (ANSWER, last), (OBSERVATION, closing)]
    row = {
        "response_ids": [token for _, tokens in parts for token in tokens],
        "spans": [{"kind": kind, "tokens": len(tokens)} for kind, tokens in parts],
    }
    check_tokens(config, [row | {"response": "so 4"}])
    with pytest.raises(ConfigError, match="another tokenizer .* reads the tokens of a response as 'call.3. so 4'"):
        check_tokens(config, [row | {"response": "one"}])


def test_a_begun_answer_is_part_of_a_recorded_response(settings: list[str], tiny_model: Path) -> None:
    config, tokenizer = load_config(settings), AutoTokenizer.from_pretrained(tiny_model)
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so "}]
    row = {"response_ids": tokenizer("4")["input_ids"], "prompt": json.dumps(begun)}
    check_tokens(config, [row | {"response": "so 4"}])
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_tokens(config, [row | {"response": "4"}])


# the plan


def test_dry_run_of_a_replay(recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    before = sorted(recorded.parent.rglob("*"))
    printed = dry_run(str(recorded), "--iterations", "2-3", capsys=capsys)
    for part in (
        "Plan of source-replay",
        f"training prompts {2 * BATCH}",
        "iterations 2",
        f"{BATCH} prompts x {SAMPLES} samples = {BATCH * SAMPLES} rows in 2 chunks of {CHUNK} prompts",
        f"responses recorded: iterations 2-3 of {recorded}",
        "replay 1 x 1 CPU",
        "0 GPUs",
        "a replay starts no engine",
        "training is off-policy. actor.old_log_probs=recompute",
    ):
        assert part in printed, printed
    for part in ("memory of an engine", "chunks in flight", "rollout ", "not read in this run"):
        assert part not in printed, printed
    assert sorted(recorded.parent.rglob("*")) == before


def test_notes_of_a_corrected_and_of_a_guarded_replay(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "off-policy" not in dry_run(str(recorded), "algorithm=tis", capsys=capsys)
    printed = dry_run(str(recorded), "trainer.max_log_prob_gap=1e-4", "rollout.num_engines=3", capsys=capsys)
    assert "trainer.max_log_prob_gap=0.0001 ends the replay" in printed
    assert "but not read in this run: rollout.num_engines=3" in printed


def test_engines_do_not_count(recorded: Path, tmp_path: Path) -> None:
    resolved = plan(replay_config(recorded, None, []), ITERATIONS * BATCH)
    assert [stage.name for stage in resolved.stages] == ["replay", "reward, advantage", "train"]
    assert resolved.gpus == 0 and resolved.greedy_rows_per_iteration == 0
    assert plan(replay_config(recorded, None, ["algorithm=remax"]), 12).greedy_rows_per_iteration == 0


def test_rows_are_read_where_prompts_would_be(recorded: Path) -> None:
    resolved = plan(replay_config(recorded, None, ["trainer.placement.prompts.role=data"]), ITERATIONS * BATCH)
    assert {stage.name: stage.labels for stage in resolved.stages if stage.labels} == {"replay": {"role": "data"}}


def test_too_few_cpus_are_summed_up(refused: Refused) -> None:
    refused("trainer.ray_num_cpus=2", parts=("trainer.ray_num_cpus=2", "the replay stage", "= 1 + 1 + 2 x 1 = 4 CPUs"))


# refusals


def test_folders_that_are_no_run(refused: Refused, recorded: Path, tmp_path: Path) -> None:
    refused(run_dir=tmp_path / "nowhere", parts=("does not exist", "nowhere", "runs/NAME"))
    refused(run_dir=recorded / "trajectories", parts=("has no config.yaml", "not the folder of a run"))
    (tmp_path / "empty").mkdir()
    save_yaml(Config(), tmp_path / "empty" / "config.yaml")
    refused(run_dir=tmp_path / "empty", parts=("empty/trajectories", "no complete iteration"))
    (tmp_path / "empty" / "config.yaml").write_text("data: {keys_of_old: 1}")
    refused(run_dir=tmp_path / "empty", parts=("cannot be replayed by this version", "keys_of_old"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--iterations", "2-9"], ("iteration 4 of 2 to 9", "recorded are iterations 1 to 3")),
        (["--iterations", "last"], ("data.recorded_iterations='last'", "such as 3-10")),
        (["rollout.n=4"], ("rollout.n=4", "were sampled with rollout.n=3")),
        (["rollout.temperature=1.0"], ("rollout.temperature=1.0", "rollout.temperature=0.9")),
        (["rollout.top_p=0.5", "actor.old_log_probs=recompute"], ("rollout.top_p=0.5", "rollout.top_p=1.0")),
        (["data.max_response_length=8"], ("data.max_response_length=8", "may have 12 tokens")),
        (["data.val_files=val.parquet"], ("starts no engine, so it cannot validate", "data.val_files")),
        (["trainer.test_freq=5"], ("starts no engine, so it cannot validate", "trainer.test_freq")),
        (["data.train_files=more.parquet"], ("data.train_files does nothing with data.recorded_run",)),
        (["experiment=countdown_cpu"], ("experiment=countdown_cpu", "algorithm=NAME")),
        (["trainer.experiment_name=source"], ("trainer.experiment_name=source is the folder of the recording",)),
        (["data.train_batch_size=16"], ("12", "16", "do not fill one iteration")),
        (["data.train_batch_size=5"], ("data.train_batch_size=5 is not a whole number of chunks",)),
        (["algorithm=remax"], ("algorithm.adv_estimator=remax", "recorded none (its estimator is grpo)")),
        (["reward.rule_kwargs={}", "reward.custom_reward_function.path=gone.py"], ("gone.py",)),
        (["actor.lr=1"], ("actor.lr", "did you mean actor.optim.lr?")),
    ],
)
def test_settings_that_cannot_be_replayed(refused: Refused, arguments: list[str], parts: tuple[str, ...]) -> None:
    refused(*arguments, parts=parts)


def test_groups_of_another_run(refused: Refused, recorded: Path, settings: list[str]) -> None:
    save_yaml(load_config([*settings, "rollout.n=4"]), recorded / "config.yaml")
    refused(parts=("holds groups of 3 rows", "rollout.n=4"))


def test_a_model_with_another_tokenizer(refused: Refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = build_tokenizer(["quite other texts " * 50, *countdown_texts(8, seed=3)], vocab_size=290)
    model = build_model(tokenizer, hidden=64, layers=1, heads=2, kv_heads=2, tie=True, seed=0)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    capsys.readouterr()
    refused(f"model.path={tmp_path / 'other'}", parts=(str(tmp_path / "other"), "another tokenizer", "was recorded"))


def test_a_data_source_without_a_rule(refused: Refused, recorded: Path, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    record(recorded, range(1, ITERATIONS + 1), tokenizer=tokenizer, data_source="riddles")
    refused(parts=("'riddles'", "reward.custom_reward_function.path"))


def test_recorded_baselines_hold_for_the_recorded_reward_alone(
    refused: Refused, recorded: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    save_yaml(load_config([*settings, "algorithm.adv_estimator=remax"]), recorded / "config.yaml")
    assert "remax advantages" in dry_run(str(recorded), "actor.optim.lr=0.1", "reward.num_cpus=0.5", capsys=capsys)
    refused(
        "reward.length_penalty=0.5", parts=("reward.length_penalty=0.5", "recorded scores of greedy responses", "0.0")
    )
    assert "rloo" in dry_run(str(recorded), "algorithm=rloo", "reward.length_penalty=0.5", capsys=capsys)


def test_another_range_in_the_same_folder(refused: Refused, recorded: Path) -> None:
    folder = recorded.parent / "source-replay"
    folder.mkdir()
    save_yaml(replay_config(recorded, "1-2", []), folder / "config.yaml")
    refused(parts=("data.recorded_iterations (1-2 there, 1-3 now)", "trainer.experiment_name"))


def test_ranges_mean_nothing_without_a_recording(tiny_model: Path) -> None:
    given = [f"model.path={tiny_model}", "data.train_files=a.parquet", "data.recorded_iterations=3-4"]
    with pytest.raises(ConfigError, match="data.recorded_iterations=3-4 does nothing without data.recorded_run"):
        check(load_config(given))


def test_help_of_the_command() -> None:
    """In a process of its own: neither Ray nor torch is needed for it, so it comes at once."""
    code = (
        "import sys; from jobs.replay import main\n"
        "try: main(['--help'])\n"
        "finally: print('loaded:', [name for name in ('ray', 'torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    parts = ("RUN_DIR", "--iterations FIRST-LAST", "--dry-run", "algorithm=rloo", "docs after_training", "loaded: []")
    for part in parts:
        assert part in done.stdout
