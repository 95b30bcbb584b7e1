/* Part 4: learning curves over steps or training time, one chart per task. */

function drawCurves() {
  const section = byId("curves");
  removeCharts(section);
  const tasks = shownTasks();
  if (tasks.length === 0) {
    section.replaceChildren();
    return;
  }
  const timed = state.data.groups.some((group) => group.time);
  const usesTime = state.axis === "time" && timed;
  const axisButton = (axis, text, usable) => element("button", {
    type: "button", id: `axis-${axis}`, "aria-pressed": String((axis === "time") === usesTime),
    disabled: !usable, title: usable ? null : "These runs did not record their training time.",
    onclick: () => { state.axis = axis; zooms.clear(); drawCurves(); byId(`axis-${axis}`).focus(); },
  }, text);
  const untimed = usesTime ? shownGroups().filter((group) => !group.time).length : 0;
  section.replaceChildren(...present([
    element("div", { class: "bar" },
      element("div", {}, ...heading("curves", "Learning curves")),
      element("div", { class: "controls" },
        checkbox("show-seeds", "Seeds", state.seeds, (on) => { state.seeds = on; redrawCharts(); }),
        state.data.published.length
          ? checkbox("show-published", "Published", state.published, (on) => {
            state.published = on;
            redrawCharts();
            drawResults();
          }) : null,
        element("div", { class: "switch", role: "group", "aria-label": "Horizontal axis" },
          axisButton("steps", "Steps", true), axisButton("time", "Training time", timed)))),
    element("p", { class: "lead" },
      "Line: IQM over seeds; band: 95 % bootstrap interval; faint lines: seeds. ",
      state.data.published.length ? "Gray: published means, the band is one standard deviation over seeds. " : "",
      "Drag to zoom, double-click to show everything; with the keyboard: Tab, arrow keys, + and −."),
    untimed ? element("p", { class: "note" },
      `${plural(untimed, "group")} did not record training time and cannot be drawn over it.`) : null,
    element("div", { class: tasks.length === 1 ? "grid single" : "grid" },
      tasks.map((task) => curveCard(task, usesTime))),
  ]));
}

function checkbox(id, text, on, change) {
  const input = element("input", { type: "checkbox", id, onchange: () => change(input.checked) });
  input.checked = on;
  return element("label", {}, input, text);
}

function curveCard(task, usesTime) {
  return chartCard(taskName(task), null, {
    key: `curve ${taskName(task)}`,
    layers: () => curveLayers(task, usesTime),
    xLabel: usesTime ? "training time" : state.data.tasks[task].unit,
    xValues: usesTime ? duration : short,
    yLabel: "mean evaluation return",
    cursorLabel: usesTime ? (at) => `after ${duration(at)}` : (at) => `step ${integer(at)}`,
    labels: true,
    height: state.data.tasks.length === 1 ? 400 : 310,
    empty: usesTime ? "No training time was recorded." : "No evaluations to draw.",
  }, { "data-chart": "curve", "data-task": taskName(task) });
}

const FEW_BANDS = 2;

/** The name of a method without its config and punctuation, which publications write differently. */
const methodName = (name) => name.toLowerCase().split("/")[0].replace(/[^a-z0-9]/g, "");

function curveLayers(task, usesTime) {
  const published = usesTime ? [] : shownPublished(task);
  const own = new Set(state.data.methods.map((method) => methodName(method.algorithm)));
  const layers = published.map((curve) => ({
    label: `${curve.method}, published`,
    name: curve.method,
    kind: "published",
    x: curve.steps,
    y: curve.mean,
    // Many gray bands hide each other: those of the page's own algorithms are drawn, others alone.
    low: published.length > FEW_BANDS && !own.has(methodName(curve.method))
      ? null : curve.mean.map((value, index) => value - curve.deviation[index]),
    high: curve.mean.map((value, index) => value + curve.deviation[index]),
    faint: [],
    color: () => css("--published"),
    dash: publishedDash(curve.method),
    note: (index) => `± ${score(curve.deviation[index])}, ${curve.seeds} seeds`,
  }));
  for (const group of shownGroups()) {
    const curve = usesTime ? group.time : group.curve;
    if (group.task !== task || !isDrawn(group.method) || !curve) continue;
    layers.push({
      label: label(group.method),
      kind: "group",
      x: axisValues(curve.x),
      y: curve.center,
      low: curve.low,
      high: curve.high,
      faint: state.seeds && group.runs.length > 1 ? group.runs.map((index) => seedLine(index, usesTime)) : [],
      color: () => methodColor(group.method),
      dash: methodDash(group.method),
      note: (index) => (curve.low
        ? `${interval(curve.low[index], curve.high[index])}, ${plural(curve.seeds, "seed")}`
        : plural(curve.seeds, "seed")),
    });
  }
  return layers;
}

function seedLine(index, usesTime) {
  const run = state.data.runs[index];
  return { x: usesTime ? run.seconds ?? [] : axisValues(run.x), y: run.returns };
}
