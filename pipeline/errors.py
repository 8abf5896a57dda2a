"""Errors by what can be done about them."""


class FinalError(RuntimeError):
    """What a restart from the last checkpoint would only meet again; the run ends at once, whatever
    `trainer.max_failures` says."""


class PeerDied(ConnectionError):
    """Another process of the run cannot be reached, most likely because it has died; a restart helps."""
