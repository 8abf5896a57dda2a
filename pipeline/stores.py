"""Which policy store a run has."""

from pipeline.admission import Admission
from pipeline.config import Config
from pipeline.dynamic_store import DynamicStore
from pipeline.first_come_store import FirstComeStore
from pipeline.groups import DynamicSampling
from pipeline.overlap import ahead, first_come
from pipeline.store import PolicyStore


def store_of(config: Config, iterations: int) -> tuple[type[PolicyStore], Admission]:
    """The class of the store of a run of so many iterations, and the rule that it begins with."""
    dynamic = DynamicSampling.of(config, iterations)
    rule = Admission(config.rollout.chunk_prompts, config.data.train_batch_size, ahead(config), dynamic)
    if dynamic:
        return DynamicStore, rule
    return (FirstComeStore if first_come(config) else PolicyStore), rule
