/* Part 8: filters, legend, theme, printing, and the start. */

const SECTIONS = [
  ["results", "Final scores", drawResults], ["curves", "Learning curves", drawCurves],
  ["improvement", "Probability of improvement", drawImprovement],
  ["profiles", "Performance profiles", drawProfiles], ["health", "Health", drawHealth],
  ["time", "Where time goes", drawTime], ["videos", "Videos", drawVideos],
  ["runs", "Runs", drawRuns], ["settings", "Settings", drawSettings],
  ["provenance", "Provenance", drawProvenance],
];

function drawPage() {
  for (const [, , draw] of SECTIONS) draw();
  byId("sections").replaceChildren(...SECTIONS
    .filter(([id]) => byId(id).childElementCount > 0)
    .map(([id, name]) => element("a", { href: `#${id}` }, name)));
  const shown = shownRuns().length;
  const all = state.data.runs.length;
  byId("filter-count").textContent = shown === all ? "" : `${integer(shown)} of ${plural(all, "run")}`;
  byId("filter-clear").hidden = state.task === "" && state.algorithm === "" && state.text === "";
}

function drawHeader() {
  const { data } = state;
  document.title = data.title;
  byId("title").textContent = data.title;
  const algorithms = [...new Set(data.methods.map((method) => method.algorithm))];
  byId("subtitle").textContent = data.subtitle ?? [plural(data.runs.length, "run"), plural(algorithms.length, "algorithm"),
    plural(data.tasks.length, "task"), `${"control" in data ? "changed" : "made"} ${data.created}`].join(" · ");
  byId("footer").textContent = `Made by rl_training ${data.version}. This page loads nothing from outside. `
    + "Charts are drawn with uPlot (MIT license).";
  byId("notes").replaceChildren(...(data.notes.length ? [element("details", { class: "note", open: data.notes.length < 4 },
    element("summary", {}, plural(data.notes.length, "note")),
    element("ul", {}, data.notes.map((note) => element("li", {}, note))))] : []));
  fillChoice("filter-task", "All tasks", data.tasks.map((task) => task.name), state.task);
  fillChoice("filter-algorithm", "All algorithms", algorithms, state.algorithm);
}

function fillChoice(id, all, names, chosen) {
  byId(id).replaceChildren(element("option", { value: "" }, all),
    ...names.map((name) => element("option", { value: name, selected: name === chosen }, name)));
}

function drawLegend() {
  const { data } = state;
  const used = [...new Set(data.groups.map((group) => group.method))].sort((first, second) => first - second);
  const chips = used.map((method) => chip(label(method), methodSwatch(method), state.hidden, { "data-method": label(method) }, used.map(label)));
  const names = publishedNames();
  if (names.length) {
    chips.push(element("span", { class: "kind" }, "Published:"));
    for (const name of names) {
      chips.push(chip(name, swatch("var(--published)", publishedDash(name), 1.6), state.hiddenPublished, { "data-published": name }, names));
    }
  }
  byId("legend").replaceChildren(...chips);
}

function chip(name, mark, hidden, attributes, all) {
  const button = element("button", {
    type: "button", class: "chip", "aria-pressed": String(!hidden.has(name)),
    title: "Show or hide. Double-click: show only this one.", ...attributes,
  }, mark, name);
  const toggle = (change) => {
    change();
    drawLegend();
    redrawCharts();
    if ("data-published" in attributes) drawResults();
    [...byId("legend").children].find((each) => Object.keys(attributes).every(
      (key) => each.getAttribute(key) === name))?.focus();
  };
  button.addEventListener("click", (event) => toggle(() => {
    if (event.detail === 2) { // the second click of a double-click
      for (const each of all) hidden.add(each);
      hidden.delete(name);
    } else if (hidden.has(name)) hidden.delete(name);
    else hidden.add(name);
    if (all.every((each) => hidden.has(each)) && event.detail === 2) hidden.clear();
  }));
  return button;
}

function connectFilters() {
  byId("filter-task").addEventListener("change", (event) => { state.task = event.target.value; drawPage(); });
  byId("filter-algorithm").addEventListener("change", (event) => { state.algorithm = event.target.value; drawPage(); });
  let timer = 0;
  byId("filter-text").addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => { state.text = event.target.value.trim(); drawPage(); }, 120);
  });
  byId("filter-clear").addEventListener("click", () => {
    Object.assign(state, { task: "", algorithm: "", text: "" });
    byId("filter-text").value = "";
    drawHeader();
    drawPage();
    byId("filter-text").focus();
  });
}

/* Theme: the system's, until the button chooses another one. */

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
  if (state.data) redrawCharts();
}

function connectTheme() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const current = () => chosen ?? (system.matches ? "dark" : "light");
  byId("theme").addEventListener("click", () => {
    chosen = current() === "dark" ? "light" : "dark";
    setTheme(chosen);
  });
  system.addEventListener("change", () => setTheme(current()));
  window.addEventListener("beforeprint", () => { // ink on paper
    drawAll();
    setTheme("light");
    for (const chart of charts.values()) chart.resize();
  });
  window.addEventListener("afterprint", () => setTheme(current()));
  byId("print").addEventListener("click", () => window.print());
  setTheme(current());
}

/** Show data; what the user chose, opened and zoomed stays. */
function show(data) {
  data.groups.forEach((group, index) => { group.index = index; });
  state.data = data;
  if (!data.tasks.some((task) => task.name === state.task)) state.task = "";
  if (!data.methods.some((method) => method.algorithm === state.algorithm)) state.algorithm = "";
  const focused = document.activeElement?.id;
  drawHeader();
  drawLegend();
  drawPage();
  if (focused && byId(focused) !== document.activeElement) byId(focused)?.focus({ preventScroll: true });
  document.dispatchEvent(new CustomEvent("rl-training:shown", { detail: data }));
}

/** Called after all parts; the dashboard's part gets the data from its server. */
function start() {
  connectTheme();
  connectFilters();
  const embedded = JSON.parse(byId("data").textContent);
  if (embedded.live) startLive();
  else if (embedded.sweep) startSweep(embedded);
  else show(embedded);
}
