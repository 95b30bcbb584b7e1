"""The report and the dashboard in a real browser, where one is installed."""

from __future__ import annotations

import fcntl
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_pages import ATTACKS, opened
from made_up_runs import dashboard_command, evaluation_row, write_run

from rl_training.report.page import write_report

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=20_000)
pytestmark = pytest.mark.browser

ALGORITHMS, TASKS = {"sac": 2800.0, "td3": 2400.0, "tqc": 3100.0}, ("Hopper-v5", "Walker2d-v5")
LONG_NAME = 5 * ATTACKS[0]
"""Name of a task"""


def make_runs(root: Path) -> Path:
    for algorithm, level in ALGORITHMS.items():
        for task in TASKS:
            for seed in range(2):
                write_run(
                    root / f"{algorithm}__{task}__seed{seed}",
                    algorithm=algorithm,
                    environment=task,
                    seed=seed,
                    rows=60,
                    level=level,
                )
    return root


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    root = make_runs(folder / "runs")
    for number, name in enumerate(ATTACKS):
        write_run(root / name, algorithm="ddpg", environment=LONG_NAME, seed=number, rows=20)
    return write_report([root], folder / "report.html").as_uri()


@pytest.fixture
def shown(browser: Any, report: str) -> Iterator[Any]:
    """The report, opened from its file."""
    watched = opened(browser, report, color_scheme="light")
    page = watched.page
    show_curve(page)
    yield page
    watched.check()
    assert watched.requests == [report]
    page.context.close()


def curve(page: Any, task: str = "Hopper-v5") -> Any:
    return page.locator(f'[data-chart="curve"][data-task="{task}"]')


def show_curve(page: Any) -> None:
    """Scroll to a chart; charts are drawn when they come near the window."""
    curve(page).scroll_into_view_if_needed()
    expect(curve(page).locator("canvas")).to_be_visible()


def test_the_report_shows_every_section(shown: Any) -> None:
    for section in ("results", "curves", "improvement", "profiles", "health", "time", "runs"):
        assert shown.locator(f"#{section} h2").count() == 1, section
        text = shown.locator(f"#{section}").inner_text()
        assert not re.search(r"\b(null|undefined|NaN|Infinity)\b|\[object", text), section


def test_names_of_attackers_are_only_text(shown: Any) -> None:
    assert shown.locator("#runs").get_by_text(ATTACKS[0], exact=True).count() >= 1
    assert shown.locator("main img, main script, main iframe, main object").count() == 0
    links = shown.locator("a").evaluate_all("all => all.map((each) => each.protocol)")
    assert set(links) <= {"file:"}
    for details in shown.locator("#provenance details").all()[-len(ATTACKS) :]:
        details.locator("summary").click()
    assert "\u202e" not in shown.content()


def test_filters_leave_what_they_name(shown: Any) -> None:
    shown.select_option("#filter-task", "Walker2d-v5")
    expect(curve(shown)).to_have_count(0)
    expect(curve(shown, "Walker2d-v5")).to_have_count(1)
    shown.select_option("#filter-algorithm", "sac")
    expect(shown.locator("#runs tbody tr")).to_have_count(2)
    shown.fill("#filter-text", "seed1")
    expect(shown.locator("#runs tbody tr")).to_have_count(1)
    expect(shown.locator("#filter-count")).to_contain_text("1 of 18 runs")
    shown.click("#filter-clear")
    expect(curve(shown)).to_have_count(1)
    expect(shown.locator("#runs tbody tr")).to_have_count(18)


def test_the_legend_hides_a_method(shown: Any) -> None:
    chip = shown.locator('#legend button[data-method="td3"]')
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "false")
    assert "td3" not in curve(shown).get_attribute("aria-label")
    shown.keyboard.press("Enter")  # it has the focus
    expect(chip).to_have_attribute("aria-pressed", "true")
    assert "td3" in curve(shown).get_attribute("aria-label")


def test_values_appear_under_the_cursor(shown: Any) -> None:
    box = curve(shown).bounding_box()
    shown.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
    expect(shown.locator("#tooltip")).to_be_visible()
    expect(shown.locator("#tooltip")).to_contain_text("step")
    expect(shown.locator("#tooltip")).to_contain_text("tqc")
    shown.mouse.move(5, 5)
    expect(shown.locator("#tooltip")).to_be_hidden()


def test_dragging_zooms_and_a_button_shows_everything(shown: Any) -> None:
    box = curve(shown).bounding_box()
    card = curve(shown).locator("xpath=..")
    everything = card.get_by_role("button", name="Show all")
    expect(everything).to_be_hidden()
    shown.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 100)
    shown.mouse.down()
    shown.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 100, steps=5)
    shown.mouse.up()
    everything.click()
    expect(everything).to_be_hidden()


def test_charts_work_with_the_keyboard(shown: Any) -> None:
    curve(shown).focus()
    shown.keyboard.press("ArrowRight")
    expect(shown.locator("#tooltip")).to_be_visible()
    first = shown.locator("#tooltip strong").inner_text()
    shown.keyboard.press("End")
    assert shown.locator("#tooltip strong").inner_text() != first
    everything = curve(shown).locator("xpath=..").get_by_role("button", name="Show all")
    shown.keyboard.press("+")
    expect(everything).to_be_visible()
    shown.keyboard.press("0")
    expect(everything).to_be_hidden()
    shown.keyboard.press("Escape")
    expect(shown.locator("#tooltip")).to_be_hidden()


def test_everything_can_be_reached_with_tab(shown: Any) -> None:
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(60):
        shown.keyboard.press("Tab")
        reached.add(shown.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {
        "theme",
        "print",
        "filter-task",
        "filter-text",
        "chip",
        "axis-steps",
        "chart",
    } <= reached


def test_the_axis_can_be_training_time(shown: Any) -> None:
    shown.click("#axis-time")
    expect(shown.locator("#axis-time")).to_have_attribute("aria-pressed", "true")
    curve(shown).focus()
    shown.keyboard.press("End")
    expect(shown.locator("#tooltip strong")).to_contain_text("after")


def test_a_key_works_on_a_chart_that_the_browser_has_not_drawn_yet(shown: Any) -> None:
    shown.evaluate(
        """() => {
          document.querySelector("#axis-time").click();
          const chart = document.querySelector('[data-chart="curve"]');
          chart.focus();
          chart.dispatchEvent(new KeyboardEvent("keydown", { key: "End", bubbles: true }));
        }"""
    )
    expect(shown.locator("#tooltip strong")).to_contain_text("after")


def test_the_theme_follows_the_system_and_the_button(browser: Any, report: str, shown: Any) -> None:
    def background(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = background(shown)
    shown.click("#theme")
    dark = background(shown)
    assert dark != light
    watched = opened(browser, report, color_scheme="dark")
    assert background(watched.page) == dark
    watched.check()
    watched.page.context.close()


def test_the_report_prints(shown: Any) -> None:
    pdf = shown.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 40
    assert (
        shown.locator(".chart canvas").count() == shown.locator(".chart").count()
    )  # all are drawn
    shown.emulate_media(media="print")
    expect(shown.locator("#toolbar .filters")).to_be_hidden()
    expect(shown.locator("#results")).to_be_visible()


@pytest.mark.parametrize("width", [380, 800])
def test_small_windows_need_no_scrolling_sideways(browser: Any, report: str, width: int) -> None:
    watched = opened(browser, report)
    watched.page.set_viewport_size({"width": width, "height": 700})
    show_curve(watched.page)
    expect(watched.page.locator("#health-task")).to_be_attached()
    wide = watched.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    watched.check()
    watched.page.context.close()


def test_settings_do_not_make_another_algorithm(browser: Any, tmp_path: Path) -> None:
    for tau in (0.01, 0.02):
        write_run(tmp_path / "runs" / f"{tau}", rows=20, algo_kwargs={"tau": tau})
    page = write_report([tmp_path / "runs"], tmp_path / "report.html")
    watched = opened(browser, page.as_uri())
    expect(watched.page.locator("#subtitle")).to_contain_text("2 runs · 1 algorithm · 1 task")
    assert watched.page.locator("#legend [data-method]").all_inner_texts() == [
        "sac (tau=0.01)",
        "sac (tau=0.02)",
    ]
    watched.check()
    watched.page.context.close()


# The dashboard


@pytest.fixture(scope="module")
def watched_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("dashboard") / "runs")


@pytest.fixture(scope="module")
def address(watched_root: Path) -> Iterator[str]:
    with dashboard_command(watched_root, "--port", "0", "--allow-control") as (_, printed):
        yield printed


@pytest.fixture
def dashboard(browser: Any, address: str) -> Iterator[Any]:
    watched = opened(browser, address)
    expect(watched.page.locator("#live")).to_have_text("Live")
    yield watched.page
    watched.check()
    server = address.partition("/?")[0]
    assert [request for request in watched.requests if not request.startswith(server)] == []
    watched.page.context.close()


def run_row(page: Any, name: str, section: str = "runs") -> Any:
    return page.locator(f'#{section} tr[data-run="{name}"]')


def test_new_rows_and_runs_appear_and_deleted_runs_go(watched_root: Path, dashboard: Any) -> None:
    run = write_run(watched_root / "new", seed=7, steps=300_000, total=1_000_000, finished=False)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        row = run_row(dashboard, "new", "now")
        expect(row).to_be_visible()
        expect(row).to_contain_text("30 %")
        expect(row).to_contain_text("23.3 min")  # 700,000 steps at 500 per second
        dashboard.fill("#filter-text", "seed 7")
        dashboard.locator('#provenance details[data-run="new"] summary').click()
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 350000, "time/wall_seconds": 700.0}\n')
        expect(row).to_contain_text("35 %")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(evaluation_row(400_000, 1234.0))
        expect(row).to_contain_text("1,234")
        expect(row).to_contain_text("40 %")
        assert dashboard.input_value("#filter-text") == "seed 7"
        expect(dashboard.locator('#provenance details[data-run="new"] pre').first).to_be_visible()
    expect(dashboard.locator("#now")).to_contain_text("No run is training")
    expect(run_row(dashboard, "new")).to_contain_text("stopped")
    shutil.rmtree(run)
    expect(run_row(dashboard, "new")).to_have_count(0)


def test_hostile_runs_do_nothing_to_the_dashboard(watched_root: Path, dashboard: Any) -> None:
    runs = [
        write_run(watched_root / name, algorithm="ddpg", environment=ATTACKS[0], seed=20 + number)
        for number, name in enumerate(ATTACKS)
    ]
    expect(dashboard.locator("#runs tbody tr")).to_have_count(12 + len(ATTACKS))
    assert dashboard.locator("main img, main script, main iframe").count() == 0
    for run in runs:
        shutil.rmtree(run)
    expect(dashboard.locator("#runs tbody tr")).to_have_count(12)


def test_a_run_is_stopped_after_a_question(watched_root: Path, dashboard: Any) -> None:
    lock = watched_root / "sac__Hopper-v5__seed0" / ".lock"
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "file.write(sys.argv[2]); file.flush(); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock), "placeholder"])
    try:
        button = run_row(dashboard, lock.parent.name, "now").get_by_role("button", name="Stop")
        expect(button).to_be_visible()
        lock.write_text(f"{holder.pid} {platform.node()}")
        questions: list[str] = []

        def refuse(dialog: Any) -> None:
            questions.append(dialog.message)
            dialog.dismiss()

        dashboard.once("dialog", refuse)
        button.click()
        assert lock.parent.name in questions[0]
        assert holder.poll() is None
        dashboard.once("dialog", lambda dialog: dialog.accept())
        button.click()
        expect(dashboard.locator("#message")).to_contain_text("was asked to save and stop")
        assert holder.wait(timeout=10) < 0
        expect(run_row(dashboard, lock.parent.name, "now")).to_have_count(0)
    finally:
        holder.kill()
        holder.wait()
        lock.unlink()


def test_the_page_waits_while_a_chart_is_read(watched_root: Path, dashboard: Any) -> None:
    show_curve(dashboard)
    box = curve(dashboard).bounding_box()
    dashboard.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
    expect(dashboard.locator("#tooltip")).to_be_visible()
    with (watched_root / "td3__Hopper-v5__seed0" / "metrics.jsonl").open("a") as file:
        file.write(evaluation_row(1_000_500, 77.0))
    dashboard.wait_for_timeout(4_000)
    expect(dashboard.locator("#tooltip")).to_be_visible()
    dashboard.mouse.move(5, 5)
    expect(run_row(dashboard, "td3__Hopper-v5__seed0")).to_contain_text("77.00")


def test_without_the_token_there_is_only_a_refusal(browser: Any, address: str) -> None:
    watched = opened(browser, address.partition("?")[0])
    assert "403" in watched.page.content()
    assert watched.page.locator("script").count() == 0
    watched.page.context.close()


def test_a_page_says_when_its_server_is_gone(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", rows=10)
    with dashboard_command(tmp_path, "--port", "0") as (process, printed):
        watched = opened(browser, printed)
        expect(watched.page.locator("#live")).to_have_text("Live")
        expect(watched.page.locator("#runs tbody tr")).to_have_count(1)
        assert watched.page.locator("button[data-control]").count() == 0  # not allowed
        process.kill()
        expect(watched.page.locator("#live")).to_have_text("Reconnecting")
        expect(watched.page.locator("#runs tbody tr")).to_have_count(1)
        watched.page.context.close()
