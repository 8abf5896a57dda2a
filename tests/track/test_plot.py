"""The picture shows the numbers of `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.track.plot import draw, drawable, learning_curve, save, smoothed

MAX_GAP = "training/rollout_log_probs_diff_max"


def _records(count: int = 30) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for iteration in range(count + 1):
        record: dict[str, Any] = {"iteration": iteration, "time": 1e9, "elapsed_s": 60.0 + 12.0 * iteration}
        if iteration % 10 == 0:
            record["val-core/countdown/reward/mean@1"] = iteration / 100
        if iteration:
            record["critic/score/mean"] = None if iteration == 5 else iteration / 50
            record["response_length/mean"] = 20.0 + iteration
            record[MAX_GAP] = 1e-5 * iteration
        records.append(record)
    return records


def _line(figure: Any, gid: str) -> tuple[list[float], list[float]]:
    (line,) = [line for axes in figure.axes for line in axes.lines if line.get_gid() == gid]
    return list(line.get_xdata()), list(line.get_ydata())


def test_axes_hold_the_data() -> None:
    figure = draw(_records(), "a title")
    iterations, scores = _line(figure, "validation countdown")
    assert iterations == [0, 10, 20, 30] and scores == pytest.approx([0.0, 0.1, 0.2, 0.3])
    iterations, rewards = _line(figure, "reward")
    assert iterations == [number for number in range(1, 31) if number != 5]
    assert rewards == pytest.approx([number / 50 for number in iterations])
    assert _line(figure, "response_length/mean")[1] == pytest.approx([20.0 + number for number in range(1, 31)])
    assert _line(figure, MAX_GAP)[1] == pytest.approx([1e-5 * number for number in range(1, 31)])
    assert figure.get_suptitle() == "a title"
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "validation countdown: 0.000 → 0.300" in legend


def test_a_band_is_the_standard_error_of_each_validation() -> None:
    records = _records()
    assert not draw(records, "").axes[0].collections
    for record in records[10:]:
        if "val-core/countdown/reward/mean@1" in record:
            record["val-aux/countdown/reward/stderr@1"] = 0.02
    (band,) = draw(records, "").axes[0].collections
    assert band.get_gid() == "standard error"
    corners = {tuple(point) for path in band.get_paths() for point in path.vertices.round(3).tolist()}
    # The first validation has none.
    assert corners == {(i, round(i / 100 + sign * 0.02, 3)) for i in (10, 20, 30) for sign in (-1, 1)}


def _titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


def test_a_critic_and_a_kl_have_a_panel_each() -> None:
    records = _records()
    plain = _titles(draw(records, ""))
    for record in records[1:]:
        record["critic/vf_explained_var"] = 1.0 - 30.0 / record["iteration"] ** 2
        record["actor/reward_kl_penalty"] = record["iteration"] / 1000
    figure = draw(records, "")
    assert len(plain) == 2 and len(_titles(figure)) == 4
    iterations, shares = _line(figure, "critic/vf_explained_var")
    assert iterations == list(range(1, 31)) and shares == pytest.approx([1.0 - 30.0 / i**2 for i in iterations])
    (panel,) = [axes for axes in figure.axes if "critic" in axes.get_title(loc="left")]
    assert panel.get_ylim() == (-1.0, 1.05)  # the first is -29
    assert _line(figure, "actor/reward_kl_penalty")[1] == pytest.approx([i / 1000 for i in iterations])
    for record in records:
        record.pop("critic/vf_explained_var", None)
    assert len(_titles(draw(records, ""))) == 3


def test_two_kls_are_told_apart() -> None:
    records = [record | {"actor/kl_loss": 0.1, "actor/reward_kl_penalty": 0.2} for record in _records()]
    figure = draw(records, "")
    (panel,) = [axes for axes in figure.axes if axes.get_title(loc="left") == "KL to the reference policy"]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["in the loss", "in the reward"]


def test_upper_axis_shows_minutes_where_they_were_reached() -> None:
    figure = draw(_records(), "")
    (above,) = [axes for axes in figure.axes if axes.get_xlabel() == "minutes"]
    assert above.get_xlim() == figure.axes[0].get_xlim()
    for place, label in zip(above.get_xticks(), above.get_xticklabels(), strict=True):
        assert place == pytest.approx((float(label.get_text()) - 1) * 5)


def test_minutes_of_a_long_iteration_do_not_pile_up() -> None:
    records = _records()
    for record in records[29:]:
        record["elapsed_s"] += 600.0
    (above,) = [axes for axes in draw(records, "").axes if axes.get_xlabel() == "minutes"]
    places = list(above.get_xticks())
    assert len(places) > 2 and all(b - a >= 0.04 * 30 for a, b in zip(places, places[1:], strict=False))


def test_file_is_a_png_and_replaced_whole(tmp_path: Path) -> None:
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "learning_curve.png"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in _records()))
    out.write_bytes(b"old")
    assert learning_curve(metrics, out, "run")
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learning_curve.png", "metrics.jsonl"]


@pytest.mark.parametrize("count", [0, 1])
def test_short_runs_are_drawn(tmp_path: Path, count: int) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in _records(count)))
    assert learning_curve(metrics, tmp_path / "curve.png", "run")


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert not learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "run")
    assert not (tmp_path / "curve.png").exists()


def test_smoothing_keeps_constants_and_damps_noise() -> None:
    assert smoothed([0.4] * 50) == pytest.approx([0.4] * 50)
    noisy = smoothed([0.0, 1.0] * 50)
    assert noisy[0] == 0.0 and max(noisy[20:]) - min(noisy[20:]) < 0.3


@pytest.mark.filterwarnings("error")
def test_names_of_any_script_are_drawn_apart(tmp_path: Path) -> None:
    sources = ["数学", "语文", "$a$ $\\frac$", "x" * 300]
    records = [{"iteration": 1} | {f"val-core/{source}/acc/mean@1": 0.5 for source in sources}]
    figure = draw(records, "$\\frac$ 数学")
    save(figure, tmp_path / "curve.png")
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert len(set(legend)) == 4 and max(map(len, legend)) < 100
    assert drawable("数学") == r"\u6570\u5b66" and drawable("a$b") == r"a\$b"


def test_a_supervised_run_shows_its_losses() -> None:
    records: list[dict[str, Any]] = [
        {"iteration": step, "elapsed_s": 2.0 * step, "loss": 3.0 / step, "grad_norm": 1.0, "lr": 1e-3 / step}
        for step in range(1, 9)
    ]
    records[3]["val_loss"], records[7]["val_loss"] = 1.5, 0.5
    figure = draw(records, "warm")
    assert _line(figure, "loss") == ([*range(1, 9)], pytest.approx([3.0 / step for step in range(1, 9)]))
    assert _line(figure, "val_loss") == ([4, 8], [1.5, 0.5])
    assert _titles(figure) == ["gradient norm", "learning rate"]
    for record in records:
        record["accuracy"] = 0.5
    records[7]["val_accuracy"] = 0.75
    figure = draw(records, "rewards")
    assert _titles(figure) == ["accuracy", "gradient norm", "learning rate"]
    assert _line(figure, "val_accuracy") == ([8], [0.75])
    assert {axes.get_xlabel() for axes in figure.axes} == {"step", "minutes"}


def test_the_gap_has_labels_at_decades_only() -> None:
    records = _records(3)
    for record in records[1:]:
        record[MAX_GAP] = 0.3 + 0.05 * record["iteration"]
    figure = draw(records, "")
    (axes,) = [axes for axes in figure.axes if "gap" in axes.get_title(loc="left")]
    assert axes.get_ylim() == pytest.approx((0.1, 1.0))
    figure.canvas.draw()
    assert not any(label.get_text() for label in axes.yaxis.get_minorticklabels())
    assert [label.get_text() for label in axes.yaxis.get_majorticklabels() if label.get_text()]
