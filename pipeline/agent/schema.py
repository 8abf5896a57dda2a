"""`schema_of`: makes the JSON schema of a function, for programs that show the policy tools of their own."""

from pipeline.agent.inside.schema import schema_of

__all__ = ["schema_of"]
