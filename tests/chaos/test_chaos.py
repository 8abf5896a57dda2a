"""The parts of the chaos script that need no run, and a short run of it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from pipeline.config import load_config
from pipeline.derived import uses_agent, uses_critic, uses_engines, uses_reference
from pipeline.plan.checks import check
from tests.chaos import campaign as campaign_module
from tests.chaos import checks
from tests.chaos.__main__ import KINDS, main, parse
from tests.chaos.campaign import Campaign, Strike
from tests.chaos.checks import Recorded
from tests.chaos.inputs import ENVIRONMENT, Inputs, settings
from tests.chaos.processes import Found, kill_tree, kind_of
from tests.chaos.report import Report
from tests.chaos.schedule import Kill, schedule
from tests.chaos.site import ChaosError
from tests.chaos.tracking import tracked

ITERATIONS, PROMPTS, SAMPLES = 4, 3, 2


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_comes_as_often_as_any_other_by_the_seed(seed: int) -> None:
    kills = schedule(KINDS, len(KINDS) + 7, seed)
    assert kills == schedule(KINDS, len(KINDS) + 7, seed) != schedule(KINDS, len(KINDS) + 7, seed + 1)
    counts = Counter(kill.kind for kill in kills)
    assert set(counts) == set(KINDS) and max(counts.values()) - min(counts.values()) <= 1
    assert any(kill.early for kill in schedule(KINDS, 100, seed))


def test_fewer_kills_than_kinds_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--kills", "3"]) == 2
    assert "--kills 3 is fewer than the" in capsys.readouterr().err


def test_unknown_kinds_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parse(["--out", str(tmp_path), "--kinds", "engine,moon"])
    assert "moon is none of engine" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--out", str(tmp_path), "--kinds", "node"])
    assert "node" in parse(["--out", str(tmp_path), "--nodes", "2"]).kinds


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("ray::MapWorker(MapBatches(Rollout)).submit", "engine"),
        ("ray::MapWorker(ReadRange->MapBatches(Prompts)).submit", "prompts"),
        ("ray::MapWorker(MapBatches(Value)).submit", "value"),
        ("ray::RayTrainWorker.execute", "train worker"),
        ("ray::PolicyStore", "store"),
        ("ray::Host", "host"),
        ("ray::MapBatches(Advantage)->MapBatches(Record)", "light task"),
        ("ray::MapBatches(Reward)->MapBatches(Validation)", None),
        ("ray::_StatsActor", "service"),
        ("ray::IDLE", None),
        ("python -m tests.store.test_policy_store", None),
        ("python -c from pipeline.reward.program import main; main(4, 5)", "reward worker"),
    ],
)
def test_titles(title: str, kind: str | None) -> None:
    assert kind_of(title) == kind


def test_a_tree_of_processes_is_killed() -> None:
    inner = "import subprocess, sys; subprocess.run(['sleep', '1000'])"
    code = f"import subprocess, sys; print(1, flush=True); subprocess.run([sys.executable, '-c', {inner!r}])"
    root = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert root.stdout is not None and root.stdout.readline()
    time.sleep(0.3)
    kill_tree(root.pid)
    assert root.wait(5) == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while any(other.status() != psutil.STATUS_ZOMBIE for other in psutil.process_iter() if group(other) == root.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def rows(k: int, version: int | None = None) -> pa.Table:
    """What iteration `k` trained on: prompts `0-{3k}` and the two after it."""
    uids = [f"0-{offset}" for offset in range(PROMPTS * (k - 1), PROMPTS * k) for _ in range(SAMPLES)]
    return pa.table(
        {
            "uid": uids,
            "sample": pa.array(list(range(SAMPLES)) * PROMPTS, pa.int32()),
            "policy_version": [k - 1 if version is None else version] * len(uids),
            "response_ids": pa.array([[k, i] for i in range(len(uids))], pa.list_(pa.int32())),
            "score": [i % 2 / 1 for i in range(len(uids))],
        }
    )


def recorded() -> Recorded:
    """A run in which all is well."""
    history = [{"iteration": k, "time": k, "a": 0.1 * k, "timing_s/step": 1.0} for k in range(1, ITERATIONS + 1)]
    return Recorded(history, {k: rows(k) for k in range(1, ITERATIONS + 1)}, rows(ITERATIONS))


def failed(run: Recorded, twin: Recorded | None = None) -> dict[str, str]:
    done = checks.check(run, twin or recorded(), ITERATIONS, PROMPTS * SAMPLES, SAMPLES)
    return {check.name: check.sentence for check in done if check.ok is False}


def told(run: Recorded) -> dict[str, str]:
    done = checks.check(run, recorded(), ITERATIONS, PROMPTS * SAMPLES, SAMPLES)
    return {check.name: check.sentence for check in done if check.ok is None}


def test_a_sound_run_passes() -> None:
    run = recorded()
    # Chunks may have another order, and times differ.
    run.rows[2] = run.rows[2].take(list(reversed(range(len(run.rows[2])))))
    run.history[1]["timing_s/step"] = 9.0
    assert failed(run) == {}
    assert told(run) == {
        "same responses": "the responses of 4 of 4 iterations equal those without kills",
        "same metrics": "the metrics of 4 of 4 iterations equal those without kills",
    }


def lose_iteration(run: Recorded) -> None:
    del run.history[2]


def repeat_iteration(run: Recorded) -> None:
    run.history.append(run.history[1])


def lose_row(run: Recorded) -> None:
    run.rows[3] = run.rows[3].slice(1)


def lose_rows(run: Recorded) -> None:
    del run.rows[3]


def repeat_sample(run: Recorded) -> None:
    run.rows[2] = run.rows[2].take([0, 1, 2, 3, 4, 4])


def repeat_prompts(run: Recorded) -> None:
    run.rows[3] = rows(2, version=2)


def use_old_version(run: Recorded) -> None:
    run.rows[3] = rows(3, version=1)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lose_iteration, {"iterations": "lacks iteration 3"}),
        (repeat_iteration, {"iterations": "repeats iteration 2"}),
        (lose_row, {"rows": "iteration 3 has 5", "prompts": "in iteration 3"}),
        (lose_rows, {"rows": "iteration 3 has 0", "prompts": "in iteration 3: 3 lost, 0 more"}),
        (repeat_sample, {"rows": "iteration 2 holds a sample twice"}),
        (repeat_prompts, {"prompts once": "trained twice: 0-", "prompts": "in iteration 3: 3 lost, 3 more"}),
        (use_old_version, {"versions": "iteration 3"}),
    ],
)
def test_damage_is_found(damage: Callable[[Recorded], None], found: dict[str, str]) -> None:
    run = recorded()
    damage(run)
    problems = failed(run)
    assert problems.keys() == found.keys() and all(text in problems[name] for name, text in found.items())


def test_a_validation_beyond_the_noise_is_found() -> None:
    run = recorded()
    assert run.validation is not None
    run.validation = run.validation.set_column(4, "score", pa.array([9.0, 10.0] * PROMPTS))
    assert failed(run).keys() == {"validation"}
    run.validation = run.validation.slice(1)
    assert failed(run)["validation"] == "the last validation has 5 rows, 6 without kills"
    run.validation = None
    assert failed(run).keys() == {"validation"}


def test_other_responses_and_metrics_are_told() -> None:
    run = recorded()
    run.rows[2] = run.rows[2].set_column(3, "response_ids", run.rows[3]["response_ids"])
    run.history[1]["a"] = 0.3
    run.history[2]["b"] = 0.3
    assert told(run) == {
        "same responses": "the responses of 3 of 4 iterations equal those without kills; others from iteration 2 on",
        "same metrics": "the metrics of 2 of 4 iterations equal those without kills; "
        "the first that differ are a of iteration 2",
    }


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_run_has_every_party(tmp_path: Path, tiny_model: Path, prompt_files: Any, nodes: int) -> None:
    """The settings are the pipeline's own, and its checks have nothing against them."""
    given = Inputs(tiny_model, Path(prompt_files.train), Path(prompt_files.val))
    options: dict[str, Any] = {"iterations": 9, "seed": 1, "patience_s": 100.0, "mlflow": True, "nodes": nodes}
    config = load_config(settings(given, tmp_path, "chaos", **options))
    check(config)
    assert uses_engines(config) and uses_reference(config) and uses_critic(config)
    assert config.trainer.num_workers == 2 and config.trainer.save_freq == 1
    assert config.algorithm.max_staleness == 0 and config.rollout.seed_per_request
    assert config.reward.custom_reward_function.path is None, "Countdown's own rule"
    assert config.trainer.placed("rollout") == ({"host": "second"} if nodes == 2 else None)
    assert all(
        getattr(config.trainer.deadlines, field.name) < 100 for field in dataclasses.fields(config.trainer.deadlines)
    )


def test_a_run_of_episodes_has_an_environment_on_a_host(tmp_path: Path, tiny_model: Path, prompt_files: Any) -> None:
    environment = tmp_path / "environment.py"
    environment.write_text(ENVIRONMENT)
    given = Inputs(tiny_model, Path(prompt_files.train), Path(prompt_files.val), environment=environment)
    options: dict[str, Any] = {"iterations": 9, "seed": 1, "patience_s": 100.0, "mlflow": False, "nodes": 1}
    config = load_config(settings(given, tmp_path, "chaos", **options))
    check(config)
    assert uses_agent(config) and config.agent.hosts == 1
    kinds = parse(["--out", str(tmp_path), "--episodes"]).kinds
    assert {"host", "zygote", "engine"} <= set(kinds) and "reward task" not in kinds


def test_no_tracking_server_database_has_two_runs(tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute("create table runs (run_uuid, status)")
        connection.execute("create table metrics (run_uuid, key, step)")
        connection.execute("insert into runs values ('a', 'FINISHED')")
        connection.executemany("insert into metrics values ('a', 'critic/score/mean', ?)", [(1,), (2,), (2,)])
    assert tracked(tmp_path / "mlflow.db", 3).ok
    assert tracked(tmp_path / "mlflow.db", 3).sentence == "1 run (FINISHED) with 2 of 3 iterations in MLflow"
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute("insert into runs values ('b', 'RUNNING')")
    assert tracked(tmp_path / "mlflow.db", 3).ok is False


class FakeSite:
    """A run that does one iteration each time it is looked at, and one again after an engine has been killed."""

    def __init__(self, metrics: Path, last: int):
        self.metrics, self.last = metrics, last
        self.history: list[dict[str, float]] = []
        self.engine, self.killed = 100, 0
        self.stuck = False

    @property
    def finished(self) -> bool:
        return len(self.history) == self.last

    def tend(self) -> list[str]:
        if not self.stuck and not self.finished:
            time.sleep(0.005)
            self.history.append({"iteration": len(self.history) + 1, "time": time.time()})
            self.metrics.write_text("".join(f"{json.dumps(record)}\n" for record in self.history))
        return []

    def find(self) -> list[Found]:
        return [Found("engine", self.engine, 0.0, ""), Found("store", 7, 0.0, "")]

    def kill(self, found: Found) -> None:
        assert found.pid == self.engine
        self.engine, self.killed = self.engine + 1, self.killed + 1
        self.history = self.history[:-1]

    @property
    def driver(self) -> "FakeSite":
        return self

    def printed(self) -> str:
        return "a\nwaiting\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    monkeypatch.setattr(campaign_module, "POLL_S", 0.001)
    yield FakeSite(tmp_path / "metrics.jsonl", 30)


def campaign(site: FakeSite, *kills: Kill, patience_s: float = 5.0) -> Campaign:
    return Campaign(site, site.metrics.parent, kills, 1, patience_s, lambda sentence: None)  # type: ignore[arg-type]


def test_a_campaign(site: FakeSite) -> None:
    made = campaign(site, Kill("engine", False, 0.0), Kill("engine", True, 0.001), Kill("engine", False, 0.01))
    made.run()
    assert site.killed == 3 and site.finished
    assert [strike.pid for strike in made.strikes] == [100, 101, 102]
    for strike in made.strikes:
        assert strike.again == 1 and strike.renewed == ["engine"]
        assert strike.next_s is not None and strike.second_s is not None and strike.next_s <= strike.second_s
        assert strike.told == "restarted: engine"
    first, second, third = made.strikes
    assert third.at - second.at > 0.01 and third.iteration > second.iteration >= first.iteration - 1


def test_a_run_that_does_not_come_back_is_an_error(site: FakeSite) -> None:
    class Dead(FakeSite):
        def kill(self, found: Found) -> None:
            self.stuck = True

    dead = Dead(site.metrics, 30)
    made = campaign(dead, Kill("engine", False, 0.0), patience_s=0.3)
    with pytest.raises(ChaosError, match=r"no iteration came for 0 s after kill 1 \(engine\).*waiting"):
        made.run()


def test_a_run_that_ends_too_early_is_an_error(site: FakeSite) -> None:
    with pytest.raises(ChaosError, match=r"the run ended before kill 1 \(value\); give it more --iterations"):
        campaign(site, Kill("value", False, 0.0)).run()


def test_the_report(tmp_path: Path) -> None:
    strikes = [
        Strike(1, "train worker", 5, False, 3, 100.0, "ray::RayTrainWorker", 20.0, 24.0, 1, ["engine", "train worker"]),
        Strike(2, "driver", 6, True, 3, 105.0, "", 30.0, None, 0, ["driver", "engine", "head", "train worker"]),
        Strike(3, "light task", 7, False, 8, 150.0, "", 2.0, 5.0, 0, []),
    ]
    done = [checks.Check("rows", True, "all there"), checks.Check("same metrics", None, "3 of 4")]
    report = Report(["python"], 1, 9, strikes, ["driver 1 ended with code 1: x"], 200.0, 50.0, done)
    report.write(tmp_path)
    text = (tmp_path / "chaos.md").read_text()
    assert "| 1 | train worker | 4 | 20 s | 24 s | 1 | Ray Train restarted the train workers" in text
    assert "| 2 | driver (early) | 4 | 30 s | - | 0 | the same command was started again, with a new Ray |" in text
    assert "3 kills of 3 kinds in 200 s (seed 1); the same run without kills took 50 s" in text
    assert "within 14 s (median), 24 s at most" in text and "- driver 1 ended with code 1: x" in text
    content = json.loads((tmp_path / "chaos.json").read_text())
    assert content["ok"] and len(content["kills"]) == 3 and content["kills"][0]["again"] == 1
    report.checks.append(checks.Check("prompts", False, "2 lost"))
    assert not report.ok and "FAILED: prompts: 2 lost" in report.as_markdown()


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_run_survives_three_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--out", str(tmp_path), "--kills", "3", "--kinds", "engine,train worker,driver", "--iterations", "16"]
    assert main(options) == 0, capsys.readouterr().out
    content = json.loads((tmp_path / "chaos.json").read_text())
    assert Counter(kill["kind"] for kill in content["kills"]) == {"engine": 1, "train worker": 1, "driver": 1}
    renewed = {kill["kind"]: kill["renewed"] for kill in content["kills"]}
    assert all(kind in kinds for kind, kinds in renewed.items())
    assert {check["name"]: check["ok"] for check in content["checks"]} == {
        **dict.fromkeys(("iterations", "rows", "prompts once", "versions", "prompts", "validation", "model"), True),
        **dict.fromkeys(("same responses", "same metrics")),
    }
    assert not list(tmp_path.glob("ray-logs"))
