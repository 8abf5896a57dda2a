"""Fixtures of all tests, and the marker `unit` for every test without another one."""

import contextlib
import copy
import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests import sentences
from tests.share import Share, needs_engine

if TYPE_CHECKING:
    from pipeline.config import Config
    from tests.runs import Training
    from tests.streams import Run

ROOT = Path(__file__).resolve().parent.parent

# Before any import of the libraries that read them; Ray's worker processes inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
# The libraries' objects are many, and each look for cycles that goes over them all takes half a second.
gc.set_threshold(10_000, 10, 10)
# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the runs that they interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Under `nohup` as well: commands of the tests inherit what is ignored, and get the default of what is handled.
    signal.signal(signal.SIGHUP, lambda number, frame: None)
# A busy machine makes no example too slow, and no strategy's draw either.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")
# A tracking server or a cluster of the developer's own is no place for test runs.
for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
    os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-sentences", action="store_true", help="write tests/sentences.txt; see tests/sentences.py")
    parser.addoption("--share", metavar="FOLDER", type=Path, help="share the slow tests; see tests/share.py")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    if (folder := config.getoption("--share")) is not None:
        config.pluginmanager.register(Share(folder))


def pytest_collection_finish() -> None:
    # What was imported stays, and needs no look; each look while it was imported was in vain.
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--write-sentences"):
        items[:] = [item for item in items if "named" in getattr(item, "fixturenames", ())]
    for item in items:
        if not needs_engine(item) and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.unit)


@pytest.fixture(scope="session")
def all_sentences(request: pytest.FixtureRequest) -> Iterator[sentences.Sentences]:
    """The file's sentences; with `--write-sentences` those of the tests, which become the file if all tests pass."""
    writes = request.config.getoption("--write-sentences")
    found = {} if writes else sentences.read(sentences.FILE.read_text())
    yield found
    if writes and not request.session.testsfailed:
        sentences.FILE.write_text(sentences.written(sentences.of_other_files(found) | found))


@pytest.fixture
def named(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, all_sentences: sentences.Sentences
) -> Iterator[sentences.Named]:
    """Call it with a sentence and the keys that it must name; the words must be those of `sentences.txt`."""
    folder = tmp_path_factory.getbasetemp()
    test, case = request.node.nodeid.partition("[")[0], sentences.case_of(request.node)
    if not request.config.getoption("--write-sentences"):
        yield sentences.Named(all_sentences.get(test, {}).get(case, []), folder)
        return
    asserts = sentences.Named(None, folder)
    yield asserts
    cases = all_sentences.setdefault(test, {})
    assert case not in cases, f"two cases of {test} are called {case!r}"
    cases[case] = asserts.sentences


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for all tests that need it, with more CPUs than the machine has: test stages mostly wait."""
    import ray

    from pipeline.run.cluster import LOCAL_RAY

    os.environ.update(LOCAL_RAY)
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=1 << 30,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process as the only rank of a process group."""
    import torch.distributed as dist

    on_gpu = os.environ.get("SLIPSTREAM_TEST_DEVICE", "cpu") != "cpu"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer Qwen3 with tied embeddings, random weights and a tokenizer trained on Countdown text."""
    from jobs.tiny import build_model, build_tokenizer, countdown_texts

    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = build_tokenizer(countdown_texts(512, seed=0), vocab_size=320)
    model = build_model(tokenizer, hidden=64, layers=2, heads=2, kv_heads=2, tie=True, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, which the demo downloads and converts."""
    from jobs.demo import Demo

    demo = Demo.here("sums", 1, "smollm2")
    with contextlib.chdir(ROOT):
        demo.make_model()
    return ROOT / demo.model


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow to copy; making its tables takes seconds."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}")
    return path


@dataclass(frozen=True)
class PromptFiles:
    """Parquet files in verl's format."""

    train: str
    train_rows: int
    val: str
    val_rows: int


@pytest.fixture(scope="session")
def prompt_files(tmp_path_factory: pytest.TempPathFactory) -> PromptFiles:
    """40 training prompts in row groups of 10 and 7 validation prompts; `extra_info.index` numbers them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("prompts")
    files = PromptFiles(str(folder / "train.parquet"), 40, str(folder / "val.parquet"), 7)
    for path, rows in ((files.train, files.train_rows), (files.val, files.val_rows)):
        table = pa.Table.from_pylist(
            [
                {
                    "data_source": "countdown",
                    "prompt": [{"role": "user", "content": f"Numbers: {i + 1}, {i + 2}. Target: {2 * i + 3}."}],
                    "ability": "math",
                    "reward_model": {"style": "rule", "ground_truth": {"target": 2 * i + 3, "numbers": [i + 1, i + 2]}},
                    "extra_info": {"index": i},
                }
                for i in range(rows)
            ]
        )
        pq.write_table(table, path, row_group_size=10)
    return files


@pytest.fixture(scope="session")
def stream_config(tiny_model: Path, prompt_files: PromptFiles, tmp_path_factory: pytest.TempPathFactory) -> "Config":
    """Configuration of the streams in `tests/streams.py`; change a copy."""
    from tests.streams import tiny_config

    return tiny_config(tiny_model, prompt_files, tmp_path_factory.mktemp("reward"))


@contextlib.contextmanager
def data_context() -> Iterator[None]:
    """`stream.build` sets this process's context of Ray Data; other tests get their own back."""
    from ray.data import DataContext

    before = copy.deepcopy(DataContext.get_current())
    try:
        yield
    finally:
        DataContext._set_current(before)


@pytest.fixture(scope="module")
def stream_context(ray_session: None) -> Iterator[None]:
    with data_context():
        yield


@pytest.fixture(scope="session")
def whole_stream(
    stream_config: "Config", tmp_path_factory: pytest.TempPathFactory, ray_session: None
) -> Iterator["Run"]:
    """One stream for all tests that read what comes of it."""
    from tests.streams import whole_run

    with contextlib.ExitStack() as stack:
        with data_context():
            run = stack.enter_context(whole_run(stream_config, tmp_path_factory.mktemp("whole")))
        yield run


@pytest.fixture(scope="session")
def training(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prompt_files: PromptFiles, ray_session: None
) -> "Training":
    """One whole run for all tests that read or use what a run leaves; they leave it as it is."""
    from tests.runs import train

    return train(tmp_path_factory.mktemp("training"), tiny_model, prompt_files)
