"""Episodes that show pictures: their tokens, what the engine is asked, and what fails by name."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.agent import Call, Message, Observation, ToolResult, episode
from pipeline.agent.conversation import Conversation
from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.processes import Processes
from pipeline.agent.tokens.bridge import Bridge
from pipeline.agent.tokens.calls import AnswerParser
from pipeline.agent.tokens.chat_format import ChatFormat
from pipeline.agent.tokens.pictures import Pictures, decoded
from pipeline.agent.turns import TurnsPlayer
from pipeline.config.agent import AgentConfig
from pipeline.config.model import ModelConfig
from pipeline.generation import Generation, PromptImages
from pipeline.models.processor import FAMILIES, Vision, load_vision
from tests.agent.test_episode import ROW, ToySession
from tests.agent.test_processes import run
from tests.pictures import picture, save_tiny

SMALL, TALL, WIDE = picture(1), picture(2, 60, 90), picture(3, 120, 60)
ANSWER = [70, 71, 72]


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, request.param)
    return load_vision(ModelConfig(path=str(folder)))


class Policy:
    """A policy that answers with the same tokens each time; `asked` has tokens and images of each request."""

    def __init__(self, answer: list[int]) -> None:
        self._answer, self.asked = answer, list[tuple[list[int], PromptImages | None]]()

    async def __call__(self, ids: list[int], most: int, turn: int, images: PromptImages | None = None) -> Generation:
        self.asked.append((list(ids), images))
        count = len(self._answer)
        return Generation(np.array(self._answer, np.int32), np.full(count, -1.0, np.float32), "stop", ((0, count),))


def chat_format(vision: Vision, longest: int = 1000, **config: Any) -> ChatFormat:
    tokenizer = vision.processor.tokenizer
    section = AgentConfig(environment="toy:Toy", **config)
    bridge = Bridge.prove(tokenizer, {}, {"user"}, [])
    return ChatFormat(section, bridge, AnswerParser(tokenizer, [], bridge), [], 1000, longest)


def play(
    vision: Vision,
    replies: list[Observation],
    images: list[bytes] = [],  # noqa: B006
    prompt: str = "Begin.",
    most_bytes: int = 1_000_000,
    answer: list[int] = ANSWER,
    longest: int = 1000,
    **config: Any,
) -> tuple[episode.Episode, Policy]:
    made, policy = chat_format(vision, longest, **config), Policy(answer)
    session = ToySession([sent(reply) for reply in replies])

    async def opened() -> Any:
        return TurnsPlayer(made.config, session, {}, environment=True)  # type: ignore[arg-type]

    row = {**ROW, "prompt": [{"role": "user", "content": prompt}]}
    pictures = Pictures(vision, most_bytes, images)
    return asyncio.run(episode.run(row, opened(), made, policy, longest, pictures=pictures)), policy


def sent(reply: Observation) -> Observation:
    """An observation as the process sends it."""
    images: Any = [base64.b64encode(image).decode() for image in reply.images]
    return Observation(reply.content, reply.done, reply.reward, reply.parts, images)


def test_what_the_policy_reads_and_what_the_engine_is_asked(vision: Vision) -> None:
    replies = [Observation("<image> and <image>?", images=[TALL, WIDE]), Observation("text"), Observation(done=True)]
    played, policy = play(vision, replies, [SMALL], "See <image>.", max_turns=4)
    assert played.error is None and played.turns == 3
    (context,) = played.contexts
    shown = [SMALL, TALL, WIDE]
    assert context.images == shown and context.image_hashes == [vision.hash(image) for image in shown]
    assert context.sent is not None and context.sent.count(vision.placeholder) == 3
    assert vision.expand(context.sent, shown) == context.prompt_ids + context.ids
    for turn, count in enumerate((1, 3, 3)):
        ids, images = policy.asked[turn]
        assert images is not None and images.encoded == tuple(shown[:count])
        assert vision.expand(images.prompt_ids, images.encoded) == ids == (context.prompt_ids + context.ids)[: len(ids)]
    assert sum(context.mask) == 3 * len(ANSWER), "features are not trained"
    # The tokens of observations are those of the template on the whole conversation.
    assert context.messages[2] == {"role": "user", "content": "<image> and <image>?"}


def test_an_observation_after_text_may_be_the_first_with_an_image(vision: Vision) -> None:
    played, policy = play(vision, [Observation("<image>", images=[SMALL]), Observation(done=True)])
    assert played.error is None and played.contexts[0].images == [SMALL]
    assert [images is None for _, images in policy.asked] == [True, False]


def test_marks_and_placeholders_in_text_stay_text(vision: Vision) -> None:
    mark = vision.processor.image_token
    played, policy = play(vision, [Observation(f"<image> {mark}"), Observation(done=True)], prompt=f"{mark} <image>")
    assert played.error is None
    assert vision.placeholder not in played.contexts[0].prompt_ids + played.contexts[0].ids
    if mark == "<image>":
        return
    played, _ = play(vision, [Observation(f"{mark} <image>", images=[SMALL]), Observation(done=True)])
    assert played.error is None and played.contexts[0].sent.count(vision.placeholder) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Observation("none", images=[SMALL]), "<image> stands 0 times in the prompt, which has 1 images"),
        (Observation("<image><image>", images=[SMALL]), "<image> stands 2 times in the prompt, which has 1 images"),
        (Observation("<image>", images=[b"no picture"]), "an image of 10 bytes cannot be decoded"),
        (Observation("<image>", images=[SMALL[:100]]), "an image of 100 bytes cannot be decoded"),
        (Observation("<image>", images=[picture(5, 600, 600)]), "more than data.max_image_bytes=100000"),
    ],
)
def test_what_cannot_be_shown_is_the_error_of_its_row(vision: Vision, reply: Observation, words: str) -> None:
    played, _ = play(vision, [reply], most_bytes=100_000)
    assert words in (played.error or ""), played.error
    assert played.contexts[0].images == []


def test_images_count_together_against_the_limit(vision: Vision) -> None:
    replies = [Observation("<image>", images=[TALL])] * 3 + [Observation(done=True)]
    assert play(vision, replies, most_bytes=3 * len(TALL), max_turns=5)[0].error is None
    played, _ = play(vision, replies, most_bytes=3 * len(TALL) - 1, max_turns=5)
    assert "data.max_image_bytes" in (played.error or "") and played.contexts[0].images == [TALL] * 2


def test_an_image_that_does_not_fit_ends_the_episode_before_it_is_shown(vision: Vision) -> None:
    room = len(vision.expansion(TALL)) + len(ANSWER)
    played, policy = play(vision, [Observation("<image>", images=[TALL])], longest=room)
    assert (played.error, played.ended) == (None, "length")
    assert played.contexts[0].images == [] and vision.placeholder not in played.contexts[0].ids
    assert len(policy.asked) == 1


def test_an_observation_with_an_image_is_not_cut(vision: Vision) -> None:
    replies = [
        Observation("<image> " + "a b c " * 9, images=[SMALL]),
        Observation("a b c " * 9),
        Observation(done=True),
    ]
    played, _ = play(vision, replies, max_observation_tokens=8)
    assert played.error is None and played.numbers["cut_observations"] == 1
    assert played.contexts[0].images == [SMALL]


def test_a_policy_that_writes_the_placeholder_gets_no_further_turn(vision: Vision) -> None:
    """It keeps its rewards: an error would let it escape a bad one."""
    played, policy = play(vision, [Observation("go on", reward=-1.0)], answer=[70, vision.placeholder])
    assert (played.error, played.ended, played.score, len(policy.asked)) == (None, "malformed", -1.0, 1)
    assert played.numbers["malformed"] == 1
    played, _ = play(vision, [Observation(done=True)], answer=[70, vision.placeholder])
    assert (played.error, played.ended) == (None, "done"), "the last turn is read by nobody"


def test_marks_count_in_the_messages_that_have_images_and_others_stay_text(vision: Vision) -> None:
    replies = [Observation("again <image>"), Observation("<image>", images=[TALL]), Observation(done=True)]
    played, _ = play(vision, replies, [SMALL], "<image>", max_turns=5)
    assert played.error is None and played.contexts[0].images == [SMALL, TALL]
    played, _ = play(vision, [Observation("<image>", images=[TALL]), Observation(done=True)], prompt="plain <image>")
    assert played.error is None and played.contexts[0].images == [TALL]


def test_an_episode_shows_no_more_images_than_an_engine_reads(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.agent.tokens.pictures.MOST_IMAGES", 2)
    played, _ = play(vision, [Observation("<image>", images=[TALL])] * 2, [SMALL], "<image>", max_turns=5)
    assert "the episode shows 3 images, and at most 2 are read" in (played.error or "")
    assert len(played.contexts[0].images) == 2


def test_images_in_a_run_of_text(vision: Vision) -> None:
    made = chat_format(vision)
    conversation = Conversation(made, Policy(ANSWER), 1000)

    async def talk() -> None:
        context = conversation.begin([{"role": "user", "content": "Hello."}])
        await conversation.answer(context)
        message = {"role": "user", "content": "<image>"}
        conversation.observe(context, [message], [([message], [SMALL])])

    with pytest.raises(EpisodeFailed, match="the episode shows images, but model.vision=none"):
        asyncio.run(talk())


def test_a_tools_result_with_an_image(vision: Vision) -> None:
    shown: Any = [base64.b64encode(SMALL).decode()]

    class Tools(ToySession):
        async def call(
            self, name: str, arguments: dict[str, Any], timeout_s: float, images: bool = False
        ) -> ToolResult | str:
            return ToolResult("see <image>", shown) if images else "see [no image]"

    for pictures in (Pictures(vision, 1_000_000), None):
        made = chat_format(vision)
        conversation = Conversation(made, Policy(ANSWER), 1000, pictures=pictures)
        player = TurnsPlayer(made.config, Tools(), {"look": None}, environment=False)  # type: ignore[arg-type]
        (message,), images = asyncio.run(player._call(conversation, Call("1", "look", {}), 0))
        assert message["content"] == ("see <image>" if pictures else "see [no image]")
        assert images == ([SMALL] if pictures else [])


WORLD = f"""
from pipeline.agent import Environment, Observation, ToolResult, tool

class Shows(Environment):
    def reset(self, row, seed):
        return Observation("<image>", images=[{SMALL!r}]) if seed else Observation("x", reward=1.0)

    def step(self, message):
        if message.text == "large":
            return Observation("<image>", images=[bytes(4 << 20)])
        if message.text == "path":
            return Observation("<image>", images="shot.png")
        return Observation("<image>", images=[{TALL!r}, {WIDE!r}])

    @tool
    def look(self) -> str:
        '''Look.'''
        return ToolResult("see <image>", [{SMALL!r}])

    @tool
    def wrong(self) -> str:
        '''Look.'''
        return ToolResult(5)
"""


def test_a_process_sends_images(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(WORLD)

    async def use(processes: Processes) -> None:
        session = await processes.open(ROW, 1, 30)
        assert (session.opened, decoded(session.opened_images)) == ("<image>", [SMALL])
        found = await session.step(Message("go"), 10)
        assert decoded(found.images) == [TALL, WIDE]  # type: ignore[arg-type]
        shown = await session.call("look", {}, 10, True)
        assert isinstance(shown, ToolResult) and (shown.text, shown.plain) == ("see <image>", None)
        assert decoded(shown.images) == [SMALL]  # type: ignore[arg-type]
        for text, words in (
            ("large", "images of 5,592,408 bytes in base64; at most"),
            ("path", "expected a list of by"),
        ):
            session = await processes.open(ROW, 1, 30)
            with pytest.raises(EpisodeFailed, match=words):
                await session.step(Message(text), 10)
        session = await processes.open(ROW, 1, 30)
        with pytest.raises(EpisodeFailed, match="tool wrong returned a ToolResult with 5; expected a text"):
            await session.call("wrong", {}, 10)
        with pytest.raises(EpisodeFailed, match="reset returned an Observation with done, reward or parts"):
            await processes.open(ROW, 0, 30)

    run(AgentConfig(environment=f"{tmp_path}/shows.py:Shows"), use)


def test_a_text_that_is_no_base64() -> None:
    with pytest.raises(ValueError, match="an image of an observation is not in base64"):
        decoded(["é?"])
