"""The token sequences (contexts) of an episode: they grow by the policy's turns and the observations after each.

The tokens up to a turn are the tokens up to the turn before, the sampled tokens, and the bridge to the next turn,
concatenated. Sampled tokens are never encoded again, so the trainer computes log-probs of exactly the tokens that the
engine saw.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.heard import characters, compared, texts, to_calls
from pipeline.agent.inside.forms import as_recorded, call_id, for_template, recorded
from pipeline.agent.inside.interface import EpisodeOver
from pipeline.agent.tokens.chat_format import TOKEN, ChatFormat
from pipeline.agent.tokens.context import Answer, Context
from pipeline.agent.tokens.pictures import Pictures, Source, written
from pipeline.config.agent import AgentConfig
from pipeline.conversations import begun_answer
from pipeline.generation import Generation, PromptImages


class Ask(Protocol):
    """The policy."""

    async def __call__(self, ids: list[int], most: int, turn: int, images: PromptImages | None = None) -> Generation:
        """Return a turn.

        Args:
            ids: tokens so far.
            most: maximum number of tokens to generate.
            turn: number of the turn.
            images: images in the tokens so far; None if there are none.
        """


LEFT_OUT, LEFT_OUT_SHORT = "\n[... {} tokens are left out ...]\n", "..."
"""Text that replaces the middle of a cut message; the short one is used if the long one would take more than half of
the allowed tokens."""
USUAL = 8
"""Characters per allowed token from which on a text is suspected to be too long: its tokens are then counted piece by
piece before the whole is encoded. Encoding 4 MiB would take seconds, and would block the engine's other episodes."""
READ_AT_ONCE = 1000
"""Maximum number of tokens of a turn that is parsed on the event loop; longer ones are parsed in a thread. Also the
number of tokens up to which an observation is kept in the record even if no turn fits after it."""
PIECE, SEAM = 1 << 13, 16
"""Number of characters of such a piece, and the maximum number of tokens that cutting the text can add to a piece."""


class Conversation:
    """The contexts (token sequences) of one episode.

    Args:
        chat_format: chat format of the engine.
        ask: the policy.
        longest: maximum number of tokens after a context's prompt.
        stop: texts that end a turn.
        pictures: images of the prompt, and their processor; None in a run without images.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        ask: Ask,
        longest: int,
        stop: Sequence[str] = (),
        pictures: Pictures | None = None,
    ) -> None:
        self.pictures = pictures
        self._chat_format, self._ask, self._longest, self._stop = chat_format, ask, longest, stop
        self.config: AgentConfig = chat_format.config
        self.contexts: list[Context] = []
        self.turns = 0
        """Number of turns that the policy has generated."""
        self.over = ""
        """The limit that ended the conversation: `length` or `turns`; "" while it goes on."""
        self.engine_s = 0.0
        """Seconds in which the policy was generating at least one turn."""
        self.cut_observations = 0
        self.calls: Counter[str] = Counter()
        """Number of calls in the turns, by name of the tool; 0 for a tool that was shown but not called."""
        self.mistakes: Counter[str] = Counter()
        """Number of calls in the turns that could not be parsed (`malformed`), name a tool that does not exist
        (`unknown`), or got an error from the tool (`tool_errors`)."""
        self._asked = self._made = 0
        """Number of requests to the policy, and number of calls that were parsed."""
        self._answering: list[Context] = []
        """Contexts for which the policy is generating a turn."""
        self._busy_since = 0.0

    def begin(
        self, messages: list[dict[str, Any]], chat_format: ChatFormat | None = None, sources: Sequence[Source] = ()
    ) -> Context:
        """Begin a context with `messages` as its prompt.

        Args:
            messages: the messages of the prompt.
            chat_format: None takes the chat format of the engine.
            sources: the same messages with their images; empty if there are none.

        Raises:
            EpisodeFailed: the episode has `agent.max_contexts` contexts already; the prompt is too long, ends with an
                assistant's message or is refused by the chat template; or `stop` could cut a tool call.
            EpisodeOver: the prompt is too long, and the context is not the first.
        """
        chat_format, most = chat_format or self._chat_format, self.config.max_contexts
        if begun_answer(messages) is not None:
            raise EpisodeFailed(
                "the messages with which the episode begins end with the assistant's, and an answer of an episode "
                "cannot be continued; end with a message that the policy is to answer"
            )
        if chat_format.tools and self._stop:
            raise EpisodeFailed(
                f"rollout.stop or extra_info.sampling_params.stop is {list(self._stop)!r:.200} where the policy is "
                "shown tools: a text could end an answer inside a call; leave it out"
            )
        if len(self.contexts) == most:
            raise EpisodeFailed(
                f"the messages do not continue an earlier conversation of the episode, which may have "
                f"agent.max_contexts={most}; repeat those of the chat before with its answer as it was, and end with "
                "something new"
            )
        many = len(messages) > chat_format.max_prompt_length
        length = f"{len(messages):,} messages" if many else f"{characters(messages):,} characters"
        fits = self._may_fit(messages, chat_format.max_prompt_length)
        ids, sent, images = list[int](), list[int](), list[bytes]()
        if fits:
            try:
                shown, images = self._written(messages, sources)
                sent = chat_format.bridge.prompt(shown, chat_format.tools or None)
                ids = self._expanded(sent, images)
            except ValueError as error:
                raise EpisodeFailed(str(error)) from error
            length, fits = f"{len(ids)} tokens", len(ids) <= chat_format.max_prompt_length
        if not fits:
            if self.contexts:
                # The length depends on the policy's turns.
                self._end("length")
            raise EpisodeFailed(
                f"the prompt with its tools and the environment's first messages has {length}, more than "
                f"data.max_prompt_length={chat_format.max_prompt_length}"
            )
        context = self._new(ids, recorded(messages), chat_format, [compared(message) for message in messages])
        if self.pictures is not None:
            context.sent = list(sent)
            self.pictures.show(context, images)
        return context

    def _new(
        self, ids: list[int], messages: list[dict[str, Any]], chat_format: ChatFormat, heard: list[Any]
    ) -> Context:
        self.contexts.append(Context(ids, messages, chat_format, heard))
        return self.contexts[-1]

    def _written(
        self, messages: list[dict[str, Any]], sources: Sequence[Source]
    ) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Return messages as the chat template reads them, and their images."""
        if not any(images for _, images in sources):
            return messages, []
        if self.pictures is None:
            raise ValueError("the episode shows images, but model.vision=none; set model.vision=frozen or trained")
        return written(sources)

    async def prepare(self, context: Context | None, images: Sequence[bytes]) -> None:
        """Read images that a context, or a new one, is about to show. Raises EpisodeFailed if that is not possible."""
        if self.pictures is not None and images:
            try:
                await self.pictures.prepare(context.images if context else (), images)
            except ValueError as error:
                raise EpisodeFailed(str(error)) from error

    def wrote_placeholder(self, context: Context) -> bool:
        """Return True if the last turn has the placeholder of images, which no engine could read as text again."""
        return self.pictures is not None and self.pictures.was_sampled(context.answer)

    def _expanded(self, ids: list[int], images: Sequence[bytes]) -> list[int]:
        """Return tokens with the features of `images` in place of their placeholders."""
        return ids if self.pictures is None else self.pictures.vision.expand(ids, images)

    def _room(self, context: Context) -> int:
        """Return the number of tokens that still fit into a context.

        A prompt that holds earlier turns, and so is longer than `max_prompt_length`, leaves fewer.
        """
        total = self._chat_format.max_prompt_length + self._longest
        return min(self._longest, total - len(context.prompt_ids)) - len(context.ids)

    async def answer(self, context: Context, most: int | None = None) -> Answer:
        """Let the policy generate a turn in a context, with at most `most` tokens, and at most as many as still fit."""
        room = self._room(context)
        limit = min(tokens for tokens in (room, self.config.max_turn_tokens, most) if tokens)
        ids, number = context.prompt_ids + context.ids, self._asked
        self._asked += 1
        self._busy(context)
        try:
            shown = None if self.pictures is None else self.pictures.of(context)
            generation = await (self._ask(ids, limit, number, shown) if shown else self._ask(ids, limit, number))
            truncated = generation.finish_reason == "length"
            read, said = context.chat_format.reader.read, generation.token_ids.tolist()
            # Some parsers take 50 µs for each token; other episodes would wait.
            long = len(said) > READ_AT_ONCE
            message, malformed = await asyncio.to_thread(read, said, truncated) if long else read(said, truncated)
        finally:
            self._done(context)
        context.add_answer(generation)
        self.turns += 1
        context.calls, context.text = message.calls, message.text
        context.turns.append(number)
        context.messages.append(as_recorded(message))
        context.heard.append(compared(context.messages[-1]))
        return Answer(message, malformed, truncated and limit == room, len(ids), len(context.answer))

    def _busy(self, context: Context) -> None:
        if not self._answering:
            self._busy_since = time.monotonic()
        self._answering.append(context)

    def _done(self, context: Context) -> None:
        self._answering = [other for other in self._answering if other is not context]
        if not self._answering:
            self.engine_s += time.monotonic() - self._busy_since

    def observe(
        self, context: Context, messages: list[dict[str, Any]], sources: Sequence[Source] = ()
    ) -> Context | None:
        """Append observations after the last turn of a context.

        Args:
            context: the context.
            messages: the observations.
            sources: the same messages with their images; empty if there are none. Messages with images are never cut.

        Returns:
            The context to go on with: this one, or with `agent.context=rerender` a new one if the chat template renders
            earlier turns differently from how they were sampled. None if no further turn would fit.

        Raises:
            EpisodeFailed: the chat template cannot continue with the messages, or their images cannot be shown.
        """
        chat_format, bridge = context.chat_format, context.chat_format.bridge
        heard = [*context.heard, *(compared(message) for message in messages)]
        # A new sequence may leave out parts that take room in this one.
        keeps = self.config.context == "keep"
        room = self._room(context) if keeps else chat_format.max_prompt_length + self._longest
        most = self.config.max_observation_tokens
        # An observation that may be long is not even cut. A short one is recorded even if no turn fits after it.
        begun = [message | {"content": message["content"][:most]} for message in messages]
        if not self._may_fit(begun, max(room, READ_AT_ONCE)):
            return None
        try:
            shown, images = self._written(messages, sources)
        except ValueError as error:
            raise EpisodeFailed(str(error)) from error
        pictured = [isinstance(message["content"], list) for message in shown]
        uncut, messages = messages, [m if whole else self.cut(m) for m, whole in zip(messages, pictured, strict=True)]
        shown = [one if whole else cut for one, cut, whole in zip(shown, messages, pictured, strict=True)]
        self.cut_observations += sum(message is not one for message, one in zip(messages, uncut, strict=True))
        whole = [*context.messages, *messages]
        if not self._may_fit(messages, room):
            context.messages, context.heard = whole, heard
            return None
        try:
            sent = bridge.after(context.answer, shown, context.calls)
            ids = self._expanded(sent, images)
            if self.config.context == "rerender":
                shown = bridge.prompt([for_template(message) for message in whole], chat_format.tools or None)
                if bridge.text(shown) != bridge.text(context.prompt_ids + context.ids + ids):
                    fits = len(shown) < chat_format.max_prompt_length + self._longest
                    return self._new(shown, whole, chat_format, heard) if fits else None
        except ValueError as error:
            raise EpisodeFailed(str(error)) from error
        context.messages, context.heard = whole, heard
        # An observation without a turn after it would train nothing.
        if len(ids) >= self._room(context):
            return None
        context.add_observation(ids, sent)
        if self.pictures is not None:
            self.pictures.show(context, images)
        return context

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, most: int | None = None
    ) -> Answer:
        """Let the policy generate a turn after `messages`, which either continue an earlier context or begin a new one.

        The messages continue a context if they repeat its messages, turns included, and add at least one. A context for
        which the policy is still generating cannot be continued. A cancelled chat leaves no trace.

        Args:
            messages: result of `messages.checked_messages`.
            tools: schemas of the tools; a context keeps the same tools from its beginning to its end.
            most: maximum number of tokens of the turn; None leaves it to `agent.max_turn_tokens`.

        Raises:
            EpisodeOver: no turn is left, or no further turn fits; each later chat raises it, too.
            EpisodeFailed: `begin` or `observe` raised it, or the tools cannot be used.
        """
        try:
            chat_format = await self._chat_format.with_tools(tools or [])
        except ValueError as error:
            raise EpisodeFailed(str(error)) from None
        if self.over:
            self._end(self.over)
        if self.turns + len(self._answering) >= self.config.max_turns:
            self._end("turns")
        known = self._continued(messages, chat_format)
        new: list[dict[str, Any]] = []
        if known is None:
            context = self.begin(messages, chat_format)
        else:
            new = to_calls(known, messages[len(known.heard) :])
            following = self.observe(known, new)
            if following is None:
                self._end("length")
            context = following
        try:
            answer = await self.answer(context, most)
        except BaseException:
            if context is known:
                context.drop_observation(len(new))
            else:
                del self.contexts[[each is context for each in self.contexts].index(True)]
            raise
        # Ids of calls begin at 0 in each turn; a program needs ids that are unique in the episode.
        calls = [replace(call, id=call_id(self._made + i)) for i, call in enumerate(answer.message.calls)]
        self._made += len(calls)
        context.call_ids = [call.id for call in calls]
        answer = replace(answer, message=replace(answer.message, calls=calls))
        names = {tool["function"]["name"] for tool in chat_format.tools}
        called = [call.name if call.name in names else None for call in answer.message.calls]
        self.calls.update(dict.fromkeys(names, 0))
        self.calls.update(name for name in called if name is not None)
        self.mistakes["unknown"] += called.count(None)
        self.mistakes["malformed"] += answer.malformed is not None
        return answer

    def _end(self, over: str) -> NoReturn:
        self.over = over
        limit = f"agent.max_turns={self.config.max_turns}"
        if over == "length":
            limit = f"data.max_response_length={self._longest} or data.max_prompt_length"
        raise EpisodeOver(f"the episode is over: no further answer is allowed by {limit}")

    def _continued(self, messages: list[dict[str, Any]], chat_format: ChatFormat) -> Context | None:
        """Return the context with the longest conversation that `messages` repeat and continue; None if there is
        none."""
        wanted = [compared(message) for message in messages]
        found: Context | None = None
        for context in self.contexts:
            known = context.heard
            longer = found is None or len(known) > len(found.heard)
            free = context.chat_format.key == chat_format.key and not any(context is other for other in self._answering)
            # Further messages of an assistant are not turns of the policy.
            follows = len(known) < len(wanted) and all(role != "assistant" for role, *_ in wanted[len(known) :])
            if longer and free and follows and wanted[: len(known)] == known:
                found = context
        return found

    def _may_fit(self, messages: list[dict[str, Any]], tokens: int) -> bool:
        """Return False if messages surely take more than `tokens` tokens, without encoding long texts as a whole.

        Each message takes at least one token.
        """
        if len(messages) > tokens or (length := characters(messages)) > tokens * TOKEN:
            return False
        if length <= tokens * USUAL:
            return True
        for text in texts(messages):
            for start in range(0, len(text), PIECE):
                tokens -= max(0, len(self._chat_format.bridge.content_ids(text[start : start + PIECE])) - SEAM)
                if tokens < 0:
                    return False
        return True

    def cut(self, message: dict[str, Any]) -> dict[str, Any]:
        """Shorten a message to at most `agent.max_observation_tokens` tokens: a mark replaces the middle of the
        text."""
        text, most = message["content"], self.config.max_observation_tokens
        bridge = self._chat_format.bridge
        # A token is at least one byte, so most texts need not be encoded to be counted.
        if len(text.encode()) <= most:
            return message
        half = most * TOKEN // 2
        long = len(text) > 2 * half
        ids = bridge.content_ids(text[:half] + text[-half:] if long else text)
        if len(ids) <= most and not long:
            return message
        mark = LEFT_OUT.replace("{}", "more than {}") if long else LEFT_OUT
        if 2 * len(bridge.content_ids(mark.format(len(ids)))) > most:
            mark = LEFT_OUT_SHORT
        kept = min(len(ids), most - len(bridge.content_ids(mark.format(len(ids)))))
        mark = mark.format(len(ids) - kept)
        head, tail = ids[: kept - kept // 2], ids[len(ids) - kept // 2 :]
        return message | {"content": bridge.text(head) + mark + bridge.text(tail)}
