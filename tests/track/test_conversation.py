"""A recorded row as a conversation."""

import json

import pytest

from pipeline.track.conversation import conversation, why_ended
from tests.pictures import picture
from tests.track.conversations import OPENED, PLAYED, PROMPT, SPANS, episode, programmed, single


def test_a_single_response_is_a_conversation_with_one_answer() -> None:
    row = single(3, 1, 5)
    talk = conversation(row)
    (turn,) = talk.turns
    assert talk.prompt == [{"role": "user", "content": "question 3"}] and talk.prompts == [[1, 2, 3]]
    assert turn.answer and turn.trains and turn.messages == [{"role": "assistant", "content": row["response"]}]
    assert (turn.start, turn.tokens, turn.versions, turn.reward) == (0, len(row["response_ids"]), [4], None)
    assert turn.log_prob == pytest.approx(sum(row["rollout_log_probs"]) / turn.tokens)
    assert why_ended(row) == "stop: the model ended it"


def test_images_are_named_by_their_sizes() -> None:
    prompt = [{"role": "user", "content": "Is <image> like <image>?"}]
    row = single(prompt=json.dumps(prompt))
    images = [picture(1, 60, 90), b"gone bad"]
    text = "Is [image 60 x 90 PNG] like [image of 8 bytes]?"
    assert conversation(row | {"images": images}).prompt == [{"role": "user", "content": text}]
    for none in ({}, {"images": None}, {"images": []}):
        assert conversation(row | none).prompt == prompt, "without images the mark is text"


def test_a_begun_answer_is_part_of_the_response() -> None:
    prompt = [*PROMPT, {"role": "assistant", "content": "So "}]
    talk = conversation(single(prompt=json.dumps(prompt), response="So 3"))
    assert talk.prompt == PROMPT
    assert [turn.messages for turn in talk.turns] == [[{"role": "assistant", "content": "So 3"}]]


def test_an_episode_has_its_turns_in_order() -> None:
    row = episode(iteration=5)
    talk = conversation(row)
    assert talk.prompt == [*PROMPT, *OPENED]
    assert [turn.messages for turn in talk.turns] == [[message] for message in PLAYED]
    assert [turn.answer for turn in talk.turns] == [True, False] * 3
    assert [turn.tokens for turn in talk.turns] == [4, 2, 1, 3, 2, 0]
    assert [turn.start for turn in talk.turns] == [0, 4, 6, 7, 10, 12]
    assert [turn.context for turn in talk.turns] == [3, 7, 9, 10, 13, 15] and talk.turns[-1].sequence == 0
    assert [turn.versions for turn in talk.turns] == [[4], [4], [4], [4], [5], []]
    assert [turn.reward for turn in talk.turns] == [None, None, 0.25, None, 0.5, None]
    assert [turn.log_prob for turn in talk.turns] == [-0.5, None, -0.5, None, -0.5, None]
    assert [turn.trains for turn in talk.turns] == [True, False, True, False, True, False]
    assert why_ended(row) == "done: the environment ended it"


def test_answers_in_the_prompt_are_no_turns() -> None:
    shots = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}, *PROMPT[1:]]
    row = episode(prompt=json.dumps(shots), messages=json.dumps([*shots, *PLAYED]))
    talk = conversation(row)
    assert talk.prompt == shots and [turn.messages[0] for turn in talk.turns] == PLAYED


def test_several_messages_of_one_reply_stay_together() -> None:
    two = [PLAYED[1], PLAYED[1] | {"content": "17"}]
    talk = conversation(episode(messages=json.dumps([*PROMPT, PLAYED[0], *two, *PLAYED[2:]])))
    assert talk.turns[1].messages == two and talk.turns[2].messages == [PLAYED[2]]


def test_an_episode_that_failed_has_what_there_was() -> None:
    none = {"response_ids": [], "response_mask": [], "rollout_log_probs": [], "version_runs": [], "spans": []}
    talk = conversation(episode(**none, messages=json.dumps([*PROMPT, *OPENED]), ended="error"))
    assert talk.turns == [] and talk.prompt == [*PROMPT, *OPENED]
    # The last answer was sampled and never read.
    talk = conversation(episode(messages=json.dumps([*PROMPT, *PLAYED[:4]])))
    assert [turn.messages for turn in talk.turns] == [*([message] for message in PLAYED[:4]), []]
    assert talk.turns[4].answer and talk.turns[4].tokens == 2


def test_a_reply_may_be_in_the_prompt_of_the_next_sequence() -> None:
    contexts = [{"prompt": None, "tokens": 4}, {"prompt": [9] * 8, "tokens": 8}]
    spans = [SPANS[0] | {"tokens": 4}, SPANS[2] | {"tokens": 3}, *SPANS[3:]]
    talk = conversation(episode(contexts=contexts, spans=spans))
    assert [turn.messages for turn in talk.turns] == [[message] for message in PLAYED]
    assert [turn.tokens for turn in talk.turns] == [4, 0, 3, 3, 2, 0]
    assert [turn.sequence for turn in talk.turns] == [0, 0, 1, 1, 1, 1]
    assert [turn.context for turn in talk.turns] == [3, 7, 8, 11, 14, 16]


def test_each_conversation_of_a_program_has_its_own_answers() -> None:
    talk = conversation(programmed())
    assert talk.prompt == OPENED and [turn.opening for turn in talk.turns[:3]] == [[], [], []]
    assert [turn.messages for turn in talk.turns] == [[message] for message in [*PLAYED[:3], *PLAYED[4:]]]
    assert talk.turns[3].opening == [OPENED[0], PLAYED[4], *PROMPT[1:]] and talk.turns[4].opening == []
    assert [turn.sequence for turn in talk.turns] == [0, 0, 0, 1, 1]
    assert [turn.tokens for turn in talk.turns] == [4, 2, 3, 3, 0]


def test_conversations_of_older_rows_are_one() -> None:
    row = programmed()
    unmarked = [{**message, "new_context": False} for message in json.loads(row["messages"])]
    talk = conversation(row | {"messages": json.dumps(unmarked)})
    assert [turn.sequence for turn in talk.turns if turn.answer] == [0, 0, 1]
    assert not any(turn.opening for turn in talk.turns) and talk.turns[-2].messages[0]["content"] == "40"


def test_an_answer_that_was_masked_does_not_train() -> None:
    talk = conversation(episode(response_mask=[0] * 10 + [1, 1]))
    assert [turn.trains for turn in talk.turns if turn.answer] == [False, False, True]
    assert sum(turn.tokens for turn in talk.turns) == sum(span["tokens"] for span in SPANS)
