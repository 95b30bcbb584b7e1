/* Part 6: health of the learned networks, where time goes, and videos. */

const HEALTH = [
  ["q_minus_return", "Q minus return", "Mean of Q(s, π(s)) minus the discounted return that followed. Above zero: the critic overestimates."],
  ["q_mean", "Q, mean", "Mean of Q(s, π(s)) over the states of an evaluation."],
  ["return_mean", "Discounted return, mean", "Mean discounted return from the same states."],
  ["entropy", "Policy entropy", "It falls as the policy gets more certain. Far below its target, the policy explores too little."],
  ["action_saturation", "Action saturation", "Share of action components at a bound (above 0.99 of it)."],
  ["gradient_norm_actor", "Gradient norm, actor", "Of one batch, before clipping."],
  ["gradient_norm_critic", "Gradient norm, critic", "Of one batch, before clipping."],
  ["weight_norm_actor", "Weight norm, actor", "Steady growth makes later updates smaller in effect."],
  ["weight_norm_critic", "Weight norm, critic", "Steady growth makes later updates smaller in effect."],
  ["dead_units_actor", "Dead units, actor", "Share of hidden units without effect on a batch of observations."],
  ["dead_units_critic", "Dead units, critic", "Share of hidden units without effect on a batch of observations."],
];
const SHARES = new Set(["action_saturation", "dead_units_actor", "dead_units_critic"]);
/** Name, title, and the number of the color. */
const PHASES = [
  ["environments", "Environments", 0], ["acting", "Acting", 1], ["sampling", "Sampling", 2],
  ["update", "Update", 3], ["compilation", "Compilation", 7], ["evaluation", "Evaluation", 4],
  ["health", "Health", 8], ["saving", "Saving", 5], ["other", "Other", 6],
];

function drawHealth() {
  const section = byId("health");
  removeCharts(section);
  const groups = shownGroups().filter((group) => group.health);
  const tasks = [...new Set(groups.map((group) => group.task))].sort((first, second) => first - second);
  if (tasks.length === 0) {
    section.replaceChildren();
    return;
  }
  if (!tasks.some((task) => taskName(task) === state.healthTask)) state.healthTask = taskName(tasks[0]);
  const task = tasks.find((each) => taskName(each) === state.healthTask);
  const shown = groups.filter((group) => group.task === task);
  const known = new Map(HEALTH.map(([name, title, about]) => [name, [title, about]]));
  const names = HEALTH.map(([name]) => name);
  for (const group of shown) for (const metric of group.health.metrics) {
    if (!known.has(metric.name)) {
      known.set(metric.name, [metric.name.replaceAll("_", " "), ""]);
      names.push(metric.name);
    }
  }
  const present = names.filter((name) => shown.some((group) => healthMetric(group, name)));
  const choice = element("select", { id: "health-task", onchange: () => { state.healthTask = choice.value; drawHealth(); byId("health-task").focus(); } },
    tasks.map((each) => element("option", { value: taskName(each), selected: each === task }, taskName(each))));
  section.replaceChildren(
    element("div", { class: "bar" },
      element("div", {}, ...heading("health", "Health")),
      tasks.length > 1 ? element("div", { class: "controls" }, element("label", {}, "Task", choice)) : ""),
    element("p", { class: "lead" },
      tasks.length > 1 ? element("b", {}, taskName(task)) : "", tasks.length > 1 ? ". " : "",
      "Computed at evaluations. Line: mean over seeds; band: smallest and largest value of a seed."),
    element("div", { class: "grid small" }, present.map((name) => healthCard(task, shown, name, ...known.get(name)))));
}

function healthMetric(group, name) {
  return group.health.metrics.find((metric) => metric.name === name);
}

function healthCard(task, groups, name, title, about) {
  const isShare = SHARES.has(name);
  return chartCard(title, about, {
    key: `health ${taskName(task)} ${name}`,
    layers: () => groups.filter((group) => isDrawn(group.method) && healthMetric(group, name)).map((group) => {
      const metric = healthMetric(group, name);
      return {
        label: label(group.method),
        kind: "group",
        x: axisValues(group.health.x),
        y: metric.center,
        low: metric.low,
        high: metric.high,
        faint: [],
        color: () => methodColor(group.method),
        dash: methodDash(group.method),
        note: (index) => (!metric.low ? "" : isShare
          ? `${percent(metric.low[index])} to ${percent(metric.high[index])}`
          : interval(metric.low[index], metric.high[index])),
      };
    }),
    xLabel: state.data.tasks[task].unit,
    yLabel: null,
    yLimits: isShare ? [0, 1] : undefined,
    yValues: isShare ? (value) => `${trim(Number((100 * value).toPrecision(3)))} %` : short,
    showValue: isShare ? (value) => `${trim(Number((100 * value).toPrecision(2)))} %` : score,
    cursorLabel: (at) => `step ${integer(at)}`,
    height: 210,
  }, { "data-chart": "health", "data-task": taskName(task), "data-metric": name });
}

function drawTime() {
  const section = byId("time");
  const groups = shownGroups().filter((group) => group.phases);
  if (groups.length === 0) {
    section.replaceChildren();
    return;
  }
  const used = PHASES.map(([name, title, color]) => ({ name, title, color }))
    .filter(({ name }) => groups.some((group) => group.phases.seconds.some(([phase, time]) => phase === name && time > 0)));
  section.replaceChildren(
    ...heading("time", "Where time goes", "Mean over the runs of a group, from start to now, without the time in which no process ran."),
    element("div", { class: "keys" }, used.map(({ title, color }) => element("span", {},
      element("i", { style: { background: `var(--p${color})` } }), title))),
    element("div", { class: "card scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, header("Task"), header("Algorithm"), header("Time", true), header("Steps/s", true), header("Share of time"))),
      element("tbody", {}, groups.map((group) => timeRow(group, used))))));
}

function timeRow(group, used) {
  const { phases } = group;
  const seconds = new Map(phases.seconds);
  return element("tr", { "data-group": group.index },
    element("td", {}, taskName(group.task)),
    element("td", {}, methodSwatch(group.method), ` ${label(group.method)}`),
    element("td", { class: "number" }, duration(phases.total)),
    element("td", { class: "number" }, isNumber(phases.speed) ? integer(phases.speed) : "–"),
    element("td", { style: { width: "55%" } }, element("div", { class: "stack" }, used.map(({ name, title, color }) => {
      const share = (seconds.get(name) ?? 0) / phases.total;
      return share > 0 ? element("span", {
        class: color === 0 || color === 3 ? "dark-text" : null,
        style: { width: `${100 * share}%`, background: `var(--p${color})` },
        title: `${title}: ${percent(share)}, ${duration(seconds.get(name))}`,
      }, share > 0.07 ? percent(share) : "") : null;
    }))));
}

/** Links lead to files beside the page; anything else is not a link. */
function safeLink(href) {
  return typeof href === "string" && /^(\.\.?\/|videos\/)/.test(href) && !href.includes("\\") ? href : null;
}

function drawVideos() {
  const section = byId("videos");
  const runs = shownRuns().filter((run) => run.videos.length > 0);
  if (runs.length === 0) {
    section.replaceChildren();
    return;
  }
  section.replaceChildren(
    ...heading("videos", "Videos", "The newest evaluation of a run: its best and its worst episode. The files are beside this page, in the run folders."),
    element("div", { class: "grid small" }, runs.slice(0, 60).map(videoCard)));
}

function videoCard(run) {
  const newest = Math.max(...run.videos.map((video) => video.step));
  const link = (video) => element("a", { href: safeLink(video.href) }, `${video.kind}, step ${integer(video.step)}`);
  return element("div", { class: "card video", "data-run": run.name },
    element("header", {}, element("h3", {}, runTitle(run))),
    run.videos.filter((video) => video.step === newest && safeLink(video.href)).map((video) => element("div", {},
      element("video", { src: safeLink(video.href), controls: true, preload: "metadata", muted: true, "aria-label": `${video.kind} episode of ${runTitle(run)}` }),
      element("p", { class: "about" }, link(video)))),
    element("div", { class: "links" }, run.videos.filter((video) => video.step !== newest).map(link)));
}
