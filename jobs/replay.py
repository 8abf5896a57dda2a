"""Train on the recorded rows of a run, without engines: `python -m jobs.replay runs/NAME algorithm=rloo`."""

import sys
from pathlib import Path

from jobs.command import CONTINUES, add_settings, called, exit_code, new_parser
from jobs.entry import command
from jobs.train import train
from pipeline.config import Config, ConfigError, load_config
from pipeline.config.paths import local_path
from pipeline.derived import chunk_prompts
from pipeline.replay.checks import recorded_config, replay_of
from pipeline.replay.recording import whole_iterations
from pipeline.run.versions import check_versions

EPILOG = """\
settings:
  key=value pairs as of python -m jobs.train, laid over those of the run that was recorded (RUN_DIR/config.yaml); see
  `slipstream docs after_training` for those that a replay does not take.

examples:
  python -m jobs.replay runs/mine
  python -m jobs.replay runs/mine --dry-run algorithm=rloo
  python -m jobs.replay runs/mine --iterations 3-10 trainer.experiment_name=other-reward \\
      reward.custom_reward_function.path=my_reward.py
  python -m jobs.replay runs/mine algorithm=[grpo,tis] actor.optim.lr=1e-5 trainer.total_epochs=3

the same command continues a replay that was interrupted.
"""


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 finished, 2 bad settings or input, 130 interrupted, 1 failed."""
    parser = new_parser("replay", "Train on the trajectories that a run recorded, without engines.", EPILOG)
    parser.add_argument("run_dir", type=local_path, metavar="RUN_DIR", help="folder of the run that was recorded")
    parser.add_argument(
        "--iterations", metavar="FIRST-LAST", help="iterations of the recording, 3-10 or 3 (default: all whole ones)"
    )
    add_settings(parser)
    # Settings and options may be mixed in any order.
    options = parser.parse_intermixed_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        check_versions()
        config = replay_config(options.run_dir, options.iterations, options.settings, options.config_dir)
        return train(config, options.dry_run, [*called("replay"), *given])

    return exit_code(run, interrupted=CONTINUES)


def replay_config(run_dir: Path, iterations: str | None, settings: list[str], config_dir: str | None = None) -> Config:
    """Return the settings of a replay.

    Args:
        run_dir: folder of the run that was recorded.
        iterations: the recorded iterations to train on, such as `3-10`; None takes all that are complete.
        settings: `key=value` arguments, which override settings of the recorded run.
        config_dir: further folder with config files.

    Raises:
        ConfigError: `run_dir` is not the folder of a run, or a setting cannot be read.
        FileNotFoundError: the folder has no recorded iteration.
    """
    recorded = recorded_config(run_dir)
    for setting in settings:
        if setting.lstrip("+~").startswith("experiment="):
            raise ConfigError(
                f"{setting}: a replay begins with the settings of {run_dir}, which an experiment would replace; give "
                "single keys, or algorithm=NAME"
            )
    if iterations is None:
        iterations = whole_iterations(str(run_dir), recorded.data.train_batch_size // chunk_prompts(recorded))
    return load_config(settings, config_dir=config_dir, base=replay_of(recorded, run_dir, iterations))


if __name__ == "__main__":
    sys.exit(main())
