"""Compare learning curves of runs: `python -m jobs.compare runs/a runs/b --labels PPO,GRPO --out compared.png`."""

import sys

from rich.console import Console

from jobs.command import complain, exit_code, new_parser
from jobs.entry import command
from pipeline.config.paths import local_path
from pipeline.track.compare import draw, read_runs, table
from pipeline.track.plot import save

PNG = b"\x89PNG\r\n\x1a\n"
"""First bytes of a PNG file."""


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 drawn, 2 bad arguments or runs, 1 the figure cannot be written."""
    about = "Draw the validation accuracy and training reward of several runs, and print a table of them."
    parser = new_parser("compare", about)
    parser.add_argument("runs", nargs="+", type=local_path, metavar="RUN_DIR", help="a run's folder, such as runs/NAME")
    parser.add_argument("--out", type=local_path, required=True, metavar="FILE.png", help="the figure")
    parser.add_argument("--labels", metavar="A,B,...", help="what to call the runs (default: by their folders)")
    options = parser.parse_args(arguments)

    def run() -> int:
        if options.out.suffix.lower() != ".png":
            raise ValueError(f"--out {options.out} is not the name of a PNG file; let it end in .png")
        if options.out.exists() and not (options.out.is_file() and options.out.read_bytes()[:8] == PNG):
            raise ValueError(f"--out {options.out} exists and is not a PNG file; choose another name or remove it")
        labels = None if options.labels is None else [label.strip() for label in options.labels.split(",")]
        runs = read_runs(options.runs, labels)
        print("validation (iteration)")
        Console(markup=False).print(table(runs))
        try:
            save(draw(runs), options.out)
        except OSError as error:
            complain(f"the figure cannot be written to {options.out}: {error.strerror or error}")
            return 1
        print(f"figure: {options.out}")
        return 0

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
