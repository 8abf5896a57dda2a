"""Data settings that cannot be run, or of which one would do nothing, are refused by name."""

import pytest

from pipeline.plan.checks import check
from pipeline.prompts.generator import Generator
from pipeline.prompts.sampler import Sampler
from tests.plan.test_checks import good, refusal

WEIGHTS = ["data.source_weights.a=1", "data.source_weights.b=0.5"]


class Mine(Sampler):
    def shares(self, iteration):
        return self.data.source_weights


class Made(Generator):
    pass


MINE, MADE = f"{__name__}:Mine", f"{__name__}:Made"


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.sampler=weighted", *WEIGHTS],
        [f"data.sampler={MINE}", *WEIGHTS, "data.sampler_kwargs.x=1"],
        ["data.sampler=solve_rate", "data.sampler_kwargs.least=0.2"],
        [f"data.generator={MADE}", "data.generator_kwargs.x=1"],
        [f"data.generator={MADE}", "data.train_files=null", "trainer.total_training_steps=5"],
        ["data.max_bad_rows=10"],
    ],
)
def test_what_fits_passes(overrides):
    check(good(*overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sampler=wieghted"], "data.sampler 'wieghted' is unknown. Did you mean 'weighted'"),
        (["data.sampler=operator:add"], "not a class derived from pipeline.prompts.sampler.Sampler"),
        (["data.sampler=json:dumps"], "data.sampler 'json:dumps': it is called with data and seed: too many"),
        (["data.sampler=weighted"], "data.sampler=weighted needs data.source_weights"),
        (WEIGHTS, "data.source_weights does nothing with data.sampler=uniform; set data.sampler=weighted"),
        (["data.sampler=solve_rate", *WEIGHTS], "does nothing with data.sampler=solve_rate"),
        (["data.sampler=weighted", "data.source_weights.a=0"], "one of them above 0"),
        (["data.sampler=weighted", *WEIGHTS, "data.source_weights.c=-1"], "weights must be at least 0"),
        (["data.sampler_kwargs.least=0.1"], "does nothing with data.sampler=uniform"),
        (["data.generator_kwargs.a=1"], "does nothing without data.generator"),
        (["data.generator=made"], "data.generator 'made' is no import path"),
        ([f"data.generator={MADE}", "data.train_files=null"], "set trainer.total_training_steps"),
        (
            [
                f"data.generator={MADE}",
                "data.train_files=null",
                "trainer.total_training_steps=5",
                "data.sampler=solve_rate",
            ],
            "data.sampler=solve_rate chooses among the prompts of data.train_files, which is not set",
        ),
        (["data.max_bad_rows=-1"], "data.max_bad_rows=-1"),
        (["data.train_files=null"], "data.train_files is not set; give the files of the training prompts, or a"),
        (["data.val_files=null", "trainer.test_freq=5"], "data.val_files is not set"),
    ],
)
def test_what_does_not_is_named(overrides, words):
    assert words in refusal(*overrides)
