"""Notices and summary of the processes that Ray's memory monitor has killed."""

from pipeline.run.memory_kills import EVERY_S, MemoryKills
from pipeline.upstream.ray_memory import Killed

ENGINE = Killed("a", 41, "MapWorker(MapBatches(Rollout)).__init__", 3 * 2**30, "the node was full")
TRAINER = Killed("b", 42, "RayTrainWorker.__init__", 0, "the node was full")
OTHER = Killed("c", 43, "SplitCoordinator.__init__", 0, "the node was full")


def test_each_kill_is_told_once_and_counted() -> None:
    now, table = [0.0], [Killed("z", 1, "MapWorker(MapBatches(Rollout)).__init__", 0, "of an earlier run")]
    kills = MemoryKills(lambda: table, lambda: now[0])
    assert kills.news() == [] and kills.summary() == {}
    table += [ENGINE, TRAINER]
    assert kills.news() == [], "the table is not read all the time"
    now[0] += EVERY_S
    assert kills.news() == [
        "out of memory: the engine (pid 41, 3.0 GiB) ended: the node was full; its work is repeated",
        "out of memory: the train worker (pid 42) ended: the node was full; its work is repeated",
    ]
    table += [OTHER, Killed("d", 44, ENGINE.task, 0, "the node was full")]
    assert kills.news() == []
    now[0] += EVERY_S
    assert [text.partition(" (")[0] for text in kills.news()] == [
        "out of memory: SplitCoordinator.__init__",
        "out of memory: the engine",
    ]
    assert kills.summary() == {
        "engines restarted": "2 (out of memory)",
        "train workers restarted": "1 (out of memory)",
        "other processes restarted": "1 (out of memory)",
    }


def test_the_summary_has_kills_since_the_last_look() -> None:
    table: list[Killed] = []
    kills = MemoryKills(lambda: table, lambda: 0.0)
    assert kills.news() == []
    table.append(ENGINE)
    assert kills.summary() == {"engines restarted": "1 (out of memory)"}
