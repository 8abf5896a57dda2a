"""Export a checkpoint to Hugging Face format: `python -m jobs.export runs/NAME --out models/mine`."""

import argparse
import logging
import os
import sys
from pathlib import Path

from jobs.train import complain

EPILOG = """\
examples:
  python -m jobs.export runs/NAME --out models/mine
  python -m jobs.export runs/NAME --out models/best --best val-core/countdown/acc/mean@1
  python -m jobs.export runs/NAME --out models/60 --iteration 60 --dtype bfloat16
  python -m jobs.export runs/NAME/checkpoints/iteration_000060 --out models/60
  python -m jobs.export runs/NAME --out models/mine --register countdown --alias champion

neither a GPU nor Ray is needed; the memory needed is that of the weights in their new type.
"""


def parser() -> argparse.ArgumentParser:
    """The options of `python -m jobs.export`."""
    own = argparse.ArgumentParser(
        prog="python -m jobs.export",
        description="Write the policy of a checkpoint as a Hugging Face folder with tokenizer, chat template and model "
        "card, and register it in MLflow.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = own.add_argument
    add("run", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run's folder, such as runs/NAME, or one of its "
        "checkpoints")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the model; new or empty")
    which = own.add_argument_group("which checkpoint", "the newest whole one, unless one of these is given")
    choice(which)
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the weights (default: as they were trained)",
    )
    add(
        "--critic",
        action="store_true",
        help="the critic instead of the policy, for token classification with one label",
    )
    add("--base", metavar="MODEL", help="the model that the run began with, if it lies elsewhere now")
    add("--register", metavar="NAME", help="make it a new version of this registered model in the run's MLflow")
    add("--alias", metavar="ALIAS", help="alias of the new version, such as champion; needs --register")
    return own


def choice(group: argparse._ArgumentGroup) -> None:
    """The options that say which checkpoint of a run is meant."""
    group.add_argument("--iteration", type=int, metavar="N", help="the one of iteration N")
    group.add_argument("--best", metavar="METRIC", help="the one with the highest METRIC of metrics.jsonl, such as "
        "val-core/countdown/acc/mean@1")  # fmt: skip
    group.add_argument("--lowest", action="store_true", help="with --best: the one with the lowest")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 written, 2 bad arguments or input, 130 interrupted, 1 failed)."""
    options = parser().parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        if options.alias and not options.register:
            raise ValueError("--alias names a version of a registered model; give --register NAME as well")
        if options.lowest and not options.best:
            raise ValueError("--lowest says how --best chooses; give --best METRIC as well")
        run(options)
    except (ValueError, ImportError) as error:
        complain(str(error))
        return 2
    except OSError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        complain("interrupted; no model was written")
        return 130
    return 0


def run(options: argparse.Namespace) -> None:
    """Choose, write, register."""
    from transformers.utils.logging import disable_progress_bar

    from pipeline.export.choice import choose
    from pipeline.export.folder import export
    from pipeline.export.registry import connect, register

    disable_progress_bar()
    checkpoint, notes = choose(options.run, options.iteration, options.best, options.lowest)
    for note in notes:
        print(note)
    if options.register:
        # Before the long part: a tracker that is away is known now.
        connect(checkpoint)
    export(checkpoint, options.out, options.dtype, critic=options.critic, base=options.base)
    print(f"{options.out}: iteration {checkpoint.iteration} of {checkpoint.run_dir}")
    if options.register:
        version, place = register(checkpoint, options.out, options.register, options.alias)
        alias = f", alias {options.alias}" if options.alias else ""
        print(f"registered as {options.register}, version {version}{alias}, in {place}")


if __name__ == "__main__":
    sys.exit(main())
