/* Part 5: probability of improvement and performance profiles, where there are several methods. */

function drawImprovement() {
  const section = byId("improvement");
  const tables = state.data.improvement.filter(shownComparison).filter((table) => shownMethods(table.methods).length > 1);
  if (tables.length === 0) {
    section.replaceChildren();
    return;
  }
  section.replaceChildren(
    ...heading("improvement", "Probability of improvement",
      "How often a random seed of the method in the row scores higher than one of the method in the "
      + "column. Below each value: its 95 % interval. An interval that contains 0.50 shows no difference."),
    element("div", { class: tables[0].methods.length > 4 ? "grid" : "grid small" }, tables.map(improvementCard)));
}

function shownComparison(table) {
  if (table.task === null) return state.task === "" && state.text === "";
  return shownTasks().includes(table.task);
}

function shownMethods(methods) {
  return methods.filter((method) => state.algorithm === "" || state.data.methods[method].algorithm === state.algorithm);
}

function comparisonTitle(table) {
  return table.task === null ? `Over ${table.tasks} tasks` : taskName(table.task);
}

function improvementCard(table) {
  const methods = shownMethods(table.methods);
  const found = new Map(table.pairs.map(([first, second, ...values]) => [`${first} ${second}`, values]));
  return element("div", { class: "card", "data-task": table.task === null ? "all" : taskName(table.task) },
    element("header", {}, element("h3", {}, comparisonTitle(table))),
    element("div", { class: "scroll" }, element("table", { class: "matrix" },
      element("thead", {}, element("tr", {}, element("td", { class: "self" }, "row > column"),
        methods.map((method) => element("th", { scope: "col" }, label(method))))),
      element("tbody", {}, methods.map((first) => element("tr", {},
        element("th", { scope: "row" }, label(first)),
        methods.map((second) => improvementCell(first === second ? null : found.get(`${first} ${second}`)))))))));
}

function improvementCell(values) {
  if (!values) return element("td", { class: "self" }, "–");
  const [chance, low, high] = values;
  if (!isNumber(chance)) return element("td", { class: "self" }, "–");
  const strength = Math.min(1, Math.abs(chance - 0.5) * 2);
  const color = chance >= 0.5 ? "--better" : "--worse";
  return element("td", { style: { background: `rgb(var(${color}) / ${Math.round(strength * 45)}%)` } },
    chance.toFixed(2), element("small", {}, isNumber(low) ? `${low.toFixed(2)} to ${high.toFixed(2)}` : ""));
}

function drawProfiles() {
  const section = byId("profiles");
  removeCharts(section);
  const tables = state.data.profiles.filter(shownComparison)
    .filter((table) => shownMethods(table.curves.map((curve) => curve.method)).length > 1);
  if (tables.length === 0) {
    section.replaceChildren();
    return;
  }
  section.replaceChildren(
    ...heading("profiles", "Performance profiles",
      "The share of runs that score higher than a threshold. A curve that is above another one "
      + "everywhere is better. Bands: 95 % bootstrap intervals."),
    element("div", { class: tables.length === 1 ? "grid single" : "grid" }, tables.map(profileCard)));
}

function profileCard(table) {
  const name = table.task === null ? "all" : taskName(table.task);
  return chartCard(comparisonTitle(table), null, {
    key: `profile ${name}`,
    layers: () => table.curves
      .filter((curve) => isDrawn(curve.method) && shownMethods([curve.method]).length > 0)
      .map((curve) => ({
        label: label(curve.method),
        kind: "group",
        x: table.thresholds,
        y: curve.share,
        low: curve.low,
        high: curve.high,
        faint: [],
        color: () => methodColor(curve.method),
        dash: methodDash(curve.method),
        note: (index) => `${percent(curve.low[index])} to ${percent(curve.high[index])}`,
      })),
    stepped: true,
    xRange: [table.thresholds[0], table.thresholds[table.thresholds.length - 1]],
    yRange: [-0.02, 1.02],
    xLabel: table.unit,
    yLabel: "share of runs above",
    yValues: percent,
    showValue: percent,
    cursorLabel: (at) => `above ${score(at)}`,
    height: 270,
  }, { "data-chart": "profile", "data-task": name });
}
