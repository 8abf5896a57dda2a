"""What the rows of episodes must be, from what the engine was asked and from the chat template alone.

Nothing here uses the code that makes the rows. Each answer of a row is found among the requests that the engine got, by
the tokens that it was asked with: those of the row so far. The tokens between two answers are what the template writes
when it renders the whole conversation, with a stand-in for each answer.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.agent.families import FAMILIES, plain, tokenizer

ENDS = {
    "chatml": ("<|im_end|>", "<|im_end|>"),
    "thinking": ("<|im_end|>", "<|im_end|>"),
    "headers": ("<|eot_id|>", "<|eot_id|>"),
    "alternating": ("<end_of_turn>", ""),
    "channels": ("<|end|> <|return|>", "<|call|>"),
    "instruct": ("</s>", "</s>"),
    "unclosed": ("<|user|>", "<|observation|>"),
}
"""Family: what its template may write behind an answer, the first in front of a user's message; and of a result."""
CALLS = {"chatml": "objects", "thinking": "objects", "channels": "objects", "unclosed": "objects", "instruct": "texts"}
"""How templates read the arguments of calls; others need no call in front of a result."""
BEGINS = re.compile(r"begin \d+: ")
"""With this the program of `random_worlds` begins each conversation."""
ANSWER = 1


@dataclass
class Asked:
    """One request to the engine, and what came of it."""

    prompt: list[int]
    seed: int
    cached: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    """The weights of each token."""
    finish_reason: str = ""


@dataclass
class Sequence:
    """One context of a row."""

    prompt: list[int]
    ids: list[int]
    mask: list[int]
    log_probs: list[float]
    versions: list[int]
    spans: list[tuple[int, int]]
    messages: list[dict[str, Any]]
    answers: list[int]
    """Places of the answers in `messages`."""
    shown: int = 0
    """Messages in the prompt."""


class Wrong(AssertionError):
    """A row is not what it must be."""


def check(holds: bool, *what: Any) -> None:
    if not holds:
        raise Wrong(" ".join(map(str, what)))


def per_token(runs: list[dict[str, int]]) -> list[int]:
    return [run["version"] for run in runs for _ in range(run["tokens"])]


class Oracle:
    """Checks rows of a template family.

    Args:
        name: of the family.
        tools: schemas of the tools of each agent.
        template: agents with `context=rerender`.
        masks: agents with `on_malformed=mask`.
        programs: agents that are programs.
    """

    def __init__(
        self, name: str, tools: dict[str, list[dict]], template: set[str], masks: set[str], programs: set[str]
    ) -> None:
        self.name, self.tools = name, tools
        self.template, self.masks, self.programs = template, masks, programs
        self.tokenizer = tokenizer(name)
        family = FAMILIES[name]
        self.special = family.special.split()
        self.controls = self.special + family.added.split()
        self.ids = {text: self.tokenizer.convert_tokens_to_ids(text) for text in self.controls}
        check(plain(name).get_vocab_size() <= min(self.ids.values()), "text has no control tokens")
        self.seen: Counter[str] = Counter()
        """How often what was checked."""

    def check(self, row: dict[str, Any], asked: list[Asked]) -> None:
        """Check a row against the requests of its episode, in the order of their turns.

        Raises:
            Wrong: the row is another.
        """
        agent = row["agent_name"]
        waiting = list(asked)
        check(len(row["response_ids"]) == len(per_token(row["version_runs"])), "each token has a version")
        asked_of = []
        sequences = self.sequences(row)
        for number, sequence in enumerate(sequences):
            if number == 0 or agent in self.programs:
                shown = self.prompt(sequence.messages[: sequence.shown], agent)
                check(sequence.prompt == shown, "prompt", number, "is", sequence.prompt, "but the template has", shown)
            asked_of += self.walk(row, sequence, waiting)
        check(row["turns"] == len(asked_of), "the row has", row["turns"], "turns and", len(asked_of), "answers")
        # Where one of two chats at the same time finds the episode over, the other one is cancelled.
        cancelled = agent in self.programs and row["ended"] in ("turns", "length") and len(waiting) == 1
        check(cancelled or not waiting, "requests that are not in the row:", waiting)
        self.seen["cancelled"] += cancelled
        self.seen["rows of two versions"] += len(row["version_runs"]) > 1
        if agent in self.template:
            self.check_history(row, sequences)
        elif agent not in self.programs:
            check(len(sequences) == 1 and asked_of == asked, "the answers stand in the order of their turns")
        self.seen["contexts"] += len(sequences)
        self.seen["answers"] += len(asked_of)
        self.seen["rows"] += 1

    def sequences(self, row: dict[str, Any]) -> list[Sequence]:
        """The contexts of a row."""
        messages, first = json.loads(row["messages"]), json.loads(row["prompt"])
        contexts = row["contexts"] or [{"prompt": None, "tokens": len(row["response_ids"])}]
        columns = [row[name] for name in ("response_ids", "response_mask", "rollout_log_probs")]
        columns.append(per_token(row["version_runs"]))
        spans = [(span["kind"], span["tokens"]) for span in row["spans"]]
        program = row["agent_name"] in self.programs
        begins = [i for i, m in enumerate(messages) if m["role"] == "user" and BEGINS.match(m["content"])]
        marked = [i for i, message in enumerate(messages) if message.pop("new_context", False)]
        check(marked == (begins[1:] if program else []), "conversations begin at", marked, "and not", begins)
        found, start = [], 0
        said = sum(message["role"] == "assistant" for message in first)
        for number, context in enumerate(contexts):
            end, own = start + context["tokens"], []
            while sum(tokens for _, tokens in own) < context["tokens"]:
                own.append(spans.pop(0))
            heard = messages
            if program:
                heard = messages[begins[number] : [*begins, len(messages)][number + 1]]
            places = [i for i, message in enumerate(heard) if message["role"] == "assistant"]
            count = sum(kind == ANSWER for kind, _ in own)
            # Answers of the program's own messages stand in front of the policy's.
            places = places[len(places) - count :] if program else places[said : said + count]
            said += count
            prompt = row["prompt_ids"] if context["prompt"] is None else context["prompt"]
            parts = [column[start:end] for column in columns]
            shown = places[0] if places else len(heard)
            found.append(Sequence(prompt, *parts, own, heard, places, shown))
            start = end
        check(start == len(row["response_ids"]) and not spans, "contexts and spans make the response")
        return found

    def walk(self, row: dict[str, Any], sequence: Sequence, waiting: list[Asked]) -> list[Asked]:
        """Check the tokens of one sequence, one span after the other; the requests of its answers."""
        found, start, places = [], 0, iter(sequence.answers)
        kinds = [kind for kind, _ in sequence.spans]
        check(kinds == [ANSWER, 0] * (len(kinds) // 2) + [ANSWER], "answers and observations take turns:", kinds)
        for number, (kind, tokens) in enumerate(sequence.spans):
            end = start + tokens
            ids, mask = sequence.ids[start:end], sequence.mask[start:end]
            log_probs, versions = sequence.log_probs[start:end], sequence.versions[start:end]
            if kind == ANSWER:
                place = next(places)
                before = sequence.prompt + sequence.ids[:start]
                fitting = [each for each in waiting if each.prompt == before and list(each.tokens) == ids]
                check(bool(fitting), "span", number, "is no answer to", before, ":", ids, "; waiting:", waiting)
                request = fitting[0]
                waiting.remove(request)
                found.append(request)
                trains = int(not self.masked(row["agent_name"], sequence.messages, place))
                said = sequence.messages[place : place + 2]
                check(mask == [trains] * tokens, "span", number, "has the mask", mask, "and not", trains, "in", said)
                got = np.asarray(request.log_probs, np.float32).tolist()
                check(log_probs == got and max(log_probs) <= 0, "span", number, "has", log_probs, "and not", got)
                check(versions == list(request.versions), "span", number, "has the versions", versions)
                self.count(request, sequence.messages[place], row, trains)
            else:
                wanted = self.between(sequence.messages, place, sequence.ids[:start], row["agent_name"])
                check(ids == wanted, "span", number, "is", ids, self.text(ids), "and not", wanted, self.text(wanted))
                check(not any(mask) and not any(log_probs), "an observation trains:", mask, log_probs)
                check(set(versions) == {sequence.versions[start - 1]}, "an observation has the versions", versions)
                self.seen["observations"] += 1
            start = end
        return found

    def masked(self, agent: str, messages: list[dict], place: int) -> bool:
        """Whether an answer is malformed and does not train."""
        following = messages[place + 1] if place + 1 < len(messages) else {"role": "", "content": ""}
        # A short limit leaves the beginning of the reply alone.
        begins = following["content"].partition("...")[0][: len("Error: ")]
        return agent in self.masks and following["role"] == "user" and bool(begins) and "Error: ".startswith(begins)

    def prompt(self, messages: list[dict], agent: str) -> list[int]:
        """Tokens of a first prompt: special tokens in contents are text, other added tokens are tokens."""
        hidden = [self.hide(as_template(message, self.name), self.special) for message in messages]
        return self.encode(self.render(hidden, self.tools[agent]))

    def between(self, messages: list[dict], place: int, before: list[int], agent: str) -> list[int]:
        """Tokens between the answer at `place` and the next one, by the whole conversation up to there."""
        stop = next(i for i in range(place + 1, len(messages) + 1) if i == len(messages) or is_answer(messages[i]))
        role = messages[place + 1]["role"]
        conversation, stand_in = [], f"SAID{place}SAID"
        form = CALLS.get(self.name)
        waiting: list[dict] = []
        for i, message in enumerate(messages[:stop]):
            hidden = self.hide(message, self.special)
            if is_answer(message):
                # An environment may reply as a tool that was not called.
                calls = message.get("calls") or [{"name": "tool"}]
                follows = messages[i + 1]["role"] == "tool"
                waiting = answered(calls, f"SAID{i}SAID", form) if follows and form else []
                waiting = [self.hide(call, self.special) for call in waiting]
                text = {"content": ""} if waiting else {"content": f"SAID{i}SAID"}
                hidden = {"role": "assistant", **text} | ({"tool_calls": waiting} if waiting else {})
            elif message["role"] == "tool" and waiting:
                call, *waiting = waiting
                hidden = {"tool_call_id": call["id"], "name": call["function"]["name"]} | hidden
            conversation.append(hidden)
        text = self.render(conversation, self.tools[agent])
        check(text.count(stand_in) == 1, "the template writes the answer", text.count(stand_in), "times")
        text = text.partition(stand_in)[2]
        ends = ENDS[self.name][role == "tool"].split()
        if role == "tool" and form:
            text = text[text.index(ends[0]) :]
        self.note(messages[place + 1 : stop])
        ids = self.encode(text)
        closed = before[-1] in [self.ids[end] for end in ends]
        self.seen["closed"] += closed
        return ids[ids.index(self.ids[ends[0]]) + 1 :] if closed else ids

    def check_history(self, row: dict[str, Any], sequences: list[Sequence]) -> None:
        """Check where the answers of an agent with `context=rerender` begin new contexts."""
        for number, sequence in enumerate(sequences):
            for count, place in enumerate(sequence.answers):
                if number == count == 0:
                    continue
                shown = self.prompt(sequence.messages[:place], row["agent_name"])
                if count == 0:
                    earlier = sequences[number - 1]
                    check(sequence.prompt == shown, "context", number, "has the prompt", sequence.prompt, "not", shown)
                    tail = self.between(earlier.messages, earlier.answers[-1], earlier.ids, row["agent_name"])
                    kept = earlier.prompt + earlier.ids + tail
                else:
                    end = sum(tokens for _, tokens in sequence.spans[: 2 * count])
                    kept = sequence.prompt + sequence.ids[:end]
                same = self.text(kept) == self.text(shown)
                check(same == (count > 0), "answer", count, "of context", number, "stands in the wrong context")

    def render(self, messages: list[dict], tools: list[dict]) -> str:
        text: Any = self.tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        return text

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def hide(self, value: Any, texts: list[str]) -> Any:
        """`value` as valid UTF-8 with a stand-in for each of `texts` in it."""
        if isinstance(value, str):
            value = value.encode("utf-8", "replace").decode()
            for text in sorted(texts, key=len, reverse=True):
                value = value.replace(text, f"TEXT{self.controls.index(text):02}TEXT")
            return value
        if isinstance(value, dict):
            return {key: self.hide(entry, texts) for key, entry in value.items()}
        return [self.hide(entry, texts) for entry in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Tokens of what a template wrote; control tokens are tokens, and what stand-ins stand for is text."""
        ids: list[int] = []
        controls = "|".join(re.escape(text) for text in sorted(self.controls, key=len, reverse=True))
        for part in re.split(f"({controls})", text):
            if part in self.ids:
                ids.append(self.ids[part])
            else:
                part = re.sub(r"TEXT(\d\d)TEXT", lambda match: self.controls[int(match[1])], part)
                ids += plain(self.name).encode(part).ids
        return ids

    def note(self, messages: list[dict]) -> None:
        """Count what observations are of."""
        for message in messages:
            content = message["content"]
            self.seen[message["role"]] += 1
            self.seen["with control text"] += any(text in content for text in self.controls)
            self.seen["empty"] += not content
            self.seen["shortened"] += "..." in content
        self.seen["several messages"] += len(messages) > 1

    def count(self, request: Asked, message: dict, row: dict[str, Any], trains: int) -> None:
        self.seen[request.finish_reason] += 1
        self.seen["with calls"] += bool(message.get("calls"))
        self.seen["masked"] += not trains
        self.seen["answers of two versions"] += len(set(request.versions)) > 1
        self.seen["cached"] += request.cached > 0
        controls = set(self.ids.values())
        self.seen["control tokens sampled within"] += any(token in controls for token in request.tokens[:-1])


def is_answer(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant"


def answered(calls: list[dict], stand_in: str, form: str) -> list[dict]:
    """Calls as the template reads them, with the stand-in in the last one's arguments."""
    made = []
    for number, call in enumerate(calls):
        values: Any = {"value": stand_in if number + 1 == len(calls) else "x"}
        function = {"name": call["name"], "arguments": values if form == "objects" else json.dumps(values)}
        made.append({"id": f"call{number:05}", "type": "function", "function": function})
    return made


def as_template(message: dict[str, Any], name: str) -> dict[str, Any]:
    """A recorded message as the family's template reads it."""
    shown = {key: value for key, value in message.items() if key not in ("calls", "reasoning")}
    if message.get("calls"):
        shown["tool_calls"] = []
        for number, call in enumerate(message["calls"]):
            arguments = call["arguments"]
            if CALLS.get(name) == "texts":
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": call["name"], "arguments": arguments}
            shown["tool_calls"].append({"id": f"call{number:05}", "type": "function", "function": function})
    return shown
