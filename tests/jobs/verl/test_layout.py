"""Where verl's GPUs go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.verl.layout import Layout, lay_out


@settings(deadline=None)
@given(st.integers(1, 512), st.integers(1, 64), st.sampled_from([1, 3, 7, 16, 60, 128, 256]), st.integers(0, 3))
def test_chunks_suit_workers_and_no_gpu_is_made_up(gpus: int, steps: int, mini: int, pools: int) -> None:
    batch = mini * steps
    layout = lay_out(gpus, batch, mini, pools)
    assert batch % layout.chunk == 0
    assert batch // layout.chunk % layout.workers == 0
    assert mini % (layout.chunk * layout.workers) == 0
    assert min(layout.workers, layout.engines, layout.chunk) >= 1
    assert layout.replicas * layout.share * pools == pytest.approx(layout.replicas if pools else 0, abs=0.02 * gpus)
    # One GPU each is the least; beyond it, verl's GPUs are all there are.
    assert layout.gpus == layout.workers + layout.engines + layout.replicas == max(gpus, 2 + bool(pools))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 1024, 256, 0), Layout(workers=4, engines=4, replicas=0, share=0.0, chunk=16, gpus=8)),
        ((8, 1024, 256, 1), Layout(workers=4, engines=3, replicas=1, share=1.0, chunk=16, gpus=8)),
        ((16, 512, 512, 2), Layout(workers=8, engines=6, replicas=2, share=0.5, chunk=16, gpus=16)),
        # 8 does not divide 60, 6 does; ten engines take 20 chunks or more, and 2 is the largest divisor of 10 for that.
        ((16, 60, 60, 0), Layout(workers=6, engines=10, replicas=0, share=0.0, chunk=2, gpus=16)),
        ((1, 64, 64, 1), Layout(workers=1, engines=1, replicas=1, share=1.0, chunk=16, gpus=3)),
        # Sixteen engines are kept busy by chunks of one.
        # Engines of two GPUs: three are left for one and a replica, or for two engines without scoring pools.
        ((8, 1024, 256, 1, 2), Layout(workers=4, engines=1, replicas=2, share=1.0, chunk=16, gpus=8)),
        ((8, 1024, 256, 0, 2), Layout(workers=4, engines=2, replicas=0, share=0.0, chunk=16, gpus=8)),
        ((8, 1024, 256, 0, 3), Layout(workers=4, engines=1, replicas=0, share=0.0, chunk=16, gpus=7)),
        ((2, 64, 64, 0, 4), Layout(workers=1, engines=1, replicas=0, share=0.0, chunk=16, gpus=5)),
        ((32, 32, 32, 0), Layout(workers=16, engines=16, replicas=0, share=0.0, chunk=1, gpus=32)),
    ],
)
def test_layouts(arguments: tuple[int, ...], expected: Layout) -> None:
    assert lay_out(*arguments) == expected
