"""Imports OpenAI's client, and what it imports when it is first used, for scripts beside it (`agent.preload`)."""

from openai import OpenAI

OpenAI(api_key="none").chat.completions  # noqa: B018
