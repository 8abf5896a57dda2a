"""Servers of the policy for programs: HTTP with OpenAI's and Anthropic's protocols, and chats over the process's
connection."""
