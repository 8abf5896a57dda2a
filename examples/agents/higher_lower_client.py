"""The guessing game as a script with OpenAI's client, which knows nothing of Slipstream.

    python -m jobs.train agent.command='[python, examples/agents/higher_lower_client.py]' \
        agent.preload='[openai_ready]' agent.max_turns=6 ...

Each episode runs the script once. The variables OPENAI_BASE_URL and OPENAI_API_KEY lead the client to the policy,
SLIPSTREAM_ROW names a file with the row, and the last line that is printed has the reward of each guess: 1 for the
number, and else up to WORTH, by how well it halved what was left. `openai_ready.py`, which lies beside the script,
imports the client once for all episodes. The rows come from `python -m jobs.prepare higher_lower`; `higher_lower.py` is
the same game, with the same rewards, as an environment.
"""

import json
import os

from openai import OpenAI

GUESSES, NUMBERS = int(os.environ.get("GUESSES", "6")), 63
WORTH = float(os.environ.get("WORTH", "0"))
MAX_DIGITS = 4


def main() -> dict:
    """Play one episode; the rewards of its guesses and further numbers."""
    with open(os.environ["SLIPSTREAM_ROW"]) as file:
        row = json.load(file)
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
    print(json.dumps(main()))
