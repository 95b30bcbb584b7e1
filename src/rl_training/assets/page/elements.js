/* The report's script, part 1 of 8: elements, numbers, colors and the state that all parts share.
 *
 * The parts are joined in this order into one script: elements, charts, results, curves,
 * comparison, health, runs, page; the dashboard adds live, and a sweep adds sweep, trials and
 * parallel. There is no build step and no framework.
 *
 * Ids and attributes that stay the same (tests and styles use them):
 *   #results #curves #improvement #profiles #health #time #videos #runs #settings #provenance
 *     the sections; one that has nothing to show is empty
 *   #filter-task #filter-algorithm #filter-text #filter-clear #filter-count   the filters
 *   #legend button[data-method]       shows or hides a method (aria-pressed)
 *   #legend button[data-published]    shows or hides a published method
 *   #axis-steps #axis-time            the horizontal axis of the curves (aria-pressed)
 *   #show-seeds #show-published       checkboxes above the curves
 *   #theme #print #tooltip #live      theme, print, values under the cursor, state of the connection
 *   [data-chart="curve|profile|health"][data-task]   a chart; it has the focus for keys
 *   [data-task] [data-group] [data-run]              cards and rows of a task, a group, a run
 *   button[data-copy]                 copies the command beside it
 *
 * Text from runs reaches the page through textContent and setAttribute of fixed attributes only.
 */

const SVG = "http://www.w3.org/2000/svg";
const DASHES = [[], [9, 4], [3, 3], [11, 3, 2, 3], [6, 2], [14, 5], [2, 2, 6, 2], [1, 3]];
const COLORS = 8;
const PUBLISHED_DASHES = [[2, 4], [5, 5], [1, 3], [8, 4, 2, 4], [3, 6], [10, 6]];

const state = {
  data: null,
  axis: "steps",
  task: "",
  algorithm: "",
  text: "",
  hidden: new Set(), // labels of methods
  hiddenPublished: new Set(), // names of published methods
  seeds: true,
  published: true,
  healthTask: null,
  sort: { key: "name", down: false },
  open: new Set(), // names of runs whose details are open
  enlarged: new Set(), // keys of charts
};

/** Create an element. Strings become text; no string is ever parsed as HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  setAll(made, attributes);
  made.append(...present(children));
  return made;
}

/** Children without those that are left out. */
function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined);
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  setAll(made, attributes);
  made.append(...children);
  return made;
}

function setAll(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick" || name === "onchange" || name === "oninput") {
      made.addEventListener(name.slice(2), value);
    } else if (name === "style") {
      for (const [property, text] of Object.entries(value)) made.style.setProperty(property, text);
    } else {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
}

function byId(id) {
  return document.getElementById(id);
}

/** The heading of a section, with the name that the page has for it. */
function heading(section, text, lead) {
  const name = state.data?.headings?.[section] ?? text;
  const parts = [element("h2", { id: `${section}-heading` }, name)];
  if (lead) parts.push(element("p", { class: "lead" }, lead));
  return parts;
}

/* Numbers */

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A score: as many digits as are worth reading. */
function score(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 3;
  return minus(value.toLocaleString("en-US", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  }));
}

function minus(text) {
  return text.replace("-", "\u2212");
}

function interval(low, high) {
  return isNumber(low) && isNumber(high) ? `${score(low)} to ${score(high)}` : "–";
}

function integer(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US") : "–";
}

function short(value) {
  const size = Math.abs(value);
  if (size < 10000 && Number.isInteger(value)) return minus(value.toLocaleString("en-US"));
  for (const [unit, letter] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return minus(`${trim(value / unit)}${letter}`);
  }
  return minus(trim(value));
}

function trim(value) {
  return String(Number(value.toPrecision(4)));
}

function percent(value) {
  return isNumber(value) ? `${Math.round(100 * value)} %` : "–";
}

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 90) return `${trim(Number(seconds.toPrecision(3)))} s`;
  if (seconds < 5400) return `${trim(Number((seconds / 60).toPrecision(3)))} min`;
  if (seconds < 172800) return `${trim(Number((seconds / 3600).toPrecision(3)))} h`;
  return `${trim(Number((seconds / 86400).toPrecision(3)))} d`;
}

function plural(count, word) {
  return `${integer(count)} ${word}${count === 1 ? "" : "s"}`;
}

function bounds(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!isNumber(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

/** Round values between two ends, about `count` of them. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((each) => each * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}

/* Colors and marks */

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function methodColor(method) {
  return css(`--m${method % COLORS}`);
}

function methodDash(method) {
  // The second round through the colors begins with another dash.
  return DASHES[(method + Math.floor(method / COLORS)) % DASHES.length];
}

function faded(color, alpha) {
  const number = parseInt(color.slice(1), 16);
  return `rgba(${number >> 16}, ${(number >> 8) & 255}, ${number & 255}, ${alpha})`;
}

/** A short line in the color and the dash pattern of a method. */
function swatch(color, dash, width = 2.5) {
  const line = svg("line", {
    x1: 1, x2: 25, y1: 6, y2: 6, "stroke-width": width, "stroke-dasharray": dash.join(" ") || null,
  });
  line.style.stroke = color;
  return svg("svg", { class: "swatch", width: 26, height: 12, "aria-hidden": "true" }, line);
}

function methodSwatch(method) {
  return swatch(`var(--m${method % COLORS})`, methodDash(method));
}

/* Published methods */

function publishedNames() {
  return [...new Set(state.data.published.map((curve) => curve.method))];
}

function publishedDash(name) {
  return PUBLISHED_DASHES[Math.max(0, publishedNames().indexOf(name)) % PUBLISHED_DASHES.length];
}

function shownPublished(task) {
  return state.data.published.filter(
    (curve) => curve.task === task && state.published && !state.hiddenPublished.has(curve.method),
  );
}

/* What the filters leave */

function label(method) {
  return state.data.methods[method].label;
}

function taskName(task) {
  return state.data.tasks[task].name;
}

function runText(run) {
  if (run.searched === undefined) {
    const group = state.data.groups[run.group];
    const words = [run.name, run.path, run.state, `seed ${run.seed}`];
    if (group) {
      words.push(label(group.method), taskName(group.task));
      for (const [key, , value] of group.settings.changes) words.push(`${key}=${value}`);
    }
    run.searched = words.join("\n").toLowerCase();
  }
  return run.searched;
}

function passesText(run) {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  return words.every((word) => runText(run).includes(word));
}

function passesChoice(group) {
  if (!group) return state.task === "" && state.algorithm === "";
  return (state.task === "" || taskName(group.task) === state.task)
    && (state.algorithm === "" || state.data.methods[group.method].algorithm === state.algorithm);
}

function shownRuns() {
  return state.data.runs.filter(
    (run) => passesChoice(state.data.groups[run.group]) && passesText(run),
  );
}

/** Groups that pass the filters; the legend hides lines, but no rows of tables. */
function shownGroups() {
  return state.data.groups.filter(
    (group) => passesChoice(group) && group.runs.some((run) => passesText(state.data.runs[run])),
  );
}

function shownTasks() {
  const tasks = new Set(shownGroups().map((group) => group.task));
  return state.data.tasks.map((_, index) => index).filter((index) => tasks.has(index));
}

function isDrawn(method) {
  return !state.hidden.has(label(method));
}

function axisValues(index) {
  return state.data.axes[index];
}
