"""Entry point of train workers. Ray Train's controller imports this module too, so it imports the loop only to run
it."""

from pipeline.store.events import TrainingEnded
from pipeline.train.loop_settings import LoopSettings


def train_loop(settings: dict[str, LoopSettings]) -> TrainingEnded:
    """Run the train loop in a Ray Train worker; returns how training ended."""
    from pipeline.train.loop import Loop

    return Loop(settings["settings"]).run()
