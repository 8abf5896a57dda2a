"""The table of `lookup.py` as a program that forgets: each step is a conversation of its own.

    python -m jobs.train experiment=lookup_cpu agent.environment=null \
        agent.program=examples/agents/lookup_program.py:run agent.max_contexts=3 ...

After a lookup the program does not go on with the conversation, but asks again from the number that was found. So an
episode of three steps has three contexts, all of one row with one reward.
"""

import random

KEYS = range(10, 100)
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "The number that the table has at a key.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "integer", "description": "a number of two digits"}},
            "required": ["key"],
        },
    },
}


async def run(row, chat):
    """Play one episode; `random` is seeded for it."""
    table = {start: random.choice(KEYS) for start in KEYS}
    key, steps = map(int, row["ground_truth"].split())
    right = key
    for _ in range(steps):
        right = table[right]
    messages = row["prompt"]
    for left in range(steps - 1, -1, -1):
        answer = await chat(messages, tools=[TOOL])
        if not answer.calls:
            break
        asked = answer.calls[0]
        found = table.get(asked.arguments.get("key")) if asked.name == "get" else None
        if found is None:
            return {"reward": 0.0, "acc": 0}
        if left:
            messages = [{"role": "user", "content": f"From {found} take {left}."}]
        else:
            result = {"role": "tool", "tool_call_id": asked.id, "name": "get", "content": str(found)}
            answer = await chat([*messages, answer, result], tools=[TOOL])
    right_answer = answer.text.strip() == str(right)
    return {"reward": float(right_answer), "acc": int(right_answer)}
