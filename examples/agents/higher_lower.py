"""A guessing game as an environment: `make demo TASK=higher_lower`.

    python -m jobs.train agent.environment=examples/agents/higher_lower.py:HigherLower \
        agent.kwargs.guesses=6 agent.max_turns=6 data.train_files=...

The rows come from `python -m jobs.prepare higher_lower`; their ground truth is the number to find.
"""

from pipeline.agent import Environment, Observation

MAX_DIGITS = 4


class HigherLower(Environment):
    """Says `higher` or `lower` until the number is found or no guess is left.

    A guess earns 1 if it is right, and else up to `worth`: nothing where earlier replies exclude it, most in the middle
    of what they leave. Rewards of single guesses are for `algorithm=turn_grpo`. The part `acc` of the score is 1 for a
    number that was found.

    Args:
        guesses: of one game.
        numbers: the largest number.
        worth: most that a guess earns which is not right.
        blind: replies are dots, which shows how far a player comes without them.
    """

    def __init__(self, guesses: int = 6, numbers: int = 63, worth: float = 0.0, blind: bool = False):
        self.guesses, self.numbers, self.worth, self.blind = guesses, numbers, worth, blind

    def reset(self, row, seed):
        self.number = int(row["ground_truth"])
        self.made = 0
        self.low, self.high = 1, self.numbers

    def step(self, message):
        self.made += 1
        guess = message.text.strip()
        parts = {"acc": 0, "guesses": self.made}
        # What the model writes may be anything: a million digits, or no digit at all.
        if not guess.isdecimal() or len(guess) > MAX_DIGITS:
            return Observation(
                "." if self.blind else "A number.", done=self.made == self.guesses, reward=0.0, parts=parts
            )
        value = int(guess)
        if value == self.number:
            return Observation(done=True, reward=1.0, parts={**parts, "acc": 1})
        # The share that the guess excludes for certain of the most that one can; 0 outside.
        excluded = max(0, min(value - self.low, self.high - value) + 1)
        reward = self.worth * excluded / ((self.high - self.low) // 2 + 1)
        if value < self.number:
            self.low = max(self.low, value + 1)
        else:
            self.high = min(self.high, value - 1)
        reply = "." if self.blind else "higher" if value < self.number else "lower"
        return Observation(reply, done=self.made == self.guesses, reward=reward, parts=parts)
