"""Export a checkpoint to Hugging Face format: `python -m jobs.export runs/NAME --out models/mine`."""

import argparse
import logging
import os
import sys

from jobs.command import exit_code, new_parser
from jobs.entry import command
from pipeline.config.paths import local_path

EPILOG = """\
examples:
  python -m jobs.export runs/NAME --out models/mine
  python -m jobs.export runs/NAME --out models/best --best val-core/countdown/acc/mean@1
  python -m jobs.export runs/NAME --out models/60 --iteration 60 --dtype bfloat16
  python -m jobs.export runs/NAME/checkpoints/iteration_000060 --out models/60
  python -m jobs.export runs/NAME --out models/adapter --adapter
  python -m jobs.export runs/NAME --out models/mine --register countdown --alias champion

neither a GPU nor Ray is needed; the memory needed is that of the weights in their new type.
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the options in `arguments`."""
    about = (
        "Write the policy of a checkpoint as a Hugging Face folder with tokenizer, chat template and model card, and "
        "register it in MLflow."
    )
    parser = new_parser("export", about, EPILOG)
    add = parser.add_argument
    add("run", type=local_path, metavar="RUN_OR_CHECKPOINT", help="folder of a run or of one of its checkpoints")
    add("--out", type=local_path, required=True, metavar="DIR", help="folder for the model; new or empty")
    add_choice(parser)
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="type of the weights (default: as trained)")
    add("--critic", action="store_true", help="export the critic, for token classification with one label")
    add("--adapter", action="store_true", help="export only the adapter (model.lora), in the format of peft and vLLM")
    add("--base", metavar="MODEL", help="the model that the run started from, if it has moved since")
    add("--register", metavar="NAME", help="make it a new version of this registered model in the run's MLflow")
    add("--alias", metavar="ALIAS", help="alias of the new version, such as champion; needs --register")
    return parser.parse_args(arguments)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add `--iteration`, `--best` and `--lowest`, which choose a checkpoint of a run."""
    add = parser.add_argument_group("which checkpoint of a run (default: the newest complete one)").add_argument
    add("--iteration", type=int, metavar="N", help="the one of iteration N")
    add("--best", metavar="METRIC", help="the one with the highest METRIC of metrics.jsonl, such as "
        "val-core/countdown/acc/mean@1")  # fmt: skip
    add("--lowest", action="store_true", help="with --best: the one with the lowest")


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 written, 2 bad arguments or input, 130 interrupted, 1 failed."""
    options = parse(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return exit_code(lambda: run(options), failed=(OSError,), interrupted="interrupted; no model was written")


def run(options: argparse.Namespace) -> None:
    """Choose a checkpoint, export it, and with `--register` register the model in MLflow."""
    if options.alias and not options.register:
        raise ValueError("--alias names a version of a registered model; give --register NAME as well")
    if options.adapter and (options.critic or options.register):
        raise ValueError("--adapter writes the policy's adapter, which cannot be registered without its base; leave "
                         "out --critic and --register")  # fmt: skip
    if options.lowest and not options.best:
        raise ValueError("--lowest is an option of --best; give --best METRIC as well")
    from pipeline.export.choose import choose
    from pipeline.export.registry import connect, register

    checkpoint, notes = choose(options.run, options.iteration, options.best, options.lowest)
    for note in notes:
        print(note)
    if options.register:
        # A missing tracker is noticed before the export, which takes long.
        connect(checkpoint)
    # Torch and transformers take seconds to import. Errors above are reported without them.
    from pipeline.export.export import export

    choice = {"critic": options.critic, "base": options.base, "alone": options.adapter}
    ends = export(checkpoint, options.out, options.dtype, **choice)
    print(f"{options.out}: iteration {checkpoint.iteration} of {checkpoint.run_dir}")
    if ends:
        print(f"{options.out}: {ends.line}")
    if options.register:
        version, tracker = register(checkpoint, options.out, options.register, options.alias)
        alias = f", alias {options.alias}" if options.alias else ""
        print(f"registered as {options.register}, version {version}{alias}, in {tracker}")


if __name__ == "__main__":
    sys.exit(main())
