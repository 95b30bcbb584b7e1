/* Part 9, of a sweep only: the best trial, importances, curves of all trials, their table, and the
 * sweep itself. The winner's runs with fresh seeds are shown by the parts of the report.
 *
 * Ids and attributes that stay the same (tests and styles use them):
 *   #results #importance #slices #parallel #progress #trials #failures #repeat   the sections
 *   [data-chart="progress|slice|parallel"]   a chart; it has the focus for keys
 *   [data-trial]                      a mark, a line or a row of a trial, by its number
 *   [data-parameter]                  a slice, a bar or an axis of a parameter, by its place
 *   #brush-count #brush-clear         how many trials the brushes leave, and the way back to all
 */

const TOP_TRIALS = 3;
const PRINTED_TRIALS = 60; // as the style does
const STATE_NAMES = ["finished", "pruned", "failed", "running", "queued"]; // as they are numbered
const METRIC_NAMES = {
  eval_return_mean: "evaluation return", eval_length_mean: "episode length", eval_success_rate: "success rate",
};
const STATISTIC_NAMES = { iqm: "IQM", mean: "mean", median: "median", min: "minimum", max: "maximum" };
const sweep = {
  data: null,
  trials: [],
  ranked: [], // finished trials, the best one first
  brushes: new Map(), // place of an axis -> [low, high] as shares of its length
  chosen: null, // number of the trial that is marked everywhere
  sort: { key: "value", down: true },
};

function startSweep(data) {
  sweep.data = data.sweep;
  sweep.trials = data.sweep.trials.map(
    ([number, stateNumber, at, value, scores, message, x, y]) => ({
      number, state: STATE_NAMES[stateNumber], at, value, scores, message, y,
      x: x === null ? [] : data.sweep.axes[x],
    }),
  );
  const sign = sweep.data.objective.mode === "max" ? -1 : 1;
  sweep.sort.down = sign < 0;
  sweep.ranked = sweep.trials.filter((trial) => trial.state === "finished" && isNumber(trial.value))
    .sort((first, second) => sign * (first.value - second.value) || first.number - second.number);
  sweep.ranked.forEach((trial, rank) => { trial.rank = rank; });
  data.notes = [...sweep.data.notes, ...data.notes];
  data.subtitle = subtitle(data);
  data.headings = {
    curves: "The winner's learning curves with fresh seeds", health: "Health of the winner",
    runs: "Runs of the winner", settings: "Settings of the winner", provenance: "Provenance of the winner",
  };
  byId("toolbar").hidden = true; // it filters runs, and these are the seeds of one trial
  const own = new Map(SECTIONS.map((each) => [each[0], each]));
  const order = [
    ["results", "Best trial", drawBest], ["importance", "Importances", drawImportances],
    ["slices", "Slices", drawSlices], ["parallel", "Parallel coordinates", drawParallel],
    ["progress", "Trials over steps", drawProgress], ["curves", "Winner's curves", drawCurves],
    ["trials", "All trials", drawTrials], ["failures", "Failed trials", drawFailures],
    own.get("health"), own.get("runs"), own.get("settings"), own.get("provenance"),
    ["repeat", "Sweep file", drawRepeat],
  ];
  for (const [id] of order) {
    byId("main").append(byId(id) ?? element("section", { id, "aria-labelledby": `${id}-heading` }));
  }
  SECTIONS.splice(0, SECTIONS.length, ...order);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && sweep.chosen !== null) choose(null);
  });
  show(data);
}

function subtitle(data) {
  const { task, trials, states, planned, seeds } = sweep.data;
  const counts = STATE_NAMES.filter((name) => states[name] > 0).map((name) => `${integer(states[name])} ${name}`);
  return [task.env_id, task.algorithm, `${plural(planned, "trial")}${trials.length ? ` (${counts.join(", ")})` : ""}`,
    `${plural(seeds.length, "seed")} each`, `made ${data.created}`].join(" · ");
}

/* Words and marks of trials */

function objectiveName() {
  const { metric, statistic } = sweep.data.objective;
  return `${METRIC_NAMES[metric] ?? metric}, ${STATISTIC_NAMES[statistic] ?? statistic} over seeds`;
}

/** The last part of a key, such as `tau`, where that tells the parameters apart. */
function parameterName(place) {
  const last = (key) => key.slice(key.lastIndexOf(".") + 1);
  const keys = sweep.data.parameters.map((parameter) => parameter.key);
  const name = last(keys[place]);
  return keys.filter((key) => last(key) === name).length === 1 ? name : keys[place];
}

function parameterText(parameter, value) {
  if (parameter.scale === "choice") return parameter.values[value];
  if (parameter.whole) return minus(String(Math.round(value)));
  return minus(Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
    ? Number(value.toPrecision(4)).toExponential() : trim(value));
}

/** What is known of a trial, for the tooltip. */
function trialReadout(trial) {
  const { parameters } = sweep.data;
  const rows = parameters.map((parameter, place) => [parameterName(place), parameterText(parameter, trial.at[place])]);
  const rank = trial.rank === undefined ? trial.state : `rank ${trial.rank + 1} of ${sweep.ranked.length}`;
  return element("div", {},
    element("strong", {}, `Trial ${trial.number}`), element("span", { class: "muted" }, ` ${rank}`),
    element("table", {}, element("tbody", {},
      isNumber(trial.value) ? element("tr", {},
        element("td", {}, trial.state === "pruned" ? "last objective" : "objective"),
        element("td", { class: "number" }, element("b", {}, score(trial.value)))) : null,
      rows.map(([name, text]) => element("tr", {}, element("td", {}, name), element("td", { class: "number" }, text))))),
    trial.message === null ? null : element("p", {}, sweep.data.messages[trial.message]));
}

/** Mark a trial in all charts and in the table; null marks none. */
function choose(number) {
  sweep.chosen = sweep.chosen === number ? null : number;
  markChosen(document);
}

function markChosen(place) {
  for (const each of place.querySelectorAll("[data-trial].chosen")) each.classList.remove("chosen");
  if (sweep.chosen === null) return;
  for (const each of place.querySelectorAll(`[data-trial="${sweep.chosen}"]`)) {
    each.classList.add("chosen");
    if (each.namespaceURI === SVG) each.parentNode.append(each); // above the others
  }
}

/* The answer */

function drawBest() {
  const { best, winner, why, objective } = sweep.data;
  const section = byId("results");
  const parts = heading("results", "Best trial");
  if (best === null) {
    section.replaceChildren(...parts, element("p", { class: "answer" }, "No trial has finished yet."),
      element("p", { class: "lead" }, why));
    return;
  }
  const fresh = isNumber(winner.value);
  const found = [
    element("b", {}, `Trial ${best.number}`), ` is the best of ${plural(sweep.data.states.finished, "finished trial")}: `,
    element("b", {}, score(best.value)), ` in the search${within(best)}`,
  ];
  if (fresh) found.push("; with fresh seeds it reaches ", element("b", {}, score(winner.value)), `${within(winner)}.`);
  else found.push(`; ${winner.problem}.`);
  parts.push(element("p", { class: "answer" }, found), element("p", { class: "lead" }, why),
    element("div", { class: "grid best-grid" }, scoreCard(best, winner, objective), parametersCard(best)));
  section.replaceChildren(...parts);
}

function within(result) {
  return isNumber(result.low) ? ` (95 % interval ${interval(result.low, result.high)})` : "";
}

function scoreCard(best, winner, objective) {
  const rows = [["In the search", best, "--m1"], ["Fresh seeds", winner, "--m0"]]
    .filter(([, result]) => isNumber(result.value));
  const [low, high] = padded(bounds(rows.flatMap(([, result]) => [
    result.low, result.high, result.value, ...result.values.map((each) => each.value)])) ?? [0, 1]);
  const at = (value) => `${Math.max(0, Math.min(100, (100 * (value - low)) / (high - low)))}%`;
  const marks = ticks(low, high, 5);
  const center = STATISTIC_NAMES[objective.statistic];
  return element("div", { class: "card", "data-card": "score" },
    element("header", {}, element("h3", {}, objectiveName())),
    element("div", { class: "scroll" }, element("table", { class: "results-table" },
      element("thead", {}, element("tr", {}, header("Trained"), header(center, true),
        header("95 % interval", true), header(objective.mode === "max" ? "higher is better" : "lower is better"))),
      element("tbody", {}, rows.map(([name, result, color]) => element("tr", {},
        element("td", { class: "method" }, element("b", {}, name), element("div", { class: "muted" }, plural(result.values.length, "seed"))),
        cell(score(result.value), center, "score"),
        cell(interval(result.low, result.high), "95 %"),
        element("td", { class: "plot" }, scoreStrip(result, result.value, `var(${color})`, at, marks))))),
      element("tfoot", {}, element("tr", {}, element("td", { colspan: 3 }),
        element("td", { class: "plot" }, element("div", { class: "scale" },
          marks.map((mark) => element("span", { style: { left: at(mark) } }, short(mark))))))))),
    element("dl", { class: "facts seeds" }, rows.map(([name, result]) => [
      element("dt", {}, name), element("dd", {}, result.values.map(seedScore))])),
    element("p", { class: "about" }, "The score in the search is optimistic: the trial was chosen because of it, so "
      + "part of it may be luck. ", isNumber(winner.value)
      ? "The fresh seeds had no part in the choice. Report their score."
      : "A score to report needs fresh seeds, which have no part in the choice."));
}

function seedScore({ seed, value }) {
  return element("span", { title: isNumber(value) ? String(value) : null },
    element("span", { class: "muted" }, `seed ${seed} `), score(value), " ");
}

function parametersCard(best) {
  return element("div", { class: "card", "data-card": "parameters" },
    element("header", {}, element("h3", {}, `Parameters of trial ${best.number}`)),
    element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, best.params.map(([key, value]) =>
      element("tr", {}, element("th", { scope: "row" }, breakable(key)), element("td", { class: "mono value" }, value)))))));
}

/** A key that may be broken after its dots. */
function breakable(key) {
  return key.split(".").flatMap((part, place) => (place ? [".", element("wbr"), part] : [part]));
}

/* Importances */

function drawImportances() {
  const { shares, problem, trials, best } = sweep.data.importances;
  const section = byId("importance");
  if (problem) {
    section.replaceChildren(...heading("importance", "Importances"),
      element("p", { class: "muted" }, `There are no importances: ${problem}.`));
    return;
  }
  section.replaceChildren(
    ...heading("importance", "Importances", `How much each parameter decides whether a trial is among the best ${best} of `
      + `${trials} finished trials: the difference between its values in these and in all (PED-ANOVA). `
      + `${best < 6 ? "With so few trials, this is a rough guide." : ""}`),
    element("div", { class: "card" }, element("table", { class: "bars" }, element("tbody", {}, shares.map(([place, share]) =>
      element("tr", { "data-parameter": place },
        element("th", { scope: "row", title: sweep.data.parameters[place].key }, parameterName(place)),
        element("td", { class: "number" }, percent(share)),
        element("td", { class: "bar-cell" }, element("div", { class: "importance", style: { width: `${100 * share}%` } }))))))));
}

/* The objective of all trials over steps */

function drawProgress() {
  const section = byId("progress");
  removeCharts(section);
  const curves = sweep.trials.filter((trial) => trial.x.length > 0);
  if (curves.length === 0) {
    section.replaceChildren();
    return;
  }
  const top = sweep.ranked.filter((trial) => trial.x.length > 0).slice(0, TOP_TRIALS);
  const shown = top.length ? top : curves.slice(0, 1);
  const others = curves.filter((trial) => !shown.includes(trial));
  section.replaceChildren(
    ...heading("progress", "Trials over steps", `The objective at each evaluation. Bold: the best ${plural(shown.length, "trial")}`
      + `${others.length ? "; faint: the others. A faint line that ends early was pruned, failed, or is still running" : ""}.`),
    element("div", { class: "grid single" }, chartCard("All trials", null, {
      key: "progress",
      layers: () => shown.map((trial, order) => ({
        label: order === 0 && top.length ? `trial ${trial.number}, the best` : `trial ${trial.number}`,
        name: `trial ${trial.number}`,
        kind: "group",
        x: trial.x,
        y: trial.y,
        faint: order === 0 ? others : [],
        faintColor: () => faded(css("--faint"), Math.max(0.06, Math.min(0.45, 40 / others.length))),
        color: () => css(["--m1", "--m0", "--m2"][order]),
        dash: DASHES[order],
        note: () => (trial.rank === undefined ? trial.state : `rank ${trial.rank + 1}`),
      })),
      xLabel: "steps",
      yLabel: objectiveName(),
      cursorLabel: (at) => `step ${integer(at)}`,
      labels: true,
      height: 380,
    }, { "data-chart": "progress" })));
}

/* All trials */

function trialColumns() {
  return [
    ["number", "Trial", (trial) => trial.number, true],
    ["state", "State", (trial) => trial.state],
    ["value", "Objective", (trial) => trial.value, true],
    ...sweep.data.parameters.map((parameter, place) => [`p${place}`, parameterName(place), (trial) => trial.at[place], true]),
    ["scores", "Each seed", (trial) => bounds(trial.scores)?.[1], true],
    ["step", "Step", (trial) => (trial.x.length ? trial.x[trial.x.length - 1] : null), true],
  ];
}

function drawTrials() {
  const section = byId("trials");
  const shown = sweep.trials.filter(isInside);
  if (sweep.trials.length === 0) {
    section.replaceChildren();
    return;
  }
  const best = sweep.ranked[0];
  const left = shown.length < sweep.trials.length
    ? ` ${integer(shown.length)} of ${integer(sweep.trials.length)} trials are within the brushes of the parallel coordinates.` : "";
  section.replaceChildren(
    ...heading("trials", "All trials", "The objective of a pruned trial is the last one that it reported; its seeds are those at its end. "
      + `Click a row to mark the trial in all charts.${left}`),
    element("div", { class: "card scroll tall" }, element("table", {},
      element("thead", {}, element("tr", {}, sortHeaders("trials", trialColumns(), sweep.sort, drawTrials))),
      element("tbody", {}, sortedRows(shown, trialColumns(), sweep.sort).map((trial) => trialRow(trial, trial === best))))),
    shown.length > PRINTED_TRIALS
      ? element("p", { class: "printed muted" }, `The first ${PRINTED_TRIALS} of ${integer(shown.length)} trials are printed.`) : "");
  markChosen(section);
}

function trialRow(trial, isBest) {
  const [step] = trial.x.slice(-1);
  const button = element("button", { type: "button", class: "quiet", "aria-label": `Mark trial ${trial.number} in all charts` }, String(trial.number));
  return element("tr", { class: isBest ? "best" : null, "data-trial": trial.number, onclick: () => choose(trial.number) },
    element("td", { class: "number" }, button),
    element("td", { title: trial.message === null ? null : sweep.data.messages[trial.message] },
      element("span", { class: `state ${trial.state}` }, trial.state)),
    element("td", { class: "number score", title: isNumber(trial.value) ? String(trial.value) : null }, score(trial.value)),
    sweep.data.parameters.map((parameter, place) => element("td", {
      class: "number value", title: parameter.scale === "choice" ? null : String(trial.at[place]),
    }, parameterText(parameter, trial.at[place]))),
    element("td", { class: "number seeds" }, trial.scores.length ? trial.scores.map(score).join("  ") : "–"),
    element("td", { class: "number" }, step === undefined ? "–" : integer(step)));
}

function drawFailures() {
  const section = byId("failures");
  const failed = sweep.trials.filter((trial) => trial.state === "failed");
  if (failed.length === 0) {
    section.replaceChildren();
    return;
  }
  const groups = new Map();
  for (const trial of failed) groups.set(trial.message, [...(groups.get(trial.message) ?? []), trial.number]);
  section.replaceChildren(
    ...heading("failures", "Failed trials", `${plural(failed.length, "trial")} did not give an objective, and the search went on without.`),
    element("div", { class: "card scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, header("Message"), header("Trials"))),
      element("tbody", {}, [...groups].map(([message, numbers]) => element("tr", {},
        element("td", { class: "long" }, message === null ? "no message" : sweep.data.messages[message]),
        element("td", { class: "value" }, numbers.join(", "))))))));
}

/* The sweep itself */

function drawRepeat() {
  const { files, commands, folder, seeds, fresh_seeds: fresh } = sweep.data;
  byId("repeat").replaceChildren(
    ...heading("repeat", "Sweep file", `To repeat the sweep, save ${files.length > 1 ? "these files" : "this file"} and run the command below. `
      + "Settings of machines and databases are not shown."),
    element("div", { class: "card" },
      element("dl", { class: "facts" }, [["Folder", folder], ["Seeds of a trial", seeds.join(", ")], ["Fresh seeds", fresh.join(", ")]]
        .map(([name, text]) => [element("dt", {}, name), element("dd", {}, text)])),
      [...files, ...commands].map(([name, text]) => command(name, text))));
}
