"""Data settings that cannot be run, or of which one would do nothing. Part of `checks.check`."""

import math
from collections.abc import Iterator

from pipeline.config import Config
from pipeline.derived import uses_engines
from pipeline.prompts.generator import generator_class
from pipeline.prompts.sampler import Sampler, sampler_class


def problems(config: Config) -> Iterator[str]:
    """One sentence per problem of the section `data`."""
    data, trainer = config.data, config.trainer
    if not data.train_files and data.generator is None and uses_engines(config):
        yield "data.train_files is not set; give the files of the training prompts, or a data.generator"
    if trainer.test_freq > 0 and not data.val_files and uses_engines(config):
        yield (
            f"trainer.test_freq={trainer.test_freq} asks for validation and data.val_files is not set; "
            "give validation files or set trainer.test_freq=-1"
        )
    yield from _sampler(config)
    yield from _generator(config)


def _sampler(config: Config) -> Iterator[str]:
    data = config.data
    try:
        found = sampler_class(data.sampler)
    except ValueError as error:
        yield str(error)
        return
    if data.source_weights and found.shares is Sampler.shares:
        yield f"data.source_weights does nothing with data.sampler={data.sampler}; set data.sampler=weighted"
    if data.sampler == "weighted" and not data.source_weights:
        yield (
            "data.sampler=weighted needs data.source_weights, for example "
            "'data.source_weights={countdown: 0.7, gsm8k: 0.3}'"
        )
    weights = data.source_weights.values()
    if weights and not (all(weight >= 0 and math.isfinite(weight) for weight in weights) and sum(weights) > 0):
        yield f"data.source_weights={data.source_weights}: weights must be at least 0, and one of them above 0"
    if data.sampler_kwargs and found is Sampler:
        yield f"data.sampler_kwargs={data.sampler_kwargs} does nothing with data.sampler=uniform"


def _generator(config: Config) -> Iterator[str]:
    data = config.data
    if data.generator is None:
        if data.generator_kwargs:
            yield f"data.generator_kwargs={data.generator_kwargs} does nothing without data.generator"
        return
    try:
        generator_class(data.generator)
    except ValueError as error:
        yield str(error)
    if not data.train_files and config.trainer.total_training_steps is None:
        yield (
            "data.generator without data.train_files makes prompts without end, and there are no epochs to count; set "
            "trainer.total_training_steps"
        )
    if not data.train_files and data.sampler != "uniform":
        yield f"data.sampler={data.sampler} chooses among the prompts of data.train_files, which is not set"
