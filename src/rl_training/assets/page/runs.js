/* Part 7: the runs, their settings, where they come from, and commands that repeat them. */

function runTitle(run) {
  const group = state.data.groups[run.group];
  if (!group) return run.name;
  return `${label(group.method)}, ${taskName(group.task)}, seed ${run.seed ?? "?"}`;
}

const RUN_COLUMNS = [
  ["name", "Run", (run) => run.name],
  ["task", "Task", (run) => (state.data.groups[run.group] ? taskName(state.data.groups[run.group].task) : "")],
  ["seed", "Seed", (run) => run.seed, true],
  ["state", "State", (run) => run.state],
  ["step", "Step", (run) => run.step, true],
  ["last", "Last evaluation", (run) => run.last?.value, true],
  ["best", "Best evaluation", (run) => run.best?.value, true],
  ["speed", "Steps/s", (run) => run.speed, true],
];

function drawRuns() {
  const section = byId("runs");
  const runs = sortedRows(shownRuns(), RUN_COLUMNS, state.sort);
  if (runs.length === 0) {
    section.replaceChildren();
    return;
  }
  section.replaceChildren(
    ...heading("runs", "Runs"),
    element("div", { class: "card scroll tall" }, element("table", {},
      element("thead", {}, element("tr", {}, sortHeaders("runs", RUN_COLUMNS, state.sort, drawRuns), state.data.control ? header("") : null)),
      element("tbody", {}, runs.map(runRow)))));
}

/** Rows in the order of a column, [key, name, value(row), isNumeric]; those without a value last. */
function sortedRows(rows, columns, sort) {
  const value = columns.find(([key]) => key === sort.key)[2];
  const direction = sort.down ? -1 : 1;
  return rows.sort((first, second) => {
    const [one, other] = [value(first), value(second)];
    if (one === other) return 0;
    if (one === null || one === undefined) return 1;
    if (other === null || other === undefined) return -1;
    return (one < other ? -1 : 1) * direction;
  });
}

/** Headers that sort the table of a section. */
function sortHeaders(section, columns, sort, redraw) {
  return columns.map(([key, name, , isNumeric]) => {
    const sorted = sort.key === key;
    const order = sorted ? (sort.down ? "descending" : "ascending") : "none";
    const arrow = sorted ? (sort.down ? " ↓" : " ↑") : "";
    return element("th", { scope: "col", "aria-sort": order, class: isNumeric ? "number" : null },
      element("button", { type: "button", class: "sort", "data-sort": key, onclick: () => {
        Object.assign(sort, { key, down: sorted ? !sort.down : Boolean(isNumeric) });
        redraw();
        document.querySelector(`#${section} [data-sort="${key}"]`).focus();
      } }, name + arrow));
  });
}

function runRow(run) {
  const share = run.total ? Math.min(1, (run.step ?? 0) / run.total) : null;
  return element("tr", { "data-run": run.name },
    element("td", { class: "long", title: run.path }, run.name),
    element("td", {}, RUN_COLUMNS[1][2](run)),
    element("td", { class: "number" }, run.seed === null ? "–" : String(run.seed)),
    element("td", { title: run.detail || null },
      element("span", { class: `state ${["running", "finished", "stopped", "unreadable"].includes(run.state) ? run.state : ""}` }, run.state),
      run.problem ? element("div", { class: "about muted" }, run.problem) : null),
    element("td", { class: "number" }, integer(run.step),
      share !== null && share < 1 ? element("div", {}, element("progress", { max: 1, value: share, "aria-label": `${percent(share)} done` })) : null),
    element("td", { class: "number", title: run.last ? `at step ${integer(run.last.step)}: ${run.last.value}` : null }, score(run.last?.value)),
    element("td", { class: "number", title: run.best ? `at step ${integer(run.best.step)}: ${run.best.value}` : null }, score(run.best?.value)),
    element("td", { class: "number" }, isNumber(run.speed) ? integer(run.speed) : "–"),
    state.data.control ? element("td", { class: "number" }, controlButton(run, "runs")) : null);
}

function drawSettings() {
  const section = byId("settings");
  const groups = shownGroups();
  if (groups.length === 0) {
    section.replaceChildren();
    return;
  }
  const parts = heading("settings", "Settings", "What differs between the groups, and from the packaged config of each. Seeds, folders and execution settings are left out.");
  const between = state.data.differences.map((row) => ({ ...row, shown: groups.map((group) => row.values[group.index]) }))
    .filter((row) => new Set(row.shown.filter((value) => value !== null)).size > 1);
  if (between.length > 0) {
    parts.push(element("div", { class: "card" },
      element("header", {}, element("h3", {}, "Between groups")),
      element("div", { class: "scroll" }, element("table", { "data-table": "between" },
        element("thead", {}, element("tr", {}, header("Setting"), groups.map((group) => element("th", { scope: "col" },
          label(group.method), element("div", { class: "muted" }, taskName(group.task)))))),
        element("tbody", {}, between.map((row) => element("tr", {}, element("th", { scope: "row" }, row.key),
          row.shown.map((value) => element("td", { class: "mono value" }, value ?? "–")))))))));
  }
  parts.push(element("div", { class: "grid" }, defaults(groups).map(defaultCard)));
  section.replaceChildren(...parts);
}

/** Groups with the same changes against the same packaged config share a card. */
function defaults(groups) {
  const cards = new Map();
  for (const group of groups) {
    const key = JSON.stringify([group.method, group.settings]);
    if (!cards.has(key)) cards.set(key, []);
    cards.get(key).push(group);
  }
  return [...cards.values()];
}

function defaultCard(groups) {
  const { settings, method } = groups[0];
  return element("div", { class: "card" },
    element("header", {}, element("h3", {}, methodSwatch(method), ` ${label(method)}`)),
    element("p", { class: "about" }, groups.map((group) => taskName(group.task)).join(", ")),
    settings.default === null
      ? element("p", { class: "muted" }, "There is no packaged config for this algorithm.")
      : settings.changes.length === 0
        ? element("p", {}, "As packaged: ", element("code", {}, settings.default))
        : element("div", { class: "scroll" }, element("table", { "data-table": "default" },
          element("thead", {}, element("tr", {}, header("Setting"), header(settings.default), header("These runs"))),
          element("tbody", {}, settings.changes.map(([key, packaged, value]) => element("tr", {},
            element("th", { scope: "row" }, key), element("td", { class: "mono muted value" }, packaged), element("td", { class: "mono value" }, value)))))));
}

function drawProvenance() {
  const section = byId("provenance");
  const runs = shownRuns();
  if (runs.length === 0) {
    section.replaceChildren();
    return;
  }
  section.replaceChildren(
    ...heading("provenance", "Provenance", "Versions, machine and commit of each run, and the commands that repeat and resume it."),
    element("div", { class: "card tall" }, runs.map(runDetails)));
}

function runDetails(run) {
  const details = element("details", { class: "run", "data-run": run.name, open: state.open.has(run.name) },
    element("summary", {}, element("b", {}, run.name),
      element("span", { class: "muted" }, [run.created, run.id].filter(Boolean).join(" · "))));
  const fill = () => {
    if (details.childElementCount === 1) details.append(...runFacts(run));
  };
  if (details.open) fill();
  details.addEventListener("toggle", () => {
    if (details.open) state.open.add(run.name);
    else state.open.delete(run.name);
    fill();
  });
  return details;
}

function runFacts(run) {
  const facts = [["Folder", run.path], ["Run id", run.id], ["Started", run.created]];
  facts.push(...(state.data.machines[run.machine] ?? []));
  const parts = [element("dl", { class: "facts" }, facts.filter(([, text]) => text).map(
    ([name, text]) => [element("dt", {}, name), element("dd", {}, text)]))];
  for (const [name, text] of [["Repeat", run.repeat], ["Resume", run.resume]]) {
    if (text) parts.push(command(name, text));
  }
  if (run.started_with) {
    parts.push(element("div", { class: "command plain" }, element("span", { class: "label" }, "Started with"), element("pre", {}, run.started_with)));
  }
  return parts;
}

function command(name, text) {
  const button = element("button", { type: "button", class: "quiet", "data-copy": name.toLowerCase() }, "Copy");
  button.addEventListener("click", async () => {
    const copied = await copy(text);
    button.textContent = copied ? "Copied" : "Select and copy";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return element("div", { class: "command" }, element("span", { class: "label" }, name), element("pre", {}, text), button);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // pages from a file may not have a clipboard
    const area = element("textarea", { class: "visually-hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}
