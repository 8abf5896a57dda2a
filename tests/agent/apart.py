"""An environment that does what it is told, and says what came of it."""

import os
import time

import beside

from pipeline.agent import Environment, Observation


class Told(Environment):
    def reset(self, row, seed):
        return beside.GREETING

    def step(self, message):
        if message.text == "tree":
            return self.tree()
        try:
            return f"done: {eval(message.text)!r}"
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"

    def tree(self):
        """Processes of sessions of their own, each of which has started others."""
        for _ in range(6):
            if os.fork() == 0:
                os.setsid()
        time.sleep(1000)
        return Observation("")
