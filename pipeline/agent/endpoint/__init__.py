"""Servers of the policy for programs: OpenAI's and Anthropic's interfaces, and chats over the process's connection."""
