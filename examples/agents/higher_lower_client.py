"""The guessing game as a script with OpenAI's client, which knows nothing of Slipstream.

    python -m jobs.train agent.program=examples/agents/higher_lower_client.py:play agent.max_turns=6 ...
    python -m jobs.train agent.command='[python, examples/agents/higher_lower_client.py]' agent.max_turns=6 ...

The variables OPENAI_BASE_URL and OPENAI_API_KEY lead the client to the policy. The result has the reward of each guess:
1 for the number, and else up to WORTH, by how well it halved what was left. As a program, the file is imported once and
each episode is a fork that calls `play`. As a command, each episode starts an interpreter; SLIPSTREAM_ROW names a file
with the row, and the last line that is printed is the result.

The rows come from `python -m jobs.prepare higher_lower`; `higher_lower.py` is the same game, with the same rewards, as
an environment.
"""

import json
import os

from openai import OpenAI

GUESSES, NUMBERS = int(os.environ.get("GUESSES", "6")), 63
WORTH = float(os.environ.get("WORTH", "0"))
MAX_DIGITS = 4


# Packages import some modules when they are first used; all episodes find these imported.
OpenAI(api_key="none").chat.completions  # noqa: B018


def play(row: dict) -> dict:
    """Play one episode; the rewards of its guesses and further numbers."""
    number, messages, client = int(row["ground_truth"]), row["prompt"], OpenAI()
    low, high, rewards = 1, NUMBERS, []
    for made in range(1, GUESSES + 1):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        guess = (answer.content or "").strip()
        is_number = guess.isdecimal() and len(guess) <= MAX_DIGITS
        value = int(guess) if is_number else 0
        if value == number:
            return {"rewards": [*rewards, 1.0], "acc": 1, "guesses": made}
        # The share that the guess excludes for certain of the most that one can; 0 outside.
        rewards.append(WORTH * max(0, min(value - low, high - value) + 1) / ((high - low) // 2 + 1))
        if is_number and value < number:
            low = max(low, value + 1)
        elif is_number:
            high = min(high, value - 1)
        reply = "A number." if not is_number else "higher" if value < number else "lower"
        # The answer goes back as it came, so that the next turn continues the conversation.
        messages += [answer, {"role": "user", "content": reply}]
    return {"rewards": rewards, "acc": 0, "guesses": GUESSES}


if __name__ == "__main__":
    with open(os.environ["SLIPSTREAM_ROW"]) as given:
        print(json.dumps(play(json.load(given))))
