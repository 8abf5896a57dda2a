"""A recorded row as an MLflow trace: a span for the whole row, and below it one per answer, reply or tool call.

1. Ids follow from the MLflow run and the row, so a trace that is sent again replaces itself.
2. Messages have OpenAI's form, which MLflow's pages show as a conversation.
3. Only the total seconds of a row are known. The engine's seconds are divided among answers by their tokens, the
   environment's equally among replies, and the row ends when it is reported. So times of single spans are estimates.
4. Tags to filter by: `iteration`, `split`, `data_source`, `uid`, `sample`, `ended`, `run`. The score is feedback.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.agent.inside.forms import joined, tool_call
from pipeline.track.conversation import Turn, content, conversation, why_ended

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

TEXT_LENGTH = 20_000
"""Maximum length of the text of one message, in characters."""
PREVIEW_LENGTH = 1000
TAG_LENGTH = 250
ROLES = ("system", "user", "assistant", "tool")
"""Roles that MLflow's pages show; others become `user`."""


class Trace:
    """The trace of one row.

    Args:
        row: the row, with the columns of `conversation`.
        iteration: iteration of the row; for validation, the policy version.
        run_id: id of the MLflow run.
        run_name: name of the run.
        experiment_id: id of the MLflow experiment.
        ended: time at which the row ended, in Unix seconds.
    """

    def __init__(
        self, row: Mapping[str, Any], iteration: int, run_id: str, run_name: str, experiment_id: str, ended: float
    ) -> None:
        self._row, self._talk = row, conversation(row)
        self._place = f"{run_id} {row['split']} {iteration} {row['uid']} {row['sample']}"
        self.trace_id = f"tr-{_hexadecimal(self._place, 16)}"
        self._tags = {
            "mlflow.traceName": f"{row['split']} {iteration}: {row['uid']} sample {row['sample']}",
            "iteration": str(iteration),
            "split": row["split"],
            "data_source": row["data_source"],
            "uid": row["uid"],
            "sample": str(row["sample"]),
            "ended": str(row.get("ended") or row["finish_reason"]),
            "run": run_name,
        }
        self._run_id, self._experiment_id = run_id, experiment_id
        numbers = json.loads(row.get("episode") or "{}")
        seconds = float(numbers.get("episode_s", row["generate_s"] or 0.0))
        self._numbers, self._ended_ns, self._began_ns = numbers, int(ended * 1e9), int((ended - seconds) * 1e9)
        # Rows lack ids of calls. These ids join the calls to their results.
        parts = [part for turn in self._talk.turns for part in (turn.opening, turn.messages)]
        self._prompt, *parts = chat_messages([self._talk.prompt, *parts])
        self._openings, self._parts = parts[::2], parts[1::2]

    def info(self) -> "TraceInfo":
        """Make the trace's entry for MLflow's lists."""
        from mlflow.entities import AssessmentSource, Feedback, TraceInfo, TraceLocation, TraceState

        row, error = self._row, self._row["reward_error"]
        score = Feedback(
            name="score",
            value=None if error else float(row["score"]),
            error=clean(error, PREVIEW_LENGTH) if error else None,
            source=AssessmentSource("CODE", "slipstream"),
            trace_id=self.trace_id,
        )
        score.assessment_id = f"a-{_hexadecimal(f'{self._place} score', 16)}"
        asked = [message for message in self._prompt if message["role"] == "user"] or self._prompt
        return TraceInfo(
            trace_id=self.trace_id,
            trace_location=TraceLocation.from_experiment_id(self._experiment_id),
            request_time=self._began_ns // 1_000_000,
            execution_duration=(self._ended_ns - self._began_ns) // 1_000_000,
            state=TraceState.ERROR if error else TraceState.OK,
            request_preview=clean(asked[-1]["content"], PREVIEW_LENGTH) if asked else None,
            response_preview=clean(row["response"], PREVIEW_LENGTH),
            trace_metadata={"mlflow.sourceRun": self._run_id},
            tags={name: clean(value, TAG_LENGTH) for name, value in self._tags.items()},
            assessments=[score],
        )

    def spans(self) -> "list[Span]":
        """Make the spans; the first is for the whole row."""
        row, talk = self._row, self._talk
        talks: list[list[dict[str, Any]]] = [[]]
        for opening, part in zip(self._openings, self._parts, strict=True):
            if opening:
                talks.append([*opening])
            talks[-1] += part
        attributes = {
            "score": row["score"],
            "parts": json.loads(row["reward_parts"] or "{}"),
            "ended": why_ended(row),
            "prompt_tokens": sum(len(ids) for ids in talk.prompts),
            "response_tokens": len(row["response_ids"]),
            "policy_versions": sorted({version for turn in talk.turns for version in turn.versions}),
            "engine": row["engine"],
            "episode": self._numbers,
        }
        whole = self._began_ns, self._ended_ns
        error = row["reward_error"]
        spans = [self._span("row", "AGENT", None, whole, _chat(self._prompt), _chat(joined(talks)), attributes, error)]
        heard, calls = list(self._prompt), list[dict[str, Any]]()
        answers = 0
        columns = zip(talk.turns, self._openings, self._parts, self._times(), strict=True)
        for number, (turn, opening, part, times) in enumerate(columns):
            facts = _attributes(turn)
            if turn.answer:
                answers += 1
                total = turn.context + turn.tokens
                usage = {"input_tokens": turn.context, "output_tokens": turn.tokens, "total_tokens": total}
                facts["mlflow.chat.tokenUsage"] = usage
                name = f"answer {answers}, sequence {turn.sequence + 1}" if turn.sequence else f"answer {answers}"
                heard = opening or heard
                spans.append(self._span(name, "CHAT_MODEL", number, times, _chat(heard), _chat(part), facts))
                calls, heard = [call for message in part for call in message.get("tool_calls", [])], []
            else:
                spans += self._replies(number, turn, part, times, calls)
                heard = part
        return spans

    def _replies(
        self, number: int, turn: Turn, part: list[dict[str, Any]], times: tuple[int, int], calls: list[dict[str, Any]]
    ) -> "list[Span]":
        """Make the spans of a reply: one per tool call, or a single one for the environment."""
        if not calls or len(calls) != len(part):
            return [self._span("environment", "ENVIRONMENT", number, times, None, _chat(part), _attributes(turn))]
        spans = []
        for place, (call, message) in enumerate(zip(calls, part, strict=True)):
            # The tokens count all results together.
            facts = _attributes(turn) if place == 0 else {}
            function, text = call["function"], message["content"]
            spans.append(
                self._span(function["name"], "TOOL", f"{number} {place}", times, function["arguments"], text, facts)
            )
        return spans

    def _times(self) -> list[tuple[int, int]]:
        """Return (begin, end) of each turn in Unix nanoseconds; estimates, see the module's third point."""
        turns, whole = self._talk.turns, self._ended_ns - self._began_ns
        tokens = sum(turn.tokens for turn in turns if turn.answer)
        replies = sum(not turn.answer for turn in turns)
        engine = min(whole, int(self._numbers.get("engine_s", whole / 1e9) * 1e9))
        times, now = [], self._began_ns
        for turn in turns:
            took = engine * turn.tokens // max(tokens, 1) if turn.answer else (whole - engine) // replies
            times.append((now, now + took))
            now += took
        return times

    def _span(
        self,
        name: str,
        kind: str,
        number: int | str | None,
        times: tuple[int, int],
        inputs: Any,
        outputs: Any,
        facts: Mapping[str, Any],
        error: str | None = None,
    ) -> "Span":
        """Make a span. `number` is None for the span of the whole row; all others are below that one."""
        from mlflow.entities import Span
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode

        def context(number: int | str | None) -> SpanContext:
            span_id = _hexadecimal(f"{self._place} span {number}", 8)
            return SpanContext(int(self.trace_id.removeprefix("tr-"), 16), int(span_id, 16), is_remote=False)

        values = {
            "mlflow.traceRequestId": self.trace_id,
            "mlflow.spanType": kind,
            "mlflow.message.format": "openai",
            "mlflow.spanInputs": inputs,
            "mlflow.spanOutputs": outputs,
            **facts,
        }
        return Span(
            ReadableSpan(
                clean(name, TAG_LENGTH),
                context=context(number),
                parent=None if number is None else context(None),
                # MLflow keeps the values of attributes as JSON.
                attributes={key: clean(json.dumps(value, ensure_ascii=False)) for key, value in values.items()},
                status=Status(StatusCode.ERROR, clean(error, PREVIEW_LENGTH)) if error else Status(StatusCode.OK),
                start_time=times[0],
                end_time=times[1],
                resource=Resource.get_empty(),
            )
        )


def chat_messages(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Convert messages of a row to OpenAI's form, with long texts cut; results of tools get the ids of their calls in
    order."""
    made: list[list[dict[str, Any]]] = []
    waiting: list[str] = []
    total = 0
    for part in parts:
        made.append([])
        for message in part:
            role = message["role"] if message["role"] in ROLES else "user"
            entry: dict[str, Any] = {"role": role, "content": clean(content(message), TEXT_LENGTH)}
            if message.get("reasoning"):
                entry["reasoning"] = clean(message["reasoning"], TEXT_LENGTH)
            if calls := message.get("calls"):
                waiting = [f"call_{total + number}" for number in range(len(calls))]
                total += len(calls)
                entry["tool_calls"] = [_call(name, call) for name, call in zip(waiting, calls, strict=True)]
            elif role == "tool" and waiting:
                entry["tool_call_id"] = waiting.pop(0)
            made[-1].append(entry)
    return made


def clean(text: str, most: int | None = None) -> str:
    """Make text valid for any tracking store: UTF-8 without NUL, cut to `most` characters if given."""
    text = text.encode(errors="replace").decode().replace("\0", "\ufffd")
    if most is None or len(text) <= most:
        return text
    mark = f" … ({len(text)} characters)"
    return text[: most - len(mark)] + mark


def _chat(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"messages": messages}


def _call(name: str, call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return tool_call(name, clean(call["name"], TAG_LENGTH), clean(arguments, TEXT_LENGTH))


def _attributes(turn: Turn) -> dict[str, Any]:
    facts: dict[str, Any] = {"tokens": turn.tokens}
    if turn.answer:
        facts |= {"policy_versions": turn.versions, "log_prob_mean": turn.log_prob, "trains": turn.trains}
    if turn.reward is not None:
        facts["reward"] = turn.reward
    return facts


def _hexadecimal(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=size).hexdigest()
