/* Part 9, of the dashboard only: new data, runs that train now, and buttons that stop and resume.
 *
 * Ids and attributes that stay the same (tests and styles use them):
 *   #live                             state of the connection: live, reconnecting or ended
 *   #now                              the runs that train now; [data-run] is a row
 *   #message                          what the last button did
 *   button[data-control="stop|resume"]   only with --allow-control
 */

const LIVE_SECONDS = 2;
const HIDDEN_SECONDS = 20; // while nobody looks at the page
const SLOWEST_SECONDS = 15; // between attempts to reconnect
const BUSY_SECONDS = 10; // how long new data wait while a chart is being read
const token = new URLSearchParams(window.location.search).get("token") ?? "";
const PROGRESS = ["status", "phases"]; // what changes with every row, sent apart from the curves
const live = {
  version: "", parts: {}, failures: 0, waitingSince: null, onlyProgress: true, clock: 0, message: "",
};

function startLive() {
  const section = element("section", { id: "now", "aria-labelledby": "now-heading" });
  byId("results").before(section);
  SECTIONS.unshift(["now", "Now", drawNow]);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  setInterval(drawAges, 1000);
  poll();
}

/* New data */

let timer = 0;
let asking = false;

async function poll() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    await ask();
    live.failures = 0;
    setLive("", "Live");
  } catch (error) {
    live.failures += 1;
    setLive("lost", error.message === "403" ? "Ended; open the new address" : "Reconnecting");
  }
  asking = false;
  const seconds = Math.min(SLOWEST_SECONDS, LIVE_SECONDS * (1 + live.failures));
  timer = setTimeout(poll, 1000 * (document.hidden ? HIDDEN_SECONDS : seconds));
}

async function ask() {
  const headers = { Authorization: `Bearer ${token}` };
  if (live.version) headers["If-None-Match"] = `"${live.version}"`;
  const answer = await fetch("data.json", { headers, cache: "no-store" });
  const now = Date.parse(answer.headers.get("Date") ?? "");
  if (isNumber(now)) live.clock = now - Date.now();
  if (answer.status === 200) {
    apply(await answer.json());
    live.waitingSince ??= Date.now();
  } else if (answer.status !== 304) throw new Error(String(answer.status));
  if (live.waitingSince !== null && !isBusy()) {
    live.waitingSince = null;
    if (live.onlyProgress && state.data !== null) showProgress();
    else showParts();
    live.onlyProgress = true;
  }
}

/** Whether new data would take away what somebody is reading or dragging. */
function isBusy() {
  const reads = tooltipOwner !== null || document.querySelector(".chart:active") !== null;
  return reads && state.data !== null && Date.now() - live.waitingSince < 1000 * BUSY_SECONDS;
}

function apply(changes) {
  if (changes.complete) live.parts = {};
  if (Object.keys(changes.values).length + changes.removed.length > 0) live.onlyProgress = false;
  for (const key of changes.removed) delete live.parts[key];
  Object.assign(live.parts, changes.values);
  for (const [key, [length, items]] of Object.entries(changes.lists)) {
    const before = live.parts[key] ?? [];
    const changed = length !== before.length || Object.keys(items).length > 0;
    if (changed && !PROGRESS.includes(key)) live.onlyProgress = false;
    const list = before.slice(0, length);
    for (const [index, item] of Object.entries(items)) list[Number(index)] = item;
    live.parts[key] = list;
  }
  live.version = changes.version;
}

/** Show the progress of runs, without drawing curves again. */
function showProgress() {
  const { status, phases } = live.parts;
  state.data.runs.forEach((run, index) => Object.assign(run, status[index], { searched: undefined }));
  state.data.groups.forEach((group, index) => { group.phases = phases[index]; });
  const focused = document.activeElement?.id;
  drawNow();
  drawTime();
  drawRuns();
  if (focused && byId(focused) !== document.activeElement) byId(focused)?.focus({ preventScroll: true });
}

/** Show everything. */
function showParts() {
  const { status, phases, ...data } = live.parts;
  const from = window.scrollY;
  show({
    ...data,
    runs: data.runs.map((run, index) => ({ ...run, ...status[index], videos: run.videos.map(withToken) })),
    groups: data.groups.map((group, index) => ({ ...group, phases: phases[index] })),
  });
  if (window.scrollY !== from) window.scrollTo({ top: from, behavior: "instant" });
}

function withToken(video) {
  return { ...video, href: video.href + window.location.search };
}

function setLive(className, text) {
  const badge = byId("live");
  badge.hidden = false;
  badge.className = className;
  if (badge.textContent !== text) badge.textContent = text;
}

/* Runs that train now */

function drawNow() {
  const { runs } = state.data;
  const running = shownRuns().filter((run) => run.state === "running");
  const count = (name) => runs.filter((run) => run.state === name).length;
  const speed = running.reduce((sum, run) => sum + (run.speed ?? 0), 0);
  const tiles = [
    ["running", count("running"), speed > 0 ? `${short(Number(speed.toPrecision(3)))} steps/s` : ""],
    ["finished", count("finished"), ""], ["stopped", count("stopped"), ""],
    ["unreadable", count("unreadable"), ""],
  ].filter(([name, number]) => number > 0 || name === "running");
  const unread = runs.filter((run) => run.is_reading).length;
  byId("now").replaceChildren(
    ...heading("now", "Now"),
    element("div", { class: "tiles" }, tiles.map(([name, number, more]) => element("div", { class: "tile" },
      element("b", {}, integer(number)), element("span", { class: `state ${name}` }, name),
      more ? element("span", { class: "muted" }, more) : null))),
    element("p", { id: "message", role: "status", class: live.message ? "note" : null }, live.message),
    unread ? element("p", { class: "muted" }, `still reading the metrics of ${plural(unread, "run")} …`) : "",
    running.length ? nowTable(running) : element("p", { class: "muted" }, runs.length
      ? "No run is training. Runs appear here as soon as they start."
      : "There are no runs yet. Runs appear here as soon as they start."));
}

function nowTable(running) {
  const columns = [["Run"], ["Progress"], ["Step", true], ["Time left", true], ["Steps/s", true],
    ["Last evaluation", true], ["Last row", true]];
  if (state.data.control) columns.push([""]);
  return element("div", { class: "card scroll now" }, element("table", {},
    element("thead", {}, element("tr", {}, columns.map(([name, isNumeric]) => header(name, isNumeric)))),
    element("tbody", {}, running.map(nowRow))));
}

function nowRow(run) {
  const share = run.total ? Math.min(1, run.step / run.total) : null;
  const number = (text, attributes = {}) => element("td", { class: "number", ...attributes }, text);
  const group = state.data.groups[run.group];
  return element("tr", { "data-run": run.name },
    element("td", { title: run.path }, group ? methodSwatch(group.method) : null, ` ${runTitle(run)}`,
      element("div", { class: "about muted" }, run.name)),
    element("td", {}, share === null ? "–" : element("span", { class: "share" },
      element("progress", { max: 1, value: share, "aria-label": `${percent(share)} done` }), percent(share))),
    number(run.total ? `${short(run.step)} of ${short(run.total)}` : integer(run.step), { title: integer(run.step) }),
    number(duration(run.seconds_left)),
    number(isNumber(run.speed) ? short(Number(run.speed.toPrecision(3))) : "–"),
    number(score(run.last?.value)),
    number(age(run.updated), { "data-updated": run.updated ?? null }),
    state.data.control ? element("td", { class: "number" }, controlButton(run, "now")) : null);
}

function age(updated) {
  return isNumber(updated) ? `${duration(Math.max(0, Math.round((Date.now() + live.clock) / 1000 - updated)))} ago` : "–";
}

function drawAges() {
  for (const cell of document.querySelectorAll("[data-updated]")) {
    cell.textContent = age(Number(cell.dataset.updated));
  }
}

/* Stop and resume */

function controlButton(run, place) {
  const action = { running: "stop", stopped: "resume" }[run.state];
  if (!action) return null;
  const name = action === "stop" ? "Stop" : "Resume";
  return element("button", {
    type: "button", class: "quiet", id: `${place}-${action}-${run.key}`, "data-control": action,
    "aria-label": `${name} ${runTitle(run)}`, onclick: () => control(run, action),
  }, name);
}

async function control(run, action) {
  const question = action === "stop"
    ? `Stop ${run.name}?\n\nIt saves a checkpoint and can be resumed. Seeds that are trained by the same process stop too.`
    : `Resume ${run.name}?`;
  if (!window.confirm(question)) return;
  let text;
  try {
    const answer = await fetch(`control/${action}`, {
      method: "POST",
      headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json", "X-RL-Training": "control" },
      body: JSON.stringify({ run: run.key }),
    });
    const result = await answer.json();
    text = result.done ?? result.error ?? `error ${answer.status}`;
  } catch {
    text = "there is no connection to the dashboard";
  }
  live.message = `${run.name}: ${text}`;
  drawNow();
  poll();
}
