"""The handshake of engine and trainer, as far as it has come (`pipeline/greeting.py`)."""

from dataclasses import dataclass

from pipeline.greeting import Change, Greeting, GreetingPlan


@dataclass
class Shaking:
    """The handshake of one attempt."""

    plan: GreetingPlan | None = None
    """What the next engine is asked for; None if nothing is asked (any more)."""
    greeting: Greeting | None = None
    """The first engine's rows."""
    change: Change | None = None
    """The other way in which rows pass through models of the policy's class."""
    settled: bool = True
    """Whether `change` is known."""

    def greet(self, greeting: Greeting) -> None:
        """Keep the first greeting; no further engine is asked."""
        self.plan, self.greeting = None, self.greeting or greeting

    def settle(self, change: Change | None) -> None:
        """Note what was found."""
        self.change, self.settled = change, True
