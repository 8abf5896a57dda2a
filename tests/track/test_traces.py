"""Recorded rows as traces, in a real MLflow store."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.track import async_loggers
from pipeline.track.async_loggers import AsyncLoggers
from pipeline.track.loggers import TrackedRun
from pipeline.track.mlflow_logger import MlflowLogger
from pipeline.track.traces import TEXT_LENGTH, chat_messages, clean
from pipeline.track.trajectories import discard_trajectories
from tests.track.conversations import CALL, NUMBERS, OPENED, PLAYED, PROMPT, SPANS, episode, programmed, single, write

NOW = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)


class Store:
    """A run in `folder` with its MLflow store, or with that of another run, and what sends to it."""

    def __init__(self, folder: Path, resume: bool = False, store_of: Path | None = None) -> None:
        from mlflow.tracking import MlflowClient

        self.folder = folder
        self.run = TrackedRun(folder, {}, "a project", "a run", resume, store_of)
        self.logger = MlflowLogger(self.run)
        folder.mkdir(exist_ok=True)
        self.logger.start()
        self.uri = f"sqlite:///{(store_of or folder).parent / 'mlflow.db'}"
        self.client = MlflowClient(self.uri)
        self.run_id = (folder / "mlflow_run_id").read_text().strip()

    def found(self, filter: str | None = None) -> list[Any]:
        """Traces of the run, the oldest first."""
        experiment = self.client.get_experiment_by_name("a project")
        return self.client.search_traces(
            locations=[experiment.experiment_id],
            run_id=self.run_id,
            filter_string=filter,
            order_by=["timestamp_ms ASC"],
        )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, mlflow_database: Path) -> Store:
    """Of one run; others use its database."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copyfile(mlflow_database, folder / "mlflow.db")
    return Store(folder / "run")


def test_an_episode_as_a_trace(store: Store) -> None:
    write(store.folder, episode(iteration=5))
    store.logger.traces("train", 5, NOW, 4)
    (trace,) = store.found("tags.iteration = '5'")
    info, (root, *below) = trace.info, trace.data.spans
    tags = {"iteration": "5", "split": "train", "data_source": "countdown", "uid": "0-0", "sample": "0"}
    tags |= {"ended": "done", "run": "a run"}
    assert tags.items() <= info.tags.items() and info.trace_metadata["mlflow.sourceRun"] == store.run_id
    assert (info.request_time, info.execution_duration) == (NOW * 1000 - 2000, 2000) and info.state == "OK"
    assert info.request_preview == OPENED[0]["content"] and info.response_preview == "40"
    (score,) = info.assessments
    assert (score.name, score.value, score.source.source_id) == ("score", 0.75, "slipstream")
    assert root.span_type == "AGENT" and root.parent_id is None
    assert root.inputs == {"messages": [*PROMPT, *OPENED]}
    facts = {"score": 0.75, "parts": {"acc": 1}, "prompt_tokens": 3, "response_tokens": 12, "policy_versions": [4, 5]}
    assert (facts | {"episode": NUMBERS}).items() <= root.attributes.items()
    assert root.attributes["ended"] == "done: the environment ended it"

    names = ["answer 1", "calc", "answer 2", "environment", "answer 3", "environment"]
    assert [span.name for span in below] == names and {span.parent_id for span in below} == {root.span_id}
    assert [span.span_type for span in below] == ["CHAT_MODEL", "TOOL", *["CHAT_MODEL", "ENVIRONMENT"] * 2]
    said = root.outputs["messages"]
    assert [message["content"] for message in said] == [message["content"] for message in PLAYED]
    outputs = [{"messages": [message]} for message in said]
    assert [span.outputs for span in below] == [outputs[0], "16", *outputs[2:]]
    first, result = below[0], below[1]
    (call,) = said[0]["tool_calls"]
    assert call["function"] == CALL | {"arguments": '{"expression": "32 / 2"}'}
    assert said[1]["tool_call_id"] == call["id"] and said[0]["reasoning"] == "Halve it."
    assert result.inputs == CALL["arguments"] and result.outputs == "16"
    assert first.inputs == root.inputs and below[2].inputs["messages"] == [said[1]]
    numbers = [(span.attributes["tokens"], span.attributes.get("policy_versions")) for span in below]
    assert numbers == [(4, [4]), (2, None), (1, [4]), (3, None), (2, [5]), (0, None)]
    assert [span.attributes.get("reward") for span in below] == [None, None, 0.25, None, 0.5, None]
    assert [span.attributes["log_prob_mean"] for span in below[::2]] == [-0.5] * 3
    usage = [span.attributes["mlflow.chat.tokenUsage"] for span in below[::2]]
    assert [(one["input_tokens"], one["output_tokens"]) for one in usage] == [(3, 4), (9, 1), (13, 2)]
    times = [time for span in below for time in (span.start_time_ns, span.end_time_ns)]
    assert times == sorted(times) and root.start_time_ns == times[0]
    assert times[1] - times[0] == 1.4e9 * 4 // 7 and times[-1] == pytest.approx(root.end_time_ns, abs=100)


def test_conversations_of_a_program_are_told_apart(store: Store) -> None:
    write(store.folder, programmed(iteration=9))
    store.logger.traces("train", 9, NOW, 4)
    (trace,) = store.found("tags.iteration = '9'")
    root, *below = trace.data.spans
    opening = [OPENED[0], PLAYED[4], *PROMPT[1:]]
    assert [span.name for span in below] == ["answer 1", "calc", "answer 2", "answer 3, sequence 2", "environment"]
    assert root.inputs == below[0].inputs == {"messages": OPENED} and below[3].inputs == {"messages": opening}
    said = root.outputs["messages"]
    assert said[3:] == [opening[0] | {"new_context": True}, *opening[1:], *PLAYED[4:]]
    assert [message["content"] for message in said[:3]] == [message["content"] for message in PLAYED[:3]]


def test_single_responses_and_a_failed_one(store: Store) -> None:
    rows = [single(0, sample, 6, chunk=-1, split="val", uid="val-0") for sample in (0, 1)]
    failed = single(1, 0, 6, chunk=-1, split="val", uid="val-1", reward_error="ValueError: boom")
    write(store.folder, *rows, failed)
    store.logger.traces("val", 6, NOW, 4)
    right, wrong = sorted(
        store.found("tags.iteration = '6' AND tags.split = 'val'"), key=lambda each: each.info.tags["uid"]
    )
    root, answer = right.data.spans
    assert right.info.tags["sample"] == "0" and answer.span_type == "CHAT_MODEL"
    assert answer.outputs == {"messages": [{"role": "assistant", "content": rows[0]["response"]}]} == root.outputs
    assert answer.attributes["policy_versions"] == [5] and right.info.execution_duration == 1500
    assert wrong.info.state == "ERROR" and wrong.data.spans[0].status.description == "ValueError: boom"
    (score,) = wrong.info.assessments
    assert score.value is None and score.error.error_message == "ValueError: boom"


def test_an_iteration_that_is_trained_again_replaces_its_traces(store: Store, tmp_path: Path) -> None:
    first = Store(tmp_path, store_of=store.folder)
    write(first.folder, episode(0, 0, 3), episode(0, 1, 3))
    first.logger.traces("train", 3, NOW, 2)
    ids = {trace.info.trace_id for trace in first.found()}
    discard_trajectories(str(first.folder), 3)
    # Rows that are gone are those of an iteration that is trained again.
    first.logger.traces("train", 3, NOW, 2)
    shorter = {"spans": SPANS[:1], "messages": json.dumps([*PROMPT, *OPENED, PLAYED[0]]), "score": 0.5}
    write(first.folder, episode(0, 0, 3, **shorter), episode(0, 1, 3, **shorter))
    again = Store(tmp_path, True, store.folder)
    again.logger.traces("train", 3, NOW + 60, 2)
    found = again.found()
    assert {trace.info.trace_id for trace in found} == ids and len(found) == 2
    assert [[span.name for span in trace.data.spans] for trace in found] == [["row", "answer 1"]] * 2
    assert [[score.value for score in trace.info.assessments] for trace in found] == [[0.5]] * 2


def test_hostile_text_is_taken_and_bounded(store: Store) -> None:
    evil = "\ud800\0<script>" + "x" * (2 * TEXT_LENGTH)
    calls = [{"name": evil, "arguments": {evil: [evil]}}]
    messages = [PLAYED[0] | {"content": evil, "reasoning": evil, "calls": calls}, {"role": "tool", "content": evil}]
    messages += [*PLAYED[2:], {"role": "developer", "content": ["no text"]}]
    named = {"data_source": "\0" + "s" * 9000, "reward_parts": json.dumps({"\ud800": evil}), "response": "\0" * 5000}
    write(store.folder, episode(iteration=8, messages=json.dumps([*PROMPT, *OPENED, *messages]), **named))
    store.logger.traces("train", 8, NOW, 1)
    (trace,) = store.found("tags.iteration = '8'")
    said = trace.data.spans[0].outputs["messages"]
    assert all(len(message["content"]) <= TEXT_LENGTH for message in said) and said[-1]["role"] == "user"
    assert said[0]["content"].startswith("?\ufffd<script>x") and said[0]["content"].endswith("(40010 characters)")
    assert len(trace.info.tags["data_source"]) == 250


def test_damaged_rows_are_given_up_at_once(store: Store, tmp_path: Path) -> None:
    loggers = AsyncLoggers(["mlflow"], Store(tmp_path, store_of=store.folder).run)
    write(tmp_path, single(iteration=1))
    (tmp_path / "trajectories/iteration=000001/chunk-000000.parquet").write_bytes(b"half")
    loggers.start()
    loggers.traces("train", 1, NOW, 4)
    loggers.log(1, NOW, {"a": 1.0})
    assert loggers.finish("finished", 60.0) == ["mlflow lacks records: 1 were refused"]


def test_a_store_without_traces_keeps_no_metrics_back(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracing.client import TracingClient

    def fail(*args: Any) -> None:
        raise ConnectionError("no traces here")

    monkeypatch.setattr(TracingClient, "log_spans", fail)
    monkeypatch.setattr(async_loggers, "TRACE_TRIES", 2)
    run = Store(tmp_path, True, store.folder)
    loggers = AsyncLoggers(["mlflow"], run.run)
    write(tmp_path, single(iteration=1))
    loggers.start()
    begun = time.monotonic()
    loggers.traces("train", 1, NOW, 4)
    loggers.traces("train", 1, NOW, 0)
    loggers.log(1, NOW, {"a": 1.0})
    assert time.monotonic() - begun < 20
    (lacking,) = loggers.finish("finished", 60.0)
    assert "1 were given up (last error: ConnectionError: no traces here)" in lacking
    found = run.client.get_run(run.run_id)
    assert found.data.metrics == {"a": 1.0} and found.info.status == "FINISHED"


def test_results_name_their_calls() -> None:
    two = {"role": "assistant", "content": "", "calls": [CALL, CALL]}
    result = {"role": "tool", "content": "1"}
    first, second = chat_messages([[two, result, result], [two, result, {"role": "user", "content": None}]])
    ids = [call["id"] for part in (first, second) for call in part[0]["tool_calls"]]
    assert len(set(ids)) == 4 and [message["tool_call_id"] for message in first[1:]] == ids[:2]
    assert second[1]["tool_call_id"] == ids[2] and second[2] == {"role": "user", "content": ""}


def test_clean_text_keeps_its_bound() -> None:
    assert clean("x" * 100, 100) == "x" * 100
    cut = clean("x" * 101, 100)
    assert len(cut) == 100 and cut.endswith(" … (101 characters)")
