"""What scripts with OpenAI's client import, and the client itself when it is first used: `agent.preload=[openai_ready]`."""

from openai import OpenAI

OpenAI(api_key="none").chat.completions  # noqa: B018
