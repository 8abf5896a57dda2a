"""Calls go to a program one at a time, and its answers are kept as they are."""

import os
import select
from collections.abc import Iterator

import pytest

from pipeline.reward.sandbox.inside import values
from pipeline.reward.sandbox.inside.dialogue import Dialogue


class Pipes:
    """The far ends, as a program has them, and the dialogue with it."""

    def __init__(self, *calls: str) -> None:
        self.hears, asks = os.pipe()
        replies, self.says = os.pipe()
        self.fds = [self.hears, asks, replies, self.says]
        self.kept = bytearray()
        self.poll = select.poll()
        self.dialogue = Dialogue(calls, asks, replies, self.kept.extend)
        os.set_blocking(self.hears, False)

    def step(self, said: bytes = b"") -> tuple[str, bytes]:
        """How the dialogue ended after the program has said something, and what it hears then."""
        if said:
            os.write(self.says, said)
        ended = self.dialogue.step(self.poll)
        try:
            return ended, os.read(self.hears, 1 << 20)
        except BlockingIOError:
            return ended, b""

    def close(self, fd: int) -> None:
        os.close(fd)
        self.fds.remove(fd)


@pytest.fixture
def pipes() -> Iterator[list[Pipes]]:
    made: list[Pipes] = []
    yield made
    for one in made:
        for fd in one.fds:
            os.close(fd)


def test_a_call_is_sent_when_the_one_before_is_answered(pipes: list[Pipes]) -> None:
    pipes.append(one := Pipes("first", "second", "third"))
    assert one.step() == ("", b"first\n")
    assert one.step() == one.step(b"answer") == ("", b"")
    assert one.step(b" 1\n") == ("", b"second\n")
    assert one.step(b"2\n") == ("", b"third\n")
    assert one.step(b"3\nmore\n") == ("exit", b"")
    assert one.kept == b"answer 1\n2\n3\nmore\n"


def test_an_answer_ahead_of_its_call_is_an_answer(pipes: list[Pipes]) -> None:
    pipes.append(one := Pipes("first", "second"))
    one.step()
    assert one.step(b"1\n2\n") == ("exit", b"")


def test_a_program_that_ends_has_answered_what_it_has(pipes: list[Pipes]) -> None:
    pipes.append(one := Pipes("first", "second"))
    one.step()
    os.write(one.says, b"1\n")
    one.close(one.says)
    assert one.step()[0] == "exit" and one.kept == b"1\n"


def test_a_program_that_does_not_read_holds_nobody_up(pipes: list[Pipes]) -> None:
    pipes.append(one := Pipes("x" * (1 << 20), "second"))
    assert one.dialogue.step(one.poll) == ""  # a pipe holds less
    assert one.poll.poll(0) == []
    heard = b""
    while len(heard) <= 1 << 20:
        heard += one.step()[1]
    assert heard == b"x" * (1 << 20) + b"\n" and one.step(b"1\n") == ("", b"second\n")
    pipes.append(other := Pipes("x" * (1 << 20)))
    other.step()
    other.close(other.hears)
    assert other.dialogue.step(other.poll) == other.dialogue.step(other.poll) == ""
    assert other.poll.poll(0) == []  # it is not told of the closed end again and again


def test_answers_have_a_limit(pipes: list[Pipes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_FRAME", 1000)
    pipes.append(one := Pipes("first"))
    assert one.step(b"x" * 900)[0] == ""
    assert one.step(b"x" * 101)[0] == "output" and len(one.kept) == 900
