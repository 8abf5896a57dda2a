"""The guessing game as a script with OpenAI's client, which knows nothing of Slipstream.

    python -m jobs.train agent.command='[python, examples/agents/higher_lower_client.py]' agent.max_turns=6 ...

Each episode runs the script once. The variables OPENAI_BASE_URL and OPENAI_API_KEY lead the client to the policy,
SLIPSTREAM_ROW names a file with the row, and the last line that is printed is the reward. The rows come from
`python -m jobs.prepare higher_lower`; `higher_lower.py` is the same game as an environment, which needs a tenth of the
time: an interpreter that imports the client takes about a second.
"""

import json
import os

from openai import OpenAI

GUESSES = int(os.environ.get("GUESSES", "6"))
MAX_DIGITS = 4


def main() -> dict:
    """Play one episode; the reward and further numbers."""
    with open(os.environ["SLIPSTREAM_ROW"]) as file:
        row = json.load(file)
    number, messages, client = int(row["ground_truth"]), row["prompt"], OpenAI()
    for made in range(1, GUESSES + 1):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        guess = (answer.content or "").strip()
        is_number = guess.isdecimal() and len(guess) <= MAX_DIGITS
        if is_number and int(guess) == number:
            return {"reward": 1.0, "acc": 1, "guesses": made}
        reply = "A number." if not is_number else "higher" if int(guess) < number else "lower"
        # The answer goes back as it came, so that the next turn continues the conversation.
        messages += [answer, {"role": "user", "content": reply}]
    return {"reward": 0.0, "acc": 0, "guesses": GUESSES}


if __name__ == "__main__":
    print(json.dumps(main()))
