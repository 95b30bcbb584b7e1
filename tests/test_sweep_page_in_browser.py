"""The page of a sweep in a real browser, where one is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_pages import ATTACKS, opened
from made_up_sweeps import made_up_results, make_winner, settings

from rl_training.sweeps.report import page as pages
from rl_training.sweeps.report.page import write_sweep_report
from rl_training.sweeps.results import SweepResults
from rl_training.sweeps.study import Trial

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("optuna")
expect = sync_api.expect
expect.set_options(timeout=20_000)
pytestmark = pytest.mark.browser

TRIALS, PARAMETERS = 60, 6
NOTHING = r"\b(null|undefined|NaN|Infinity)\b|\[object"


def write(results: SweepResults, page: Path) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pages, "read_results", lambda *_: results)
        return write_sweep_report(results.folder, page).as_uri()


def sweep_page(folder: Path, trials: int, parameters: int) -> str:
    """Write the page of a sweep with a winner and messages of attackers."""
    results = made_up_results(folder / "sweep", settings(parameters, trials=trials))
    make_winner(results)
    failed = [trial.number for trial in results.trials if trial.state == "failed"]
    trials_with_attacks = [
        Trial(trial.number, "failed", trial.params, message=ATTACKS[failed.index(trial.number)])
        if trial.number in failed[: len(ATTACKS)]
        else trial
        for trial in results.trials
    ]
    shown = SweepResults(results.folder, results.sweep, trials_with_attacks)
    return write(shown, folder / "page.html")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sweep_page(tmp_path_factory.mktemp("sweep"), TRIALS, PARAMETERS)


@pytest.fixture
def shown(browser: Any, address: str) -> Iterator[Any]:
    """The page, opened from its file."""
    watched = opened(browser, address, color_scheme="light")
    yield watched.page
    watched.check()
    assert watched.requests == [address]
    watched.page.context.close()


def chart(page: Any, kind: str, place: int | None = None) -> Any:
    """A chart in view; charts are drawn when they come near the window."""
    which = "" if place is None else f'[data-parameter="{place}"]'
    found = page.locator(f'.card [data-chart="{kind}"]{which}')
    found.scroll_into_view_if_needed()
    expect(found.locator("svg, canvas").first).to_be_visible()
    return found


def axis(page: Any, place: int) -> Any:
    return chart(page, "parallel").locator(f'.axis[data-parameter="{place}"]')


def lines_outside(page: Any) -> int:
    return int(page.locator('[data-chart="parallel"] .line.outside').count())


def rows(page: Any) -> Any:
    return page.locator("#trials tbody tr")


def test_every_section_is_there(shown: Any) -> None:
    for section in (
        *("results", "importance", "slices", "parallel", "progress", "curves", "trials"),
        *("failures", "health", "runs", "settings", "provenance", "repeat"),
    ):
        assert shown.locator(f"#{section} h2").count() == 1, section
        text = shown.locator(f"#{section}").inner_text()
        assert not re.search(NOTHING, text), section
    expect(shown.locator("#toolbar")).to_be_hidden()
    expect(shown.locator("#results .answer")).to_contain_text("with fresh seeds it reaches")
    expect(shown.locator("#results")).to_contain_text("optimistic")
    expect(shown.locator("#results .lead")).to_contain_text("This table is exact")
    assert shown.locator("#importance [data-parameter]").count() == PARAMETERS
    assert shown.locator('[data-chart="slice"]').count() == PARAMETERS
    assert rows(shown).count() == TRIALS


def test_texts_of_attackers_are_only_text(shown: Any) -> None:
    assert shown.locator("#failures").get_by_text(ATTACKS[0], exact=True).count() == 1
    assert shown.locator("main img, main script, main iframe, main object").count() == 0
    assert "\u202e" not in shown.content()


@pytest.mark.parametrize("attack", ATTACKS[:3])
def test_names_of_attackers_are_only_text(browser: Any, tmp_path: Path, attack: str) -> None:
    """Names of parameters, choices and environments, which a stranger's sweep file can have."""
    results = made_up_results(tmp_path / "sweep", settings(2))
    real = pages.sweep_json

    def hostile(*arguments: Any) -> Any:
        values = real(*arguments)
        values["task"]["env_id"] = values["folder"] = attack
        for parameter in values["parameters"]:
            parameter["key"] = attack
        values["parameters"][1]["values"] = [attack, *values["parameters"][1]["values"][1:]]
        values["best"]["params"] = [[attack, attack]]
        return values

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pages, "sweep_json", hostile)
        address = write(results, tmp_path / "page.html")
    watched = opened(browser, address)
    page = watched.page
    chart(page, "parallel").hover(position={"x": 300, "y": 150})
    chart(page, "slice", 1).press("ArrowRight")
    expect(page.locator("#tooltip")).to_contain_text(attack)
    assert page.locator("main img, main script, #tooltip img").count() == 0
    watched.check()
    page.context.close()


def test_a_slice_is_read_with_the_keyboard_and_marks_its_trial(shown: Any) -> None:
    slice_chart = chart(shown, "slice", 0)
    slice_chart.focus()
    shown.keyboard.press("ArrowRight")
    tooltip = shown.locator("#tooltip")
    expect(tooltip).to_be_visible()
    expect(tooltip).to_contain_text("learning_rate")
    first = tooltip.locator("strong").inner_text()
    shown.keyboard.press("ArrowRight")
    second = tooltip.locator("strong").inner_text()
    assert first != second
    shown.keyboard.press("Enter")
    number = second.removeprefix("Trial ")
    expect(shown.locator(f'#trials tr[data-trial="{number}"]')).to_have_class(re.compile("chosen"))
    chart(shown, "parallel")
    expect(shown.locator(f'#parallel [data-trial="{number}"]')).to_have_class(re.compile("chosen"))
    slice_chart.focus()
    shown.keyboard.press("Escape")
    expect(tooltip).to_be_hidden()
    expect(shown.locator(".chosen")).to_have_count(0)


def test_a_slice_is_read_with_the_pointer(shown: Any) -> None:
    mark = chart(shown, "slice", 0).locator(".mark.top")
    box = mark.bounding_box()
    shown.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(shown.locator("#tooltip")).to_contain_text("rank 1 of")
    shown.mouse.down()
    shown.mouse.up()
    best = mark.get_attribute("data-trial")
    expect(shown.locator(f'#trials tr[data-trial="{best}"]')).to_have_class(re.compile("chosen"))
    shown.mouse.move(5, 5)
    expect(shown.locator("#tooltip")).to_be_hidden()


def test_pruned_and_failed_trials_have_marks_of_their_own(shown: Any) -> None:
    marks = chart(shown, "slice", 0)
    table = shown.locator("#trials .state")
    for state in ("finished", "pruned", "failed"):
        expected = table.filter(has_text=state).count()
        assert expected > 0
        assert marks.locator(f".mark.{state}").count() == expected
        shapes = marks.locator(f".mark.{state}").evaluate_all(
            "all => all.map((each) => each.tagName)"
        )
        assert set(shapes) == {"circle" if state == "finished" else "path"}


def test_an_axis_is_brushed_with_the_keyboard(shown: Any) -> None:
    objective = axis(shown, PARAMETERS)
    objective.focus()
    for _ in range(2):
        shown.keyboard.press("PageUp")
    outside = lines_outside(shown)
    assert 0 < outside < TRIALS
    expect(shown.locator("#brush-count")).to_contain_text(f"of {TRIALS} trials")
    expect(rows(shown)).to_have_count(TRIALS - outside)
    assert " to " in objective.get_attribute("aria-valuetext")
    assert shown.locator("#slices .mark.outside").count() > 0
    shown.keyboard.press("Shift+PageDown")
    assert lines_outside(shown) > outside
    shown.keyboard.press("Escape")
    expect(rows(shown)).to_have_count(TRIALS)
    assert lines_outside(shown) == 0
    assert objective.get_attribute("aria-valuetext") == "everything"
    shown.keyboard.press("ArrowLeft")
    focused = shown.evaluate("document.activeElement.dataset.parameter")
    assert focused == str(PARAMETERS - 1)


def test_an_axis_is_brushed_with_the_pointer_and_cleared(shown: Any) -> None:
    box = axis(shown, 0).locator(".hit").bounding_box()
    middle = box["x"] + box["width"] / 2
    shown.mouse.move(middle, box["y"] + box["height"] * 0.1)
    shown.mouse.down()
    shown.mouse.move(middle, box["y"] + box["height"] * 0.5, steps=6)
    shown.mouse.up()
    outside = lines_outside(shown)
    assert 0 < outside < TRIALS
    expect(rows(shown)).to_have_count(TRIALS - outside)
    assert shown.locator(".chosen").count() == 0  # the drag is no click
    shown.click("#brush-clear")
    expect(rows(shown)).to_have_count(TRIALS)
    expect(shown.locator("#brush-clear")).to_be_hidden()


def test_a_click_on_an_axis_clears_its_brush(shown: Any) -> None:
    axis(shown, 1).press("ArrowUp")
    shown.keyboard.press("PageUp")
    expect(shown.locator("#brush-clear")).to_be_visible()
    box = axis(shown, 1).locator(".hit").bounding_box()
    shown.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(shown.locator("#brush-clear")).to_be_hidden()


def test_the_table_is_sorted_by_any_column(shown: Any) -> None:
    def numbers() -> list[int]:
        found = rows(shown).evaluate_all("all => all.map((row) => Number(row.dataset.trial))")
        return [int(each) for each in found]

    best = int(numbers()[0])
    expect(shown.locator("#results .answer")).to_contain_text(f"Trial {best}")
    shown.click('#trials [data-sort="number"]')
    assert numbers() == list(range(TRIALS - 1, -1, -1))
    shown.keyboard.press("Enter")  # the header keeps the focus
    assert numbers() == list(range(TRIALS))
    shown.click('#trials [data-sort="p0"]')
    rates = rows(shown).evaluate_all("all => all.map((row) => Number(row.cells[3].title))")
    assert rates == sorted(rates, reverse=True)
    sizes = rows(shown).evaluate_all(
        "all => all.map((row) => [row.cells[6].innerText, row.cells[6].title])"
    )
    assert all(text == exact for text, exact in sizes)  # integers are never rounded


def test_curves_of_trials_and_of_the_winner_are_read_with_the_keyboard(shown: Any) -> None:
    progress = chart(shown, "progress")
    progress.focus()
    shown.keyboard.press("End")
    expect(shown.locator("#tooltip")).to_contain_text("the best")
    winner = chart(shown, "curve")
    winner.focus()
    shown.keyboard.press("End")
    expect(shown.locator("#tooltip")).to_contain_text("2 seeds")
    expect(shown.locator("#curves h2")).to_have_text(
        "The winner's learning curves with fresh seeds"
    )
    shown.click("#axis-time")
    expect(shown.locator("#curves h2")).to_have_text(
        "The winner's learning curves with fresh seeds"
    )


def test_the_theme_changes_the_marks(shown: Any) -> None:
    mark = chart(shown, "slice", 0).locator(".mark.top")
    light = mark.evaluate("each => getComputedStyle(each).fill")
    shown.click("#theme")
    dark = chart(shown, "slice", 0).locator(".mark.top")
    assert dark.evaluate("each => getComputedStyle(each).fill") != light


def test_the_page_prints(shown: Any) -> None:
    pdf = shown.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 20
    assert shown.locator(".trial-chart svg").count() == PARAMETERS + 1  # all are drawn


@pytest.mark.parametrize(("trials", "parameters"), [(60, 6), (3, 1)])
@pytest.mark.parametrize("width", [380, 800])
def test_small_windows_need_no_scrolling_sideways(
    browser: Any, tmp_path: Path, width: int, trials: int, parameters: int
) -> None:
    watched = opened(browser, sweep_page(tmp_path, trials, parameters))
    watched.page.set_viewport_size({"width": width, "height": 700})
    chart(watched.page, "slice", 0)
    chart(watched.page, "parallel")
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    watched.check()
    watched.page.context.close()


def test_a_sweep_that_has_only_begun_has_a_page(browser: Any, tmp_path: Path) -> None:
    full = made_up_results(tmp_path / "sweep", settings(3))
    queued = [Trial(trial.number, "queued", trial.params) for trial in full.trials]
    results = SweepResults(full.folder, full.sweep, queued)
    watched = opened(browser, write(results, tmp_path / "page.html"))
    page = watched.page
    expect(page.locator("#results")).to_contain_text("No trial has finished yet")
    expect(page.locator("#notes")).to_contain_text("The sweep goes on")
    assert rows(page).count() == 12
    assert not re.search(NOTHING, page.locator("main").inner_text())
    for empty in ("slices", "parallel", "progress", "curves", "failures", "runs"):
        assert page.locator(f"#{empty}").inner_text() == ""
    watched.check()
    page.context.close()


def test_a_thousand_trials_can_be_opened_and_brushed(browser: Any, tmp_path: Path) -> None:
    results = made_up_results(tmp_path / "sweep", settings(6, trials=1_000), reports=20)
    watched = opened(browser, write(results, tmp_path / "page.html"))
    page = watched.page
    assert rows(page).count() == 1_000
    axis(page, 0).press("PageUp")
    expect(page.locator("#brush-count")).to_contain_text("of 1,000 trials")
    watched.check()
    page.context.close()
